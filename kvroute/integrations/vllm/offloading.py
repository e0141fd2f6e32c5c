"""The copies that vLLM's ``OffloadingConnector`` makes between blocks and chunks in host memory, from its own messages.

A chunk has the KV of some successive blocks of one group. vLLM's worker copies to a chunk when the step that filled the
blocks is over, before the next one; earlier, if it needs the blocks anew (``jobs_to_flush``). It loads from a chunk
while a request waits. Chunks whose content comes from elsewhere, as with further tiers, have no messages: for those
:func:`places_of` is 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvroute.connector.carriers.port import NO_PAIRS, Load, Moves, Pairs


def places_of(connector: Any) -> int:
    """How many blocks this connector of vLLM's keeps in host memory; 0 if it does not say all that happens there."""
    try:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # type: ignore[import-not-found]
        from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec  # type: ignore[import-not-found]
    except ImportError:
        return 0
    scheduler: Any = getattr(connector, "connector_scheduler", None)
    manager: Any = getattr(scheduler, "manager", None)
    worker: Any = getattr(connector, "connector_worker", None)
    spec: Any = getattr(worker, "spec", None)
    if type(manager) is CPUOffloadingManager and hasattr(manager, "_num_chunks"):  # from vLLM 0.30 on
        return int(manager._num_chunks * scheduler.config.blocks_per_chunk)
    plain = isinstance(spec, CPUOffloadingSpec) and type(spec).get_manager is CPUOffloadingSpec.get_manager
    if plain and hasattr(spec, "num_chunks"):
        return int(spec.num_chunks * spec.blocks_per_chunk)
    return 0


def moves_of(scheduler: Any, message: Any, group: int) -> Moves:
    """The copies of the KV of this ``group`` that a step's ``message`` of vLLM's ``scheduler`` asks for."""
    numbers = [each.group_idx for each in scheduler.config.kv_group_configs]
    if group not in numbers:  # its KV stays on the device
        return Moves()
    place = numbers.index(group)
    size = scheduler.config.blocks_per_chunk
    flushed = message.jobs_to_flush or ()
    kept = [NO_PAIRS]
    later = [NO_PAIRS]
    for name, job in message.store_jobs.items():
        _, pairs = _pairs(job.src_spec, job.dst_spec, place, size)
        (kept if name in flushed else later).append(pairs)
    loads = list[Load]()
    for job in message.load_jobs.values():
        first, pairs = _pairs(job.dst_spec, job.src_spec, place, size)
        loads.append(Load(job.req_id, first, pairs))
    return Moves(np.concatenate(kept), np.concatenate(later), loads)


def _pairs(device: Any, host: Any, group: int, size: int) -> tuple[int, Pairs]:
    """A group's blocks and places in a job: the first one's place among the request's blocks, and the pairs.

    vLLM lists the blocks of all groups one after the other, and likewise their chunks; the first and the last chunk of
    a group may be used in part.
    """
    block = chunk = 0
    for number, (blocks, first) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
        skipped = first % size
        chunks = -(-(blocks + skipped) // size) if blocks else 0
        if number == group:
            ids = np.asarray(device.block_ids[block : block + blocks], np.int64)
            chunk_ids = np.asarray(host.block_ids[chunk : chunk + chunks], np.int64)
            places = chunk_ids[:, None] * size + np.arange(size)
            used = places.reshape(-1)[skipped : skipped + blocks]
            return first, np.stack([ids, used], axis=1)
        block += blocks
        chunk += chunks
    return 0, NO_PAIRS


__all__ = ["moves_of", "places_of"]

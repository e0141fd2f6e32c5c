"""Where vLLM's ``OffloadingConnector`` puts KV without a GPU: host memory beside the KV of a CPU.

The connector, its scheduler, its manager and their order of transfers are vLLM's own. Only the copy is not: vLLM copies
with streams of CUDA or XPU and refuses other devices, but takes a spec from outside (``spec_module_path``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

DAMAGED_RANK = "KVROUTE_TEST_DAMAGED_RANK"
"""In the environment: the tensor-parallel rank that brings a bit of every layer wrong, in the first block of a load."""


class HostSpec(CPUOffloadingSpec):
    """vLLM's offloading to host memory, with another copy."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return HostWorker(kv_caches, self.num_chunks, self.blocks_per_chunk)


@dataclass
class Transfer:
    store: bool
    blocks: Any
    places: Any
    asked: int = 0  # how often it was asked for


class HostWorker(OffloadingWorker):
    """Copies a step after it was told to, as a stream may; or when it is waited for."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int, blocks_per_chunk: int) -> None:
        self._size = blocks_per_chunk
        self._device = [each.tensor for each in kv_caches.tensors]
        self._host = [torch.zeros(chunks * self._size, each.shape[1], dtype=torch.int8) for each in self._device]
        self._under_way: dict[int, Transfer] = {}
        self._done: list[TransferResult] = []
        self._damages = os.environ.get(DAMAGED_RANK) == str(get_tensor_model_parallel_rank())

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._under_way[job_id] = Transfer(True, src_spec.block_ids, self._places(src_spec, dst_spec))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._under_way[job_id] = Transfer(False, dst_spec.block_ids, self._places(dst_spec, src_spec))
        return True

    def _places(self, device: Any, host: Any) -> list[int]:
        """Where each block of the device is on the host: chunks of some blocks, the first and last used in part."""
        places, chunks = list[int](), iter(host.block_ids.tolist())
        for blocks, first in zip(device.group_sizes, device.block_indices, strict=True):
            skipped = first % self._size
            for at in range(skipped, skipped + blocks):
                if at == skipped or at % self._size == 0:
                    chunk = next(chunks)
                places.append(chunk * self._size + at % self._size)
        return places

    def get_finished(self) -> list[TransferResult]:
        for transfer in self._under_way.values():
            transfer.asked += 1
        self.wait({job_id for job_id, transfer in self._under_way.items() if transfer.asked > 1})
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids & set(self._under_way)):
            transfer = self._under_way.pop(job_id)
            blocks, places = (torch.as_tensor(ids, dtype=torch.int64) for ids in (transfer.blocks, transfer.places))
            nbytes = 0
            for device, host in zip(self._device, self._host, strict=True):
                if transfer.store:
                    host[places] = device[blocks]
                else:
                    device[blocks] = host[places]
                    device[blocks[:1], 0] ^= int(self._damages)
                nbytes += len(blocks) * host.shape[1]
            self._done.append(TransferResult(job_id, success=True, transfer_size=nbytes, transfer_time=1e-3))

"""What differs between SGLang's releases: which were judged, which names are needed, and how older ones are asked.

The law: every name of SGLang that kvroute takes or hooks is in this module, and is looked up before the first one is
hooked. A release without one of them is refused by that name, whatever the setting ``untested`` says; where a part of
SGLang needs the name, an older release refuses that part's argument alone.

This module imports nothing of SGLang by itself. SGLang's plugin loader logs what a plugin raises and goes on, so
nothing is refused there: see ``plugin.py`` for the place.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from kvroute.integrations.judged import Judged

WAYS: Final[Mapping[str, str]] = {
    "tests": "`make test-sglang`",
    "smoke": "`make smoke-sglang`",
    "by hand": "by hand",
}
"""How a release was judged, as a page says it."""
_OLDER: Final = "its Python over 0.5.23's packages; without external linkers"
JUDGED: Final = (
    Judged("0.5.12", ("by hand",), "2026-11-30", f"`make smoke-sglang-0.5.12`; {_OLDER}"),
    Judged("0.5.12.post1", ("smoke",), "2026-11-30", _OLDER),
    Judged("0.5.15.post1", ("smoke",), "2026-11-30", _OLDER),
    Judged("0.5.16", ("smoke",), "2026-11-30", _OLDER),
    Judged(
        "0.5.22",
        ("by hand",),
        "2026-11-29",
        f"`make smoke-sglang-0.5.22`; {_OLDER}",
    ),
    Judged("0.5.23", ("tests",), "2026-11-29"),
)
"""The releases that kvroute works with, oldest first. The refusal, ``kvroute doctor`` and the pages read this table."""
TESTED: Final = tuple(entry.version for entry in JUDGED)
PREFERRED: Final = next(entry.version for entry in JUDGED if "tests" in entry.how)
"""The release to install: all tests run on it."""

DOOR: Final = "sglang.srt.managers.scheduler.Scheduler.__init__"
"""Called once in each process with rows, with all server arguments; an exception in it ends the server."""

HOST: Final = "enable_hierarchical_cache"
LINKER: Final = "enable_unified_cache_external_linker"
APART: Final = "disaggregation_mode"
DRAFTS: Final = "speculative_algorithm"
DATA_PARALLEL: Final = (0, 5, 23)
"""The first release whose data parallelism was judged, with replicas (``dp_size``) and in attention."""
WEIGHTS_SETTING: Final = "routing_weights"
"""The setting that needs names of its own."""
PARTS: Final = (HOST, LINKER, APART, DRAFTS)
"""Server arguments that need names of their own: a release without one of them refuses the argument, and no more."""


class Place(NamedTuple):
    """A name of SGLang."""

    names: tuple[str, ...]  # the newest release's first; of an older one the next that is there
    parameters: tuple[str, ...] = ()  # those that our hook reads
    part: str = ""  # of PARTS, or WEIGHTS_SETTING, which alone needs it
    since: tuple[int, ...] = ()  # releases before this have nothing there to follow
    until: tuple[int, ...] = (99,)  # and releases behind this


_MEMORY: Final = "sglang.srt.mem_cache"
_PARTS: Final = "sglang.srt.managers.scheduler_components"
_CONTROLLER: Final = f"{_MEMORY}.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_RADIX_CONTROLLER: Final = "sglang.srt.managers.cache_controller.HiCacheController"
_UNIFIED: Final = (0, 5, 17)
_RADIX: Final = (0, 5, 16)
"""The last release whose pages on the host are those of another tree, with another controller: ``radix.py``."""
_UPDATER: Final = f"{_PARTS}.weight_updater.SchedulerWeightUpdaterManager.update_weights_from"
_OLD_UPDATER: Final = (
    "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin.update_weights_from"
)
_APART: Final = "sglang.srt.disaggregation"
_DRAFTS: Final = "sglang.srt.speculative"
_OLD_RESULTS: Final = "sglang.srt.managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"

PLACES: Final[Mapping[str, Place]] = {
    "created": Place(("sglang.srt.model_executor.model_runner.ModelRunner.init_routed_experts_capturer",)),
    "hosted": Place((f"{_CONTROLLER}.__init__",), part=HOST, since=_UNIFIED),
    "backed_up": Place((f"{_CONTROLLER}.write",), ("device_indices",), HOST, _UNIFIED),
    "brought_back": Place((f"{_CONTROLLER}.load",), ("host_indices",), HOST, _UNIFIED),
    "stored": Place((f"{_CONTROLLER}.write_storage",), part=HOST, since=_UNIFIED),
    "found": Place((f"{_CONTROLLER}._storage_hit_query",), part=HOST, since=_UNIFIED),
    "prefetched": Place(
        (f"{_MEMORY}.unified_radix_cache.UnifiedRadixCache._handle_prefetch_result",), ("operation",), HOST, _UNIFIED
    ),
    "radix_hosted": Place((f"{_RADIX_CONTROLLER}.__init__",), part=HOST, until=_RADIX),
    "radix_backed_up": Place((f"{_RADIX_CONTROLLER}.write",), ("device_indices",), HOST, until=_RADIX),
    "radix_brought_back": Place((f"{_RADIX_CONTROLLER}.load",), ("host_indices",), HOST, until=_RADIX),
    "radix_stored": Place((f"{_RADIX_CONTROLLER}.write_storage",), ("host_indices", "hash_value"), HOST, until=_RADIX),
    "radix_found": Place((f"{_RADIX_CONTROLLER}._storage_hit_query",), part=HOST, until=_RADIX),
    "radix_prefetched": Place(
        (f"{_MEMORY}.hiradix_cache.HiRadixCache._insert_helper_host",), ("host_value", "hash_value"), HOST, until=_RADIX
    ),
    "linked": Place(
        (f"{_MEMORY}.unified_cache.linker_factory.create_unified_cache_linker",), ("params", "components"), LINKER
    ),
    "flushed": Place(("sglang.srt.managers.scheduler.Scheduler.flush_cache",)),
    "named": Place(("sglang.srt.managers.scheduler.Scheduler.handle_update_weight_version",), since=(0, 5, 17)),
    **{
        f"updated_{way}": Place((f"{_UPDATER}_{way}", f"{_OLD_UPDATER}_{way}"))
        for way in ("disk", "distributed", "tensor", "ipc")
    },
    "collects": Place(
        (
            f"{_PARTS}.batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_routed_experts",
            f"{_OLD_RESULTS}.maybe_collect_routed_experts",
        ),
        ("req",),
    ),
    "retracted": Place(
        ("sglang.srt.managers.schedule_batch.release_req",), ("req", "req_to_token_pool"), since=(0, 5, 15)
    ),
    "retracted_of_batch": Place(
        ("sglang.srt.managers.schedule_batch.ScheduleBatch.release_req",), ("idx",), until=(0, 5, 14)
    ),
    "handed": Place(
        (f"{_APART}.prefill.SchedulerDisaggregationPrefillMixin._send_kv_chunk",), ("req", "last_chunk"), APART
    ),
    "gated": Place((f"{_APART}.utils._apply_metadata_gate",), ("polls", "decode_reqs", "metadata_buffers"), APART),
    "prebuilt": Place(
        (f"{_PARTS}.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prebuilt",),
        ("batch",),
        APART,
    ),
    "put_aside": Place(("sglang.srt.managers.schedule_batch.backup_kv_cache",), ("req",), APART),
    "resumed": Place((f"{_APART}.decode.restore_kv_cache",), ("req",), APART),
    "begins": Place(("sglang.srt.model_executor.model_runner.ModelRunner.forward",), ("forward_batch",)),
    "accepted": Place((f"{_DRAFTS}.eagle_worker_common.eagle_sample",), part=DRAFTS),
    "accepted_ngram": Place((f"{_DRAFTS}.ngram_worker.eagle_sample",), part=DRAFTS),
    "carried": Place((f"{_DRAFTS}.ngram_worker.NGRAMWorker.forward_batch_generation",), part=DRAFTS),
    "streamed": Place(
        (
            f"{_PARTS}.output_streamer.SchedulerOutputStreamer._stream_output_generation",
            f"{_OLD_RESULTS}.stream_output_generation",
        ),
        ("reqs",),
    ),
}
"""What is hooked. 0.5.22 makes its linkers elsewhere, which no hook follows; earlier releases have none."""

_CONTEXT: Final = "sglang.srt.runtime_context"
_EXPERTS: Final = "sglang.srt.state_capturer.routed_experts"
_LINKERS: Final = f"{_MEMORY}.unified_cache.unified_cache_linker.UnifiedCacheLinker"
_SERVER_ARGS: Final = Place((f"{_CONTEXT}.get_server_args", "sglang.srt.server_args.get_global_server_args"))
_RESOLVED: Final = Place(("sglang.srt.arg_groups.overrides.resolved_view",), since=(0, 5, 15))
_SCHEDULE: Final = Place((f"{_CONTEXT}.get_schedule",), since=(0, 5, 17))
_MODEL: Final = Place((f"{_CONTEXT}.get_model",), since=(0, 5, 17))
_CAPTURER: Final = Place((f"{_EXPERTS}.get_global_experts_capturer",))
_SET_CAPTURER: Final = Place((f"{_EXPERTS}.set_global_experts_capturer",))
_RANK: Final = Place(("sglang.srt.distributed.parallel_state.get_tensor_model_parallel_rank",))
_PARALLEL: Final = Place((f"{_CONTEXT}.get_parallel",), since=DATA_PARALLEL)
_RANKS_PLACE: Final = Place(("sglang.srt.layers.dp_attention.dp_slot_in",), since=DATA_PARALLEL)
_RUNNER: Final = Place(("sglang.srt.layers.moe.get_moe_runner_backend",))
_PACKED: Final = Place(("sglang.srt.managers.io_struct.wrap_as_pickle",), since=(0, 5, 15))
_UNPACKED: Final = Place(("sglang.srt.managers.io_struct.unwrap_from_pickle",), since=(0, 5, 15))
TAKEN: Final = (
    *(_SERVER_ARGS, _RESOLVED, _SCHEDULE, _MODEL, _CAPTURER, _SET_CAPTURER, _RANK, _RUNNER, _PACKED, _UNPACKED),
    *(_PARALLEL, _RANKS_PLACE, Place((f"{_EXPERTS}.RoutedExpertsCapturer.capture",))),
    Place((f"{_EXPERTS}.RoutedExpertsCapturer.destroy",), since=(0, 5, 17)),
    Place(
        ("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.forward",),
        ("hidden_states", "topk_output"),
        WEIGHTS_SETTING,
    ),
    Place(("sglang.srt.layers.moe.topk.StandardTopKOutput.topk_weights",), part=WEIGHTS_SETTING),
    Place(("sglang.srt.layers.moe.topk.StandardTopKOutput.topk_ids",), part=WEIGHTS_SETTING),
    Place((f"{_MEMORY}.hicache_storage.PoolName",), part=LINKER),
    Place((f"{_MEMORY}.cache_init_params.CacheInitParams.attn_tp_cache_group",), part=LINKER),
    *(
        Place((f"{_LINKERS}.{name}",), part=LINKER)
        for name in ("lookup", "load", "offload", "num_completed_offloads", "pop_completed_offload")
    ),
)
"""What is called or replaced, and not hooked."""


def resolved(place: str) -> tuple[Any, str]:
    """The object that holds a dotted name, and the name in it. Raises what importing or looking up raises."""
    path, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(path)
    getattr(owner, name)
    return owner, name


def _lacks(name: str, parameters: Sequence[str]) -> str:
    """What of this SGLang's ``name`` is absent: it, or ``name(parameter)``; empty if it is there."""
    try:
        owner, last = resolved(name)
    except Exception as error:  # noqa: BLE001 - a module of another version may fail in any way when it is imported
        return name if isinstance(error, (ImportError, AttributeError)) else f"{name} ({error!r})"
    known = inspect.signature(getattr(owner, last)).parameters if parameters else {}
    return next((f"{name}({parameter})" for parameter in parameters if parameter not in known), "")


def name_of(place: Place) -> str | None:
    """The first of a place's names that this SGLang has; ``None``: it has none."""
    return next((name for name in place.names if not _lacks(name, place.parameters)), None)


def release(version: str) -> tuple[int, ...]:
    """``(0, 5, 12)`` of ``"0.5.12.post1"``."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])


def _wanted(version: str, part: str) -> Iterator[Place]:
    """The places that a release has to have for this part, or with ``""`` for all else."""
    for place in (*PLACES.values(), *TAKEN):
        if place.part == part and place.since <= release(version) <= place.until:
            yield place


def absent(version: str, part: str = "") -> list[str]:
    """The names that this SGLang lacks for a part of :data:`PARTS`, or for all else.

    A name without one of the parameters that a hook reads is ``name(parameter)``.
    """
    lacking = ([_lacks(name, place.parameters) for name in place.names] for place in _wanted(version, part))
    return [reasons[0] for reasons in lacking if all(reasons)]


def hooked(version: str) -> dict[str, str]:
    """What is hooked in this SGLang, and its name there; nothing of a part that it does not have whole."""
    parts = ("", *(part for part in PARTS if not absent(version, part)))
    wanted = [place for part in parts for place in _wanted(version, part)]
    names = {hook: name_of(place) for hook, place in PLACES.items() if place in wanted}
    return {hook: name for hook, name in names.items() if name is not None}


def unfit(version: str, untested: str) -> tuple[str, str] | None:
    """What is wanted of SGLang and what it is, where kvroute cannot work in it; else ``None``.

    ``untested``, an operator's setting, accepts a version that was not judged, and never one that lacks a name.
    """
    judged = " or ".join(TESTED)
    if lacking := absent(version):
        others = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        return f"SGLang {judged}, or one with {lacking[0]}{others}", f"{version}, which lacks it"
    if version not in (untested, *TESTED):
        return f"SGLang {judged}, or untested={version!r}", version
    return None


@cache
def function_at(place: Place) -> Any:
    """What is at a place of this SGLang, for calls in each pass; ``None`` if there is nothing."""
    name = name_of(place)
    return None if name is None else pkgutil.resolve_name(name)


def arguments() -> Any:
    """The server arguments of this process, as SGLang has resolved them."""
    published, view = function_at(_SERVER_ARGS)(), function_at(_RESOLVED)
    return published if view is None else view(published)


def page_size() -> int:
    """Tokens of a page of KV."""
    schedule = function_at(_SCHEDULE)
    size: int = (arguments() if schedule is None else schedule()).page_size
    return size


def kv_cache_dtype() -> Any:
    """The dtype of KV, as SGLang names it."""
    model = function_at(_MODEL)
    return (arguments() if model is None else model()).kv_cache_dtype


def first_rank() -> bool:
    """Whether this process has the rows: the first of the ranks that share their requests, which answers them."""
    parallel = function_at(_PARALLEL)
    return not (function_at(_RANK)() if parallel is None else parallel().attn_tp_rank)


def data_rank() -> int:
    """Which of the ranks with requests of their own this process is of."""
    parallel = function_at(_PARALLEL)
    if parallel is None:
        return 0
    ranks = parallel()
    replica = getattr(ranks, "dp_rank", None)  # 0.5.16 has none, where more than one is refused
    rank: int = ranks.attn_dp_rank if ranks.attn_dp_size > 1 else replica or 0
    return rank


class AttentionRank(NamedTuple):
    """Which part of the heads this process has."""

    rank: int
    world: int


def shard() -> AttentionRank:
    """Among the ranks that share their requests."""
    parallel = function_at(_PARALLEL)
    if parallel is None:
        return AttentionRank(0, 1)
    ranks = parallel()
    return AttentionRank(ranks.attn_tp_rank, ranks.attn_tp_size)


def experts_capturer() -> Any:
    """This process's capturer of routed experts, or ``None``."""
    return function_at(_CAPTURER)()


def set_experts_capturer(capturer: Any) -> None:
    function_at(_SET_CAPTURER)(capturer)


def host_tokens(capturer: Any) -> int:
    """For how many slots SGLang's capturer has a buffer on the host."""
    return len(capturer.host_cache.buffer)


def without_host_buffer(capturer: Any) -> None:
    """Free SGLang's buffer on the host, whose place kvroute's blocks take."""
    if hasattr(capturer, "destroy"):
        capturer.destroy()
    capturer.host_cache = None


class Part(NamedTuple):
    """This rank's part of the tokens that the routers have in a pass."""

    start: int
    tokens: int  # of requests of this rank
    routed: int  # how many tokens each router has: without ``shared`` at least, with it exactly
    shared: bool = False  # with ranks that have requests of their own


def part_of(forward_batch: Any) -> Part:
    """This rank's part of a pass that is over. SGLang pads the tokens of each rank, and counts the padded ones."""
    padded = getattr(forward_batch, "global_num_tokens_cpu", None)
    if padded is None:
        tokens = len(slots_of(forward_batch))
        return Part(0, tokens, tokens)
    shared = len(padded) > 1
    rank = function_at(_RANKS_PLACE)(padded) if shared else 0
    tokens = forward_batch.original_global_num_tokens_cpu[rank]
    return Part(sum(padded[:rank]), tokens, sum(padded) if shared else tokens, shared)


def verifies_drafts(forward_batch: Any) -> bool:
    """Whether a pass computes drafts, of which nobody knows yet which ones count."""
    mode: Any = getattr(forward_batch, "forward_mode", None)
    return mode is not None and bool(mode.is_target_verify())


def pool_row(req: Any) -> int:
    """Which row of SGLang's pool of requests has the slots of ``req``."""
    holder = req if hasattr(req, "req_pool_idx") else req.kv  # up to 0.5.16, and since
    return int(holder.req_pool_idx)


def slots_of(forward_batch: Any) -> Any:
    """The slots of a pass's tokens, as requests have them; attention may know them by other numbers."""
    virtual = getattr(forward_batch, "out_cache_loc_virtual", None)  # since 0.5.22
    return forward_batch.out_cache_loc if virtual is None else virtual


def add_information(message: Any, key: str, entries: Sequence[list[Any]]) -> None:
    """Put ``entries``, a list for each request of a message with outputs, beside SGLang's information on its tokens."""
    pack, unpack = function_at(_PACKED), function_at(_UNPACKED)
    information = message.customized_info if unpack is None else unpack(message.customized_info)
    information = {**(information or {}), key: list(entries)}
    message.customized_info = information if pack is None else pack(information)


def undecided_format() -> str:
    """The form of a choice for which a ``TopK`` names none. Up to 0.5.22 the runner's backend decides in each pass."""
    backend = function_at(_RUNNER)()
    if backend.is_triton_kernels():
        return "TRITON_KERNEL"
    checks = (getattr(backend, f"is_{name}", None) for name in _BYPASSING)
    return "BYPASSED" if any(check is not None and check() for check in checks) else "STANDARD"


_BYPASSING: Final = ("flashinfer_trtllm", "flashinfer_mxfp4", "experimental_sgl_trtllm")


TRANSFERRING: Final = 3
TRANSFERRED: Final = 4
"""SGLang's ``KVPoll``: the state of a request whose KV comes from another engine, and has come."""


def is_on(server_args: Any, part: str) -> bool:
    """Whether an engine with these arguments has the part of :data:`PARTS`."""
    return getattr(server_args, part, None) not in (None, False, "null")


__all__ = [
    "APART",
    "DATA_PARALLEL",
    "DOOR",
    "DRAFTS",
    "HOST",
    "JUDGED",
    "LINKER",
    "PARTS",
    "PLACES",
    "PREFERRED",
    "TAKEN",
    "TESTED",
    "TRANSFERRED",
    "TRANSFERRING",
    "WAYS",
    "WEIGHTS_SETTING",
    "AttentionRank",
    "Part",
    "Place",
    "absent",
    "add_information",
    "arguments",
    "data_rank",
    "experts_capturer",
    "first_rank",
    "hooked",
    "host_tokens",
    "is_on",
    "kv_cache_dtype",
    "name_of",
    "page_size",
    "part_of",
    "release",
    "resolved",
    "set_experts_capturer",
    "shard",
    "slots_of",
    "undecided_format",
    "unfit",
    "verifies_drafts",
    "without_host_buffer",
]

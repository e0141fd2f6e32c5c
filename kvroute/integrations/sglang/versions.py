"""The versions of SGLang that kvroute was judged with, and every name of SGLang that it takes.

This module imports nothing of SGLang by itself. All names are resolved before the first one is hooked. SGLang's plugin
loader logs what a plugin raises and goes on, so nothing is refused there: see ``plugin.py`` for the place.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class Judged(NamedTuple):
    version: str
    how: str  # "tests": all of `make test-sglang`
    date: str


JUDGED: Final = (Judged("0.5.23", "tests", "2026-11-28"),)
"""Newest first. The refusal, ``kvroute doctor`` and the pages read this table."""

DOOR: Final = "sglang.srt.managers.scheduler.Scheduler.__init__"
"""Called once in each process with rows, with all server arguments; an exception in it ends the server."""

_MEMORY: Final = "sglang.srt.mem_cache"
_PARTS: Final = "sglang.srt.managers.scheduler_components"
_CONTROLLER: Final = f"{_MEMORY}.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_UPDATER: Final = f"{_PARTS}.weight_updater.SchedulerWeightUpdaterManager.update_weights_from"

PLACES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "created": (
        "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer.create",
        ("model", "model_config", "num_tokens"),
    ),
    "hosted": (f"{_CONTROLLER}.__init__", ()),
    "backed_up": (f"{_CONTROLLER}.write", ("device_indices",)),
    "brought_back": (f"{_CONTROLLER}.load", ("host_indices",)),
    "stored": (f"{_CONTROLLER}.write_storage", ()),
    "found": (f"{_CONTROLLER}._storage_hit_query", ()),
    "linked": (f"{_MEMORY}.unified_cache.linker_factory.create_unified_cache_linker", ("params", "components")),
    "flushed": ("sglang.srt.managers.scheduler.Scheduler.flush_cache", ()),
    "named": ("sglang.srt.managers.scheduler.Scheduler.handle_update_weight_version", ()),
    **{f"updated_{way}": (f"{_UPDATER}_{way}", ()) for way in ("disk", "distributed", "tensor", "ipc")},
    "prefetched": (f"{_MEMORY}.unified_radix_cache.UnifiedRadixCache._handle_prefetch_result", ("operation",)),
    "collects": (
        f"{_PARTS}.batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_routed_experts",
        ("req",),
    ),
    "begins": ("sglang.srt.model_executor.model_runner.ModelRunner.forward", ("forward_batch",)),
}
"""What is hooked: its place, and the parameters that our hook reads."""

_CONTEXT: Final = "sglang.srt.runtime_context"
_BASE: Final = "sglang.srt.state_capturer.base.BaseTopkCapturer"
_LINKER: Final = f"{_MEMORY}.unified_cache.unified_cache_linker.UnifiedCacheLinker"
TAKEN: Final = (
    *(f"{_CONTEXT}.get_{part}" for part in ("memory", "model", "parallel", "resources", "schedule", "server_args")),
    "sglang.srt.arg_groups.overrides.resolved_view",
    *(f"{_BASE}.{name}" for name in ("capture", "on_forward_end", "destroy", "get_topk")),
    f"{_MEMORY}.hicache_storage.PoolName",
    *(f"{_LINKER}.{name}" for name in ("lookup", "load", "offload", "num_completed_offloads", "pop_completed_offload")),
)
"""What is called or replaced, and not hooked."""


def resolved(place: str) -> tuple[Any, str]:
    """The object that holds a dotted name, and the name in it. Raises what importing or looking up raises."""
    path, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(path)
    getattr(owner, name)
    return owner, name


def absent() -> list[str]:
    """The names that this SGLang lacks, and ``name(parameter)`` for those that lack a parameter."""
    lacking: list[str] = []
    for place, parameters in (*PLACES.values(), *((place, ()) for place in TAKEN)):
        try:
            owner, name = resolved(place)
        except Exception as error:  # noqa: BLE001 - a module of another version may fail in any way when it is imported
            lacking.append(place if isinstance(error, (ImportError, AttributeError)) else f"{place} ({error!r})")
            continue
        known = inspect.signature(getattr(owner, name)).parameters if parameters else {}
        lacking += [f"{place}({parameter})" for parameter in parameters if parameter not in known]
    return lacking


def unfit(version: str, untested: str) -> tuple[str, str] | None:
    """What is wanted of SGLang and what it is, where kvroute cannot work in it; else ``None``.

    ``untested``, an operator's setting, accepts a version that was not judged, and never one that lacks a name.
    """
    judged = " or ".join(entry.version for entry in JUDGED)
    if lacking := absent():
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        return f"SGLang {judged}, or one with {lacking[0]}{more}", f"{version}, which lacks it"
    if version not in (untested, *(entry.version for entry in JUDGED)):
        return f"SGLang {judged}, or untested={version!r}", version
    return None


__all__ = ["DOOR", "JUDGED", "PLACES", "TAKEN", "Judged", "absent", "resolved", "unfit"]

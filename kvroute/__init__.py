"""Auxiliary rows that follow KV blocks: never wrong, never silent."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cache_manager.blocks import AuxBlocks
    from cache_manager.errors import (
        BlockBusyError,
        BlockStateError,
        ConfigError,
        FeedGapError,
        InvalidInputError,
        KVRouteError,
        NoSpaceError,
        RecordError,
        RegionError,
        RegionMismatchError,
        RegionMissingError,
        RowError,
        SlotError,
        SpecError,
        StorageError,
        StoreClosedError,
        StoreFormatError,
        StoreLockedError,
        StoreMissingError,
        StoreReadOnlyError,
        StoreUnavailableError,
    )
    from cache_manager.feed import BlockFeed
    from cache_manager.stored import JobLimits
    from cache_manager.keys import BlockKey, KeyChain, Namespace
    from cache_manager.manager import BlockManager
    from cache_manager.regions.view import RegionView
    from cache_manager.rows import Rows
    from cache_manager.spec import AuxBlockDataSpec, RecordLayout
    from cache_manager.storage import open_store
    from kvroute.checks import valid_rows
    from kvroute.config import RoutingReplayConfig
    from kvroute.journal import RequestJournal
    from kvroute.rollout import RolloutHandle, fetch_shard, open_rollouts
    from kvroute.rollout.manager import RoutingReplayManager
    from kvroute.routes import Routes
    from kvroute.routing import logprob_spec, routing_spec, routing_spec_from_hf, weights_version_spec
    from kvroute.sharding import Split

__version__: Final = "0.1.0"

# Where each public name lives. A module is loaded when one of its names is first asked for, so that importing kvroute
# costs next to nothing, numpy not included.
_HOME: Final = {
    "cache_manager.blocks": ("AuxBlocks",),
    "cache_manager.errors": (
        "BlockBusyError",
        "BlockStateError",
        "ConfigError",
        "FeedGapError",
        "InvalidInputError",
        "KVRouteError",
        "NoSpaceError",
        "RecordError",
        "RegionError",
        "RegionMismatchError",
        "RegionMissingError",
        "RowError",
        "SlotError",
        "SpecError",
        "StorageError",
        "StoreClosedError",
        "StoreFormatError",
        "StoreLockedError",
        "StoreMissingError",
        "StoreReadOnlyError",
        "StoreUnavailableError",
    ),
    "cache_manager.feed": ("BlockFeed",),
    "cache_manager.stored": ("JobLimits",),
    "cache_manager.keys": ("BlockKey", "KeyChain", "Namespace"),
    "cache_manager.manager": ("BlockManager",),
    "cache_manager.regions.view": ("RegionView",),
    "cache_manager.rows": ("Rows",),
    "cache_manager.spec": ("AuxBlockDataSpec", "RecordLayout"),
    "cache_manager.storage": ("open_store",),
    "kvroute.checks": ("valid_rows",),
    "kvroute.config": ("RoutingReplayConfig",),
    "kvroute.journal": ("RequestJournal",),
    "kvroute.rollout": ("RolloutHandle", "fetch_shard", "open_rollouts"),
    "kvroute.rollout.manager": ("RoutingReplayManager",),
    "kvroute.routes": ("Routes",),
    "kvroute.routing": ("logprob_spec", "routing_spec", "routing_spec_from_hf", "weights_version_spec"),
    "kvroute.sharding": ("Split",),
}
_MODULE_OF: Final = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def preload() -> None:
    """Load every module behind a public name now, so that the first finished request does not pay for it.

    They are numpy, msgspec and xxhash and this project's own; neither torch, zmq nor mooncake is loaded.
    """
    for module in _HOME:
        import_module(module)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "AuxBlockDataSpec",
    "AuxBlocks",
    "BlockBusyError",
    "BlockFeed",
    "BlockKey",
    "BlockManager",
    "BlockStateError",
    "ConfigError",
    "FeedGapError",
    "InvalidInputError",
    "JobLimits",
    "KVRouteError",
    "KeyChain",
    "Namespace",
    "NoSpaceError",
    "RecordError",
    "RecordLayout",
    "RegionError",
    "RegionMismatchError",
    "RegionMissingError",
    "RegionView",
    "RequestJournal",
    "RolloutHandle",
    "Routes",
    "RoutingReplayConfig",
    "RoutingReplayManager",
    "RowError",
    "Rows",
    "SlotError",
    "SpecError",
    "Split",
    "StorageError",
    "StoreClosedError",
    "StoreFormatError",
    "StoreLockedError",
    "StoreMissingError",
    "StoreReadOnlyError",
    "StoreUnavailableError",
    "__version__",
    "fetch_shard",
    "logprob_spec",
    "open_rollouts",
    "open_store",
    "preload",
    "routing_spec",
    "routing_spec_from_hf",
    "valid_rows",
    "weights_version_spec",
]

"""Auxiliary rows that follow KV blocks: never wrong, never silent."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cache_manager.aux_blocks import AuxBlocks, Rows
    from cache_manager.errors import (
        BlockBusyError,
        BlockStateError,
        ConfigError,
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
    from cache_manager.keys import BlockKey, KeyChain, Namespace
    from cache_manager.manager import BlockManager
    from cache_manager.spec import AuxBlockDataSpec, RecordLayout
    from cache_manager.storage import open_store
    from kvroute.config import RoutingReplayConfig
    from kvroute.routes import Routes
    from kvroute.routing import logprob_spec, routing_spec, routing_spec_from_hf, weights_version_spec

__version__: Final = "0.1.0"

# Where each public name lives. A module is loaded when one of its names is first asked for, so that importing kvroute
# costs next to nothing, numpy not included.
_HOME: Final = {
    "cache_manager.aux_blocks": ("AuxBlocks", "Rows"),
    "cache_manager.errors": (
        "BlockBusyError",
        "BlockStateError",
        "ConfigError",
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
    "cache_manager.keys": ("BlockKey", "KeyChain", "Namespace"),
    "cache_manager.manager": ("BlockManager",),
    "cache_manager.spec": ("AuxBlockDataSpec", "RecordLayout"),
    "cache_manager.storage": ("open_store",),
    "kvroute.config": ("RoutingReplayConfig",),
    "kvroute.routes": ("Routes",),
    "kvroute.routing": ("logprob_spec", "routing_spec", "routing_spec_from_hf", "weights_version_spec"),
}
_MODULE_OF: Final = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "AuxBlockDataSpec",
    "AuxBlocks",
    "BlockBusyError",
    "BlockKey",
    "BlockManager",
    "BlockStateError",
    "ConfigError",
    "InvalidInputError",
    "KVRouteError",
    "KeyChain",
    "Namespace",
    "NoSpaceError",
    "RecordError",
    "RecordLayout",
    "RegionError",
    "RegionMismatchError",
    "RegionMissingError",
    "Routes",
    "RoutingReplayConfig",
    "RowError",
    "Rows",
    "SlotError",
    "SpecError",
    "StorageError",
    "StoreClosedError",
    "StoreFormatError",
    "StoreLockedError",
    "StoreMissingError",
    "StoreReadOnlyError",
    "StoreUnavailableError",
    "__version__",
    "logprob_spec",
    "open_store",
    "routing_spec",
    "routing_spec_from_hf",
    "weights_version_spec",
]

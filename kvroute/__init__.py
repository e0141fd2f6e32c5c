"""Auxiliary rows that follow KV blocks: never wrong, never silent."""

from importlib import import_module
from importlib.util import find_spec

__version__ = "0.1.0"


def _foreign(name):
    """The file that ``import NAME`` would load, if that is not kvroute's own; ``None`` if it is."""
    module = find_spec(name)
    if module is None or module.origin is None:
        return "none"
    with open(module.origin, "rb") as file:
        return None if b'__distribution__ = "kvroute"' in file.read() else module.origin


def _remedy(name):
    """What its reader does about a foreign package. Distributions are asked only here: that reads all metadata."""
    from importlib.metadata import packages_distributions

    others = sorted(set(packages_distributions().get(name, ())) - {"kvroute"})
    if not others:
        return "No installed distribution brings it: give your file another name"
    brought = " ".join(others)
    return (
        f"It is of the distribution {brought}: pip uninstall -y {brought}, and install kvroute again with "
        "--force-reinstall --no-deps; or give each an environment of its own"
    )


for _name in ("cache_manager", "transfer"):
    _found = _foreign(_name)
    if _found is not None:
        raise ImportError(
            f"{_name}: wanted kvroute's own package of this name, got {_found}. {_remedy(_name)}", name=_name
        )

# A module is loaded when one of its names is first asked for, so that importing kvroute costs next to nothing, numpy
# not included. Type checkers read __init__.pyi, which has the same names.
_NAMES = {
    "cache_manager.blocks": "AuxBlocks",
    "cache_manager.errors": (
        "BlockBusyError BlockStateError ConfigError FeedGapError InvalidInputError KVRouteError NoSpaceError "
        "RecordError RegionError RegionMismatchError RegionMissingError RowError SlotError SpecError "
        "StorageError StoreClosedError StoreFormatError StoreLockedError StoreMissingError StoreReadOnlyError "
        "StoreUnavailableError"
    ),
    "cache_manager.feed": "BlockFeed",
    "cache_manager.keys": "BlockKey KeyChain Namespace",
    "cache_manager.manager": "BlockManager",
    "cache_manager.regions.view": "RegionView",
    "cache_manager.publish": "Rows",
    "cache_manager.spec": "AuxBlockDataSpec RecordLayout",
    "cache_manager.storage": "open_store",
    "cache_manager.jobs": "JobLimits",
    "kvroute.checks": "valid_rows",
    "kvroute.journal": "RequestJournal",
    "kvroute.rollout": "RolloutHandle fetch_shard open_rollouts",
    "kvroute.routes": "Routes RoutingWeights SamplingSupport Split",
    "kvroute.routing": "logprob_spec routing_spec routing_spec_from_hf routing_weights_spec weights_version_spec",
}
# Errors print under the name that users import: kvroute.SpecError.
_errors = import_module("cache_manager.errors")
for _name in _NAMES["cache_manager.errors"].split():
    getattr(_errors, _name).__module__ = "kvroute"

_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [*_HOME, "__version__", "preload"]


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOME[name]), name)
    return value


def preload():
    """Load every module behind a public name now, so that the first finished request does not pay for it.

    This loads numpy, msgspec, xxhash and this project's modules, but neither torch nor zmq nor mooncake.
    """
    for module in _NAMES:
        import_module(module)


def __dir__():
    return sorted(__all__)

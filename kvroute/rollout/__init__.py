"""Where the routes of finished rollouts wait for trainers: a URL opens a store, and handles find routes in it.

===============================================  =====================================================================
``file:///dir?layers=1&sync=put``                :class:`~kvroute.rollout.local.LocalRollouts`: a directory
``mooncake://host:port/prefix?...``              :class:`~kvroute.rollout.mooncake.MooncakeRollouts`: in a Mooncake pool
``ray:name?layers=1``                            :class:`~kvroute.rollout.ray.RayRollouts`: objects of an actor
``tq:?column=NAME,URL``                          :class:`~kvroute.rollout.transfer_queue.QueueRollouts`: a column
===============================================  =====================================================================

Further schemes come from entry points in the group ``kvroute.rollout_stores``: the entry's name is the scheme, its
value a function that takes a :class:`~cache_manager.storage.url.StoreUrl` and returns a ``RolloutStore``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Final

from cache_manager.errors import ConfigError
from cache_manager.ports import Absence
from cache_manager.storage import entry_of, opener_of
from cache_manager.storage.url import StoreUrl
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.ids import previous_turn, rollout_id_of
from kvroute.rollout.port import RolloutCounters, RolloutStore
from kvroute.rollout.shard import fetch_shard

GROUP: Final = "kvroute.rollout_stores"

_OPENERS = {
    "file": "local:open_local_rollouts",
    "mooncake": "mooncake:open_mooncake_rollouts",
    "ray": "ray:open_ray_rollouts",
    "tq": "transfer_queue:open_queue_rollouts",
}
BUILT_IN: Final = {name: EntryPoint(name, f"kvroute.rollout.{opener}", GROUP) for name, opener in _OPENERS.items()}


def open_rollouts(url: str) -> RolloutStore:
    """The rollout store at ``url``, ready for use; the caller closes it.

    Raises :class:`ConfigError` for an invalid scheme, parameter or value, ``StorageError`` when the store is there but
    cannot be used. An adapter is imported when its scheme is first asked for.
    """
    try:
        parsed = StoreUrl.parse(url)
    except ConfigError as error:
        field = "url" if error.field == "store" else error.field
        raise ConfigError(field, error.wanted, error.got) from error
    try:
        opener: Callable[[StoreUrl], RolloutStore] = opener_of(parsed.scheme, BUILT_IN, GROUP, "rollout store scheme")
    except ModuleNotFoundError as error:
        wanted = f"the package {error.name}"
        got = "none of it"
        raise ConfigError(f"{parsed.scheme}: rollout store", wanted, got) from error
    return opener(parsed)


def check_rollouts_url(text: str) -> None:
    """Raise :class:`ConfigError` for text that is no rollout store's URL, without an import of its adapter.

    Parameters, and the URLs that it holds, are judged where the store is opened.
    """
    entry_of(StoreUrl.parse(text).scheme, BUILT_IN, GROUP, "rollout store scheme")


__all__ = [
    "BUILT_IN",
    "GROUP",
    "Absence",
    "RolloutCounters",
    "RolloutHandle",
    "RolloutStore",
    "check_rollouts_url",
    "fetch_shard",
    "open_rollouts",
    "previous_turn",
    "rollout_id_of",
]

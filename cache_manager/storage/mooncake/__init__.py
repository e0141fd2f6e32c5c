"""Records in a Mooncake Store: memory of many machines, lent to one pool.

The native client lives in a child process (:mod:`.child`); this side (:mod:`.store`) waits with deadlines. Nothing here
imports mooncake.
"""

from __future__ import annotations

from cache_manager.storage.mooncake.settings import MooncakeSettings
from cache_manager.storage.mooncake.store import MooncakeCounters, MooncakeStore
from cache_manager.storage.url import StoreUrl


def open_mooncake_store(url: StoreUrl) -> MooncakeStore:
    """``mooncake://HOST:PORT/PREFIX?segment=1GiB&...``, connected; ``docs/concepts/mooncake.md`` has the parameters."""
    return MooncakeStore(MooncakeSettings.from_url(url))


__all__ = ["MooncakeCounters", "MooncakeSettings", "MooncakeStore", "open_mooncake_store"]

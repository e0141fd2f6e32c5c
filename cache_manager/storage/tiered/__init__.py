"""Stores in front of each other: reads go through, writes go to all, what is asked for moves to the front.

:mod:`.store` is what callers see, :mod:`.tier` one tier with its breakers and its debts.
"""

from __future__ import annotations

from cache_manager.errors import ConfigError
from cache_manager.ports import StorageBackend
from cache_manager.storage.tiered.store import TieredStore
from cache_manager.storage.tiered.tier import TierCounters, TieredCounters, TieredSettings
from cache_manager.storage.url import StoreUrl


def open_tiered_store(url: StoreUrl) -> TieredStore:
    """``tiered:file:///dir,mooncake://HOST:PORT/PREFIX``; parameters as ``tiered:?pause_ms=100,file:///dir,…``."""
    from cache_manager.storage import open_store  # it imports this module by name

    settings = TieredSettings.from_url(url)
    if not url.tiers:
        raise ConfigError("tiered: store tiers", "URLs, as in tiered:file:///dir,mooncake://host:port", repr(url.text))
    names = [f"{i}:{StoreUrl.parse(text).scheme}" for i, text in enumerate(url.tiers)]
    if any(name.endswith(":tiered") for name in names):
        raise ConfigError("tiered: store tiers", "URLs that are not tiered themselves", repr(url.text))
    tiers: dict[str, StorageBackend] = {}
    try:
        for name, text in zip(names, url.tiers, strict=True):
            tiers[name] = open_store(text)
        return TieredStore(tiers, settings)
    except BaseException:
        for backend in tiers.values():
            backend.close()
        raise


__all__ = ["TierCounters", "TieredCounters", "TieredSettings", "TieredStore", "open_tiered_store"]

"""Where records are stored: a store is opened by its URL, and the URL's scheme picks the adapter.

==================================================  =================================================
``memory:?capacity=64MiB``                          :class:`cache_manager.storage.memory.MemoryStore`
``file:///dir?quota=4GiB&sync=none``               :class:`cache_manager.storage.file.FileStore`
``file:///dir?mode=read``                           :class:`cache_manager.storage.file.FileReader`
``mooncake://host:port/prefix?segment=1GiB``        :class:`cache_manager.storage.mooncake.MooncakeStore`
``tiered:file:///dir,mooncake://host:port/prefix``  :class:`cache_manager.storage.tiered.TieredStore`
``apart:file:///dir``                               :class:`cache_manager.storage.apart.ApartStore`
==================================================  =================================================

Further schemes come from entry points in the group ``kvroute.stores``: the entry's name is the scheme, its value a
function that takes a :class:`~cache_manager.storage.url.StoreUrl` and returns a ``StorageBackend``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from cache_manager.errors import ConfigError
from cache_manager.ports import StorageBackend
from cache_manager.storage.url import StoreUrl

GROUP: Final = "kvroute.stores"

StoreOpener = Callable[[StoreUrl], StorageBackend]

BUILT_IN: Final = {
    "memory": EntryPoint("memory", "cache_manager.storage.memory:open_memory_store", GROUP),
    "file": EntryPoint("file", "cache_manager.storage.file:open_file_store", GROUP),
    "mooncake": EntryPoint("mooncake", "cache_manager.storage.mooncake:open_mooncake_store", GROUP),
    "apart": EntryPoint("apart", "cache_manager.storage.apart:open_apart_store", GROUP),
    "tiered": EntryPoint("tiered", "cache_manager.storage.tiered:open_tiered_store", GROUP),
}


def open_store(url: str) -> StorageBackend:
    """The store at ``url``, ready for use; the caller closes it.

    Raises :class:`ConfigError` for an invalid scheme, parameter or value, :class:`StorageError` when the store is there
    but cannot be used. An adapter is imported when its scheme is first asked for.
    """
    parsed = StoreUrl.parse(url)
    opener: StoreOpener = opener_of(parsed.scheme, BUILT_IN, GROUP, "store scheme")
    return opener(parsed)


def check_store_url(text: str) -> None:
    """Raise :class:`ConfigError` for text that is no store's URL, or holds none, without an import of any adapter.

    Parameters are judged where the store is opened.
    """
    url = StoreUrl.parse(text)
    entry_of(url.scheme, BUILT_IN, GROUP, "store scheme")
    for tier in url.tiers:
        check_store_url(tier)


def opener_of(scheme: str, built_in: Mapping[str, EntryPoint], group: str, field: str) -> Any:
    """The object for ``scheme`` in ``built_in`` or among the entry points of ``group``, imported."""
    return entry_of(scheme, built_in, group, field).load()


def entry_of(scheme: str, built_in: Mapping[str, EntryPoint], group: str, field: str) -> EntryPoint:
    """The entry point for ``scheme``; :class:`ConfigError` names the ``field`` and all schemes if there is none."""
    entry = built_in.get(scheme) or next(iter(entry_points(group=group, name=scheme)), None)
    if entry is None:
        known = sorted({*built_in, *(e.name for e in entry_points(group=group))})
        raise ConfigError(field, "one of " + ", ".join(known), repr(scheme))
    return entry


__all__ = ["BUILT_IN", "GROUP", "StoreOpener", "StoreUrl", "check_store_url", "entry_of", "open_store", "opener_of"]

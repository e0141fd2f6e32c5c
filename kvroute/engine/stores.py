"""Where a restarted engine finds what an earlier one computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from cache_manager.ports import StorageBackend
from cache_manager.storage import StoreUrl, open_store
from cache_manager.transfer_manager import TransferSettings


@dataclass(frozen=True, slots=True)
class EngineStores:
    """A store for rows and one for KV: records of a store have one size, and a block is found in both by one key."""

    rows: StorageBackend
    kv: StorageBackend

    @classmethod
    def open(cls, url: str) -> Self:
        """Open both at ``url``, in the directories ``rows`` and ``kv`` where it names a place. See ``open_store``."""
        place = StoreUrl.parse(url)
        rows = open_store(place.below("rows"))
        try:
            return cls(rows, open_store(place.below("kv")))
        except BaseException:
            rows.close()
            raise

    def flush(self) -> None:
        self.kv.flush()
        self.rows.flush()

    def close(self) -> None:
        self.kv.close()
        self.rows.close()


@dataclass(frozen=True, slots=True)
class RemoteStores:
    """The same stores, for a cache-transfer process to open: URLs, and the limits of the process."""

    rows: str
    kv: str
    settings: TransferSettings | None = None

    @classmethod
    def at(cls, url: str, settings: TransferSettings | None = None) -> Self:
        """Both at ``url``, where :meth:`EngineStores.open` finds them."""
        place = StoreUrl.parse(url)
        return cls(place.below("rows"), place.below("kv"), settings)


AnyStores = EngineStores | RemoteStores

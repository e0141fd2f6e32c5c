"""Records in this process's memory: the least recently used ones make room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from cache_manager.errors import ConfigError
from cache_manager.keys import BlockKey
from cache_manager.lock import change
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader, takes_the_place
from cache_manager.storage.batch import flat
from cache_manager.storage.guard import ClosingStore, StoreLock
from cache_manager.storage.url import StoreUrl

CAPACITY_NBYTES: Final = 64 << 20


def open_memory_store(url: StoreUrl) -> MemoryStore:
    """``memory:`` or ``memory:?capacity=64MiB``."""
    url.allow("capacity")
    if url.host or url.path:
        raise ConfigError("memory: store path", "none", repr(url.host + url.path))
    return MemoryStore(url.nbytes("capacity", CAPACITY_NBYTES))


class MemoryStore(ClosingStore):
    """A ``StorageBackend`` whose records live as long as the store.

    When the store is full the least recently used records make room (reading or putting a record uses it), so ``put``
    answers ``None`` only for a record larger than the capacity, or one that later records of its own call have evicted.
    Payloads take ``capacity_nbytes`` at most, from when they are put. One lock, held while bytes are copied.
    """

    def __init__(self, capacity_nbytes: int) -> None:
        self.lock = StoreLock("memory store")
        self._capacity_nbytes = capacity_nbytes
        self._records: OrderedDict[BlockKey, tuple[RecordHeader, bytes]] = OrderedDict()
        self._used_nbytes = 0  # by payloads
        self._evicted = 0

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        flats = [flat(header, payload) for header, payload in zip(headers, payloads, strict=True)]
        with self.lock:
            self._put(headers, flats, replace=replace)
            entries = [self._records.get(header.key) for header in headers]
        return [entry and entry[0] for entry in entries]

    @change
    def _put(self, headers: Sequence[RecordHeader], flats: Sequence[memoryview], *, replace: bool) -> None:
        records = self._records
        for header, payload in zip(headers, flats, strict=True):
            key = header.key
            nbytes = header.payload_nbytes
            if nbytes > self._capacity_nbytes:
                continue
            stored = records.get(key)
            if stored is not None:
                records.move_to_end(key)
                if not takes_the_place(header, stored[0], replace=replace):
                    continue
                self._remove(key)
            while self._used_nbytes + nbytes > self._capacity_nbytes:
                self._remove(next(iter(records)))
                self._evicted += 1
            records[key] = header, bytes(payload)
            self._used_nbytes += nbytes

    @change
    def _remove(self, key: BlockKey) -> None:
        self._used_nbytes -= len(self._records.pop(key)[1])

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        found: list[RecordHeader | Absence] = []
        records = self._records
        with self.lock:
            for key, buffer in zip(keys, buffers, strict=True):
                if (stored := records.get(key)) is None:
                    found.append(Absence.MISS)
                elif buffer.nbytes != len(stored[1]):
                    found.append(Absence.CORRUPT)
                else:
                    buffer[:] = stored[1]
                    records.move_to_end(key)
                    found.append(stored[0])
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self.lock:
            return [key in self._records for key in keys]

    def delete(self, keys: Sequence[BlockKey]) -> None:
        with self.lock:
            for key in keys:
                if key in self._records:
                    self._remove(key)

    def flush(self) -> None:
        self.lock.check()

    def usage(self) -> Mapping[str, int]:
        """The port's four, and ``evicted_records``."""
        with self.lock:
            return {
                "records": len(self._records),
                "used_nbytes": self._used_nbytes,
                "free_nbytes": self._capacity_nbytes - self._used_nbytes,
                "capacity_nbytes": self._capacity_nbytes,
                "evicted_records": self._evicted,
            }

    def close(self) -> None:
        """Idempotent."""
        if self.lock.close():
            self._records.clear()

"""Records in this process's memory: the least recently used ones make room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from cache_manager.errors import ConfigError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader, takes_the_place
from cache_manager.storage.batch import flat
from cache_manager.storage.guard import ClosingStore, OpenCheck
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
        self._capacity_nbytes = capacity_nbytes
        self._records: OrderedDict[BlockKey, tuple[RecordHeader, bytes]] = OrderedDict()
        self._sum_nbytes: int | None = 0  # of the payloads; None: a call changes them, or was interrupted
        self._evicted = 0
        self._lock = threading.Lock()
        self._guard = OpenCheck("memory store", self._lock)

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        records, flats = self._records, [flat(*each) for each in zip(headers, payloads, strict=True)]
        with self._guard.lock():
            self._guard.check()
            used_nbytes = self._used_nbytes()
            self._sum_nbytes = None
            for header, payload in zip(headers, flats, strict=True):
                key, nbytes = header.key, header.payload_nbytes
                if nbytes > self._capacity_nbytes:
                    continue
                if (stored := records.get(key)) is not None:
                    records.move_to_end(key)
                    if not takes_the_place(header, stored[0], replace=replace):
                        continue
                    used_nbytes -= len(records.pop(key)[1])
                while used_nbytes + nbytes > self._capacity_nbytes:
                    used_nbytes -= len(records.popitem(last=False)[1][1])
                    self._evicted += 1
                records[key] = header, bytes(payload)
                used_nbytes += nbytes
            self._sum_nbytes = used_nbytes
            entries = [records.get(header.key) for header in headers]
        return [entry and entry[0] for entry in entries]

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        found: list[RecordHeader | Absence] = []
        records = self._records
        with self._guard.lock():
            self._guard.check()
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
        with self._guard.lock():
            self._guard.check()
            return [key in self._records for key in keys]

    def delete(self, keys: Sequence[BlockKey]) -> None:
        with self._guard.lock():
            self._guard.check()
            used_nbytes = self._used_nbytes()
            self._sum_nbytes = None
            for key in keys:
                if key in self._records:
                    used_nbytes -= len(self._records.pop(key)[1])
            self._sum_nbytes = used_nbytes

    def flush(self) -> None:
        self._guard.check()

    def usage(self) -> Mapping[str, int]:
        """The port's four, and ``evicted_records``."""
        with self._guard.lock():
            self._guard.check()
            used = self._used_nbytes()
            return {
                "records": len(self._records),
                "used_nbytes": used,
                "free_nbytes": self._capacity_nbytes - used,
                "capacity_nbytes": self._capacity_nbytes,
                "evicted_records": self._evicted,
            }

    def close(self) -> None:
        """Idempotent."""
        if self._guard.close():
            with self._lock:
                self._records.clear()

    def _used_nbytes(self) -> int:
        """Bytes of the payloads; counted anew after a call that was interrupted. Held: lock."""
        if self._sum_nbytes is None:
            return sum(len(payload) for _, payload in self._records.values())
        return self._sum_nbytes

"""Records in this process's memory: a bounded, prefaulted slab of equal slots with the least recently used evicted."""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from cache_manager.errors import ConfigError, NoSpaceError, RecordError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader, takes_the_place
from cache_manager.spec import align
from cache_manager.storage.guard import ClosingStore, OpenCheck
from cache_manager.storage.url import StoreUrl

CAPACITY_NBYTES: Final = 64 << 20

_SKEW_NBYTES: Final = 128
"""Slots start this far into a page: copies between addresses that are 1 to 31 bytes apart modulo the page size run ten
times slower on some processors, and large numpy arrays lie 16 bytes into a page."""


def open_memory_store(url: StoreUrl) -> MemoryStore:
    """``memory:`` or ``memory:?capacity=64MiB``."""
    url.allow("capacity")
    if url.host or url.path:
        raise ConfigError("memory: store path", "none", repr(url.host + url.path))
    return MemoryStore(url.nbytes("capacity", CAPACITY_NBYTES))


def prefaulted(nbytes: int) -> mmap.mmap:
    """Anonymous memory with every page present, on huge pages where the kernel has them."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise NoSpaceError("memory", nbytes, 0, "lower the store's capacity") from error
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
    return memory


class MemoryStore(ClosingStore):
    """A ``StorageBackend`` whose records live as long as the store.

    The first record fixes the slot size: a store holds records of one size, and a record of another size is a
    :class:`RecordError` that changes nothing. When every slot is taken the least recently used record makes room
    (reading or putting a record uses it), so ``put`` answers ``None`` only for a record larger than the capacity, or
    one that later records of its own call have evicted. One lock, held while bytes are copied.
    """

    def __init__(self, capacity_nbytes: int) -> None:
        self._capacity_nbytes = capacity_nbytes
        self._memory = prefaulted(_SKEW_NBYTES + capacity_nbytes)
        self._slab = memoryview(self._memory)[_SKEW_NBYTES:]
        self._index: OrderedDict[BlockKey, tuple[RecordHeader, memoryview]] = OrderedDict()
        self._free: list[memoryview] = []  # slots that were used before
        self._fresh = 0  # where the unused bytes of the slab start
        self._record_nbytes = 0  # 0: no record yet
        self._slot_nbytes = 0
        self._evicted = 0
        self._lock = threading.Lock()
        self._guard = OpenCheck("memory store", self._lock)

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        index = self._index
        with self._guard.lock():
            self._guard.check()
            for header in headers:
                if header.payload_nbytes != self._record_nbytes:
                    self._admit(header.payload_nbytes)
            for header, payload in zip(headers, payloads, strict=True):
                key = header.key
                if header.payload_nbytes != self._record_nbytes:
                    continue  # larger than the store: _admit raised for other sizes
                entry = index.get(key)
                if entry is not None:
                    index.move_to_end(key)
                    if not takes_the_place(header, entry[0], replace=replace):
                        continue
                slot = self._take_slot() if entry is None else entry[1]
                try:
                    slot[:] = payload  # all of it or, when it raises, nothing
                except ValueError as error:
                    if entry is None:
                        self._free.append(slot)
                    got = f"{memoryview(payload).nbytes} of format {memoryview(payload).format}"
                    raise RecordError("payload", f"{header.payload_nbytes} flat bytes", got) from error
                index[key] = (header, slot)
            entries = [index.get(header.key) for header in headers]
        return [entry and entry[0] for entry in entries]

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        found: list[RecordHeader | Absence] = []
        index = self._index
        with self._guard.lock():
            self._guard.check()
            for key, buffer in zip(keys, buffers, strict=True):
                entry = index.get(key)
                if entry is None:
                    found.append(Absence.MISS)
                    continue
                header, slot = entry
                if buffer.nbytes != header.payload_nbytes:
                    found.append(Absence.CORRUPT)
                    continue
                buffer[:] = slot
                index.move_to_end(key)
                found.append(header)
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._guard.lock():
            self._guard.check()
            return [key in self._index for key in keys]

    def delete(self, keys: Sequence[BlockKey]) -> None:
        with self._guard.lock():
            self._guard.check()
            for key in keys:
                if (entry := self._index.pop(key, None)) is not None:
                    self._free.append(entry[1])

    def flush(self) -> None:
        self._guard.check()

    def usage(self) -> Mapping[str, int]:
        """The port's four, and ``evicted_records``."""
        with self._guard.lock():
            self._guard.check()
            used = len(self._index) * self._slot_nbytes
            return {
                "records": len(self._index),
                "used_nbytes": used,
                "free_nbytes": self._capacity_nbytes - used,
                "capacity_nbytes": self._capacity_nbytes,
                "evicted_records": self._evicted,
            }

    def close(self) -> None:
        """Idempotent."""
        if not self._guard.close():
            return
        with self._lock:
            self._index.clear()
            self._free.clear()
            del self._slab, self._memory  # the memory is freed with the last view of it

    def _admit(self, nbytes: int) -> None:
        """Take the first record's size as the slot size; any other size that would fit is an error."""
        if align(nbytes) > self._capacity_nbytes:
            return
        if self._record_nbytes:
            raise RecordError("payload size", f"{self._record_nbytes}, as of the records in this store", nbytes)
        self._record_nbytes = nbytes
        self._slot_nbytes = align(nbytes)

    def _take_slot(self) -> memoryview:
        if self._free:
            return self._free.pop()
        start = self._fresh
        if start + self._slot_nbytes <= self._capacity_nbytes:
            self._fresh = start + self._slot_nbytes
            return self._slab[start : start + self._record_nbytes]
        _, (_, slot) = self._index.popitem(last=False)
        self._evicted += 1
        return slot

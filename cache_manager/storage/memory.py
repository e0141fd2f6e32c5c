"""Records in this process's memory: a bounded, prefaulted slab of equal slots with the least recently used evicted."""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np

from cache_manager.errors import ConfigError, NoSpaceError, RecordError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, Lent
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
    """Anonymous memory whose every page is there already, on huge pages where the kernel has them."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise NoSpaceError("memory", nbytes, 0, "lower the store's capacity") from error
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
    return memory


class _Slot:
    """Room for one record."""

    __slots__ = ("left", "pins", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.pins = 0  # how often it is lent
        self.left = False  # its record is in the index no more: free when nobody has it lent


class MemoryStore(ClosingStore):
    """A ``StorageBackend`` and ``LendingBackend`` whose records live as long as the store.

    The first record fixes the slot size: a store holds records of one size, and a record of another size is a
    :class:`RecordError` that changes nothing. When every slot is taken the least recently used record that is not lent
    makes room (reading or putting a record uses it), so ``put`` answers ``None`` only for a record larger than the
    capacity, one that later records of its own call have evicted, or where everything is lent.

    One lock, held while bytes are copied; nothing here waits for I/O. Half of the capacity may be lent at once.
    """

    def __init__(self, capacity_nbytes: int) -> None:
        self._capacity_nbytes = capacity_nbytes
        self._memory = prefaulted(_SKEW_NBYTES + capacity_nbytes)
        self._slab = memoryview(self._memory)[_SKEW_NBYTES:]
        self._index: OrderedDict[BlockKey, tuple[RecordHeader, _Slot]] = OrderedDict()
        self._free: list[_Slot] = []  # slots that were used before
        self._fresh = 0  # bytes of the slab that were never used start here
        self._record_nbytes = 0  # 0: no record yet
        self._slot_nbytes = 0
        self._lent_nbytes = self._left_nbytes = 0
        self._evicted = self._replaced = 0
        self._lock = threading.Lock()
        self._guard = OpenCheck("memory store", self._lock)

    @property
    def lent_nbytes_max(self) -> int:
        return self._capacity_nbytes // 2

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        self._guard.check()
        index = self._index
        with self._lock:
            self._guard.check()
            for header in headers:
                if header.payload_nbytes != self._record_nbytes:
                    self._admit(header.payload_nbytes)
            for header, payload in zip(headers, payloads, strict=True):
                key = header.key
                if header.payload_nbytes != self._record_nbytes:
                    continue  # larger than the store: _admit let no other size through
                entry = index.get(key)
                if entry is not None:
                    index.move_to_end(key)
                    if not takes_the_place(header, entry[0], replace=replace):
                        continue
                lent = entry is not None and entry[1].pins
                slot = entry[1] if entry is not None and not lent else self._take_slot()
                if slot is None:
                    continue
                try:
                    slot.view[:] = payload  # all of it or, when it raises, nothing
                except ValueError as error:
                    if entry is None or lent:
                        self._free.append(slot)
                    got = f"{memoryview(payload).nbytes} of format {memoryview(payload).format}"
                    raise RecordError("payload", f"{header.payload_nbytes} flat bytes", got) from error
                if entry is not None and lent:
                    self._leave(entry[1])
                index[key] = (header, slot)
                self._replaced += entry is not None
            entries = [index.get(header.key) for header in headers]
        return [entry and entry[0] for entry in entries]

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        self._guard.check()
        found: list[RecordHeader | Absence] = []
        index = self._index
        with self._lock:
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
                buffer[:] = slot.view
                index.move_to_end(key)
                found.append(header)
        return found

    @contextmanager
    def borrow(self, keys: Sequence[BlockKey]) -> Iterator[list[Lent | Absence]]:
        self._guard.check()
        found: list[Lent | Absence] = []
        slots: list[_Slot] = []
        index, miss = self._index, Absence.MISS
        with self._lock:
            self._guard.check()
            nbytes = sum(map(index.__contains__, keys)) * self._slot_nbytes
            if self._lent_nbytes + nbytes > self.lent_nbytes_max:
                free = self.lent_nbytes_max - self._lent_nbytes
                raise NoSpaceError("memory store", nbytes, free, "borrow fewer records at once")
            self._lent_nbytes += nbytes
            for key in keys:
                if (entry := index.get(key)) is None:
                    found.append(miss)
                    continue
                header, slot = entry
                slot.pins += 1
                slots.append(slot)
                index.move_to_end(key)
                found.append((header, slot.view.toreadonly()))
        try:
            yield found
        finally:
            for lent in found:
                if isinstance(lent, tuple):
                    lent[1].release()
            with self._lock:
                self._lent_nbytes -= nbytes
                for slot in slots:
                    slot.pins -= 1
                    if slot.left and not slot.pins:
                        slot.left = False
                        self._left_nbytes -= self._slot_nbytes
                        self._free.append(slot)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._guard.check()
        with self._lock:
            self._guard.check()
            return [key in self._index for key in keys]

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._guard.check()
        with self._lock:
            self._guard.check()
            for key in keys:
                if (entry := self._index.pop(key, None)) is not None:
                    self._leave(entry[1])

    def flush(self) -> None:
        self._guard.check()

    def usage(self) -> Mapping[str, int]:
        """Beside the port's four: what was evicted and replaced, and ``lent_nbytes`` now."""
        self._guard.check()
        with self._lock:
            self._guard.check()
            used = len(self._index) * self._slot_nbytes + self._left_nbytes
            return {
                "records": len(self._index),
                "used_nbytes": used,
                "free_nbytes": self._capacity_nbytes - used,
                "capacity_nbytes": self._capacity_nbytes,
                "evicted_records": self._evicted,
                "replaced_records": self._replaced,
                "lent_nbytes": self._lent_nbytes,
            }

    def close(self) -> None:
        """Idempotent. What is lent stays readable until it is given back."""
        if not self._guard.close():
            return
        with self._lock:
            self._index.clear()
            self._free.clear()
            with suppress(BufferError):  # lent: the memory goes with the last view of it
                self._slab.release()
                self._memory.close()

    def _admit(self, nbytes: int) -> None:
        """Take the first record's size as the slot size; any other size that would fit is an error."""
        if align(nbytes) > self._capacity_nbytes:
            return
        if self._record_nbytes:
            raise RecordError("payload size", f"{self._record_nbytes}, as of the records in this store", nbytes)
        self._record_nbytes = nbytes
        self._slot_nbytes = align(nbytes)

    def _leave(self, slot: _Slot) -> None:
        """The record of a slot has gone from the index."""
        if slot.pins:
            slot.left = True
            self._left_nbytes += self._slot_nbytes
        else:
            self._free.append(slot)

    def _take_slot(self) -> _Slot | None:
        if self._free:
            return self._free.pop()
        start = self._fresh
        if start + self._slot_nbytes <= self._capacity_nbytes:
            self._fresh = start + self._slot_nbytes
            return _Slot(self._slab[start : start + self._record_nbytes])
        for key, (_, slot) in self._index.items():
            if not slot.pins:
                del self._index[key]
                self._evicted += 1
                return slot
        return None

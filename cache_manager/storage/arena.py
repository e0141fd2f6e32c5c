"""The memory through which records go to a store in a child process, and come back: one mapping, shared with it."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from queue import Empty, LifoQueue
from typing import Any, Final

from cache_manager.errors import StorageError, StoreClosedError
from cache_manager.spec import align

PAGE_NBYTES: Final = 4096
CALLS_MAX: Final = 4
"""Slots of an arena: who has one may make a call."""


@dataclass(slots=True)
class Ranges:
    """Where the records of one call lie. ``call`` is the child's one that was made of them."""

    offsets: list[int]
    nbytes: list[int]
    call: Future[Any] | None = None


class Arena:
    """Anonymous shared memory in equal slots, one for each call. Safe from several threads."""

    def __init__(self, nbytes: int) -> None:
        self.slot_nbytes = align(-(-nbytes // CALLS_MAX), PAGE_NBYTES)
        self.nbytes = CALLS_MAX * self.slot_nbytes
        self.fd = os.memfd_create("kvroute-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.nbytes)
            self._memory = mmap.mmap(self.fd, self.nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self._memory)
        self._free: LifoQueue[int | None] = LifoQueue()  # the one that was used last is in the processor's cache
        for slot in range(CALLS_MAX):
            self._free.put(slot * self.slot_nbytes)

    @property
    def idle(self) -> bool:
        """Whether no slot is lent."""
        return self._free.qsize() == CALLS_MAX

    @contextmanager
    def lend(self, sizes: Sequence[int], give_up_s: float) -> Iterator[Ranges]:
        """A range for each size, each on a cache line of its own, in one slot; the caller's within the block.

        The slot is free when the call that was made of them has ended, or its process is gone.
        """
        ends = list(accumulate([align(size) for size in sizes], initial=0))
        assert ends.pop() <= self.slot_nbytes, f"{sum(sizes)} bytes for a slot of {self.slot_nbytes}"
        try:
            slot = self._free.get(timeout=max(give_up_s - time.monotonic(), 0))
        except Empty:
            raise StorageError("the arena stayed full: no call that uses it has ended") from None
        if slot is None:
            self._free.put(None)
            raise StoreClosedError("the arena was closed")
        lent = Ranges([slot + at for at in ends], list(sizes))
        try:
            yield lent
        finally:
            if lent.call is None:
                self._free.put(slot)
            else:
                lent.call.add_done_callback(lambda _: self._free.put(slot))

    def close(self) -> None:
        """Lend nothing more, and unmap; while a slot is lent the memory stays until it is collected. Not twice."""
        taken = 0
        with suppress(Empty):
            while True:
                self._free.get_nowait()
                taken += 1
        self._free.put(None)
        os.close(self.fd)
        if taken == CALLS_MAX:
            self.view.release()
            self._memory.close()

"""The memory from which records are sent and into which they are received: one, shared with the native client."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from queue import Empty, LifoQueue
from typing import Any, Final

from cache_manager.errors import StorageError
from cache_manager.spec import align
from cache_manager.storage.mooncake.wire import CALLS_MAX

PAGE_NBYTES: Final = 4096
SLOTS: Final = CALLS_MAX
"""Who has one may make a native call."""


@dataclass(slots=True)
class Ranges:
    """Where the records of one call lie. ``call`` is the native one that was made of them."""

    offsets: list[int]
    nbytes: list[int]
    call: Future[Any] | None = None


class Arena:
    """Anonymous shared memory in equal slots, one for each call. Safe from several threads."""

    def __init__(self, nbytes: int) -> None:
        self.slot_nbytes = align(-(-nbytes // SLOTS), PAGE_NBYTES)
        self.nbytes = SLOTS * self.slot_nbytes
        self.fd = os.memfd_create("kvroute-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.nbytes)
            self._memory = mmap.mmap(self.fd, self.nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self._memory)
        self._free: LifoQueue[int] = LifoQueue()  # the one that was used last is in the processor's cache
        for slot in range(SLOTS):
            self._free.put(slot * self.slot_nbytes)

    @property
    def idle(self) -> bool:
        """Whether no slot is lent."""
        return self._free.qsize() == SLOTS

    @contextmanager
    def lend(self, sizes: Sequence[int], give_up_s: float) -> Iterator[Ranges]:
        """A range for each size, each on a cache line of its own, in one slot; the caller's within the block.

        The slot is free when the native call that was made of them has returned, or its process is gone.
        """
        ends = list(accumulate([align(size) for size in sizes], initial=0))
        assert ends.pop() <= self.slot_nbytes, f"{sum(sizes)} bytes for a slot of {self.slot_nbytes}"
        try:
            slot = self._free.get(timeout=max(give_up_s - time.monotonic(), 0))
        except Empty:
            raise StorageError("the Mooncake arena stayed full: no call that uses it has ended") from None
        lent = Ranges([slot + at for at in ends], list(sizes))
        try:
            yield lent
        finally:
            if lent.call is None:
                self._free.put(slot)
            else:
                lent.call.add_done_callback(lambda _: self._free.put(slot))

    def close(self) -> None:
        """Unmap; whoever else maps it keeps it."""
        self.view.release()
        self._memory.close()
        os.close(self.fd)

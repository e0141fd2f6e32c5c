"""The memory from which records are sent and into which they are received: one, shared with the native client."""

from __future__ import annotations

import mmap
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final

from cache_manager.errors import StorageError
from cache_manager.spec import align

PAGE_NBYTES: Final = 4096


class Ranges:
    """Where the records of one call lie. ``call`` is the native one that was made of them."""

    __slots__ = ("call", "nbytes", "offsets")

    def __init__(self, start: int, ends: Sequence[int], sizes: Sequence[int]) -> None:
        self.offsets = [start + at for at in ends]
        self.nbytes = list(sizes)
        self.call: Future[Any] | None = None


class Arena:
    """Anonymous shared memory, cut into ranges that start on a cache line; first fit. Safe from several threads."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = align(nbytes, PAGE_NBYTES)
        self.fd = os.memfd_create("kvroute-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.nbytes)
            self._memory = mmap.mmap(self.fd, self.nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self._memory)
        self._changed = threading.Condition()
        self._free = [(0, self.nbytes)]  # (offset, bytes), by offset, never adjacent
        self._taken: dict[int, int] = {}

    @contextmanager
    def lend(self, sizes: Sequence[int], give_up_s: float) -> Iterator[Ranges]:
        """A range for each size, side by side; the caller's within the block.

        After it they are free when the native call that was made of them has returned, or its process is gone.
        """
        ends = list(accumulate([align(size) for size in sizes], initial=0))
        start = self.take(ends.pop(), give_up_s)
        if start is None:
            raise StorageError("the Mooncake arena stayed full; a larger one is the parameter arena")
        lent = Ranges(start, ends, sizes)
        try:
            yield lent
        finally:
            if lent.call is None:
                self.give(start)
            else:
                lent.call.add_done_callback(lambda _: self.give(start))

    def take(self, nbytes: int, give_up_s: float) -> int | None:
        """The offset of a free range; ``None`` when there was none until then."""
        size = align(nbytes)
        with self._changed:
            while (offset := self._fit(size)) is None:
                if not self._changed.wait(max(give_up_s - time.monotonic(), 0)):
                    return None
            self._taken[offset] = size
            return offset

    def give(self, offset: int) -> None:
        with self._changed:
            nbytes = self._taken.pop(offset)
            i = bisect_left(self._free, (offset, 0))
            if i < len(self._free) and self._free[i][0] == offset + nbytes:
                nbytes += self._free.pop(i)[1]
            if i and sum(self._free[i - 1]) == offset:
                offset, before = self._free.pop(i - 1)
                nbytes, i = nbytes + before, i - 1
            self._free.insert(i, (offset, nbytes))
            self._changed.notify_all()

    @property
    def taken_nbytes(self) -> int:
        with self._changed:
            taken = sum(self._taken.values())
            assert taken + sum(nbytes for _, nbytes in self._free) == self.nbytes
            return taken

    def close(self) -> None:
        """Unmap; whoever else maps it keeps it."""
        self.view.release()
        self._memory.close()
        os.close(self.fd)

    def _fit(self, nbytes: int) -> int | None:
        for i, (offset, free) in enumerate(self._free):
            if free >= nbytes:
                self._free[i : i + 1] = [(offset + nbytes, free - nbytes)] if free > nbytes else []
                return offset
        return None

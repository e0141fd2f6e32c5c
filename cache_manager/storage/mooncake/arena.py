"""The memory from which records are sent and into which they are received: one, shared with the native client."""

from __future__ import annotations

import mmap
import os
import threading
import time
from bisect import bisect_left
from typing import Final

from cache_manager.spec import align

PAGE_NBYTES: Final = 4096


class Arena:
    """Anonymous shared memory, cut into ranges that start on a cache line; first fit. Safe from several threads.

    A range is the taker's until :meth:`give`. Ranges that native code may still touch are given back only when it has
    returned, or when its process is gone.
    """

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

    def take(self, nbytes: int, give_up_s: float) -> int | None:
        """The offset of a free range, or ``None`` when there was none until ``give_up_s`` (monotonic time)."""
        nbytes = align(nbytes)
        with self._changed:
            while (offset := self._fit(nbytes)) is None:
                if not self._changed.wait(max(give_up_s - time.monotonic(), 0)) and time.monotonic() >= give_up_s:
                    return None
            self._taken[offset] = nbytes
            return offset

    def give(self, offset: int) -> None:
        """Take a range back."""
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

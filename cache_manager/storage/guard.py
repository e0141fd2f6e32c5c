"""The check of every store before it touches a lock: is it open, and is this the process that opened it?

A forked child has its parent's locks as they were at the fork, held by threads that it does not have. So every method
checks before any lock, and once more under the lock where another thread may close meanwhile.
"""

from __future__ import annotations

import os
import threading
from typing import Self

from cache_manager.errors import StoreClosedError


class OpenCheck:
    """Whether calls may go on; messages begin with ``name``, and ``lock`` is the store's.

    A call begins with ``with guard.lock():`` and ``guard.check()``. So the lock's own methods take and leave it: an
    exception from a signal handler never leaves it taken, as one inside an ``__exit__`` of ours would.
    """

    __slots__ = ("_lock", "_name", "_open", "_pid")

    def __init__(self, name: object, lock: threading.Lock) -> None:
        self._name = name
        self._lock = lock
        self._open = True
        self._pid = os.getpid()

    def check(self) -> None:
        """:class:`StoreClosedError` after :meth:`close`, and in a child of the process that opened the store."""
        if os.getpid() != self._pid:
            raise StoreClosedError(f"{self._name}: opened before fork; open it in the process that uses it")
        if not self._open:
            raise StoreClosedError(f"{self._name}: the store is closed")

    def lock(self) -> threading.Lock:
        """The store's lock, for a ``with`` statement, where calls may go on; :meth:`check` again when it is held."""
        self.check()
        return self._lock

    @property
    def closable(self) -> bool:
        """Whether closing has anything to do: not in a forked child, whose parent goes on, and not twice."""
        return self._open and os.getpid() == self._pid

    def close(self) -> bool:
        """No call begins from here on; ``False`` if that was so before."""
        if not self.closable:
            return False
        with self._lock:
            was_open, self._open = self._open, False
        return was_open


class ClosingStore:
    """``with open_store(url) as store:`` closes the store at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

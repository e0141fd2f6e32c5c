"""The lock of every store, which says whether a call may go on: is the store open, whole, and of this process?

A forked child has its parent's locks as they were at the fork, held by threads that it does not have. So every call
checks before any lock.
"""

from __future__ import annotations

import os
from _thread import RLock  # its class: threading.RLock is a function
from typing import Self

from cache_manager.errors import StorageError, StoreClosedError


class StoreLock(RLock):  # type: ignore[misc]  # final for mypy alone
    """The lock over a store's memory; messages begin with ``name``.

    Who takes it where calls may not go on gets the error of :meth:`check`. ``torn`` counts changes that have begun and
    not ended (:func:`cache_manager.lock.change`): if one was interrupted, as by an exception from a signal handler, the
    store serves no more until it is opened anew. The lock's own method releases it, so such an exception never leaves
    it taken.
    """

    def __init__(self, name: object) -> None:
        self.torn = 0
        self._name = name
        self._open = True
        self._pid = os.getpid()

    def check(self) -> None:
        """:class:`StoreClosedError` after :meth:`close`, and in a child of the process that opened the store."""
        if os.getpid() != self._pid:
            raise StoreClosedError(f"{self._name}: opened before fork; open it in the process that uses it")
        if not self._open:
            raise StoreClosedError(f"{self._name}: the store is closed")

    def __enter__(self) -> None:  # type: ignore[override]
        if not self._open or os.getpid() != self._pid:
            self.check()
        if self._is_owned():  # type: ignore[attr-defined]
            raise StorageError(f"{self._name}: a call inside another one of its thread, as of a signal handler")
        try:
            self.acquire()
            if not self._open:
                self.check()
            if self.torn:
                raise StorageError(f"{self._name}: a call was interrupted in the middle: open the store anew")
        except BaseException:  # also from a signal handler, just after the lock was taken
            if self._is_owned():  # type: ignore[attr-defined]
                self.release()
            raise

    @property
    def closable(self) -> bool:
        """Whether closing has anything to do: not in a forked child, whose parent goes on, and not twice."""
        return self._open and os.getpid() == self._pid

    def close(self) -> bool:
        """No call begins from here on; ``False`` if that was so before."""
        if not self.closable:
            return False
        was_open = self._open
        self._open = False
        try:
            self.acquire()  # who has it ends first
        finally:
            if self._is_owned():  # type: ignore[attr-defined]
                self.release()
        return was_open


class ClosingStore:
    """``with open_store(url) as store:`` closes the store at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

"""What every rollout store here does: rows are cut into a head and parts, and what comes back is proved part by part.

A store of its own says where head and parts lie: four methods, which raise ``StorageError`` when they fail,
:class:`GoneError` for what is not there, and ``InvalidInputError`` for what is damaged.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from msgspec.structs import replace as with_fields

from cache_manager.errors import InvalidInputError, StorageError, StoreClosedError
from cache_manager.ports import Absence
from cache_manager.record import Buffer
from kvroute.rollout.grid import CutSettings, Grid, Range, Selection
from kvroute.rollout.handle import PUT_ID_NBYTES, RolloutHandle
from kvroute.rollout.head import Head, Read
from kvroute.rollout.ids import checked_id
from kvroute.rollout.port import RolloutCounters
from kvroute.routes import Routes


class GoneError(StorageError):
    """What was asked for is not there."""


Numbered = Iterable[tuple[int, Buffer]]
"""Parts with their numbers, in any order, which nobody has verified yet."""


@dataclass(frozen=True, slots=True)
class Reader:
    """One stored rollout, for as long as it is read: bytes of its head, and ``parts(numbers, bytes of the head)``."""

    head: Read
    parts: Callable[[Sequence[int], int], Numbered]

    @classmethod
    def behind_each_other(cls, grid: Grid, read: Read) -> Self:
        """``read(offset, nbytes)`` of a head and all parts behind it; fewer bytes where they end."""

        def parts(numbers: Sequence[int], head_nbytes: int) -> Iterator[tuple[int, Buffer]]:
            for part in numbers:
                yield part, read(head_nbytes + grid.offset_of(part), grid.nbytes_of(part))

        return cls(read, parts)


class PartStore(ABC):
    """A ``RolloutStore`` but for where things lie. ``name`` is for messages."""

    scheme: ClassVar[str]

    def __init__(self, name: str, cut: CutSettings | None = None) -> None:
        self._name = name
        self._cut = cut or CutSettings()
        self._closed = False
        self._counting = threading.Lock()
        self._counters = RolloutCounters()

    @abstractmethod
    def _write(self, handle: RolloutHandle, head: bytes, parts: Sequence[Buffer]) -> RolloutHandle:
        """Store all of it, make it the put that is found, and answer the handle; or leave nothing and raise."""

    @abstractmethod
    def _opened(self, handle: RolloutHandle) -> AbstractContextManager[Reader]: ...

    @abstractmethod
    def _find(self, rollout_id: str, /) -> RolloutHandle | None: ...

    @abstractmethod
    def _delete(self, handle: RolloutHandle) -> None: ...

    def _flush(self) -> None:  # noqa: B027 - most have nothing to do
        """Nothing to wait for, unless a store has stable storage."""

    def _close(self) -> None:  # noqa: B027
        """Called once."""

    # ---------------------------------------------------------------- RolloutStore

    @property
    def counters(self) -> RolloutCounters:
        with self._counting:
            return self._counters

    def put(self, rollout_id: str, routes: Routes) -> RolloutHandle:
        self._check_open()
        grid = self._cut.grid(len(routes), len(routes.layer_ids), routes.top_k * routes.ids.itemsize)
        handle = RolloutHandle.of(self.scheme, checked_id(rollout_id), os.urandom(PUT_ID_NBYTES), routes, grid)
        try:
            parts = grid.cut(routes.ids.astype(handle.dtype, order="C", copy=False))
            head = Head.of(handle, routes, parts).pack()
            handle = self._write(with_fields(handle, head_nbytes=len(head)), head, parts)
        except BaseException:
            self._count(put_failures=1)
            raise
        self._count(puts=1, put_nbytes=routes.ids.nbytes)
        return handle

    def find(self, rollout_id: str) -> RolloutHandle | None:
        self._check_open()
        checked_id(rollout_id)
        try:
            found = self._find(rollout_id)
            if found is not None and found.rollout_id != rollout_id:
                raise InvalidInputError("rollout", rollout_id, found.rollout_id)
        except GoneError:
            return None
        except InvalidInputError:
            self._count(corrupt=1)
            return None
        return found

    def get(
        self, handle: RolloutHandle, layers: Sequence[int] | None = None, spans: Sequence[Range] | None = None
    ) -> list[Routes] | Absence:
        self._check_open()
        wanted = Selection.of(handle.layer_ids, (handle.start, handle.stop), layers, spans)
        nbytes = 0
        try:
            with self._opened(handle) as reader:
                head, head_nbytes = _head_of(handle, reader.head)
                # Only now is the handle known to be one that was put, and what it claims made room for.
                room = wanted.room(handle.top_k, handle.dtype)
                for part, content in reader.parts(handle.grid.needed(wanted), head_nbytes):
                    head.verify(part, content)
                    handle.grid.paste(part, content, wanted, room)
                    nbytes += len(content)
            found = head.routes(room, wanted)
        except GoneError:
            self._count(misses=1)
            return Absence.MISS
        except InvalidInputError:
            self._count(corrupt=1)
            return Absence.CORRUPT
        self._count(hits=1, get_nbytes=nbytes)
        return found

    def delete(self, handle: RolloutHandle) -> None:
        self._check_open()
        checked_id(handle.rollout_id)
        self._delete(handle)
        self._count(deletes=1)

    def flush(self) -> None:
        self._check_open()
        self._flush()

    def close(self) -> None:
        """Flush, then close; a failure to flush is raised, and the store is closed all the same."""
        if not self._closed:
            self._closed = True
            try:
                self._flush()
            finally:
                self._close()

    # ---------------------------------------------------------------- for stores

    def _count(self, **by: int) -> None:
        with self._counting:
            self._counters = replace(self._counters, **{k: getattr(self._counters, k) + n for k, n in by.items()})

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self._name} is closed")


def _head_of(handle: RolloutHandle, read: Read) -> tuple[Head, int]:
    """The head of this very put: ``GoneError`` for that of another put, ``InvalidInputError`` for anything else."""
    head, nbytes = Head.read(read)
    found = head.handle
    if found != handle.stored:
        if (found.rollout_id, found.store) == (handle.rollout_id, handle.store) and found.put_id != handle.put_id:
            raise GoneError(f"rollout {handle.rollout_id} was put again")
        raise InvalidInputError("rollout head", f"of {handle.rollout_id} {handle.put_id}", found.rollout_id)
    return head, nbytes


__all__ = ["GoneError", "PartStore", "Reader"]

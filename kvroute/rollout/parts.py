"""The common part of the rollout stores: it makes records of rows, and verifies each part that is read.

A store adds where a record's header and parts lie: four methods, which raise ``StorageError`` when they fail,
:class:`GoneError` for missing data, and ``InvalidInputError`` for damaged data.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Final

from msgspec.structs import replace as with_fields

from cache_manager.errors import InvalidInputError, StorageError, StoreClosedError
from cache_manager.ports import Absence
from cache_manager.record import Buffer
from cache_manager.storage.batch import chunks
from kvroute.rollout.handle import PUT_ID_NBYTES, CutSettings, RolloutHandle
from kvroute.rollout.ids import checked_id
from kvroute.rollout.port import RolloutCounters
from kvroute.routes import Routes
from kvroute.routes.parts import Range
from kvroute.routes.wire import Header, record, unpack


class GoneError(StorageError):
    """The requested data is not there."""


Record = tuple[bytes, memoryview]
"""The bytes of a header, and of all parts behind it."""
BATCH_NBYTES: Final = 16 << 20
"""Bytes of parts that are read at once."""
Parts = Callable[[Sequence[Range]], Iterable[tuple[Range, Buffer]]]
"""The bytes of runs of parts ``[first, stop)`` of a record, whole or run by shorter run."""


def parts_behind_header(handle: RolloutHandle, read: Callable[[list[Range]], Sequence[Buffer]]) -> Parts:
    """Of a record whose parts lie behind its header. ``read`` answers so many bytes at several offsets."""
    grid, first = handle.grid, handle.header_nbytes
    most = max(1, BATCH_NBYTES // grid.part_nbytes)

    def parts(runs: Sequence[Range]) -> Iterator[tuple[Range, Buffer]]:
        shorter = ((at, min(at + most, stop)) for start, stop in runs for at in range(start, stop, most))
        for batch in chunks(shorter, grid.nbytes_of, BATCH_NBYTES):
            wanted = [(first + grid.starts(run[0], run[0])[0], grid.nbytes_of(run)) for run in batch]
            yield from zip(batch, read(wanted), strict=True)

    return parts


class PartStore(ABC):
    """A ``RolloutStore`` except for where records lie. ``name`` is for messages."""

    scheme: ClassVar[str]

    def __init__(self, name: str, cut: CutSettings | None = None) -> None:
        self._name = name
        self._cut = cut or CutSettings()
        self._closed = False
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()

    @abstractmethod
    def _write(self, handle: RolloutHandle, record: Record) -> RolloutHandle:
        """Store a record, make it the put that is found, and answer the handle; or leave nothing and raise."""

    @abstractmethod
    def _opened(self, handle: RolloutHandle) -> AbstractContextManager[tuple[Buffer, Parts]]:
        """One stored record, open for the ``with`` block: the bytes before its parts, and what reads its parts."""

    @abstractmethod
    def _find(self, rollout_id: str, /) -> RolloutHandle | None: ...

    @abstractmethod
    def _delete(self, handle: RolloutHandle) -> None: ...

    def _flush(self) -> None:  # noqa: B027 - most stores have nothing to do
        """Does nothing, unless a store has stable storage."""

    def _close(self) -> None:  # noqa: B027
        """Called once."""

    # ---------------------------------------------------------------- RolloutStore

    @property
    def counters(self) -> RolloutCounters:
        with self._counting:
            return RolloutCounters(**self._counts)

    def put(self, rollout_id: str, routes: Routes) -> RolloutHandle:
        self._check_open()
        grid, put_id = self._cut.grid(routes), os.urandom(PUT_ID_NBYTES).hex()
        name = f"{put_id} {checked_id(rollout_id)}"
        try:
            header, parts = record(routes, grid, name)
            packed = header.pack()
            handle = RolloutHandle.of(self.scheme, header, len(packed))
            handle.check()
            handle = self._write(handle, (packed, parts))
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
        chosen, rows = _wanted(handle, layers, spans)
        try:
            with self._opened(handle) as (head, parts):
                header = _checked(handle, unpack(head), len(head))
                # Only now is the handle known to be one that was put, and what it claims made room for.
                needed = header.grid.needed(chosen, rows)
                ids = header.ids(parts(needed), chosen, rows)
            found = [Routes.of_record(header, each, first, chosen) for each, (first, _) in zip(ids, rows, strict=True)]
        except GoneError:
            self._count(misses=1)
            return Absence.MISS
        except InvalidInputError:
            self._count(corrupt=1)
            return Absence.CORRUPT
        self._count(hits=1, get_nbytes=handle.header_nbytes + sum(map(header.grid.nbytes_of, needed)))
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
            self._counts.update(by)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self._name} is closed")


def _wanted(
    handle: RolloutHandle, layers: Sequence[int] | None, spans: Sequence[Range] | None
) -> tuple[tuple[int, ...], tuple[Range, ...]]:
    """Indices of the layers with these ids, and ranges of rows; :class:`InvalidInputError` if there are none."""
    layer_ids, start, stop = handle.layout.layer_ids, handle.start, handle.stop
    asked = set(layer_ids if layers is None else layers)
    chosen = tuple(i for i, layer in enumerate(layer_ids) if layer in asked)
    if not chosen:
        raise InvalidInputError("layers", f"one or more of {layer_ids}", sorted(asked))
    given = ((start, stop),) if spans is None else tuple(spans)
    for span in given:
        if not (len(span) == 2 and start <= span[0] <= span[1] <= stop):
            raise InvalidInputError("spans", f"ranges of positions inside [{start}, {stop}]", span)
    return chosen, tuple((a - start, b - start) for a, b in given)


def _checked(handle: RolloutHandle, header: Header, nbytes: int) -> Header:
    """``header``, if it is of this put; ``GoneError`` if of another put of the rollout, else ``InvalidInputError``."""
    found, told = RolloutHandle.of(handle.store, header, nbytes), with_fields(handle, inline=b"")
    if found != told:
        if found.rollout_id == handle.rollout_id and found.put_id != handle.put_id:
            raise GoneError(f"rollout {handle.rollout_id} was put again")
        raise InvalidInputError("routes record", told.name, found.name)
    return header

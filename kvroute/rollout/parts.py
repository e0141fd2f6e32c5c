"""The common part of the rollout stores: it makes records of rows, and verifies each part that is read.

A store adds where a record's header and parts lie: four methods, which raise ``StorageError`` when they fail,
:class:`GoneError` for missing data, and ``InvalidInputError`` for damaged data.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Final

from cache_manager.errors import ConfigError, InvalidInputError, StorageError, StoreClosedError
from cache_manager.ports import Absence
from cache_manager.record import Buffer
from cache_manager.storage.batch import chunks
from cache_manager.storage.url import StoreUrl
from kvroute.rollout.handle import PUT_ID_NBYTES, RolloutHandle
from kvroute.rollout.ids import checked_id
from kvroute.rollout.port import RolloutCounters
from kvroute.routes import Routes, SamplingSupport
from kvroute.routes.parts import Extent, Range, tokens_of_parts
from kvroute.routes.routes import routes_of_record
from kvroute.routes.support import with_support
from kvroute.routes.wire import Header, record, unpacked_header


class GoneError(StorageError):
    """The requested data is not there."""


PART_LAYERS_MAX: Final = 1024
"""In a part: all layers of any model."""
PART_NBYTES: Final = 64 << 10
BATCH_NBYTES: Final = 8 << 20
"""Bytes of parts that are read, or put, at once."""
HEADER: Final = (-1, 0)
"""The run of "parts" that is a record's header."""
SUPPORT: Final = (-2, -1)
"""The run of "parts" that is a record's sampling support, which lies behind the parts; only some records have one."""
Record = tuple[bytes, memoryview, bytes]
"""The bytes of a header, of all parts behind it, and of the sampling support behind these: empty if there is none."""
ReadParts = Callable[[Sequence[Range]], Sequence[Buffer]]


def file_places(handle: RolloutHandle, parts: Sequence[Range]) -> list[Range]:
    """Where runs of parts are in a record whose parts lie behind its header: offsets and sizes."""
    first = handle.header_nbytes
    places = {HEADER: (0, first), SUPPORT: (first + handle.nbytes, handle.support_nbytes)}
    return [
        places[run] if run in places else (first + handle.starts(run[0], run[0])[0], handle.nbytes_of(run))
        for run in parts
    ]


def layers_option(url: StoreUrl, default: int = 1) -> int:
    """The parameter ``layers``: how many a part has, a number or ``all``.

    With one layer, or as many as a stage has, a rank of pipeline parallelism reads only its layers.
    """
    text = url.parameters.get("layers", str(default))
    count = (
        PART_LAYERS_MAX if text == "all" else int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0
    )
    if not 1 <= count <= PART_LAYERS_MAX:
        wanted = f"1 to {PART_LAYERS_MAX}, or all"
        raise ConfigError("rollout store parameter layers", wanted, repr(text))
    return count


class PartStore(ABC):
    """A ``RolloutStore`` except for where records lie. ``name`` is for messages; a part has at most ``layers``."""

    scheme: ClassVar[str]

    def __init__(self, name: str, layers: int = 1) -> None:
        self._name = name
        self._layers = layers
        self._closed = False
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()

    @abstractmethod
    def _write(self, handle: RolloutHandle, record: Record) -> RolloutHandle:
        """Store a record, make it the put that is found, and answer the handle; or leave nothing and raise."""

    def _read(self, handle: RolloutHandle, parts: Sequence[Range]) -> Sequence[Buffer]:
        """The bytes of each run of parts ``[first, stop)`` of a record, of its :data:`HEADER` or :data:`SUPPORT`."""
        raise NotImplementedError

    @contextmanager
    def _opened(self, handle: RolloutHandle) -> Iterator[ReadParts]:
        """:meth:`_read` for one record, which stays the same for the ``with`` block or is found to have changed."""
        yield partial(self._read, handle)

    @abstractmethod
    def _find(self, rollout_id: str, /) -> RolloutHandle | None: ...

    @abstractmethod
    def _delete(self, handle: RolloutHandle) -> None: ...

    def _close(self) -> None:  # noqa: B027 - most stores have nothing to do
        """Called once."""

    # ---------------------------------------------------------------- RolloutStore

    @property
    def counters(self) -> RolloutCounters:
        with self._counting:
            return RolloutCounters(**self._counts)

    def put(
        self,
        rollout_id: str,
        routes: Routes,
        support: SamplingSupport | None = None,
    ) -> RolloutHandle:
        self._check_open()
        name = f"{os.urandom(PUT_ID_NBYTES).hex()} {checked_id(rollout_id)}"
        layers = min(self._layers, len(routes.layer_ids))
        try:
            header, parts = record(
                routes,
                layers,
                tokens_of_parts(routes.layout, len(routes), layers, PART_NBYTES),
                name,
            )
            header, content = with_support(header, routes, support or None)  # one of no position is none
            packed = header.pack()
            handle = RolloutHandle.of(self.scheme, header, len(packed))
            handle.check()
            handle = self._write(handle, (packed, parts, content))
        except BaseException:
            self._count(put_failures=1)
            raise
        self._count(puts=1, put_nbytes=routes.ids.nbytes)
        return handle

    def find(self, rollout_id: str) -> RolloutHandle | None:
        self._check_open()
        checked_id(rollout_id)
        try:
            handle = self._find(rollout_id)
            if handle is not None and handle.rollout_id != rollout_id:
                raise InvalidInputError("rollout", rollout_id, handle.rollout_id)
        except GoneError:
            return None
        except InvalidInputError:
            self._count(corrupt=1)
            return None
        return handle

    def get(
        self,
        handle: RolloutHandle,
        layers: Sequence[int] | None = None,
        spans: Sequence[Range] | None = None,
    ) -> list[Routes] | Absence:
        self._check_open()
        chosen, rows = _chosen(handle, layers, spans)
        try:
            with self._opened(handle) as read:
                (head,) = read([HEADER])
                header = checked_header(handle, head)
                # Only now is the handle known to be one that was put, and what it claims made room for.
                needed = header.needed(chosen, rows)
                ids = header.ids(_in_turns(header, needed, read), chosen, rows)
            routes = [
                routes_of_record(header, span_ids, first, chosen)
                for span_ids, (first, _) in zip(ids, rows, strict=True)
            ]
        except GoneError:
            self._count(misses=1)
            return Absence.MISS
        except InvalidInputError:
            self._count(corrupt=1)
            return Absence.CORRUPT
        self._count(hits=1, get_nbytes=handle.header_nbytes + sum(map(header.nbytes_of, needed)))
        return routes

    def support(self, handle: RolloutHandle) -> SamplingSupport | Absence | None:
        self._check_open()
        if not handle.support_nbytes:
            return None
        try:
            with self._opened(handle) as read:
                (head,) = read([HEADER])
                header = checked_header(handle, head)
                (content,) = read([SUPPORT])
            support = SamplingSupport.of_part(header, content)
        except GoneError:
            self._count(misses=1)
            return Absence.MISS
        except InvalidInputError:
            self._count(corrupt=1)
            return Absence.CORRUPT
        self._count(hits=1, get_nbytes=handle.header_nbytes + handle.support_nbytes)
        return support

    def delete(self, handle: RolloutHandle) -> None:
        self._check_open()
        checked_id(handle.rollout_id)
        self._delete(handle)
        self._count(deletes=1)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._close()

    # ---------------------------------------------------------------- for stores

    def _count(self, **by: int) -> None:
        with self._counting:
            self._counts.update(by)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self._name} is closed")


def _in_turns(
    extent: Extent,
    parts: Sequence[Range],
    read: ReadParts,
) -> Iterator[tuple[Range, Buffer]]:
    """Runs of parts and their bytes, few at once."""
    most = max(1, BATCH_NBYTES // extent.part_nbytes)
    shorter = ((first, min(first + most, stop)) for start, stop in parts for first in range(start, stop, most))
    for batch in chunks(shorter, extent.nbytes_of, BATCH_NBYTES):
        yield from zip(batch, read(batch), strict=True)


def _chosen(
    handle: RolloutHandle, layers: Sequence[int] | None, spans: Sequence[Range] | None
) -> tuple[tuple[int, ...], tuple[Range, ...]]:
    """Indices of the layers with these ids, and ranges of rows; :class:`InvalidInputError` if there are none."""
    layer_ids = handle.layout.layer_ids
    start = handle.start
    stop = handle.stop
    layers_wanted = set(layer_ids if layers is None else layers)
    chosen = tuple(i for i, layer in enumerate(layer_ids) if layer in layers_wanted)
    if not chosen:
        wanted = f"one or more of {layer_ids}"
        raise InvalidInputError("layers", wanted, sorted(layers_wanted))
    ranges = ((start, stop),) if spans is None else tuple(spans)
    for span in ranges:
        if not (len(span) == 2 and start <= span[0] <= span[1] <= stop):
            wanted = f"ranges of positions inside [{start}, {stop}]"
            raise InvalidInputError("spans", wanted, span)
    return chosen, tuple((a - start, b - start) for a, b in ranges)


def checked_header(handle: RolloutHandle, head: Buffer) -> Header:
    """The header in ``head``, if it is of this put; ``GoneError`` if of another put of the rollout, else
    ``InvalidInputError``."""
    header = unpacked_header(head)
    own_handle = RolloutHandle.of(handle.store, header, len(head))
    if own_handle != handle:
        if own_handle.rollout_id == handle.rollout_id and own_handle.put_id != handle.put_id:
            raise GoneError(f"rollout {handle.rollout_id} was put again")
        raise InvalidInputError("routes record", handle.name, own_handle.name)
    return header

"""Getting records: from the pool into the arena, then, when the header is right, into the caller's buffers."""

from __future__ import annotations

from collections.abc import Sequence

from cache_manager.errors import RecordError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import HEADER_NBYTES_MAX, RecordHeader, unpack_header
from cache_manager.spec import align
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.calls import Calls, bytes_of
from cache_manager.storage.mooncake.codes import EXPIRED, INVALID
from cache_manager.storage.mooncake.hidden import Hidden


class Reader:
    """The gets of one store."""

    def __init__(self, calls: Calls, hidden: Hidden) -> None:
        self._calls = calls
        self._link = calls.link
        self._hidden = hidden

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[memoryview], give_up_s: float
    ) -> list[RecordHeader | Absence]:
        views = [bytes_of(buffer) for _, buffer in zip(keys, buffers, strict=True)]
        found: list[RecordHeader | Absence] = [Absence.MISS] * len(keys)
        wanted = [i for i, key in enumerate(keys) if key not in self._hidden]
        short, late = self._get(wanted, keys, views, found, self._calls.header_room, give_up_s)
        short += self._get(late, keys, views, found, self._calls.header_room, give_up_s)[0]
        for i in self._get(short, keys, views, found, HEADER_NBYTES_MAX, give_up_s)[0]:
            found[i] = Absence.CORRUPT  # longer than any record of this payload
        return found

    def _get(
        self,
        wanted: Sequence[int],
        keys: Sequence[BlockKey],
        views: Sequence[memoryview],
        found: list[RecordHeader | Absence],
        header_room: int,
        give_up_s: float,
    ) -> tuple[list[int], list[int]]:
        """Fill in the headers and absences of the keys numbered ``wanted``.

        Answers those that did not fit their range, and those whose lease ended while they were on their way.
        """
        short: list[int] = []
        late: list[int] = []
        limit = self._link.arena.nbytes // 2

        def receive(chunk: list[int]) -> list[int]:
            sizes = [header_room + views[i].nbytes for i in chunk]
            offsets, start = self._calls.ranges(sizes, give_up_s)
            request = wire.Get([self._calls.name(keys[i]) for i in chunk], offsets, sizes)
            codes = self._link.call(self._link.reads, request, start, give_up_s)
            try:
                for i, at, code in zip(chunk, offsets, codes, strict=True):
                    if code == INVALID:
                        short.append(i)
                    elif code == EXPIRED:
                        late.append(i)
                    elif code >= 0:
                        found[i] = _opened(self._link.arena.view[at : at + code], keys[i], views[i])
            finally:
                self._link.arena.give(start)
            return [0 if code == INVALID else code for code in codes]

        fitting = [i for i in wanted if align(header_room + views[i].nbytes) <= limit]
        chunks: list[list[int]] = []
        while fitting:  # the native side answers one of two equal names in a batch
            first = {keys[i]: i for i in reversed(fitting)}
            once = [i for i in fitting if first[keys[i]] == i]
            fitting = [i for i in fitting if first[keys[i]] != i]
            chunks += self._calls.by_bytes(once, lambda i: header_room + views[i].nbytes)
        self._calls.each("failed_reads", chunks, receive)
        return short, late


def _opened(raw: memoryview, key: BlockKey, view: memoryview) -> RecordHeader | Absence:
    """The header of a received object, whose payload is in ``view`` then; or corrupt."""
    try:
        header = unpack_header(raw)
    except RecordError:
        return Absence.CORRUPT
    body = raw.nbytes - view.nbytes
    if header.key != key or header.payload_nbytes != view.nbytes or header.nbytes != body:
        return Absence.CORRUPT
    view[:] = raw[body:]
    return header


__all__ = ["Reader"]

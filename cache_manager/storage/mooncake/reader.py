"""Getting records: from the pool into the arena, then into the caller's buffers, where their sums are checked.

An object that is removed while it is read leaves its memory to another one, so that what came may be of both. A record
that is not sound is read once more: when the same bytes come again it is corrupt, otherwise it is not there any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache_manager.errors import RecordError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import HEADER_NBYTES_MAX, RecordHeader, check_record, checksum, unpack_header
from cache_manager.spec import align
from cache_manager.storage.mooncake import wire
from cache_manager.storage.mooncake.calls import Calls, bytes_of
from cache_manager.storage.mooncake.codes import EXPIRED, INVALID

Unsound = dict[int, int | None]
"""Numbers of keys, with the sum of what came; ``None``: the lease ended on the way."""


class Reader:
    """The gets of one store."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._link = calls.link

    def get_into(
        self, keys: Sequence[BlockKey], buffers: Sequence[memoryview], give_up_s: float
    ) -> list[RecordHeader | Absence]:
        views = [bytes_of(buffer) for _, buffer in zip(keys, buffers, strict=True)]
        found: list[RecordHeader | Absence] = [Absence.MISS] * len(keys)
        short: list[int] = []
        first = self._get(range(len(keys)), keys, views, found, self._calls.header_room, short, give_up_s)
        if first:
            again = self._get(list(first), keys, views, found, self._calls.header_room, short, give_up_s)
            same = [i for i, total in again.items() if total is not None and total == first[i]]
            self._calls.count("torn", len(again) - len(same))
            for i in same:
                found[i] = Absence.CORRUPT
        if short:
            longer: list[int] = []
            unsound = self._get(short, keys, views, found, HEADER_NBYTES_MAX, longer, give_up_s)
            for i in (*unsound, *longer):  # longer than any record of this payload
                found[i] = Absence.CORRUPT
        return found

    def _get(
        self,
        wanted: Iterable[int],
        keys: Sequence[BlockKey],
        views: Sequence[memoryview],
        found: list[RecordHeader | Absence],
        header_room: int,
        short: list[int],
        give_up_s: float,
    ) -> Unsound:
        """Fill in the sound records of the keys numbered ``wanted``; those that are not sound.

        The numbers of those that did not fit their range are added to ``short``.
        """
        unsound: Unsound = {}
        limit = self._link.arena.nbytes // 2

        def receive(chunk: list[int]) -> list[int]:
            sizes = [header_room + views[i].nbytes for i in chunk]
            offsets, start = self._calls.ranges(sizes, give_up_s)
            request = wire.Get([self._calls.name(keys[i]) for i in chunk], offsets, sizes)
            codes = self._link.call(self._link.reads, request, start, give_up_s)
            arena = self._link.arena.view
            try:
                for i, at, code in zip(chunk, offsets, codes, strict=True):
                    if code == INVALID:
                        short.append(i)
                    elif code == EXPIRED:
                        unsound[i] = None
                    elif code >= 0:
                        raw = arena[at : at + code]
                        try:
                            found[i] = _opened(raw, keys[i], views[i])
                        except RecordError:
                            unsound[i] = checksum(raw)
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
        return unsound


def _opened(raw: memoryview, key: BlockKey, view: memoryview) -> RecordHeader:
    """The header of a received object, whose payload is in ``view`` then; :class:`RecordError` when it is none."""
    header = unpack_header(raw)
    if header.nbytes + view.nbytes != raw.nbytes:
        raise RecordError("size", header.nbytes + view.nbytes, raw.nbytes)
    view[:] = raw[header.nbytes :]
    check_record(header, key, header.fingerprint, view)
    return header


__all__ = ["Reader"]

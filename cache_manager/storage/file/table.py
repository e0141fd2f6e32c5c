"""Where each key's record is: 64 bytes a record, and about twelve for its share of a bucket.

A bucket is a string of entries; a key is searched for in the one that its hash names. Buckets are split one at a time
as records come (linear hashing), so that no call pays for all of them. A segment that goes takes its ordinal with it:
entries that name it mean nothing from then on, and are swept out where they are met.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.keys import BlockKey
from cache_manager.record import Buffer
from cache_manager.storage.file.segment import (
    DELETED,
    ENTRY,
    ENTRY_DTYPE,
    ENTRY_NBYTES,
    LIVING,
    PAGE_NBYTES,
    UNREADABLE,
    Entry,
)

_PER_BUCKET: Final = 5
_BUCKETS_MIN: Final = 1024
_BUCKETS_AT_ONCE: Final = 16384
_KEY = struct.Struct("32s32x")  # of an entry
_PLACE = struct.Struct("<II")
_GAIN: Final = 2
"""How much of a segment the use of one of its n records stands for: 2/n, because it is seldom used alone."""


@dataclass(slots=True, eq=False)
class Segment:
    """One segment file that is open, and what the store knows about it."""

    sequence: int
    name: str
    fd: int
    size: int  # of the file; counts against the quota
    created_s: float | None = None  # wall clock; None: unknown
    end: int = PAGE_NBYTES  # where the next record would go
    count: int = 0  # of records in it, living or not
    served: int = 0  # of them in the table
    ordinal: int = 0  # in the table
    last: Entry | None = None  # the record before end, as far as somebody asks for it
    rows: bytearray = field(default_factory=bytearray)  # the entries of one without an index, for the one to come
    states: bytearray = field(default_factory=bytearray)  # and what has become of its records
    used_at: float = 0.0  # tick at which its records were used last, on an average: see use()
    touched_at: int = 0  # tick of the last use of any
    hits: bytearray = field(default_factory=bytearray)  # 1 for a record that was asked for, by its number
    suspects: set[int] = field(default_factory=set)  # numbers of records that the disk did not give back
    indexed: bool = False  # its index is in the file
    aside: bool = False  # damaged: not written any more, dropped last
    journal_fd: int = -1
    pins: int = 0  # calls that use the descriptor outside the index lock
    dirty: bool = False  # bytes were written since the last sync
    failed_syncs: int = 0  # what they covered is to be written anew
    rewritten: int = 0  # how many had failed when that was done last
    synced_records: int = 0  # how many were there at the last sync that worked
    marks: int = 0  # deletions of copies for which there is a newer one, so far
    synced_marks: int = 0  # how many of them are on stable storage
    dropped: bool = False  # close the descriptors when the last pin is gone
    expired: bool = False  # its records are in the table no more, its file is to go
    complete: bool = False  # for a reader: retired by the writer and read to its end
    damaged: bool = False  # for a reader: its page, or something in it

    def use(self, tick: int, records: int = 1) -> None:
        """So many of its records are used: what was used of a segment counts, not that something was.

        By the last use alone a segment would stay for one record in it that is asked for again and again.
        """
        share = _GAIN * records / (self.count or 1)
        self.touched_at = tick
        self.used_at += (tick - self.used_at) * (min(1.0, share))

    def hit(self, tick: int, first: int, records: int) -> None:
        """So many of its records, from number ``first`` on, are used because somebody asked for them."""
        self.use(tick, records)
        hits = self.hits
        if len(hits) < self.count:
            hits.extend(bytes(self.count - len(hits)))
        hits[first : first + records] = b"\1" * records

    def close_journal(self) -> None:
        if self.journal_fd >= 0:
            os.close(self.journal_fd)
            self.journal_fd = -1

    def close(self) -> None:
        self.close_journal()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


Place = tuple[Segment, Entry]
"""Where a record is."""


class KeyTable:
    """The living records of segments by their keys. Not locked: the index's lock is held around every call."""

    def __init__(self) -> None:
        self.records = 0
        self._dead = 0  # entries of segments that have gone
        self._serving: dict[int, Segment] = {}
        self._ordinal = 0
        self._buckets = [b""] * _BUCKETS_MIN
        self._mask = _BUCKETS_MIN - 1  # of the buckets that there will be when all of this round are split

    def find(self, key: BlockKey) -> Place | None:
        return self.find_all((key,))[0]

    def find_all(self, keys: Iterable[BlockKey]) -> list[Place | None]:
        """Where the records of keys are."""
        found: list[Place | None] = []
        buckets, mask, serving, unpack = self._buckets, self._mask, self._serving, ENTRY.unpack_from
        count, entry_of = len(buckets), tuple.__new__  # what Entry._make calls, and half of its time
        for key in keys:
            at = hash(key) & mask
            bucket = buckets[at if at < count else at & mask >> 1]
            at = bucket.find(key)
            if at % ENTRY_NBYTES and (at := _position(bucket, key)) < 0:  # also where it is -1
                found.append(None)
                continue
            entry = entry_of(Entry, unpack(bucket, at))
            segment = serving.get(entry[3])
            found.append(None if segment is None else (segment, entry))
        return found

    def join(self, segment: Segment) -> None:
        """Give a segment its ordinal, a new one each time."""
        self._ordinal += 1
        segment.ordinal = self._ordinal
        self._serving[segment.ordinal] = segment

    def add(self, segment: Segment, number: int, row: bytes) -> Place | None:
        """Serve the record that ``row``, an index's entry, is of; the one of its key that was served until now."""
        key, buckets, older = row[:32], self._buckets, None
        entry = row[:48] + _PLACE.pack(segment.ordinal, number) + row[56:]
        which = hash(key) & self._mask
        if which >= len(buckets):
            which &= self._mask >> 1
        bucket = buckets[which]
        at = bucket.find(key)
        if at % ENTRY_NBYTES and (at := _position(bucket, key)) < 0:
            if self._dead * 8 > self.records and len(bucket) >= _PER_BUCKET * ENTRY_NBYTES:
                bucket = b"".join(self._living(bucket))
            buckets[which] = bucket + entry
        else:
            known = Entry._make(ENTRY.unpack_from(bucket, at))
            if (where := self._serving.get(known.ordinal)) is None:
                self._dead -= 1
            else:
                older = where, known
                self._left(older, DELETED)
            buckets[which] = bucket[:at] + entry + bucket[at + ENTRY_NBYTES :]
        if number < len(segment.states):
            segment.states[number] = LIVING
        segment.served += 1
        self.records += 1
        if self.records > _PER_BUCKET * len(buckets):
            self._split()
        return older

    def remove(self, place: Place, state: int = DELETED) -> None:
        """Serve no more what is served, and say what has become of it."""
        key = place[1].key
        which = hash(key) & self._mask
        if which >= len(self._buckets):
            which &= self._mask >> 1
        bucket = self._buckets[which]
        at = _position(bucket, key)
        assert bucket.startswith(ENTRY.pack(*place[1]), at), "a record that is served is in the table"
        self._buckets[which] = bucket[:at] + bucket[at + ENTRY_NBYTES :]
        self._left(place, state)

    def leave(self, segment: Segment) -> int:
        """Forget a segment with all its records; how many of them were served."""
        if self._serving.pop(segment.ordinal, None) is None:
            return 0
        served, segment.served = segment.served, 0
        self.records -= served
        self._dead += served
        return served

    def entries(self, segment: Segment) -> bytes:
        """Those of a segment that are served, by their numbers; looks at all there are."""
        table = np.frombuffer(b"".join(self._buckets), ENTRY_DTYPE)
        ours = table[table["ordinal"] == segment.ordinal]
        return bytes(ours[np.argsort(ours["number"])].tobytes())

    def load(self, found: Sequence[tuple[Segment, Buffer, Buffer]]) -> list[Place]:
        """Serve the living ones of segments, oldest first, in a table that serves nothing yet; those that give way.

        As :meth:`take <cache_manager.storage.file.index.SegmentIndex.take>` says, for a million records at once. What
        decides only because the disk does not give it back now costs an older copy nothing for good.
        """
        assert not self.records, "this is for opening"
        rows = bytearray().join([rows for _, rows, _ in found])
        states = np.frombuffer(b"".join([states for _, _, states in found]), np.uint8)
        table, where, stop = np.frombuffer(rows, ENTRY_DTYPE), dict[int, Segment](), 0
        hashes = np.fromiter(map(hash, chain.from_iterable(_KEY.iter_unpack(rows))), np.int64, len(table))
        for segment, _, theirs in found:
            where[segment.ordinal], segment.count = segment, len(theirs)
            start, stop = stop, stop + segment.count
            table["ordinal"][start:stop] = segment.ordinal
            table["number"][start:stop] = np.arange(segment.count)
        living, older = states == LIVING, list[Place]()
        for before, later in replaced(rows, states):
            living[before] = False
            if states[later] != UNREADABLE:
                entry = Entry._make(ENTRY.unpack_from(rows, before * ENTRY_NBYTES))
                older.append((where[entry.ordinal], entry))
        self.records, self._dead = int(living.sum()), 0
        count = max(_BUCKETS_MIN, self.records // _PER_BUCKET)
        self._mask = (1 << (count - 1).bit_length()) - 1
        at = (hashes & self._mask).astype(np.uint32)
        at[at >= count] &= self._mask >> 1
        whole, self._buckets = np.frombuffer(rows, f"V{ENTRY_NBYTES}"), []
        for first in range(0, count, _BUCKETS_AT_ONCE):  # what is freed at once would stay with the process
            last = min(first + _BUCKETS_AT_ONCE, count)
            some = np.flatnonzero(living & (at >= first) & (at < last))
            some = some[np.argsort(at[some])]
            flat = whole[some].tobytes()
            bounds = np.searchsorted(at[some], np.arange(first, last + 1)) * ENTRY_NBYTES
            self._buckets += [flat[start:stop] for start, stop in pairwise(bounds.tolist())]
        for ordinal, served in zip(*np.unique(table["ordinal"][living], return_counts=True), strict=True):
            where[int(ordinal)].served = int(served)
        return older

    def _left(self, place: Place, state: int) -> None:
        segment, entry = place
        segment.served -= 1
        self.records -= 1
        if entry.number < len(segment.states):
            segment.states[entry.number] = state

    def _living(self, bucket: bytes) -> list[bytes]:
        """The entries whose segments are there; the others are given up."""
        entries = [bucket[at : at + ENTRY_NBYTES] for at in range(0, len(bucket), ENTRY_NBYTES)]
        if not self._dead:
            return entries
        living = [entry for entry in entries if ENTRY.unpack(entry)[3] in self._serving]
        self._dead -= len(entries) - len(living)
        return living

    def _split(self) -> None:
        """One bucket more, with what belongs there of the bucket that had it until now."""
        new = len(self._buckets)
        if new > self._mask:
            self._mask = 2 * self._mask + 1
        source, mask = new & self._mask >> 1, self._mask
        entries = self._living(self._buckets[source])
        self._buckets[source] = b"".join([entry for entry in entries if hash(entry[:32]) & mask != new])
        self._buckets.append(b"".join([entry for entry in entries if hash(entry[:32]) & mask == new]))


def _position(bucket: bytes, key: bytes) -> int:
    """Where the entry of ``key`` begins; -1: nowhere."""
    at = bucket.find(key)
    while at >= 0 and at % ENTRY_NBYTES:
        at = bucket.find(key, at + 1)
    return at


def replaced(rows: Buffer, states: NDArray[np.uint8]) -> Iterator[tuple[int, int]]:
    """The living entries that a later one of their key takes the place of, and each time that later one."""
    ends = np.frombuffer(rows, "<u8").reshape(-1, ENTRY_NBYTES // 8)[:, 3]  # the last bytes of the keys
    ordered = np.sort(ends)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    latest: dict[bytes, int] = {}
    for i in np.flatnonzero(np.isin(ends, again)).tolist() if len(again) else ():
        key = bytes(rows[i * ENTRY_NBYTES : i * ENTRY_NBYTES + 32])
        before, latest[key] = latest.get(key), i
        if before is not None and states[before] == LIVING:
            yield before, i

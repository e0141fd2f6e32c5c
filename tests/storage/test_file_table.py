"""The table of keys against a dict, and what it costs."""

from __future__ import annotations

import sys

import numpy as np
from budget import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_manager.storage.file.segment import DELETED, ENTRY, LIVING, UNREADABLE, UNSOUND
from cache_manager.storage.file.table import KeyTable, Segment
from cache_manager.testing.records import key_of

numbers = st.integers(0, 300)


def row_of(n: int) -> bytes:
    return ENTRY.pack(key_of(n), 0, 0, 0, 0, 128, bytes(4))


class TableMachine(RuleBasedStateMachine):
    """Segments that come whole, grow, lose entries and go; a key has the entry that was added last."""

    def __init__(self) -> None:
        super().__init__()
        self.table = KeyTable()
        self.segments: list[Segment] = []
        self.model: dict[int, tuple[Segment, int]] = {}

    @precondition(lambda self: not self.model)
    @rule(found=st.lists(st.lists(st.tuples(numbers, st.sampled_from((LIVING, DELETED, UNSOUND, UNREADABLE))))))
    def segments_are_opened(self, found: list[list[tuple[int, int]]]) -> None:
        """The entry that comes last decides: it is served, or the key has none."""
        parts = []
        for entries in found:
            segment = Segment(len(self.segments), "s", -1, 0)
            self.table.join(segment)
            self.segments.append(segment)
            parts.append((segment, b"".join(row_of(n) for n, _ in entries), bytes(state for _, state in entries)))
        served: dict[int, tuple[Segment, int]] = {}
        give_way = set()
        for (segment, _, _), entries in zip(parts, found, strict=True):
            for number, (n, state) in enumerate(entries):
                if (older := served.pop(n, None)) is not None and state != UNREADABLE:
                    give_way.add((older[0].sequence, older[1]))
                if state == LIVING:
                    served[n] = segment, number
        assert {(segment.sequence, entry.number) for segment, entry in self.table.load(parts)} == give_way
        self.model = served

    @precondition(lambda self: self.segments)
    @rule(which=st.integers(0, 1000), keys=st.lists(numbers, max_size=200))
    def a_segment_grows(self, which: int, keys: list[int]) -> None:
        segment = self.segments[which % len(self.segments)]
        for n in keys:
            older = self.table.add(segment, segment.count, row_of(n))
            assert (older and (older[0], older[1].number)) == self.model.get(n)
            self.model[n] = segment, segment.count
            segment.count += 1

    @rule()
    def a_segment_comes(self) -> None:
        self.segments.append(Segment(len(self.segments), "s", -1, 0))
        self.table.join(self.segments[-1])

    @rule(n=numbers)
    def an_entry_goes(self, n: int) -> None:
        if (found := self.table.find(key_of(n))) is not None:
            self.table.remove(found)
        self.model.pop(n, None)

    @precondition(lambda self: self.segments)
    @rule(which=st.integers(0, 1000))
    def a_segment_goes(self, which: int) -> None:
        segment = self.segments.pop(which % len(self.segments))
        served = sorted((number, n) for n, (where, number) in self.model.items() if where is segment)
        keys = [fields[0] for fields in ENTRY.iter_unpack(self.table.entries(segment))]
        assert keys == [key_of(n) for _, n in served]
        assert self.table.leave(segment) == len(served)
        for _, n in served:
            del self.model[n]

    @invariant()
    def a_key_has_the_entry_that_was_added_last(self) -> None:
        assert self.table.records == len(self.model)
        wanted = range(0, 301, 7)
        found = self.table.find_all([key_of(n) for n in wanted])
        assert [place and (place[0], place[1].number) for place in found] == [self.model.get(n) for n in wanted]


TestTable = TableMachine.TestCase
TestTable.settings = examples(40, stateful_step_count=25)


def nbytes_of(table: KeyTable) -> int:
    """What the allocator gives: multiples of 16."""
    return sys.getsizeof(table._buckets) + sum(sys.getsizeof(bucket) + 15 & -16 for bucket in table._buckets)


def test_a_record_costs_less_than_120_bytes_of_memory() -> None:
    """Goal: memory by arithmetic, as a table grows and as segments come and go. Method: count the buckets' bytes."""
    table, rng, segments = KeyTable(), np.random.default_rng(0), list[Segment]()
    for sequence in range(90):
        raw = rng.bytes(1_000 * 32)
        segments.append(segment := Segment(sequence, "s", -1, 0))
        table.join(segment)
        for number in range(1_000):
            table.add(segment, number, raw[32 * number : 32 * number + 32] + row_of(0)[32:])
        if sequence >= 60:  # as many go as come
            table.leave(segments[sequence - 60])
        assert nbytes_of(table) / max(table.records, 6_000) < 120

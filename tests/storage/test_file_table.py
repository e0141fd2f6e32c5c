"""The table of keys against a dict, and what it costs."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_manager.keys import BlockKey
from cache_manager.storage.file.index import Segment
from cache_manager.storage.file.segment import DELETED, ENTRY, ENTRY_NBYTES
from cache_manager.storage.file.table import KeyTable
from cache_manager.testing.records import key_of

numbers = st.integers(0, 300)


def entry_of(n: int) -> bytes:
    return ENTRY.pack(key_of(n), 0, 0, 0, 128, 0)


class TableMachine(RuleBasedStateMachine):
    """Segments that come whole, grow, lose entries and go; a key has the entry that was added last."""

    def __init__(self) -> None:
        super().__init__()
        self.table = KeyTable()
        self.segments: list[Segment] = []
        self.model: dict[int, tuple[Segment, int]] = {}

    @rule(keys=st.lists(numbers, max_size=200))
    def a_segment_comes(self, keys: list[int]) -> None:
        segment = Segment(len(self.segments), "s", -1, 0)
        segment.rows, segment.states = bytearray(b"".join(map(entry_of, keys))), bytearray(len(keys))
        self.table.join(segment)
        for rows, number, other, there in self.table.add_all(segment):
            if other is not rows or there < number:
                self.table.remove(other, there)
                self.table.add(rows, number, key_of(keys[number]))
        self.segments.append(segment)
        self.model |= {n: (segment, number) for number, n in enumerate(keys)}

    @precondition(lambda self: self.segments)
    @rule(which=st.integers(0, 1000), n=numbers)
    def a_segment_grows(self, which: int, n: int) -> None:
        segment = self.segments[which % len(self.segments)]
        if (found := self.table.find(key_of(n))) is not None:
            self.table.remove(*found)
        segment.rows += entry_of(n)
        segment.states.append(DELETED)
        self.table.add(segment, len(segment.states) - 1, key_of(n))
        self.model[n] = (segment, len(segment.states) - 1)

    @rule(n=numbers)
    def an_entry_goes(self, n: int) -> None:
        if (found := self.table.find(key_of(n))) is not None:
            self.table.remove(*found)
        self.model.pop(n, None)

    @precondition(lambda self: self.segments)
    @rule(which=st.integers(0, 1000))
    def a_segment_goes(self, which: int) -> None:
        segment = self.segments.pop(which % len(self.segments))
        served = [n for n, (where, _) in self.model.items() if where is segment]
        assert self.table.leave(segment) == len(served)
        for n in served:
            del self.model[n]

    @rule()
    def ordinals_run_out(self) -> None:
        self.table._next_ordinal = 1 << 20

    @invariant()
    def a_key_has_the_entry_that_was_added_last(self) -> None:
        assert self.table.records == len(self.model)
        for n in range(0, 301, 7):
            assert self.table.find(key_of(n)) == self.model.get(n)


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=40, stateful_step_count=25)


def test_a_record_costs_less_than_120_bytes_of_memory() -> None:
    """Goal: memory by arithmetic, at sizes around each growth. Method: count the bytes of rows, states and slots."""
    table, rng, nbytes = KeyTable(), np.random.default_rng(0), 0
    for number in range(60):
        raw = rng.bytes(2_000 * 32)
        keys = [BlockKey(raw[at : at + 32]) for at in range(0, len(raw), 32)]
        segment = Segment(number, "s", -1, 0)
        segment.rows = bytearray(b"".join(ENTRY.pack(key, 0, 0, 0, 128, 0) for key in keys))
        segment.states = bytearray(len(keys))
        table.join(segment)
        assert not list(table.add_all(segment))
        nbytes += len(keys) * (ENTRY_NBYTES + 1)
        assert table.find(keys[0]) == (segment, 0)
        assert (nbytes + table._slots.nbytes) / table.records < 120

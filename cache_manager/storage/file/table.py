"""Where each key's record is: open addressing over arrays, 65 bytes a record and 13 to 33 for its slot.

The entries of a segment stay as they are in its index, one behind the other. The table has a word for each key that is
served, ``tag (12 bits) | segment's ordinal (20) | entry (32)``. A segment that goes takes its ordinal with it: words
that name it mean nothing from then on and are used again or, now and then, swept by building the table anew.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from cache_manager.keys import BlockKey
from cache_manager.storage.file.segment import DELETED, ENTRY_DTYPE, ENTRY_NBYTES, LIVING

_GONE: Final = 1
_ORDINALS: Final = 1 << 20
_SLOTS_MIN: Final = 1 << 10
_FULL: Final = 0.65
"""Of the slots: more are not used, so that a search stays short."""
_ROOMY: Final = 0.5
"""Of the slots: no more are used after the table was built anew."""
_LAST_WORD = struct.Struct("<Q")
_WORD: Final = (1 << 64) - 1


class Rows(Protocol):
    """As much of a segment as the table needs."""

    ordinal: int
    rows: bytearray  # entries of 64 bytes
    states: bytearray  # one byte each; LIVING means that the table has it


class KeyTable:
    """The living records of segments by their keys. Not locked: the index's lock is held around every call."""

    def __init__(self) -> None:
        self.records = 0
        self._factor = secrets.randbits(64) | 1
        self._by_ordinal: dict[int, Rows] = {}
        self._next_ordinal = 1
        self._new_slots(_SLOTS_MIN)

    def find(self, key: BlockKey) -> tuple[Rows, int] | None:
        """The segment and the number of the entry of a key's record."""
        mixed = self._mix(key)
        tag, at = mixed >> self._tag_shift & 0xFFF, mixed >> self._shift
        words, by_ordinal = self._words, self._by_ordinal
        while word := words[at]:
            if word >> 52 == tag and (rows := by_ordinal.get(word >> 32 & 0xFFFFF)) is not None:
                number = word & 0xFFFFFFFF
                if rows.rows.startswith(key, number * ENTRY_NBYTES) and not rows.states[number]:
                    return rows, number
            at = at + 1 & self._mask
        return None

    def join(self, rows: Rows) -> None:
        """Give a segment its ordinal; its entries are added by :meth:`add` or :meth:`add_all`."""
        if self._next_ordinal == _ORDINALS:
            self._renumber()
        rows.ordinal = self._next_ordinal
        self._next_ordinal += 1
        self._by_ordinal[rows.ordinal] = rows

    def add(self, rows: Rows, number: int, key: BlockKey) -> None:
        """Add an entry and make it ``LIVING``; no other entry of its key may be."""
        if self._filled >= _FULL * len(self._slots):
            self._build(1)
        mixed = self._mix(key)
        at, words = mixed >> self._shift, self._words
        while (word := words[at]) and word != _GONE and word >> 32 & 0xFFFFF in self._by_ordinal:
            at = at + 1 & self._mask
        self._filled += not word
        words[at] = (mixed >> self._tag_shift & 0xFFF) << 52 | rows.ordinal << 32 | number
        rows.states[number] = LIVING
        self.records += 1

    def remove(self, rows: Rows, number: int, state: int = DELETED) -> None:
        """Take an entry out that is in the table, and say what has become of it."""
        key = BlockKey(bytes(rows.rows[number * ENTRY_NBYTES : number * ENTRY_NBYTES + 32]))
        mixed = self._mix(key)
        at, words = mixed >> self._shift, self._words
        while words[at] & 0xFFFFFFFFFFFFF != rows.ordinal << 32 | number:
            assert words[at], "an entry that is LIVING is in the table"
            at = at + 1 & self._mask
        words[at] = _GONE
        rows.states[number] = state
        self.records -= 1

    def leave(self, rows: Rows) -> int:
        """Forget a segment with all its entries; how many of them were served."""
        if self._by_ordinal.pop(rows.ordinal, None) is None:
            return 0
        served = rows.states.count(LIVING)
        self.records -= served
        return served

    def reserve(self, more: int) -> None:
        """Make room for so many more records at once."""
        if self._filled + more > _FULL * len(self._slots):
            self._build(more)

    def add_all(self, rows: Rows) -> Iterator[tuple[Rows, int, Rows, int]]:
        """Add all entries that are ``LIVING``.

        Yields what the caller has to decide, one after the other: an entry (not added, ``DELETED`` by now), and that of
        the same key which is in the table. To have the new one instead, ``remove`` the other and ``add`` it.
        """
        states = np.frombuffer(rows.states, np.uint8)
        living = np.flatnonzero(states == LIVING)
        if self._filled + len(living) > _FULL * len(self._slots):
            states[living] = DELETED
            self._build(len(living))
            states[living] = LIVING
        del states
        self.records += len(living)
        twice = self._place(np.frombuffer(rows.rows, ENTRY_DTYPE)["key"][living], rows.ordinal, living)
        self.records -= len(twice)
        for number in twice:
            rows.states[number] = DELETED
        for number in sorted(twice):
            found = self.find(BlockKey(bytes(rows.rows[number * ENTRY_NBYTES : number * ENTRY_NBYTES + 32])))
            assert found is not None, "an entry of that key was in the table"
            yield rows, number, *found

    def _mix(self, key: BlockKey) -> int:
        """64 bits of which the upper ones depend on all of the key's last word; the end of a key is a digest's."""
        word: int = _LAST_WORD.unpack_from(key, 24)[0]
        return (word ^ word >> 32) * self._factor & _WORD

    def _mix_all(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        words = keys[:, 3]
        return np.asarray((words ^ words >> np.uint64(32)) * np.uint64(self._factor))

    def _new_slots(self, count: int) -> None:
        self._slots = np.zeros(count, np.uint64)
        self._words = memoryview(self._slots.data)
        self._mask = count - 1
        self._shift = 65 - count.bit_length()
        self._tag_shift = self._shift - 12
        self._filled = 0

    def _build(self, more: int) -> None:
        """A new table of what is served, with room for ``more``."""
        wanted, count = self.records + more, _SLOTS_MIN
        while wanted > _ROOMY * count:
            count *= 2
        self._new_slots(count)
        for rows in self._by_ordinal.values():
            living = np.flatnonzero(np.frombuffer(rows.states, np.uint8) == LIVING)
            if len(living):
                twice = self._place(np.frombuffer(rows.rows, ENTRY_DTYPE)["key"][living], rows.ordinal, living)
                assert not twice, "no key is served twice"

    def _renumber(self) -> None:
        everyone = list(self._by_ordinal.values())
        self._by_ordinal = {}
        for ordinal, rows in enumerate(everyone, 1):
            rows.ordinal = ordinal
            self._by_ordinal[ordinal] = rows
        self._next_ordinal = len(everyone) + 1
        self._build(0)

    def _place(self, keys: NDArray[np.uint64], ordinal: int, numbers: NDArray[np.intp]) -> list[int]:
        """Put words for ``keys`` ``[n, 4]`` where they belong; the numbers of those whose key is there already."""
        slots, mask = self._slots, np.uint64(self._mask)
        mixed = self._mix_all(keys)
        at = mixed >> np.uint64(self._shift)
        tags = mixed >> np.uint64(self._tag_shift) & np.uint64(0xFFF)
        words = tags << np.uint64(52) | np.uint64(ordinal << 32) | numbers.astype(np.uint64)
        todo, twice = np.arange(len(keys)), []
        while len(todo):
            there = slots[at[todo]]
            empty = there == 0
            claiming = todo[empty]
            slots[at[claiming]] = words[claiming]
            won = slots[at[claiming]] == words[claiming]
            self._filled += int(won.sum())
            held, there = todo[~empty], there[~empty]
            alike = there >> np.uint64(52) == tags[held]
            same = np.zeros(len(held), bool)
            for i in np.flatnonzero(alike).tolist():
                same[i] = self._is_of(int(there[i]), keys[held[i]].tobytes())
            twice += numbers[held[same]].tolist()
            on = held[~same]
            at[on] = at[on] + np.uint64(1) & mask
            todo = np.concatenate([claiming[~won], on])
        return twice

    def _is_of(self, word: int, key: bytes) -> bool:
        rows, number = self._by_ordinal.get(word >> 32 & 0xFFFFF), word & 0xFFFFFFFF
        if rows is None or word == _GONE or rows.states[number]:
            return False
        return rows.rows.startswith(key, number * ENTRY_NBYTES)

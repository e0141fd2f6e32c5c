"""Which slots of a layout are given to new records: free ones, else those that a clock's hand finds unused.

A record has up to three uses, of which being put is the first. The hand goes from slot to slot, takes one use from
each record that it passes, and the slot of a record that has none left. So a record that nobody asks for stays for one
turn, and one that was asked for up to two more. Neighbours go together, so that a batch lies side by side. Not locked,
no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.storage.slots.extent import UNSURE, USES_MAX, Extent

_WINDOW_MIN: Final = 1024

Run = tuple[Extent, int, int]
"""An extent, the first of some slots in it that are neighbours, and how many."""


def runs_of(slots: Sequence[int] | NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ascending slots as runs of neighbours: the first, and how many.

    >>> runs_of([3, 4, 5, 9])
    [(3, 3), (9, 1)]
    """
    found = np.asarray(slots, np.int64)
    cuts = np.flatnonzero(np.diff(found) != 1) + 1
    bounds = [0, *cuts.tolist(), len(found)]
    return [(int(found[start]), stop - start) for start, stop in pairwise(bounds) if stop > start]


@dataclass(eq=False, slots=True)
class Clock:
    """The extents of one layout."""

    extents: list[Extent] = field(default_factory=list)
    turned_at: int = 0  # in calls, when the hand began this turn
    turned: bool = False  # the hand has begun a turn that nobody has asked about
    _hand: tuple[int, int] = (0, 0)  # the place of an extent, and a slot in it
    _free: list[Run] = field(default_factory=list)  # the next to be taken comes last

    def join(self, extent: Extent) -> None:
        """One extent more, with the slots in it that hold nothing."""
        self.extents.append(extent)
        unused = np.flatnonzero(np.frombuffer(extent.uses, np.uint8) >= UNSURE)
        self._free[:0] = [(extent, *run) for run in reversed(runs_of(unused))]

    def leave(self, extent: Extent) -> None:
        """Take no slot of an extent any more."""
        place = self.extents.index(extent)
        self.extents.remove(extent)
        self._free = [run for run in self._free if run[0] is not extent]
        if place <= self._hand[0]:
            self._hand = (self._hand[0] - 1, self._hand[1]) if place < self._hand[0] else (place, 0)

    def give_back(self, run: Run) -> None:
        """These hold nothing any more."""
        self._free.append(run)

    def take_free(self, count: int) -> list[Run]:
        """So many slots that hold nothing, or all that there are."""
        taken: list[Run] = []
        while count and self._free:
            extent, start, slots = self._free.pop()
            if slots > count:
                self._free.append((extent, start + count, slots - count))
                slots = count
            taken.append((extent, start, slots))
            count -= slots
        return taken

    def take_unused(self, count: int) -> list[Run]:
        """So many slots of the records that are used least, or all that there are; they still hold their records."""
        taken: list[Run] = []
        rounds = (USES_MAX + 1) * len(self.extents) + 1
        place, at = self._hand
        while count and rounds:
            if place >= len(self.extents):
                place, at, self.turned = 0, 0, True
            extent = self.extents[place]
            stop = min(at + max(_WINDOW_MIN, 2 * count), len(extent.uses))
            uses = np.frombuffer(extent.uses, np.uint8)[at:stop]
            found = np.flatnonzero(uses == 0)[:count]
            passed = int(found[-1]) + 1 if len(found) == count else len(uses)
            uses = uses[:passed]
            uses[(uses > 0) & (uses < UNSURE)] -= 1
            slots = (found + at).tolist()
            for slot in slots:
                extent.uses[slot] = UNSURE
            taken += [(extent, *run) for run in runs_of(slots)]
            count -= len(slots)
            at += passed
            if at == len(extent.uses):
                place, at, rounds = place + 1, 0, rounds - 1
        self._hand = (place, at)
        return taken

    def begin_after_newest(self) -> None:
        """Put the hand behind what was written last, where the life before had it."""
        newest = [int(extent.column("<u8").max()) for extent in self.extents]
        place = int(np.argmax(newest))
        self._hand = (place, int(np.argmax(self.extents[place].column("<u8"))) + 1)

"""Which slots of a layout are given to new records: free ones, else those that a clock's hand finds unused.

A record has up to three uses, of which being put is the first. The hand goes from slot to slot, takes one use from
each record that it passes, and the slot of a record that has none left. So a record that nobody asks for stays for one
turn, and one that was asked for up to two more. Neighbours go together, so that a batch lies side by side. Not locked,
no I/O.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cache_manager.storage.file.extent import UNSURE, USES_MAX, Extent, runs_of

_WINDOW_MIN: Final = 1024

Run = tuple[Extent, int, int]
"""An extent, the first of some slots in it that are neighbours, and how many."""


class Clock:
    """The extents of one layout. ``turned`` says that the hand has begun a turn, ``turned_at`` when it did before."""

    def __init__(self) -> None:
        self.extents: list[Extent] = []
        self.turned, self.turned_at = False, 0  # in calls
        self.free: list[Run] = []  # the next to be taken comes last
        self.hand = (0, 0)  # the place of an extent, and a slot in it

    def join(self, extent: Extent) -> None:
        """One extent more, with the slots in it that hold nothing."""
        self.extents.append(extent)
        self.free[:0] = [(extent, *run) for run in reversed(runs_of(np.flatnonzero(extent.uses >= UNSURE)))]

    def leave(self, extent: Extent) -> None:
        """Take no slot of an extent any more."""
        self.hand = (0, 0)
        self.extents.remove(extent)
        self.free = [run for run in self.free if run[0] is not extent]

    def take_free(self, count: int) -> list[Run]:
        """So many slots that hold nothing, or all that there are."""
        taken: list[Run] = []
        while count and self.free:
            extent, start, slots = self.free.pop()
            if slots > count:
                self.free.append((extent, start + count, slots - count))
                slots = count
            taken.append((extent, start, slots))
            count -= slots
        return taken

    def take_unused(self, count: int) -> list[Run]:
        """So many slots of the records that are used least, or all that there are; they still hold their records."""
        taken: list[Run] = []
        place, at = self.hand
        for _ in range((USES_MAX + 1) * len(self.extents) + 1):
            if place >= len(self.extents):
                place, at, self.turned = 0, 0, True
            extent = self.extents[place]
            while count and at < extent.slots:
                uses = extent.uses[at : at + max(_WINDOW_MIN, 2 * count)]
                found = np.flatnonzero(uses == 0)[:count]
                uses = uses[: found[-1] + 1] if len(found) == count else uses
                uses[(uses > 0) & (uses < UNSURE)] -= 1
                uses[found] = UNSURE
                taken += [(extent, *run) for run in runs_of(found + at)]
                count -= len(found)
                at += len(uses)
            if not count:
                break
            place, at = place + 1, 0
        self.hand = (place, at)
        return taken

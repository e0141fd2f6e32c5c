"""Which slots of a layout are given to new records: free ones, else those that a clock's hand finds unused.

A record has up to three uses, of which being put is the first. The hand goes from slot to slot, takes one use from
each record that it passes, and the slot of a record that has none left. So a record that nobody asks for stays for one
turn, and one that was asked for up to two more. Neighbours go together, so that a batch lies side by side. Not locked,
no I/O.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cache_manager.storage.file.extent import USES_MAX, Extent, runs_of

_WINDOW_MIN: Final = 1024
_PASSED: Final = bytes([0, *range(USES_MAX), *range(USES_MAX + 1, 256)])

Run = tuple[Extent, int, int]
"""An extent, the first of some slots in it that are neighbours, and how many."""


class Clock:
    """The extents of one layout. ``turned`` says that the hand has begun a turn, ``turned_at`` when it did before."""

    def __init__(self) -> None:
        self.extents: list[Extent] = []
        self.turned, self.turned_at = False, 0  # in calls
        self.hand = (0, 0)  # the place of an extent, and a slot in it

    def leave(self, extent: Extent) -> None:
        """Take no slot of an extent any more."""
        self.hand = (0, 0)
        self.extents.remove(extent)

    def take_free(self, count: int) -> list[Run]:
        """So many slots that hold nothing, or all that there are."""
        taken: list[Run] = []
        for extent in self.extents:
            while count and extent.free_at < extent.slots and (run := extent.take_free(count)):
                taken.append((extent, *run))
                count -= run[1]
        return taken

    def take_unused(self, count: int) -> list[Run]:
        """So many slots of the records that are used least, or all that there are; these are served no more."""
        taken: list[Run] = []
        place, at = self.hand
        for _ in range((USES_MAX + 1) * len(self.extents) + 1):
            if place >= len(self.extents):
                place, at, self.turned = 0, 0, True
            extent = self.extents[place]
            while count and at < extent.slots:
                stop = at + max(_WINDOW_MIN, 2 * count)
                found = np.flatnonzero(extent.uses[at:stop] == 0)[:count] + at
                if len(found) == count:
                    stop = int(found[-1]) + 1
                extent.use_bytes[at:stop] = extent.use_bytes[at:stop].translate(_PASSED)
                for run in runs_of(found):
                    extent.forget(*run)
                    taken.append((extent, *run))
                count -= len(found)
                at = stop
            if not count:
                break
            place, at = place + 1, 0
        self.hand = (place, at)
        return taken

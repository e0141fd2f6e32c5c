"""Which slots of a layout new records get: free ones, else those that a clock's hand finds unused.

A record has up to three uses, of which being put is the first. The hand goes from slot to slot, takes one use from each
record that it passes, and takes the slot of a record that has none left. So a record that is never read stays for one
turn, and one that was read for up to two more. Neighbours go together, so that a batch lies side by side. Not locked,
no I/O.
"""

from __future__ import annotations

from cache_manager.storage.file.extent import USES_MAX, Extent, Run


class Clock:
    """The extents of one layout, of ``extent_nbytes`` or less. ``turned``: the hand has begun a turn; ``turned_at``:
    when the turn before began."""

    def __init__(self, extent_nbytes: int) -> None:
        self.extent_nbytes = extent_nbytes
        self.extents: list[Extent] = []
        self.turned = False
        self.turned_at = 0  # in calls
        self.hand = (0, 0)  # the place of an extent, and a slot in it

    def leave(self, extent: Extent) -> None:
        """Take no slot of an extent any more."""
        self.hand = (0, 0)
        self.extents.remove(extent)

    def take_free(self, count: int, taken: list[Run]) -> None:
        """Add ``count`` slots that hold nothing to those ``taken``, or as many as there are."""
        for extent in self.extents:
            while count and extent.free_at < extent.slots and (run := extent.take_free(count)):
                taken.append((extent, *run))
                count -= run[1]

    def take_unused(self, count: int, taken: list[Run]) -> None:
        """As :meth:`take_free`, slots of the least used records; the records are served no more."""
        place, at = self.hand
        for _ in range((USES_MAX + 1) * len(self.extents) + 1):
            if place >= len(self.extents):
                place = 0
                at = 0
                self.turned = True
            extent = self.extents[place]
            while count and (run := extent.find_unused(at, count)):
                extent.forget(*run)
                taken.append((extent, *run))
                count -= run[1]
                at = sum(run)
            if not count:
                break
            place = place + 1
            at = 0
        self.hand = (place, at)

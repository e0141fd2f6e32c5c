"""The cache-transfer process: ``python -m cache_manager.transfer_manager.process``.

It copies records between shared regions, and asks a store, when its engine says so. The engine decides which blocks may
be touched and which rows become readable. Copies have a thread of their own, so that a slow store does not hold up a
swap.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cache_manager.moves import copy_records
from cache_manager.regions import SharedRegion
from cache_manager.regions.directory import region_path
from cache_manager.storage import apart_process


class Process(apart_process.Process):
    """A store's process that also copies. It keeps regions mapped until their owner has closed them."""

    regions: Final[dict[str, SharedRegion]] = {}

    def copy(self, source: str, target: str, sources: list[int], targets: list[int]) -> None:
        regions = self.region(source), self.region(target)
        for region, blocks in zip(regions, (sources, targets), strict=True):
            assert all(0 <= block < region.blocks for block in blocks), f"blocks {blocks} of {region.blocks}"
        assert regions[0].layout.fingerprint == regions[1].layout.fingerprint, "records of one layout"
        copy_records(*regions, np.array(sources), np.array(targets))

    def region(self, name: str) -> SharedRegion:
        region = self.regions.get(name)
        if region is None:
            region = self.regions[name] = SharedRegion.attach(name, writable=True)
        return region

    def tidy(self) -> None:
        """Unmap the regions that have no name any more, each behind the last copy that uses it."""
        for name in list(self.regions):
            if not region_path(name).exists():
                del self.regions[name]


if __name__ == "__main__":
    Process()

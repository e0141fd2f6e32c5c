"""The cache-transfer process: ``python -m cache_manager.transfer_manager.process``.

It copies records between shared regions, and asks a store, when its engine says so. The engine decides which blocks may
be touched and which rows become readable. Copies have a thread of their own, so that a slow store does not hold up a
swap.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from cache_manager.moves import copy_records
from cache_manager.regions import SharedRegion
from cache_manager.storage import apart_process


class Process(apart_process.Process):
    """A store's process that also copies."""

    def copy(self, source: str, target: str, sources: list[int], targets: list[int]) -> None:
        regions = _region(source), _region(target)
        for region, blocks in zip(regions, (sources, targets), strict=True):
            assert all(0 <= block < region.blocks for block in blocks), f"blocks {blocks} of {region.blocks}"
        assert regions[0].layout.fingerprint == regions[1].layout.fingerprint, "records of one layout"
        copy_records(*regions, np.array(sources), np.array(targets))


@cache
def _region(name: str) -> SharedRegion:
    return SharedRegion.attach(name, writable=True)


if __name__ == "__main__":
    Process()

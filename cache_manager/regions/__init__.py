"""Where rows live in memory: of one process (heap), or of several (shared) with views for processes that only read."""

from typing import Literal

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from cache_manager.ports import Region, TierName
from cache_manager.regions.directory import RegionInfo, list_regions, reap_orphans
from cache_manager.regions.region import HeapRegion
from cache_manager.regions.shared import SharedRegion
from cache_manager.regions.view import RegionView
from cache_manager.spec import RecordLayout

Memory = Literal["heap", "shared", "sparse"]
"""Where rows lie: in this process's memory, or in SharedMemory that others may attach; if that is sparse, rows of
blocks that are not in use take none."""


def region_in(memory: Memory, layout: RecordLayout, blocks: int, tier: TierName, namespace: Namespace) -> Region:
    """A new region of a tier's ``blocks``; :class:`ConfigError` where there is no such ``memory``."""
    if memory == "heap":
        return HeapRegion(layout, blocks)
    if memory in ("shared", "sparse"):
        sparse = memory == "sparse"
        return SharedRegion.create(layout, blocks, tier=tier, namespace=namespace.fingerprint, sparse=sparse)
    raise ConfigError("memory", "'heap', 'shared' or 'sparse'", repr(memory))


__all__ = [
    "HeapRegion",
    "Memory",
    "RegionInfo",
    "RegionView",
    "SharedRegion",
    "list_regions",
    "reap_orphans",
    "region_in",
]

"""Where rows live in memory: a process's own (heap) or that of several processes (shared)."""

from cache_manager.regions.directory import RegionInfo, list_regions, reap_orphans
from cache_manager.regions.header import Purpose
from cache_manager.regions.heap import HeapRegion
from cache_manager.regions.reader import BlockSnapshot, snapshot
from cache_manager.regions.shared import SharedRegion

__all__ = [
    "BlockSnapshot",
    "HeapRegion",
    "Purpose",
    "RegionInfo",
    "SharedRegion",
    "list_regions",
    "reap_orphans",
    "snapshot",
]

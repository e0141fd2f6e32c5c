"""Where rows live in memory: of one process (heap), or of several (shared) with views for those that only read."""

from cache_manager.regions.directory import RegionInfo, list_regions, reap_orphans
from cache_manager.regions.heap import HeapRegion
from cache_manager.regions.shared import SharedRegion
from cache_manager.regions.view import RegionView

__all__ = ["HeapRegion", "RegionInfo", "RegionView", "SharedRegion", "list_regions", "reap_orphans"]

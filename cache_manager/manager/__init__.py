"""A complete block manager for engines that have none."""

from cache_manager.manager.manager import Admission, BlockManager, ManagerCounters

__all__ = ["Admission", "BlockManager", "ManagerCounters"]

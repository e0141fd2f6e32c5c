"""A complete block manager for engines that have none."""

from cache_manager.manager.manager import BlockManager, ManagerCounters, SequenceState
from cache_manager.manager.stored import Admission

__all__ = ["Admission", "BlockManager", "ManagerCounters", "SequenceState"]

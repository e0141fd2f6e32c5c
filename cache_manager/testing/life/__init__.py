"""The life-cycle kit: it proves any paged-KV block manager by random lives and an independent oracle.

Needs nothing of the manager but an adapter (:class:`BlockManagerAdapter`), and no package but the standard library.
"""

from cache_manager.testing.life.adapter import CAPABILITIES, BlockManagerAdapter
from cache_manager.testing.life.canary import CanaryKV, MoveFailed
from cache_manager.testing.life.invariants import INVARIANTS, InvariantBroken, Operation
from cache_manager.testing.life.machine import BlockManagerMachine, prove, replay

__all__ = [
    "CAPABILITIES",
    "INVARIANTS",
    "BlockManagerAdapter",
    "BlockManagerMachine",
    "CanaryKV",
    "InvariantBroken",
    "MoveFailed",
    "Operation",
    "prove",
    "replay",
]

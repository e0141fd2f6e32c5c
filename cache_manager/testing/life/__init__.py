"""The life-cycle kit: a proof of any paged-KV block manager, by random lives and an oracle of its own.

Needs ``kvroute[testing]`` and nothing of the manager but an adapter (:class:`BlockManagerAdapter`).
"""

from cache_manager.testing.life.adapter import CAPABILITIES, BlockManagerAdapter, Capability
from cache_manager.testing.life.canary import CanaryKV, MoveFailed
from cache_manager.testing.life.invariants import INVARIANTS, Invariant
from cache_manager.testing.life.machine import BlockManagerMachine, prove, replay
from cache_manager.testing.life.world import InvariantBroken

__all__ = [
    "CAPABILITIES",
    "INVARIANTS",
    "BlockManagerAdapter",
    "BlockManagerMachine",
    "CanaryKV",
    "Capability",
    "Invariant",
    "InvariantBroken",
    "MoveFailed",
    "prove",
    "replay",
]

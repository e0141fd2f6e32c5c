"""How many lives the life-cycle kit plays."""

from __future__ import annotations

from budget import ALL_LIVES

from cache_manager.testing.life import BlockManagerMachine

BlockManagerMachine.examples = ALL_LIVES

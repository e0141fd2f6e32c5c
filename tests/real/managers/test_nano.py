"""The example manager under the life-cycle kit."""

from __future__ import annotations

from nano import Nano

from cache_manager.testing.life import BlockManagerMachine


class TestNano(BlockManagerMachine):
    adapter = Nano

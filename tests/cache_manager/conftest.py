"""What several files of examples start from; others have fixtures of these names of their own."""

from __future__ import annotations

import pytest
from blocks_house import House
from budget import ALL_LIVES

from cache_manager.testing.life import BlockManagerMachine

BlockManagerMachine.examples = ALL_LIVES


@pytest.fixture
def house():
    """Blocks that an engine gives out."""
    house = House()
    yield house
    house.close()

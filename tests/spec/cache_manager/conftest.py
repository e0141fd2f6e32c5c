"""Blocks of a small engine, as most tests of the core have them."""

from __future__ import annotations

import pytest
from blocks_house import House


@pytest.fixture
def house():
    """Blocks that an engine gives out."""
    house = House()
    yield house
    house.close()


@pytest.fixture
def full():
    """Every block has rows; the store hangs."""
    made = House()
    made.engine.renew(range(6))
    for block in range(6):
        made.fill(block, f"block {block}")
    yield made
    made.close()

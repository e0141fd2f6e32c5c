"""Blocks that an engine gives out begin lives."""

from __future__ import annotations

import pytest
from blocks_house import TOKENS

from cache_manager.errors import InvalidInputError


def test_generations_never_go_back(house) -> None:
    engine = house.engine
    assert engine.renew([0, 1], [5, 7]).tolist() == [5, 7]
    assert engine.renew([]).size == 0
    rows = house.fill(0, "mine")
    assert engine.renew([0, 1], [4, 8]).tolist() == [0, 8]
    assert house.holds(0, rows), "the life that was known"
    assert engine.read("routing", [0], generations=[4]).valid.tolist() == [False] * TOKENS
    assert engine.renew([0], [5]).tolist() == [0]  # somebody else has given out the same life
    assert engine.read("routing", [0], generations=[5]).valid.tolist() == [False] * TOKENS
    with pytest.raises(InvalidInputError, match="generations"):
        engine.renew([0, 1], [9])

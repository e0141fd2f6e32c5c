"""Both ends of a connector under a scheduler that acts at random, as real ones may; clients judge their answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from budget import scaled
from connector_house import House


@pytest.mark.parametrize("seed", range(scaled(24)))
def test_every_row_is_that_of_its_tokens_whatever_the_scheduler_does(seed: int, tmp_path: Path) -> None:
    """Goal: a row in a client's hands is that of its token and weights, with their version, and none is missing without
    a reason. Method: :mod:`connector_house`; a seed plays one life.
    """
    house = House(seed, tmp_path)
    try:
        house.lives(150)
    finally:
        house.close()

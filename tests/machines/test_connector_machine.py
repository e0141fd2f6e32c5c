"""Both ends of a connector under a scheduler that acts at random, as real ones may; clients judge their answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from budget import scaled
from connector_house import House
from part_hits import PartHouse


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


def test_a_hit_that_ends_inside_a_block(tmp_path: Path) -> None:
    """Goal: rows of a copied block come along up to the last token that was hit, and no further. Method: as above, of
    an engine that copies a block which is hit in part; seeds play lives, and in most of them blocks are copied."""
    copied, lives = 0, max(8, scaled(24))
    for seed in range(lives):
        house = PartHouse(seed, tmp_path / str(seed))
        try:
            house.lives(150)
        finally:
            house.close()
        copied += house.copied
    assert copied > 2 * lives

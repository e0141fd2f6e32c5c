"""Both ends of a connector under a scheduler that acts at random, as real ones may; clients judge their answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from budget import scaled

from tests.machines.apart_house import ApartHouse
from tests.machines.connector_house import House
from tests.machines.part_hits import PartHouse
from tests.machines.weights_house import WeightsHouse


@pytest.mark.parametrize("seed", range(scaled(24)))
def test_every_row_is_that_of_its_tokens_whatever_the_scheduler_does(seed: int, tmp_path: Path) -> None:
    """Goal: a row in a client's hands is that of its token and weights, with their version, and none is missing without
    a reason. Method: :mod:`~tests.machines.connector_house`; a seed plays one life.
    """
    house = House(seed, tmp_path)
    try:
        house.lives(150)
    finally:
        house.close()


def test_rollouts_that_a_process_of_its_own_stores(tmp_path: Path) -> None:
    """Goal: the same, where a process reads the rows later than the engine goes on, and may be gone at any time.
    Method: it is stopped and killed between all else; a life in which one was killed lost no row by that."""
    kills, read_here, lives = 0, 0, max(3, scaled(6))
    for seed in range(lives):
        house = ApartHouse(seed, tmp_path / str(seed))
        try:
            house.lives(150)
        finally:
            house.close()
        kills += house.kills
        read_here += house.taker.counters["read_here"]
    assert kills >= lives
    assert read_here, "the engine has read no row for the process"


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


def test_each_id_has_the_weight_of_its_own_pass(tmp_path: Path) -> None:
    """Goal: routing weights are those of the pass that chose their ids, bit for bit, or missing with them. Method: as
    above, of an engine with routing weights whose routers tell none for some of the time."""
    judged, lives = 0, max(6, scaled(10))
    for seed in range(lives):
        house = WeightsHouse(seed, tmp_path / str(seed))
        try:
            house.lives(150)
        finally:
            house.close()
        judged += house.judged
    assert judged > 50 * lives

"""Blocks with owners that a device writes by itself: until its step has ended nobody else fills them."""

from __future__ import annotations

import numpy as np
import pytest
from canary import canary_rows

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, BlockStateError, RowError
from cache_manager.keys import Namespace
from cache_manager.memory import places
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store
from cache_manager.table import STEP_NUMBERS

SPEC = AuxBlockDataSpec("routing", (3, 2), "uint8", 4)


@pytest.fixture
def aux():
    with AuxBlocks(
        [SPEC],
        device_blocks=5,
        host_blocks=3,
        namespace=Namespace("m", 1),
        store=open_store("memory:?capacity=1MiB"),
    ) as blocks:
        yield blocks


def rows_of(who: str) -> np.ndarray:
    return canary_rows(SPEC, [(who, i) for i in range(4)])


def fill(aux: AuxBlocks, block: int, owner: str) -> None:
    aux.allocate([block], owner)
    with aux.step(range(block * 4, block * 4 + 4)) as step:
        step.write("routing", rows_of(owner))


def device_writes(aux: AuxBlocks, block: int, who: str) -> None:
    places(aux.region("device"))[0][block] = rows_of(who).reshape(4, -1)


@pytest.mark.parametrize("owner_ends", [True, False])
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_block_that_a_device_still_writes_is_filled_by_nobody_else(aux, owner_ends: bool, end: str) -> None:
    """Goal: `no_late_device_write_lands_among_valid_rows`. Method: every call that fills block 0, then the device."""
    fill(aux, 1, "b")
    key = aux.keys.key(None, [1])
    aux.persist({key: 1}, owner="b")
    aux.swap_out([(1, 2)], leases="stay")
    aux.allocate([0], "a")
    step = aux.begin_step(range(4), in_place=True)
    step.wrote("routing")
    calls = [
        lambda: aux.copy([(1, 0)]),
        lambda: aux.swap_in([(2, 0)], leases="stay"),
        lambda: aux.restore({key: 0}, generations=aux.generations([0])),
        lambda: aux.copy([(0, 3)]),
    ]
    if owner_ends:
        aux.free("a")
        calls += [
            lambda: aux.allocate([0], "c"),
            lambda: aux.allocate_each([0], ["c"]),
            lambda: aux.swap_in([(2, 0)]),
        ]
    assert aux.has_step([0])
    assert not aux.available([0])[0]
    for call in calls:
        with pytest.raises(BlockBusyError, match="device block 0"):
            call()
    aux.evict([0]) if owner_ends else aux.reset(weights_version=1)
    for call in calls[1:2] if owner_ends else calls[:1]:  # a new life changes nothing for the device
        with pytest.raises(BlockStateError):
            call()
    device_writes(aux, 0, "late")
    if end == "commit":
        assert step.commit() == 0
    else:
        step.abort()
    assert not aux.read("routing", [0]).valid.any()
    assert aux.in_flight == 0
    aux.free("a")
    fill(aux, 0, "next")
    assert np.array_equal(aux.read("routing", [0]).values, rows_of("next"))


def test_rows_that_a_device_wrote_are_readable_when_its_step_has_ended(aux) -> None:
    aux.allocate([0], "a")
    step = aux.begin_step(range(4), in_place=True)
    device_writes(aux, 0, "device")
    assert not aux.read("routing", [0]).valid.any()
    step.wrote("routing")
    with pytest.raises(RowError, match="one write a step"):
        step.wrote("routing")
    assert step.commit(np.array([True, True, False, True])) == 3
    read = aux.read("routing", [0])
    assert read.valid.tolist() == [True, True, False, True]
    assert np.array_equal(read.values[read.valid], rows_of("device")[[0, 1, 3]])


def test_a_step_that_copies_its_rows_cannot_say_that_a_device_wrote_them(aux) -> None:
    aux.allocate([0], "a")
    with aux.begin_step(range(4)) as step, pytest.raises(BlockStateError, match="in_place=True"):
        step.wrote("routing")
    assert not aux.read("routing", [0]).valid.any()


def test_numbers_of_steps_come_back_and_nobody_is_taken_for_another(aux) -> None:
    """Goal: the 31 bits of a step's number run out without a word. Method: steps that overlap across the end: each
    writes a slot of the one before, the last one a slot that a device with the last number may write."""
    aux.allocate([0], "a")
    aux._device._last_step = STEP_NUMBERS - 4
    made = rows_of("steps")
    steps = []
    for n in range(3):
        steps.append(aux.begin_step([n, n + 1]))
        steps[n].write("routing", made[[n, n + 1]])
    device = aux.begin_step([3], in_place=True)
    late = aux.begin_step([3])
    numbers = [*aux._device.steps]
    assert len(set(numbers)) == 5
    assert max(numbers) == STEP_NUMBERS
    assert min(numbers) == 1
    assert [step.commit() for step in steps] == [1, 1, 1]
    late.write("routing", made[[0]])
    assert late.commit() == 0
    device.wrote("routing")
    assert device.commit() == 0
    read = aux.read("routing", [0])
    assert read.valid.tolist() == [True, True, True, False]
    assert np.array_equal(read.values[:3], made[:3])
    assert aux.in_flight == 0

"""AuxBlocks: each wrong call names its field and changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from aux_house import SPEC, fill, snapshot
from canary import canary_rows

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import (
    BlockStateError,
    ConfigError,
    InvalidInputError,
    RowError,
    SlotError,
    SpecError,
)
from cache_manager.keys import Namespace


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a: a.begin_step([24]), SlotError, r"slots: wanted -1 \(padding\) or a slot in \[0, 24\), got 24"),
        (lambda a: a.begin_step([-2]), SlotError, r"slots: wanted .*, got -2"),
        (lambda a: a.begin_step([0, 0]), SlotError, "slots: wanted each slot once in a step, got slot 0 twice"),
        (
            lambda a: a.begin_step(np.array([2**64 - 1], "u8")),
            SlotError,
            "slots: wanted a flat array of integers, got 1844",
        ),
        (lambda a: a.begin_step([[0], [1, 2]]), SlotError, "slots: wanted a flat array of integers, got a ragged"),
        (lambda a: a.read("routing", [0.5]), InvalidInputError, "blocks: wanted a flat sequence of block ids"),
        (lambda a: a.read("routing", [2**63]), InvalidInputError, "blocks: wanted a flat sequence of block ids"),
        (lambda a: a.read("routing", [0], 0.0, 1), InvalidInputError, "start, stop: wanted"),
        (lambda a: a.swap_out([(0, 1)], owner=""), InvalidInputError, "owner: wanted a non-empty string or an integer"),
        (lambda a: a.swap_out([(0, 1)], owner="b"), BlockStateError, "device block 0: wanted one that 'b' holds"),
        (lambda a: a.copy([(0, 3)], rows=[1, 2]), InvalidInputError, "rows: wanted 1, one count for each pair"),
        (lambda a: a.begin_step([0.0]), SlotError, "slots: wanted a flat array of integers, got float64"),
        (lambda a: a.begin_step([12]), BlockStateError, "device block 3: wanted HELD to write, got FREE"),
        (
            lambda a: a.allocate([0], "b"),
            BlockStateError,
            "device block 0: wanted FREE or CACHED to alloc.*, got HELD",
        ),
        (lambda a: a.allocate([9], "b"), InvalidInputError, r"blocks: wanted device block ids in \[0, 6\), got 9"),
        (lambda a: a.allocate([3], ""), InvalidInputError, "owner: wanted a non-empty string or an integer, got ''"),
        (lambda a: a.share([3], "b"), BlockStateError, "device block 3: wanted HELD or CACHED or LEAVING to share"),
        (lambda a: a.swap_out([(0, 3)]), InvalidInputError, r"pairs target: wanted host block ids in \[0, 3\), got 3"),
        (lambda a: a.swap_out([(0, 1), (1, 1)]), InvalidInputError, "pairs target: wanted each block once"),
        (lambda a: a.swap_out([(0, 1), (0, 2)]), InvalidInputError, "pairs source: wanted each block once"),
        (lambda a: a.copy([(0, 1)]), BlockStateError, "device block 1: wanted no readable row to fill it"),
        (
            lambda a: a.copy([(0, 3), (3, 4)]),
            InvalidInputError,
            "pairs: wanted no block as source and as target, got 3",
        ),
        (lambda a: a.swap_out([1, 2]), InvalidInputError, r"pairs: wanted \(source, target\) pairs"),
        (lambda a: a.read("logprob", [0]), SpecError, "spec name: wanted one of routing, got 'logprob'"),
        (lambda a: a.read("routing", [0], 3, 2), InvalidInputError, r"start, stop: wanted 0 <= start <= stop <= 4"),
        (lambda a: a.read("routing", [0], tier="disk"), InvalidInputError, "tier: wanted 'device' or 'host'"),
        (lambda a: a.free("a", tier=""), InvalidInputError, "tier: wanted 'device' or 'host', got ''"),
        (lambda a: a.free("a", [0], ""), InvalidInputError, "tier: wanted 'device' or 'host', got ''"),
        (lambda a: a.evict([0]), BlockStateError, "device block 0: wanted FREE or CACHED to evict, got HELD"),
    ],
)
def test_a_wrong_call_names_the_field_and_changes_nothing(aux, call, error, message) -> None:
    fill(aux, [0, 1], "mine", "a")
    before = snapshot(aux)
    with pytest.raises(error, match=message):
        call(aux)
    assert snapshot(aux) == before
    assert aux.in_flight == 0
    aux.assert_consistent()


def test_wrong_rows_leave_the_step_usable(aux) -> None:
    aux.allocate([0], "a")
    good = canary_rows(SPEC, [("x", 0), ("x", 1)])
    with aux.step([0, 1]) as step:
        for bad in (good[:1], good.astype("f4"), good.astype("i8") + 256):
            with pytest.raises(RowError):
                step.write("routing", bad)
        with pytest.raises(SpecError):
            step.write("logprob", good)
        step.write("routing", good.astype("i8"))
        with pytest.raises(RowError, match="wanted one write a step"):
            step.write("routing", good)
        with pytest.raises(RowError, match=r"keep: wanted bool of shape \(2,\)"):
            step.commit(keep=np.ones(3, bool))
    assert np.array_equal(aux.read("routing", [0], 0, 2).values, good)
    with pytest.raises(BlockStateError, match="step: wanted one that is in flight to commit, got one that has ended"):
        step.commit()
    step.abort()


def test_what_is_missing_at_the_front_door_is_named() -> None:
    for arguments, message in (
        ({"device_blocks": 0}, r"device_blocks: wanted an integer in \[1, "),
        ({"host_blocks": -1}, r"host_blocks: wanted an integer in \[0, "),
        ({"memory": "gpu"}, "memory: wanted 'heap', 'shared' or regions by tier, got 'gpu'"),
        ({"required": []}, "required: wanted at least one spec's name, got none"),
        ({"steps_max": 0}, r"steps_max: wanted an integer in \[1, "),
        ({"required": ["logprob"]}, "spec name: wanted one of routing, got 'logprob'"),
    ):
        with pytest.raises((ConfigError, SpecError), match=message):
            AuxBlocks([SPEC], **{"device_blocks": 2, "namespace": Namespace("m", 1), **arguments})
    with AuxBlocks([SPEC], device_blocks=2, namespace=Namespace("m", 1)) as aux:
        with pytest.raises(InvalidInputError, match="tier: wanted host_blocks > 0"):
            aux.swap_out([(0, 0)])
        with pytest.raises(ConfigError, match="store: wanted a storage backend, got none"):
            aux.persist({})
        step = aux.begin_step([])
        with pytest.raises(BlockStateError, match="close: wanted nothing in flight, got 1 steps or moves"):
            aux.close()
        step.abort()

"""What a forward pass in flight writes, and the numbers by which it asks for slots."""

from __future__ import annotations

import numpy as np
import pytest
from house import PROMPT, House

from cache_manager.errors import BlockBusyError, BlockStateError


@pytest.fixture
def house():
    made = House(device=8)
    yield made
    made.close()


@pytest.mark.parametrize("computed", [1, 4, 5, 7])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("call", ["preempt", "fork"])
def test_what_a_pass_writes_is_neither_swapped_nor_shared(house, computed, in_place, reset, call) -> None:
    """Goal: KV that is still written is not copied away, nor seen by a child. Method: a step beyond what is computed,
    at each alignment, and a reset in the middle of it."""
    house.manager.allocate("a", list(range(8)))
    house.compute("a", list(range(computed)))
    step = house.aux.begin_step(house.manager.slots("a", computed, 8), in_place=in_place)
    if reset:
        house.manager.reset(weights_version=1)
    before = house.state()
    calls = {"preempt": lambda: house.manager.preempt("a"), "fork": lambda: house.manager.fork("a", "child")}
    if call == "preempt" or computed % 4:
        with pytest.raises(BlockBusyError, match=f"owner 'a': wanted no step in flight to {call} it, got a step"):
            calls[call]()
        assert house.state() == before
    step.abort()
    assert calls[call]() in (True, None)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_blocks_that_a_pass_writes_are_given_out_when_it_has_ended(house, in_place, reset) -> None:
    """Goal: a block whose KV is still written is not given out. Method: a request ends in mid-step; ask for all
    blocks."""
    house.manager.allocate("dead", PROMPT)
    step = house.aux.begin_step(house.manager.slots("dead", 0, 10), in_place=in_place)
    if reset:
        house.manager.reset(weights_version=1)
    house.manager.free("dead")
    house.manager.assert_consistent()
    assert house.manager.free_device_blocks == 5
    assert house.manager.allocate("b", list(range(32))) is None
    step.commit()
    assert house.manager.free_device_blocks == 8
    assert house.manager.allocate("b", list(range(32))) is not None
    assert not house.manager.read("routing", "b", 0, 32).valid.any()


@pytest.mark.parametrize("change", ["preempt", "free", "fork"])
def test_the_same_numbers_are_judged_anew_when_a_sequence_has_changed(house, change) -> None:
    """Goal: a cached answer is not kept too long. Method: the very same array before and after a change."""
    for i in range(3):
        house.run(f"s{i}", [i, 1])
    seqs = np.array([house.manager.sequence(f"s{i}") for i in range(3)])
    slots = house.manager.append_batch(seqs)
    if change == "fork":
        house.manager.fork("s1", "child")
        with pytest.raises(BlockStateError, match=r"owner 's1': wanted append_batch\(\) before it is written"):
            house.manager.publish_batch(seqs, [7] * 3)
        assert (house.manager.append_batch(seqs) == slots).tolist() == [True, False, True]
        return
    getattr(house.manager, change)("s1")
    for call in (lambda: house.manager.append_batch(seqs), lambda: house.manager.publish_batch(seqs, [7] * 3)):
        with pytest.raises(BlockStateError, match="swapped out" if change == "preempt" else "seqs: .* not ended"):
            call()
    assert house.manager.resume("s1") if change == "preempt" else house.manager.allocate("new", [9, 9])
    assert (house.manager.append_batch(seqs) >= 0).all()


def test_a_sequence_from_before_a_reset_there_and_back_is_not_found(house) -> None:
    """Goal: KV of other weights is found under no key of these weights. Method: reset A to B to A in mid-sequence, then
    publish."""
    house.manager.allocate("a", PROMPT)
    house.manager.reset(weights_version=1)
    house.manager.reset(weights_version=0)
    house.compute("a", PROMPT)
    assert all(house.decode(["a"], [token])[0] for token in (10, 11))
    assert house.persist("a") == 0
    house.manager.fork("a", "child")
    house.manager.free("a")
    assert house.manager.allocate("b", [*PROMPT, 10, 11]).cached_tokens == 0

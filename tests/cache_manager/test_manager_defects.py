"""What adversarial tests found in the block manager, by example: each of these failed before."""

from __future__ import annotations

import numpy as np
import pytest
from canary import canary_rows
from gate import Gate, GatedStore
from house import PROMPT, SPEC, House

from cache_manager.errors import BlockBusyError, BlockStateError, TransferProcessError
from cache_manager.storage import open_store


@pytest.fixture
def house():
    made = House(device=8)
    yield made
    made.close()


# ---------------------------------------------------------------- slots


def test_slots_of_a_shared_prefix_are_refused(house) -> None:
    """Goal: nobody writes over another sequence's rows. Method: a prefix hit, then slots from the first token on."""
    house.run("a", PROMPT)
    assert house.manager.allocate("b", PROMPT).cached_tokens == 8
    for start, stop in ((0, 10), (7, 10), (0, 1), (4, 8)):
        with pytest.raises(BlockStateError, match=r"wanted append\(\) before it is written"):
            house.manager.slots("b", start, stop)
    assert house.manager.slots("b", 8, 10).size == 2
    assert house.manager.slots("b", 8, 8).size == house.manager.slots("b", 0, 0).size == 0


def test_slots_of_a_block_that_can_be_found_are_refused_to_its_own_sequence(house) -> None:
    house.run("a", PROMPT)
    for start, stop in ((3, 10), (3, 4), (7, 8)):
        with pytest.raises(BlockStateError, match=r"wanted append\(\) before it is written"):
            house.manager.slots("a", start, stop)
    assert house.manager.append("a", 12)
    assert house.manager.slots("a", 8, 12).size == 4


def test_slots_of_a_block_that_somebody_has_leased_around_the_manager_are_refused(house) -> None:
    """Goal: a lease that the manager did not give counts. Method: share the partial block, then append."""
    house.run("a", PROMPT)
    tail = house.manager.table("a")[2]
    house.aux.share([tail], "outside")
    with pytest.raises(BlockStateError, match="one that others use too"):
        house.manager.slots("a", 10, 11)
    assert house.manager.append("a", 11)
    assert house.manager.table("a")[2] != tail
    house.manager.slots("a", 10, 11)
    house.aux.free("outside")


# ---------------------------------------------------------------- preempt


@pytest.mark.parametrize("computed", [1, 4, 5, 7])
@pytest.mark.parametrize("in_place", [False, True])
def test_preempt_in_a_step_answers_the_same_whatever_the_alignment(house, computed, in_place) -> None:
    """Goal: blocks that a pass is writing are not freed. Method: a step beyond what is computed, at each alignment."""
    house.manager.allocate("a", list(range(8)))
    house.compute("a", list(range(computed)))
    step = house.aux.begin_step(house.manager.slots("a", computed, 8), in_place=in_place)
    before = house.state()
    with pytest.raises(BlockBusyError, match="owner 'a': wanted no step in flight to preempt it, got a step"):
        house.manager.preempt("a")
    assert house.state() == before
    step.abort()
    assert house.manager.preempt("a")


@pytest.mark.parametrize("tokens", [0, 3])
def test_preempt_without_host_blocks_answers_false(tokens) -> None:
    house = House(host=0)
    house.manager.allocate("a", PROMPT)
    house.compute("a", PROMPT[:tokens])
    assert house.manager.preempt("a") is False
    house.close()


# ---------------------------------------------------------------- groups sampled from one prompt


def test_a_duplicate_takes_over_the_key_of_a_block_that_nobody_holds(house) -> None:
    """Goal: a group sampled from one prompt hits. Method: the story that the life-cycle kit found."""
    house.run("a", PROMPT[:4])
    house.manager.free("a")
    assert house.run("b", PROMPT[:4]) == 0, "one token is left to compute, which is the whole block"
    house.run("c", list(range(100, 128)))  # every other block
    house.manager.free("c")
    assert house.manager.allocate("d", PROMPT[:6]).cached_tokens == 4
    assert house.manager.table("d")[0] == house.manager.table("b")[0]


def test_a_duplicate_takes_over_when_the_first_of_a_group_ends(house) -> None:
    """Goal: the key outlives the block that it was found at. Method: two of a group run; the first ends, is evicted."""
    house.manager.allocate("a", PROMPT[:4])
    house.manager.allocate("b", PROMPT[:4])
    house.compute("a", PROMPT[:4])
    house.compute("b", PROMPT[:4])
    house.manager.free("a")
    house.manager.assert_consistent()
    assert house.manager.free_device_blocks == 7, "what b has too is not worth keeping twice"
    house.run("c", list(range(100, 128)))
    house.manager.free("c")
    assert house.manager.allocate("d", PROMPT[:6]).cached_tokens == 4
    assert house.manager.table("d")[0] == house.manager.table("b")[0]


@pytest.mark.parametrize(("ended", "early"), [("a", True), ("a", False), ("b", False)])
def test_what_a_running_sequence_has_too_displaces_nothing(house, ended, early) -> None:
    """Goal: memory for a copy is given up before a cached prefix is. Method: one more block is needed than are free."""
    house.run("x", [9] * 5)
    house.manager.free("x")
    for owner in ("a", "b"):
        house.manager.allocate(owner, PROMPT[:4])
    house.compute("a", PROMPT[:4])
    if early:
        house.manager.free(ended)
    house.compute("b", PROMPT[:4])
    house.manager.free(ended)
    house.run("c", list(range(100, 124)))  # six blocks: all but x's and b's
    house.manager.free("c")
    assert house.manager.allocate("d", [9] * 5).cached_tokens == 4


def test_a_block_with_rows_takes_the_place_of_one_without_that_still_runs(house) -> None:
    for owner in ("a", "b"):
        house.manager.allocate(owner, PROMPT[:4])
    house.aux.step(house.manager.slots("a", 0, 4)).commit()
    house.manager.publish("a", PROMPT[:4])
    house.compute("b", PROMPT[:4])
    assert house.manager.allocate("c", PROMPT).cached_tokens == 4
    assert house.manager.read("routing", "c", 0, 4).valid.all()


def test_a_duplicate_without_rows_does_not_take_the_place_of_a_block_with_rows(house) -> None:
    """Goal: a takeover loses no rows. Method: the second of a group computes KV only, and the first ends."""
    house.run("a", PROMPT[:4])
    house.manager.allocate("b", PROMPT[:4])
    house.aux.step(house.manager.slots("b", 0, 4)).commit()
    house.manager.publish("b", PROMPT[:4])
    house.manager.free("a")
    assert house.manager.allocate("c", PROMPT).cached_tokens == 4
    assert house.manager.read("routing", "c", 0, 4).valid.all()
    house.manager.free("b")
    house.manager.assert_consistent()


def test_a_chain_loses_its_tail_before_its_head(house) -> None:
    """Goal: what is left of an evicted prefix can be found. Method: evict two of its blocks, then one more."""
    house.run("a", list(range(13)))
    house.manager.free("a")
    house.run("b", list(range(100, 123)))  # six blocks: five are free
    house.manager.free("b")
    assert house.run("c", list(range(13))) == 8, "the third block has gone"


# ---------------------------------------------------------------- blocks that somebody keeps for a moment


def test_blocks_that_the_store_still_reads_come_back_when_it_has_done() -> None:
    """Goal: a block in motion is in no free list. Method: the store hangs in a put while its sequence ends."""
    gate = Gate()
    store = GatedStore(open_store("memory:"))
    store.gate = gate
    house = House(store=store, device=8)
    house.run("a", PROMPT)
    assert house.manager.begin_persist("a")
    gate.settle(house.aux.jobs)
    house.manager.reset(weights_version=1)  # so that its blocks are not found by key
    house.manager.free("a")
    house.manager.assert_consistent()
    assert house.manager.free_device_blocks == 6
    assert house.manager.allocate("b", list(range(50, 82))) is None
    gate.open()
    assert house.manager.drain(60.0)
    assert house.manager.allocate("b", list(range(50, 82))) is not None
    house.close()


def test_a_hit_that_comes_back_from_the_store_is_not_given_out_as_well() -> None:
    """Goal: a block has one place in a sequence. Method: the block that a key is found at is kept by a store job while
    an equal block runs; the job ends just before a prompt hits it, so that it comes back between look and taking.
    """
    store = GatedStore(open_store("memory:?capacity=1MiB"))
    store.gate = gate = Gate()
    house = House(store, device=9)
    for owner in ("first", "second"):
        assert house.manager.allocate(owner, PROMPT) is not None
    for owner in ("first", "second"):
        house.compute(owner, PROMPT)
    assert house.manager.begin_persist("second")
    house.manager.free("second")
    gate.open()
    assert house.aux.wait(60.0)
    house.aux.poll()
    assert house.manager.allocate("third", PROMPT) is not None
    table = house.manager.table("third")
    assert len(set(table)) == len(table)
    house.manager.drain(60.0)
    house.manager.assert_consistent()


@pytest.mark.parametrize("idle", [False, True])
def test_blocks_that_somebody_has_leased_around_the_manager_are_not_given(house, idle) -> None:
    """Goal: None, not an exception, while a lease stands. Method: share before, or after, the sequence has ended."""
    house.run("a", PROMPT)
    house.manager.publish("a", PROMPT)
    blocks = house.manager.table("a")
    if idle:
        house.manager.free("a")
        house.aux.share(blocks[:2], "outside")
    else:
        house.aux.share(blocks, "outside")
        house.manager.free("a")
    assert house.manager.allocate("b", list(range(50, 82))) is None
    house.manager.assert_consistent()
    assert house.manager.free_device_blocks == (6 if idle else 5)
    assert house.manager.allocate("c", PROMPT).cached_tokens == 8, "they are found all the same"
    house.manager.assert_consistent()
    house.manager.free("c")
    house.aux.free("outside")
    assert house.manager.allocate("b", list(range(50, 82))) is not None
    assert house.manager.read("routing", "b", 0, 32).valid.sum() == 0


def test_blocks_that_a_device_still_writes_are_not_given(house) -> None:
    """Goal: an in-place writer's blocks wait for it. Method: abort a request in mid-step and ask for all blocks."""
    house.manager.allocate("dead", PROMPT)
    step = house.aux.begin_step(house.manager.slots("dead", 0, 10), in_place=True)
    house.manager.free("dead")
    assert house.manager.free_device_blocks == 5
    assert house.manager.allocate("b", list(range(32))) is None
    step.wrote("routing")
    assert step.commit() == 10, "into blocks that are nobody's"
    assert house.manager.allocate("b", list(range(32))) is not None
    assert not house.manager.read("routing", "b", 0, 32).valid.any()


def test_a_lease_taken_between_looking_and_forgetting_loses_no_block(house) -> None:
    """Goal: another thread may lease what is just let go. Method: it does so when the manager has just looked."""
    house.manager.allocate("a", PROMPT)
    look = house.aux.available

    def look_and_be_late(blocks, tier):
        found = look(blocks, tier)
        house.aux.available = look
        house.aux.share(blocks[:1], "outside")
        return found

    house.aux.available = look_and_be_late
    house.manager.free("a")
    house.manager.assert_consistent()
    assert house.manager.free_device_blocks == 7
    house.aux.free("outside")
    assert house.manager.free_device_blocks == 8


# ---------------------------------------------------------------- moves that fail


@pytest.mark.parametrize("error", [RuntimeError, TransferProcessError])
@pytest.mark.parametrize("when", ["fail_next", "fail_after"])
def test_a_resume_whose_move_fails_has_evicted_nothing(error, when) -> None:
    """Goal: refusals change nothing. Method: two free blocks, two cached ones, and a mover that fails."""
    house = House(device=6, host=4)
    house.run("a", list(range(100, 114)))
    assert house.manager.preempt("a")
    house.manager.reset(weights_version=0)  # "a"'s own blocks are not cached any more
    house.run("cached", PROMPT[:9])
    house.manager.free("cached")
    house.run("busy", list(range(200, 208)))
    before = house.state()
    setattr(house.kv, when, error)
    if error is TransferProcessError:
        assert house.manager.resume("a") is False
    else:
        with pytest.raises(RuntimeError):
            house.manager.resume("a")
    assert house.state() == before
    assert house.manager.counters.evicted_blocks == 0
    house.manager.assert_consistent()
    assert house.manager.allocate("again", PROMPT[:9]).cached_tokens == 8
    house.manager.free("again")
    assert house.manager.resume("a")
    assert house.has_kv_of("a", list(range(100, 114)))
    house.close()


def test_a_resume_into_cached_blocks_whose_move_fails_loses_one_at_most() -> None:
    """Goal: what a failed move has overwritten is never found. Method: no free block, four cached ones."""
    house = House(device=4, host=4)
    house.run("a", list(range(100, 114)))
    assert house.manager.preempt("a")
    house.manager.reset(weights_version=0)
    house.run("cached", list(range(16)))
    house.manager.free("cached")
    house.kv.fail_after = RuntimeError
    with pytest.raises(RuntimeError):
        house.manager.resume("a")
    house.manager.assert_consistent()
    assert house.manager.counters.evicted_blocks == 1
    assert house.run("again", list(range(14))) == 12, "the oldest was the tail"
    assert house.has_kv_of("again", list(range(14)))
    house.manager.free("again")
    assert house.manager.resume("a")
    assert house.has_kv_of("a", list(range(100, 114)))
    house.close()


def test_what_has_come_back_is_found_under_its_own_keys(house) -> None:
    """Goal: a resumed block has the key of its own content. Method: swap out and in, then ask for prefixes of it."""
    tokens = list(range(14))
    house.run("a", tokens)
    assert house.manager.preempt("a")
    house.run("b", list(range(100, 132)))  # all eight blocks: nothing of "a" is left on the device
    house.manager.free("b")
    assert house.manager.resume("a")
    assert house.manager.allocate("c", tokens[:9]).cached_tokens == 8
    assert house.manager.table("c")[:2] == house.manager.table("a")[:2]
    assert house.has_kv_of("c", tokens[:8])
    rows = house.manager.read("routing", "c", 0, 8)
    assert np.array_equal(rows.values, canary_rows(SPEC, [("x", p) for p in range(8)]))
    assert house.manager.allocate("d", tokens[4:]).cached_tokens == 0


# ---------------------------------------------------------------- resets


def test_a_sequence_from_before_a_reset_there_and_back_is_not_found(house) -> None:
    """Goal: KV of other weights under no key of these. Method: reset A to B to A in mid-sequence, then publish."""
    house.manager.allocate("a", PROMPT)
    house.manager.reset(weights_version=1)
    house.manager.reset(weights_version=0)
    house.compute("a", PROMPT)
    assert house.manager.append("a", 12)
    seq = [house.manager.sequence("a")]
    for token in (10, 11):
        house.manager.publish_batch(seq, [token])
    assert house.manager.persist("a") == 0
    house.manager.fork("a", "child")
    house.manager.free("a")
    assert house.manager.allocate("b", [*PROMPT, 10, 11]).cached_tokens == 0


@pytest.mark.parametrize("policy", ["gate", "mask"])
def test_a_reset_around_the_manager_is_noticed(policy) -> None:
    """Goal: what it finds is what aux still has. Method: reset aux itself, there and back; one sequence is swapped."""
    house = House(device=8, policy=policy)
    house.run("a", PROMPT)
    house.manager.free("a")
    house.run("b", PROMPT[:8])
    assert house.manager.preempt("b")
    house.aux.reset(weights_version=1)
    house.aux.reset(weights_version=0)
    assert house.manager.resume("b")
    assert house.manager.allocate("c", PROMPT).cached_tokens == 0
    house.manager.assert_consistent()
    house.close()

"""The block manager by example: what each bug in an engine's manager looked like, and wrong calls."""

from __future__ import annotations

import numpy as np
import pytest
from cache_manager.lifecycle import State
from canary import canary_rows
from gate import Gate, GatedStore
from house import PROMPT, SPEC, House

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockBusyError, BlockStateError, ConfigError, InvalidInputError
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.storage import open_store


@pytest.fixture
def house():
    made = House()
    yield made
    made.close()


def test_a_prefix_is_shared_and_outlives_its_owner(house) -> None:
    assert house.run("a", PROMPT) == 0
    house.manager.free("a")
    assert house.run("b", PROMPT) == 8
    rows = house.manager.read("routing", "b", 0, 8)
    assert rows.valid.all()
    assert np.array_equal(rows.values, canary_rows(SPEC, [("x", p) for p in range(8)]))


def test_the_rows_of_what_cannot_be_found_are_forgotten(house) -> None:
    house.run("a", PROMPT)
    house.manager.preempt("a")
    house.manager.resume("a")
    tail = house.manager.table("a")[2]
    house.manager.free("a")
    assert house.aux.blocks_in(State.CACHED) == 2, "the two that are full"
    assert house.aux.blocks_in(State.CACHED, "host") == 0
    assert not house.aux.read("routing", [tail]).valid.any()


def test_at_least_one_token_is_left_to_compute(house) -> None:
    house.run("a", PROMPT[:8])
    assert house.manager.allocate("b", PROMPT[:8]).cached_tokens == 4


def test_what_is_published_is_found_by_its_own_tokens(house) -> None:
    """Goal: keys that were made at admission are those of no other tokens. Method: the first block, then the second,
    comes out other than it was asked for; the prompt as asked, and what was really computed, are asked for next."""
    for n, other in enumerate(([7, *PROMPT[1:]], [*PROMPT[:5], 7, *PROMPT[6:]])):
        owner, base = f"a{n}", 8 * n
        asked = [base + 100 + t for t in PROMPT]
        computed = [base + 100 + t for t in other]
        assert house.manager.allocate(owner, asked) is not None
        with house.aux.step(house.manager.slots(owner, 0, 10)) as step:
            step.write("routing", canary_rows(SPEC, [(owner, p) for p in range(10)]))
        house.manager.publish(owner, computed)
        house.manager.free(owner)
        assert house.manager.allocate("as asked", asked).cached_tokens == 4 * n
        house.manager.free("as asked")
        assert house.manager.allocate("as computed", computed).cached_tokens == 8
        house.manager.free("as computed")


def test_what_a_sequence_held_across_a_reset_is_never_found_again(house) -> None:
    """Goal: KV computed under old weights must not be found under new ones. Method: reset in mid-sequence."""
    assert house.manager.allocate("a", PROMPT) is not None
    house.manager.reset(weights_version=1)
    with house.aux.step(house.manager.slots("a", 0, 10)) as step:
        step.write("routing", canary_rows(SPEC, [("old", p) for p in range(10)]))
    house.manager.publish("a", PROMPT)
    house.manager.fork("a", "child")
    house.manager.free("a")
    house.manager.free("child")
    assert house.run("b", PROMPT) == 0
    assert house.manager.persist("b") == 2
    house.manager.assert_consistent()


def test_a_reset_reaches_the_store(house) -> None:
    house.run("a", PROMPT)
    assert house.manager.persist("a") == 2
    house.manager.reset(weights_version=1)
    assert house.run("b", PROMPT, "new") == 0


def test_what_came_before_a_reset_is_not_given_after_it() -> None:
    """Goal: a pending sequence gets nothing of other weights. Method: the store's part lands, a reset, then poll."""
    gate, store = Gate(), GatedStore(open_store("memory:"))
    store.gate = gate
    first = House(store=store)
    first.run("a", PROMPT)
    assert first.manager.persist("a") == 2
    house = House(store=store, kv=first.kv)
    assert house.manager.begin_allocate("b", PROMPT).pending
    gate.open()
    assert house.aux.wait(60.0)
    assert len(house.aux.poll()) == 1
    house.manager.reset(weights_version=1)
    assert house.manager.poll()["b"].cached_tokens == 0
    assert house.manager.computed("b") == 0
    house.close()
    first.close()


def test_what_the_store_has_after_a_gap_is_not_given() -> None:
    """Goal: a hit is a prefix. Method: no KV, whose mover would cut it; the second of three blocks goes."""
    store, tokens = open_store("memory:?capacity=1MiB"), list(range(13))
    for life in range(2):
        aux = AuxBlocks([SPEC], device_blocks=6, namespace=Namespace("m", 0), store=store)
        manager = BlockManager(aux)
        admission = manager.allocate("a", tokens)
        assert admission.restored_tokens == admission.cached_tokens == (0, 4)[life]
        with aux.step(manager.slots("a", admission.cached_tokens, 13)) as step:
            rows = [("x", p) for p in range(admission.cached_tokens, 13)]
            step.write("routing", canary_rows(SPEC, rows))
        manager.publish("a", tokens)
        read = manager.read("routing", "a", 0, 13)
        assert np.array_equal(read.values, canary_rows(SPEC, [("x", p) for p in range(13)]))
        assert manager.persist("a") == 3
        store.delete(manager.keys("a", tokens)[1:2])
        aux.close()


def test_a_restart_continues_from_the_store(house) -> None:
    house.run("a", PROMPT)
    assert house.manager.persist("a") == 2
    again = House(house.store, house.kv)
    admission = again.manager.allocate("b", PROMPT)
    assert (admission.cached_tokens, admission.restored_tokens) == (8, 8)
    rows = again.manager.read("routing", "b", 0, 8)
    assert rows.valid.all()
    assert np.array_equal(rows.values, canary_rows(SPEC, [("x", p) for p in range(8)]))
    again.manager.free("b")
    assert again.manager.allocate("c", PROMPT).restored_tokens == 0, "now they are on the device"
    again.aux.close()


def test_a_flipped_bit_is_a_miss_and_is_counted(house) -> None:
    """Goal: stored bytes are never served unverified. Method: flip each of some bits in what the store returns."""
    house.run("a", PROMPT)
    key = house.aux.keys.keys(PROMPT)[0]
    for bit in (0, 7, 100, 511):
        block = house.manager.table("a")[0]
        assert house.aux.persist({key: block}, owner="a") == {key: house.aux.origins([block])[0]}
        house.store.flip_next = bit
        house.aux.allocate([5], "thief")
        assert house.aux.restore({key: 5}, owner="thief") == {key: False}
        assert not house.aux.read("routing", [5]).valid.any()
        house.aux.free("thief")
        house.store.flip_next = None
        assert house.aux.stored([key]) == [False], "what is not sound is not offered again"


def test_a_failing_store_never_stops_a_request(house) -> None:
    house.run("a", PROMPT)
    house.store.fail_put = True
    assert house.manager.persist("a") == 0
    house.store.fail_put = False
    assert house.manager.persist("a") == 2
    again = House(house.store, house.kv)
    again.store.fail_get = True
    assert again.run("b", PROMPT, "recomputed") == 0
    again.store.fail_get = False
    assert again.manager.counters.store_failures == 1
    assert house.manager.counters.store_failures == 1
    again.manager.assert_consistent()
    again.aux.close()


def test_a_full_pool_refuses_and_nothing_has_changed(house) -> None:
    house.run("a", PROMPT)
    before = house.manager.table("a"), house.manager.free_device_blocks
    assert house.manager.allocate("b", list(range(100, 120))) is None
    assert not house.manager.append("a", 100)
    assert (house.manager.table("a"), house.manager.free_device_blocks) == before
    house.manager.assert_consistent()


def test_forks_share_until_one_of_them_writes(house) -> None:
    house.run("a", PROMPT)
    house.manager.fork("a", "b")
    assert house.manager.table("a") == house.manager.table("b")
    assert house.manager.append("b", 11)
    assert house.manager.table("a")[:2] == house.manager.table("b")[:2]
    assert house.manager.table("a")[2] != house.manager.table("b")[2]
    assert house.manager.counters.cow_tokens == 2
    assert house.manager.append("a", 11), "the last holder writes in place"
    assert house.manager.counters.cow_blocks == 1


def test_a_preempted_sequence_comes_back_with_its_rows(house) -> None:
    house.run("a", PROMPT)
    assert house.manager.preempt("a")
    assert house.manager.is_swapped("a")
    house.run("b", list(range(50, 70)))
    assert not house.manager.resume("a")
    house.manager.free("b")
    assert house.manager.resume("a")
    rows = house.manager.read("routing", "a", 0, 10)
    assert rows.valid.all()
    assert np.array_equal(rows.values, canary_rows(SPEC, [("x", p) for p in range(10)]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.allocate("a", [1]), BlockStateError, "owner 'a': wanted an owner without a sequence"),
        (lambda m: m.allocate("b", []), InvalidInputError, "tokens: wanted 1 to 24 tokens, .*, got 0"),
        (lambda m: m.allocate("b", [1] * 25), InvalidInputError, "tokens: wanted 1 to 24 tokens, .*, got 25"),
        (
            lambda m: m.allocate("b", [1.5]),
            InvalidInputError,
            "tokens: wanted a flat sequence of integers, got float64",
        ),
        (lambda m: m.allocate("b", ["x"]), InvalidInputError, "tokens: wanted a flat sequence of integers, got <U1"),
        (lambda m: m.allocate("", PROMPT), InvalidInputError, "owner: wanted a non-empty string, got ''"),
        (lambda m: m.allocate(5, PROMPT), InvalidInputError, "owner: wanted a non-empty string, got 5"),
        (lambda m: m.table("b"), BlockStateError, "owner 'b': wanted an owner with a sequence, got one without"),
        (lambda m: m.slots("a", 3, 99), InvalidInputError, "start, stop: wanted 0 <= start <= stop <= 12, got 3, 99"),
        (lambda m: m.publish("a", [1, 2]), InvalidInputError, "tokens: wanted 10 to 12 tokens, got 2"),
        (lambda m: m.fork("a", "a"), BlockStateError, "owner 'a': wanted an owner without a sequence"),
    ],
)
def test_a_wrong_call_names_the_field_and_changes_nothing(house, call, error, message) -> None:
    house.run("a", PROMPT)
    before = house.manager.table("a"), house.manager.free_device_blocks, house.manager.owners
    with pytest.raises(error, match=message):
        call(house.manager)
    assert (house.manager.table("a"), house.manager.free_device_blocks, house.manager.owners) == before
    house.manager.assert_consistent()


def test_a_fork_never_sees_what_its_parent_wrote_later(house) -> None:
    """Goal: a child must not inherit rows of tokens it does not share. Method: the parent gets ahead, then a fork.

    Rows beyond what was published (here: a draft that was taken back) lie in the block that both share.
    """
    house.manager.allocate("a", PROMPT)
    with house.aux.step(house.manager.slots("a", 0, 10)) as step:
        step.write("routing", canary_rows(SPEC, [("x", p) for p in range(10)]))
    house.manager.publish("a", PROMPT[:6])
    house.manager.fork("a", "b")
    assert house.manager.append("b", 8)
    for owner in ("a", "b"):
        rows = house.manager.read("routing", owner, 0, 8)
        assert rows.valid.tolist() == [True] * 6 + [False] * 2
        assert (rows.values[6:] == 0xFF).all()
    house.manager.publish("b", [*PROMPT[:6], 70, 80])
    assert house.manager.read("routing", "b", 0, 8).valid.tolist() == [True] * 6 + [False] * 2
    assert house.manager.persist("b") == 1, "only the block whose rows are its own"


def test_a_block_that_others_use_cannot_be_written(house) -> None:
    """Goal: no write into a shared or findable block. Method: room from before a fork, used without append."""
    house.manager.allocate("a", PROMPT)
    with house.aux.step(house.manager.slots("a", 0, 6)) as step:
        step.write("routing", canary_rows(SPEC, [("x", p) for p in range(6)]))
    house.manager.publish("a", PROMPT[:6])
    house.manager.fork("a", "b")
    with pytest.raises(BlockStateError, match=r"wanted append\(\) before it is written"):
        house.manager.slots("a", 6, 8)
    assert house.manager.append("a", 8)
    with house.aux.step(house.manager.slots("a", 6, 8)) as step:
        step.write("routing", canary_rows(SPEC, [("x", 6), ("x", 7)]))
    house.manager.publish("a", PROMPT[:8])
    house.manager.free("a")
    assert house.manager.append("b", 8)
    house.manager.slots("b", 6, 8)
    assert house.manager.table("b")[1] != house.manager.allocate("c", PROMPT).blocks[1]
    house.manager.assert_consistent()


def test_a_fork_waits_for_a_step_in_flight(house) -> None:
    """Goal: the child must not see rows that arrive after the fork. Method: fork while the parent's step is open."""
    house.manager.allocate("a", PROMPT)
    with house.aux.step(house.manager.slots("a", 0, 6)) as step:
        step.write("routing", canary_rows(SPEC, [("x", p) for p in range(6)]))
    house.manager.publish("a", PROMPT[:6])
    step = house.aux.begin_step(house.manager.slots("a", 6, 7))
    with pytest.raises(BlockBusyError, match="owner 'a': wanted no step in flight to fork it"):
        house.manager.fork("a", "b")
    step.abort()
    house.manager.fork("a", "b")


def test_an_aborted_request_s_step_does_not_hold_up_the_next_owner(house) -> None:
    """Goal: blocks of a request that died in mid-step can be restored into. Method: abort, then a store hit."""
    house.run("a", PROMPT)
    assert house.manager.persist("a") == 2
    again = House(house.store, house.kv, device=3)
    again.manager.allocate("dead", list(range(90, 102)))
    step = again.aux.begin_step(again.manager.slots("dead", 0, 12))
    step.write("routing", canary_rows(SPEC, [("late", p) for p in range(12)]))
    again.manager.free("dead")
    assert again.manager.allocate("b", PROMPT).restored_tokens == 8
    step.commit()
    rows = again.manager.read("routing", "b", 0, 8)
    assert rows.valid.all()
    assert np.array_equal(rows.values, canary_rows(SPEC, [("x", p) for p in range(8)]))
    again.manager.free("b")
    again.aux.assert_consistent()
    again.aux.close()


def test_a_complete_block_takes_the_place_of_one_that_misses_rows(house) -> None:
    """Goal: holes of the first publisher must not disable a prefix. Method: KV without rows first, then with."""
    for owner, rows in (("a", False), ("b", True)):
        house.manager.allocate(owner, PROMPT)
        with house.aux.step(house.manager.slots(owner, 0, 10)) as step:
            if rows:
                step.write("routing", canary_rows(SPEC, [("x", p) for p in range(10)]))
        house.manager.publish(owner, PROMPT)
    house.manager.free("a")
    house.manager.free("b")
    assert house.manager.allocate("c", PROMPT).cached_tokens == 8
    house.manager.assert_consistent()


def test_blocks_that_are_being_stored_by_another_thread_are_not_lost(house) -> None:
    """Goal: a background persist and the scheduler. Method: the store calls the scheduler in the middle of a put."""
    house.run("a", PROMPT)
    blocks = house.manager.table("a")
    key = house.aux.keys.key(None, [99])
    house.store.during_put = lambda: house.manager.free("a")
    assert house.aux.persist({key: blocks[2]}, owner="a") == {key: 0}, "the partial block is not complete"
    assert house.aux.persist({key: blocks[0]}, owner="a") == {key: house.aux.origins(blocks[:1])[0]}
    house.store.during_put = None
    house.manager.assert_consistent()
    assert house.manager.free_device_blocks == 6
    assert house.manager.allocate("b", list(range(50, 74))) is not None


def test_no_room_for_a_further_sequence_is_no_room() -> None:
    house = House(device=8, sequences_max=2)
    house.run("a", PROMPT)
    house.manager.allocate("b", [1])
    before = house.state()
    assert house.manager.allocate("c", [2]) is None
    for call in (house.manager.fork, house.manager.hold):
        with pytest.raises(BlockBusyError, match="sequences: wanted fewer than 2, got 2"):
            call("a", "c")
    assert not house.manager.append("a", 29)
    assert not house.manager.append("a", 33), "more than there are"
    assert house.state() == before
    house.manager.free("b")
    with pytest.raises(InvalidInputError, match=r"tokens: wanted 1 to 32 tokens, .*, got 33"):
        house.manager.allocate("c", list(range(33)))
    house.close()


def test_a_limit_of_nothing_is_named(house) -> None:
    with pytest.raises(InvalidInputError, match="sequences_max: wanted an integer in"):
        BlockManager(house.aux, sequences_max=0)


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="policy: wanted 'gate' or 'mask', got 'maybe'"):
        House(policy="maybe")


def test_a_holder_reads_and_writes_nothing(house) -> None:
    house.run("a", PROMPT)
    house.manager.hold("a", "holder", 1)
    assert house.manager.table("holder") == house.manager.table("a")[1:]
    for call in (
        lambda: house.manager.append("holder", 4),
        lambda: house.manager.slots("holder", 0, 1),
        lambda: house.manager.publish("holder", [1]),
        lambda: house.manager.fork("holder", "child"),
        lambda: house.manager.preempt("holder"),
        lambda: house.manager.persist("holder"),
        lambda: house.manager.append_batch([house.manager.sequence("holder")]),
    ):
        with pytest.raises(BlockStateError, match="got a holder"):
            call()
    tail = house.manager.table("a")[2]
    assert house.manager.append("a", 11)
    assert house.manager.slots("a", 10, 11)[0] == tail * 4 + 2, "it writes in place all the same"
    house.manager.free("a")
    assert house.manager.free_device_blocks == 4
    house.manager.free("holder")
    assert house.manager.free_device_blocks == 6

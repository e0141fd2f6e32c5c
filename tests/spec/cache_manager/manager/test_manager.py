"""The block manager by example: promises that are clearer here than in a state machine, and wrong calls."""

from __future__ import annotations

import numpy as np
import pytest
from canary import canary_rows
from house import PROMPT, SPEC, House

from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError
from cache_manager.manager import BlockManager


@pytest.fixture
def house():
    made = House(device=8)
    yield made
    made.close()


def forks(house: House, n: int) -> list[str]:
    """A sequence with ten tokens, and ``n - 1`` that share all of it."""
    house.run("s0", PROMPT)
    for i in range(1, n):
        house.manager.fork("s0", f"s{i}")
    return [f"s{i}" for i in range(n)]


# ---------------------------------------------------------------- what is found


def test_what_is_published_is_found_by_its_own_tokens(house) -> None:
    """Goal: keys made at admission stand for no other tokens. Method: the first block, then the second, is computed
    with other tokens than were requested; the requested prompt and the computed one are requested next."""
    for n, other in enumerate(([7, *PROMPT[1:]], [*PROMPT[:5], 7, *PROMPT[6:]])):
        asked, computed = ([8 * n + 100 + t for t in tokens] for tokens in (PROMPT, other))
        assert house.manager.allocate("a", asked) is not None
        house.compute("a", computed)
        house.manager.free("a")
        for tokens, cached in ((asked, 4 * n), (computed, 8)):
            assert house.manager.allocate("again", tokens).cached_tokens == cached
            house.manager.free("again")


def test_a_complete_block_takes_the_place_of_one_that_misses_rows(house) -> None:
    """Goal: holes of the first publisher must not disable a prefix. Method: KV without rows first, then with."""
    for owner, rows in (("a", False), ("b", True)):
        house.manager.allocate(owner, PROMPT)
        house.compute(owner, PROMPT, rows=rows)
    assert house.manager.allocate("c", PROMPT).cached_tokens == 8
    assert house.has_rows_of("c", "x", 8)
    assert house.manager.counters.hits_cut_for_missing_rows == 1


# ---------------------------------------------------------------- who writes what


def test_a_block_that_is_given_out_begins_a_new_life(house) -> None:
    """Goal: no sequence reads rows of a block's earlier owner, by any call. Method: every block, free and cached
    ones."""
    house.run("a", PROMPT)
    before = house.aux.generations(range(8))
    house.manager.free("a")
    assert house.manager.allocate("b", list(range(50, 82))) is not None
    assert (house.aux.generations(range(8)) == before + 1).all()
    assert not house.aux.read("routing", range(8)).valid.any()


def test_forks_share_until_one_of_them_writes(house) -> None:
    forks(house, 2)
    a, b = (house.manager.table(owner) for owner in ("s0", "s1"))
    assert a == b
    assert house.manager.append("s1", 11)
    assert house.manager.table("s1")[:2] == a[:2]
    assert house.manager.table("s1")[2] != a[2]
    assert house.manager.append("s0", 11), "the last one writes in place"
    assert house.manager.table("s0") == a
    assert (house.manager.counters.cow_blocks, house.manager.counters.cow_tokens) == (1, 2)


def test_a_fork_never_sees_what_its_parent_wrote_later(house) -> None:
    """Goal: a child must not inherit rows of tokens it does not share. Method: the parent gets ahead, then a fork.

    Rows beyond what was published (here: a draft that was taken back) lie in the block that both share.
    """
    house.manager.allocate("a", PROMPT)
    house.aux.write_step(house.manager.slots("a", 0, 10), {"routing": canary_rows(SPEC, [("x", p) for p in range(10)])})
    house.manager.publish("a", PROMPT[:6])
    house.manager.fork("a", "b")
    assert house.manager.append("b", 8)
    for owner in ("a", "b"):
        rows = house.manager.read("routing", owner, 0, 8)
        assert rows.valid.tolist() == [True] * 6 + [False] * 2
        assert (rows.values[6:] == 0xFF).all()
    house.manager.publish("b", [*PROMPT[:6], 70, 80])
    assert house.manager.read("routing", "b", 0, 8).valid.tolist() == [True] * 6 + [False] * 2
    assert house.persist("b") == 1, "only the block whose rows are its own"


def test_a_block_that_others_use_cannot_be_written(house) -> None:
    """Goal: no write into a shared or findable block. Method: a prefix hit, what a sequence itself has published, and
    room from before a fork, used without append."""
    house.run("a", PROMPT)
    assert house.manager.allocate("b", PROMPT).cached_tokens == 8
    for owner, start, stop in (("b", 0, 10), ("b", 7, 10), ("b", 0, 1), ("a", 3, 10), ("a", 7, 8)):
        with pytest.raises(BlockStateError, match=r"wanted append\(\) before it is written"):
            house.manager.slots(owner, start, stop)
    assert house.manager.slots("b", 8, 10).size == 2
    assert house.manager.slots("b", 8, 8).size == house.manager.slots("b", 0, 0).size == 0
    house.manager.fork("a", "child")
    with pytest.raises(BlockStateError, match=r"wanted append\(\) before it is written"):
        house.manager.slots("a", 10, 12)
    assert house.manager.append("a", 12)
    assert house.manager.slots("a", 10, 12).size == 2


def test_held_blocks_are_not_given_out_and_come_back_once(house) -> None:
    """Goal: a block that is written from outside gets no other owner. Method: hold a sequence's last blocks, found by
    key or not; they are shared and given up again, then everything is forgotten; let them go. A holder who asks twice
    would lose track of its first blocks."""
    house.run("a", PROMPT)
    house.manager.hold("a", "holder", 1)
    with pytest.raises(InvalidInputError, match="holder"):
        house.manager.hold("a", "holder")
    free = house.manager.free_device_blocks
    house.manager.free("a")
    assert house.manager.free_device_blocks == free + 1
    assert house.run("b", PROMPT) == 8, "they are found all the same"
    house.manager.free("b")
    house.manager.reset(weights_version=99)
    house.manager.assert_consistent()
    assert house.manager.free_device_blocks == free + 1
    house.manager.release("holder")
    assert house.manager.free_device_blocks == house.aux.device_blocks


# ---------------------------------------------------------------- wrong calls


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.allocate("a", [1]), BlockStateError, "owner 'a': wanted an owner without a sequence"),
        (lambda m: m.allocate("b", []), InvalidInputError, "tokens: wanted 1 to 32 tokens, .*, got 0"),
        (lambda m: m.allocate("b", [1] * 33), InvalidInputError, "tokens: wanted 1 to 32 tokens, .*, got 33"),
        (lambda m: m.allocate("b", [1.5]), InvalidInputError, "tokens: wanted a flat sequence of .*, got float64"),
        (lambda m: m.allocate("b", ["x"]), InvalidInputError, "tokens: wanted a flat sequence of integers, got <U1"),
        (lambda m: m.allocate("", PROMPT), InvalidInputError, "owner: wanted a non-empty string, got ''"),
        (lambda m: m.allocate(5, PROMPT), InvalidInputError, "owner: wanted a non-empty string, got 5"),
        (lambda m: m.allocate("b", PROMPT, salt="lora"), InvalidInputError, "salt: wanted bytes, got 'lora'"),
        (lambda m: m.table("b"), BlockStateError, "owner 'b': wanted an owner with a sequence, got one without"),
        (lambda m: m.slots("a", 3, 99), InvalidInputError, "start, stop: wanted 0 <= start <= stop <= 12, got 3, 99"),
        (lambda m: m.slots("a", -1, 9), InvalidInputError, "start, stop: wanted 0 <= start <= stop <= 12, got -1, 9"),
        (lambda m: m.slots("a", 0.0, 2), InvalidInputError, "start, stop: wanted 0 <= .*, got 0.0, 2"),
        (lambda m: m.append("a", 11.0), InvalidInputError, "total_tokens: wanted an integer of 0 or more, got 11.0"),
        (lambda m: m.append("a", None), InvalidInputError, "total_tokens: wanted an integer of 0 or more, got None"),
        (lambda m: m.append("a", -1), InvalidInputError, "total_tokens: wanted an integer of 0 or more, got -1"),
        (lambda m: m.free(["a"]), InvalidInputError, r"owner: wanted a string, got \['a'\]"),
        (lambda m: m.fork(["a"], "b"), InvalidInputError, r"owner: wanted a string, got \['a'\]"),
        (lambda m: m.preempt(["a"]), InvalidInputError, r"owner: wanted a string, got \['a'\]"),
        (lambda m: m.begin_persist(None), InvalidInputError, "owner: wanted a string, got None"),
        (lambda m: m.publish("a", 11), InvalidInputError, "tokens: wanted a flat sequence of integers, got 11"),
        (lambda m: m.publish("a", [1, 2]), InvalidInputError, "tokens: wanted 10 to 12 tokens, got 2"),
        (lambda m: m.fork("a", "a"), BlockStateError, "owner 'a': wanted an owner without a sequence"),
        (lambda m: m.append_batch([0, 0]), InvalidInputError, "seqs: wanted each sequence once, got 1 of them again"),
        (lambda m: m.append_batch([0, -1]), BlockStateError, "seqs: wanted numbers of sequences that .*, got -1"),
        (lambda m: m.append_batch([0, 99]), BlockStateError, "seqs: wanted numbers of sequences that .*, got 99"),
        (lambda m: m.append_batch([0.5]), InvalidInputError, "seqs: wanted a flat sequence of numbers, got float64"),
        (lambda m: m.append_batch(np.array([[0]])), InvalidInputError, "seqs: .*, got int64 of shape"),
        (lambda m: m.publish_batch([0], [1, 2]), InvalidInputError, "tokens: wanted 1, one integer .*, got 2"),
        (lambda m: m.publish_batch([0], [1.5]), InvalidInputError, "tokens: wanted one integer .*, got float64"),
        (lambda m: m.publish_batch([0], [1]), BlockStateError, r"owner 'a': wanted append_batch\(\) before"),
    ],
)
def test_a_wrong_call_names_the_field_and_changes_nothing(house, call, error, message) -> None:
    house.run("a", PROMPT)
    before = house.state()
    with pytest.raises(error, match=message):
        call(house.manager)
    assert house.state() == before
    house.manager.assert_consistent()


def test_no_room_for_a_further_sequence_is_no_room() -> None:
    house = House(device=8, sequences_max=2)
    house.run("a", PROMPT)
    assert not house.manager.append("a", 10**30)
    house.manager.allocate("b", [1])
    before = house.state()
    assert house.manager.allocate("c", [2]) is None
    with pytest.raises(BlockBusyError, match="sequences: wanted fewer than 2, got 2"):
        house.manager.fork("a", "c")
    assert not house.manager.append("a", 29)
    assert not house.manager.append("a", 33), "more than there are"
    assert house.state() == before
    with pytest.raises(InvalidInputError, match="sequences_max: wanted an integer in"):
        BlockManager(house.aux, sequences_max=0)
    house.close()

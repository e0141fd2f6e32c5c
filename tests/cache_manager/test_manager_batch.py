"""The batch calls against the single calls: two managers get the same requests, one of them step by step in batches.

Which block serves a token may differ; what a call answers, how many blocks there are left, and the content of every
token's KV and rows may not.
"""

from __future__ import annotations

import numpy as np
import pytest
from budget import examples
from canary import canary_rows
from house import PROMPT, SPEC, House
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv import prefix_digest

from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError, TransferProcessError

TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=22)


class TwinMachine(RuleBasedStateMachine):
    device, host = 14, 8

    def __init__(self) -> None:
        super().__init__()
        self.houses = [House(device=self.device, host=self.host, policy="mask") for _ in range(2)]
        self.tokens: dict[str, list[int]] = {}  # what each sequence has computed
        self.swapped: set[str] = set()
        self.next_owner = 0
        self.version = 0

    def teardown(self) -> None:
        for house in self.houses:
            house.close()

    def new_owner(self) -> str:
        self.next_owner += 1
        return f"req-{self.next_owner}"

    def both(self, call):
        """The same of both managers; they answer the same."""
        first, second = (call(house.manager) for house in self.houses)
        assert first == second
        return first

    def write(self, house: House, slots: list[int], prefixes: list[list[int]]) -> None:
        """One forward pass; each token's content is that of all tokens up to it."""
        house.kv.write(slots, [prefix_digest([self.version, *prefix]) for prefix in prefixes])
        with house.aux.step(np.array(slots, np.int64)) as step:
            step.write("routing", canary_rows(SPEC, [(self.version, *prefix) for prefix in prefixes]))

    @precondition(lambda self: len(self.tokens) < 9)
    @rule(tokens=TOKENS, salt=st.sampled_from((b"", b"tenant")))
    def admit(self, tokens, salt) -> None:
        owner = self.new_owner()
        self.version += 1  # of the content, so that a stale block shows itself
        cached = self.both(lambda m: None if (a := m.allocate(owner, tokens, salt=salt)) is None else a.cached_tokens)
        if cached is None:
            return
        table = [house.manager.table(owner) for house in self.houses]
        for house, blocks in zip(self.houses, table, strict=True):
            slots = house.manager.slots(owner, cached, len(tokens)).tolist()
            assert slots == [blocks[p // 4] * 4 + p % 4 for p in range(cached, len(tokens))]
            self.write(house, slots, [tokens[: p + 1] for p in range(cached, len(tokens))])
            house.manager.publish(owner, tokens)
        self.tokens[owner] = tokens

    @rule(data=st.data())
    def decode(self, data) -> None:
        ready = sorted(self.tokens.keys() - self.swapped)
        owners = data.draw(st.lists(st.sampled_from(ready), unique=True) if ready else st.just([]))
        tokens = data.draw(st.lists(st.integers(1, 2), min_size=len(owners), max_size=len(owners)))
        batch, single = self.houses
        seqs = np.array([batch.manager.sequence(owner) for owner in owners], np.int64)
        self.version += 1
        room = batch.manager.append_batch(seqs)
        one_by_one = [single.manager.append(o, len(self.tokens[o]) + 1) for o in owners]
        assert room.tolist() == one_by_one
        running = [(owner, token) for owner, token, fits in zip(owners, tokens, one_by_one, strict=True) if fits]
        owners, tokens = [owner for owner, _ in running], [token for _, token in running]
        slots = batch.manager.slots_batch(seqs[room])
        assert slots.dtype == np.int64
        again = [batch.manager.slots(o, len(self.tokens[o]), len(self.tokens[o]) + 1)[0] for o in owners]
        assert slots.tolist() == again
        prefixes = [[*self.tokens[owner], token] for owner, token in running]
        self.write(batch, slots.tolist(), prefixes)
        others = [single.manager.slots(o, len(self.tokens[o]), len(self.tokens[o]) + 1)[0] for o in owners]
        self.write(single, others, prefixes)
        batch.manager.publish_batch(seqs[room], tokens)
        for owner, token in running:
            self.tokens[owner] = [*self.tokens[owner], token]
            single.manager.publish(owner, self.tokens[owner])

    @precondition(lambda self: self.tokens.keys() - self.swapped and len(self.tokens) < 9)
    @rule(data=st.data(), n=st.integers(1, 3))
    def fork(self, data, n) -> None:
        parent = data.draw(st.sampled_from(sorted(self.tokens.keys() - self.swapped)))
        for _ in range(n):
            child = self.new_owner()
            self.both(lambda m, child=child: m.fork(parent, child))
            self.tokens[child] = self.tokens[parent]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tokens)))
        self.both(lambda m: m.free(owner))
        del self.tokens[owner]
        self.swapped.discard(owner)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def swap(self, data) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tokens)))
        if owner in self.swapped:
            if self.both(lambda m: m.resume(owner)):
                self.swapped.remove(owner)
        elif self.both(lambda m: m.preempt(owner)):
            self.swapped.add(owner)

    @invariant()
    def they_have_the_same_room(self) -> None:
        self.both(lambda m: (m.free_device_blocks, m.free_host_blocks, m.counters, m.owners))
        self.both(lambda m: m.assert_consistent())

    @invariant()
    def they_have_the_same_content(self) -> None:
        for owner, tokens in self.tokens.items():
            self.both(lambda m, owner=owner: (m.computed(owner), len(m.table(owner)), m.is_swapped(owner)))
            kv, rows = [], []
            for house in self.houses:
                tier, table = ("host" if owner in self.swapped else "device"), house.manager.table(owner)
                kv.append([house.kv.digest(tier, table[p // 4], p % 4) for p in range(len(tokens))])
                read = house.manager.read("routing", owner, 0, len(tokens))
                rows.append((read.values.tolist(), read.valid.tolist()))
            assert kv[0] == kv[1]
            assert rows[0] == rows[1]


TestTwins = TwinMachine.TestCase
TestTwins.settings = examples(50)


# ---------------------------------------------------------------- by example


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


def test_of_those_that_share_a_block_the_last_one_keeps_it(house) -> None:
    owners = forks(house, 5)
    tail = house.manager.table("s0")[2]
    assert house.decode(owners, [10, 11, 12, 13, 14]) == [True] * 5
    tails = [house.manager.table(owner)[2] for owner in owners]
    assert tails.index(tail) == 4
    assert len(set(tails)) == 5
    assert house.manager.counters.cow_blocks == 4
    assert house.manager.counters.cow_tokens == 8
    for owner in owners:
        assert house.manager.read("routing", owner, 0, 11).valid.all()


def test_who_was_to_keep_a_block_cannot_where_another_could_not_leave_it() -> None:
    """Goal: nobody writes into a block that is still shared. Method: four forks, room for two copies."""
    house = House(device=5)
    owners = forks(house, 4)
    assert house.decode(owners, [10, 11, 12, 13]) == [True, True, False, False]
    assert house.manager.table("s2") == house.manager.table("s3")
    assert [house.manager.computed(owner) for owner in owners] == [11, 11, 10, 10]
    house.manager.free("s0")
    assert house.decode(owners[1:], [14, 12, 13]) == [True, True, True]
    house.close()


@pytest.mark.parametrize("error", [RuntimeError, TransferProcessError])
def test_a_copy_that_fails_leaves_its_sequences_as_they_were(house, error) -> None:
    """Goal: False, or the exception, and nothing else. Method: forks, a sequence that needs a block, and a mover."""
    owners = forks(house, 3)
    house.run("plain", list(range(50, 54)))
    before = house.state()[0]
    free = house.manager.free_device_blocks
    house.kv.fail_next = error
    if error is RuntimeError:
        with pytest.raises(RuntimeError):
            house.decode([*owners, "plain"], [10, 11, 12, 54])
        assert (house.state()[0], house.manager.free_device_blocks) == (before, free)
    else:
        assert house.decode([*owners, "plain"], [10, 11, 12, 54]) == [False, False, False, True]
        assert house.manager.free_device_blocks == free - 1
        assert {o: s for o, s in house.state()[0].items() if o != "plain"} == {o: before[o] for o in owners}
        assert house.manager.counters.moves_failed == 1
    house.manager.assert_consistent()
    assert house.decode(owners, [10, 11, 12]) == [True] * 3


def test_room_goes_to_the_first_that_ask(house) -> None:
    for i in range(7):
        house.run(f"s{i}", [i] * 4)
    assert house.decode([f"s{i}" for i in (3, 1, 6, 5)], [9, 9, 9, 9]) == [True, False, False, False]
    assert house.manager.computed("s3") == 5
    assert house.manager.table("s1") == house.manager.table("s1")[:1]


def test_a_block_that_a_batch_fills_is_found(house) -> None:
    """Goal: generated tokens are a prefix like any other. Method: fill a block token by token, with and without few."""
    for n in (2, 5):
        owners = [f"{n}-{i}" for i in range(n)]
        for owner in owners:
            house.run(owner, [n, len(owner)])
        for step in range(2, 4):
            assert all(house.decode(owners, [step] * n))
        assert house.manager.allocate("again", [n, len(owners[0]), 2, 3, 9]).cached_tokens == 4
        for owner in [*owners, "again"]:
            house.manager.free(owner)


@pytest.mark.parametrize("n", [1, 5])
def test_a_block_that_a_fork_fills_is_found_under_all_of_its_tokens(n) -> None:
    """Goal: tokens from before the fork are in the key. Method: fork in mid-block, fill it, ask."""
    house = House(device=14)
    owners = forks(house, n + 1)[1:]
    for token in (10, 11):
        assert all(house.decode(owners, [token] * n))
    house.manager.free("s0")
    for other in ([0, 0], [9, 8]):
        assert house.manager.allocate("other", [*PROMPT[:8], *other, 10, 11, 12]).cached_tokens == 8
        house.manager.free("other")
    assert house.manager.allocate("same", [*PROMPT, 10, 11, 12]).cached_tokens == 12
    house.close()


def test_many_long_sequences_outgrow_the_first_arrays() -> None:
    """Goal: rows and columns are added as they are needed. Method: more of both than there are to begin with."""
    house = House(device=500)
    owners = [f"s{i}" for i in range(20)]
    for i, owner in enumerate(owners):
        house.run(owner, [i, 1, 2])
    for step in range(3, 90):
        assert all(house.decode(owners, [step] * 20))
    for i, owner in enumerate(owners):
        tokens = [i, 1, 2, *range(3, 90)]
        assert house.manager.computed(owner) == len(tokens)
        assert len(house.manager.table(owner)) == 23
        rows = house.manager.read("routing", owner, 0, 90)
        assert rows.valid.all()
        assert np.array_equal(rows.values[3:], canary_rows(SPEC, [("decode", t) for t in range(3, 90)]))
        assert house.manager.allocate("again", [*tokens, 0]).cached_tokens == 88
        house.manager.free("again")
    house.close()


def test_an_ended_sequence_s_number_starts_anew(house) -> None:
    """Goal: nothing of an earlier sequence is left in its row. Method: end one in the middle of a block, begin one."""
    house.run("a", PROMPT, salt=b"lora")
    seq = house.manager.sequence("a")
    house.manager.free("a")
    house.manager.allocate("b", [7, 7, 7, 7, 7])
    assert house.manager.sequence("b") == seq
    assert house.manager.computed("b") == 0
    for token in (7, 7, 7, 7):
        assert house.decode(["b"], [token]) == [True]
    assert house.manager.allocate("c", [7] * 5).cached_tokens == 4


@pytest.mark.parametrize("call", ["append_batch", "slots_batch", "publish_batch"])
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda a, _: [a, a], InvalidInputError, "seqs: wanted each sequence once, got 1 of them again"),
        (lambda a, _: [a, -1], InvalidInputError, r"seqs: wanted ids that sequence\(\) answered, got -1"),
        (lambda a, _: [a, 99], InvalidInputError, r"seqs: wanted ids that sequence\(\) answered, got 99"),
        (lambda a, _: [0.5 + a], InvalidInputError, "seqs: wanted a flat sequence of sequence ids, got float64"),
        (lambda a, ids: [a, ids["swapped"]], BlockStateError, "owner 'swapped': .*, got one that is swapped out"),
        (lambda a, ids: [a, ids["pending"]], BlockBusyError, "owner 'pending': .*, got one whose store is asked"),
        (lambda a, ids: [a, ids["holder"]], BlockStateError, "owner 'holder': .*, got a holder"),
        (lambda a, ids: [a, ids["ended"]], BlockStateError, "sequence [0-9]+: wanted a sequence, got one that has"),
    ],
)
def test_a_wrong_batch_is_named_and_nothing_has_changed(house, call, make, error, message) -> None:
    """Goal: all or none. Method: a good sequence and a bad one; the same rows were good in the call before."""
    ids = {}
    for owner in ("a", "swapped", "ended"):
        house.run(owner, [len(owner), 1])
        ids[owner] = house.manager.sequence(owner)
    house.run("stored", PROMPT[:5])
    assert house.manager.persist("stored") == 1
    house.manager.hold("a", "holder")
    ids["holder"] = house.manager.sequence("holder")
    assert house.manager.append_batch(np.array([ids["a"], ids["swapped"], ids["ended"]])).all()
    house.manager.preempt("swapped")
    house.manager.free("ended")
    ids["pending"] = pending_sequence(house) if "pending" in message else -1
    before = house.state()
    seqs = make(ids["a"], ids)
    arguments = (seqs, [1] * len(seqs)) if call == "publish_batch" else (seqs,)
    with pytest.raises(error, match=message):
        getattr(house.manager, call)(*arguments)
    assert house.state() == before


def pending_sequence(house: House) -> int:
    """A sequence whose store is being asked."""
    house.manager.free("stored")
    house.manager.reset(weights_version=0)  # the store keeps what this version made, the device nothing
    assert house.manager.begin_allocate("pending", PROMPT[:5]).pending
    return house.manager.sequence("pending")


def test_ids_are_a_flat_array_of_integers_also_the_second_time(house) -> None:
    house.run("a", PROMPT)
    house.run("b", [1, 2])
    ids = np.array([house.manager.sequence("a"), house.manager.sequence("b")])
    for same in (ids, ids.tolist(), ids.astype(np.int32), ids):
        assert house.manager.append_batch(same).tolist() == [True, True]
    with pytest.raises(InvalidInputError, match=r"seqs: wanted a flat sequence of sequence ids, got int64 of shape"):
        house.manager.append_batch(ids[None])
    ids[1] = ids[0]
    with pytest.raises(InvalidInputError, match="each sequence once"):
        house.manager.append_batch(ids)


@pytest.mark.parametrize("change", ["preempt", "free"])
@pytest.mark.parametrize("n", [2, 5])
def test_the_same_ids_are_judged_anew_when_a_sequence_has_changed(house, change, n) -> None:
    """Goal: an answer from before is not kept too long. Method: the very same array before and after a change."""
    for i in range(n):
        house.run(f"s{i}", [i, 1])
    ids = np.array([house.manager.sequence(f"s{i}") for i in range(n)])
    assert house.manager.append_batch(ids).all()
    getattr(house.manager, change)("s1")
    for call in (house.manager.append_batch, house.manager.slots_batch):
        with pytest.raises(BlockStateError, match="got one that"):
            call(ids)
    with pytest.raises(BlockStateError, match="got one that"):
        house.manager.publish_batch(ids, [7] * n)
    if change == "preempt":
        assert house.manager.resume("s1")
    else:
        assert house.manager.allocate("new", [9, 9]) is not None
        assert house.manager.sequence("new") == ids[1]
    assert house.manager.append_batch(ids).all()


def test_the_tokens_of_a_batch_are_one_each_and_fit(house) -> None:
    house.run("a", PROMPT)
    house.run("b", [1, 2, 3, 4])
    a, b = (house.manager.sequence(owner) for owner in ("a", "b"))
    before = house.state()
    with pytest.raises(InvalidInputError, match="tokens: wanted 2, one integer for each sequence, got 1"):
        house.manager.publish_batch([a, b], [1])
    with pytest.raises(InvalidInputError, match="tokens: wanted one integer for each sequence, got float64"):
        house.manager.publish_batch([a], [1.5])
    for seqs in ([a, b], [a, b, *(three_more(house))]):
        with pytest.raises(BlockStateError, match=r"owner 'b': wanted append\(\) before it is written, got no room"):
            house.manager.publish_batch(seqs, [1] * len(seqs))
        with pytest.raises(BlockStateError, match=r"owner 'b': wanted append\(\) before it is written, got no room"):
            house.manager.slots_batch(seqs)
    assert {o: s for o, s in house.state()[0].items() if o in "ab"} == before[0]


def three_more(house: House) -> list[int]:
    for i in range(3):
        house.run(f"more-{i}", [i + 50])
    return [house.manager.sequence(f"more-{i}") for i in range(3)]


def test_slots_of_a_batch_that_others_use_are_refused(house) -> None:
    owners = forks(house, 5)
    for n in (2, 5):
        seqs = [house.manager.sequence(owner) for owner in owners[:n]]
        with pytest.raises(BlockStateError, match=r"wanted append\(\) before it is written, got one that others use"):
            house.manager.slots_batch(seqs)


def test_nothing_to_decode_is_nothing(house) -> None:
    for empty in ([], np.empty(0, np.int64)):
        assert house.manager.append_batch(empty).shape == (0,)
        assert house.manager.slots_batch(empty).shape == (0,)
        house.manager.publish_batch(empty, [])

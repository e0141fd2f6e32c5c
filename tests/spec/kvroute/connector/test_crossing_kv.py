"""Blocks of rows and KV between two engines without another KV transfer, and between unequal numbers of ranks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from kv import NBYTES, SlotKV, prefix_digest
from waiting import GIVE_UP_S, until

from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.spec import RecordLayout
from kvroute.connector.crossing import Came, Crossing, link_of
from kvroute.routing import routing_spec
from transfer import Outcome, Release
from transfer.errors import NodeClosedError, NodeFullError

SIZE, EXPERTS = 4, 16


def row_of(tokens: Sequence[int]) -> list[list[int]]:
    return np.random.default_rng(list(prefix_digest(tokens))).permutation(EXPERTS)[:4].reshape(2, 2).tolist()


class Half:
    """An engine's blocks, with KV or without, and its end of the crossing."""

    def __init__(self, *, kv: bool = True, lent_nbytes_max: int = 1 << 30, **namespace: Any) -> None:
        spec = routing_spec(EXPERTS, 2, range(2), num_layers=2, block_tokens=SIZE)
        self.kv = SlotKV(12, 0, SIZE) if kv else None
        self.rows = AuxBlocks([spec], blocks=12, namespace=Namespace("m", 1, **namespace), kv=self.kv, strict=True)
        link = link_of("tcp://127.0.0.1:*")
        self.crossing = Crossing(self.rows, link, kv=self.kv, lent_nbytes_max=lent_nbytes_max)

    @property
    def block_nbytes(self) -> int:
        """Of a block's copies."""
        return self.rows.layout.nbytes + RecordLayout((self.kv.spec,)).nbytes

    def compute(self, tokens: Sequence[int], blocks: Sequence[int], start: int, stop: int) -> None:
        slots = [blocks[i // SIZE] * SIZE + i % SIZE for i in range(start, stop)]
        prefixes = [tokens[: i + 1] for i in range(start, stop)]
        if self.kv is not None:
            self.kv.write(slots, [prefix_digest(prefix) for prefix in prefixes])
        self.rows.write_step(np.array(slots, np.int64), {"routing": np.array([row_of(prefix) for prefix in prefixes])})

    def keyed(self, tokens: Sequence[int], blocks: Sequence[int], first: int) -> dict[Any, int]:
        keys, chain = list[Any](), self.rows.keys
        for at in range(0, len(tokens), SIZE):
            keys.append(chain.key(keys[-1] if keys else None, tokens[at : at + SIZE]))
        return dict(zip(keys[first:], blocks, strict=False))

    def lend(self, transfer: bytes, tokens: Sequence[int], blocks: Sequence[int], start: int, stop: int) -> None:
        """The blocks that tokens ``[start, stop)`` have filled."""
        last = stop == len(tokens)
        first, end = start // SIZE, -(-stop // SIZE) if last else stop // SIZE
        keys = self.keyed(tokens, blocks[first:end], first)
        lives = self.rows.generations(blocks[first:end]).tolist()
        self.crossing.lender.lend(transfer, first, keys, lives, stop - first * SIZE, last=last)

    def ended(self) -> Release | Came:
        give_up_s = time.monotonic() + GIVE_UP_S
        while not (found := self.crossing.poll()):
            assert time.monotonic() < give_up_s
            time.sleep(0.001)
        (one,) = found
        return one

    def right(self, tokens: Sequence[int], blocks: Sequence[int], start: int = 0) -> list[int]:
        """The positions from ``start`` whose rows are those of the tokens; the others are missing."""
        found, good = self.rows.read("routing", blocks, start, len(tokens)), list[int]()
        for i in range(start, len(tokens)):
            if found.valid[i - start]:
                assert found.values[i - start].tolist() == row_of(tokens[: i + 1])
                good.append(i)
        return good

    def close(self) -> None:
        self.crossing.close()
        self.rows.close()


@pytest.fixture(scope="module")
def halves() -> Any:
    made = Half(), Half()
    yield made
    for each in made:
        each.close()


@examples(30)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.lists(st.integers(1, 19), max_size=3), st.data())
def test_blocks_cross_as_they_are_filled(
    halves: tuple[Half, Half], tokens: list[int], cuts: list[int], data: Any
) -> None:
    """Goal: rows and KV arrive whole, the last and partial block included, whenever decode begins. Method: prompts in
    steps; decode asks before any of them and has some blocks already; prefill's blocks are other prompts' at once.
    """
    first, second = halves
    blocks = -(-len(tokens) // SIZE)
    mine, theirs = (data.draw(st.permutations(range(12)))[:blocks] for _ in range(2))
    local, transfer = data.draw(st.integers(0, blocks - 1)), secrets.token_bytes(16)
    lives = second.rows.renew(theirs).tolist()
    wanted = second.keyed(tokens, theirs[local:], local)
    second.crossing.borrower.fetch(
        transfer, first.crossing.address, local, wanted, lives[local:], len(tokens) - local * SIZE
    )
    first.rows.renew(mine)
    steps = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    done = 0
    for start, stop in pairwise(steps):
        first.compute(tokens, mine, start, stop)
        if stop // SIZE > done or stop == len(tokens):
            first.lend(transfer, tokens, mine, done * SIZE, stop)
            done = stop // SIZE
    first.rows.renew(list(range(12)))
    first.kv.device[:] = 9  # what lies behind the next prompt
    came = second.ended()
    assert isinstance(came, Came)
    assert (came.transfer, dict(came.why), came.kv) == (transfer, {}, frozenset(range(local, blocks)))
    assert second.right(tokens, theirs, local * SIZE) == list(range(local * SIZE, len(tokens)))
    for i in range(local * SIZE, len(tokens)):
        assert second.kv.digest("device", theirs[i // SIZE], i % SIZE) == prefix_digest(tokens[: i + 1])
    if len(tokens) % SIZE:
        assert second.kv.digest("device", theirs[-1], SIZE - 1) == bytes(NBYTES), "nothing of what lies behind"
    assert isinstance(first.ended(), Release)
    second.rows.assert_consistent()


def test_what_lands_in_another_life_is_dropped(halves: tuple[Half, Half]) -> None:
    """Goal: neither rows nor KV of a transfer are written into a block that has been given to another request. Method:
    one of three landing blocks is given out again before prefill has anything to send."""
    first, second = halves
    tokens, transfer = list(range(12)), secrets.token_bytes(16)
    lives = second.rows.renew([3, 4, 5]).tolist()
    wanted = second.keyed(tokens, [3, 4, 5], 0)
    second.crossing.borrower.fetch(transfer, first.crossing.address, 0, wanted, lives, 12)
    second.rows.renew([4])
    second.kv.device[4] = 7
    first.rows.renew([0, 1, 2])
    first.compute(tokens, [0, 1, 2], 0, 12)
    first.lend(transfer, tokens, [0, 1, 2], 0, 12)
    came = second.ended()
    assert isinstance(came, Came)
    assert (dict(came.why), came.kv) == ({1: "stale"}, frozenset({0, 2}))
    assert second.right(tokens, [3, 4, 5]) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert (second.kv.device[4] == 7).all()
    first.ended()


def test_a_block_given_out_again_before_it_was_lent_is_absent(halves: tuple[Half, Half]) -> None:
    """Goal: rows and KV are sent only from the intended lives of blocks. Method: one of three blocks belongs to another
    prompt when they are lent."""
    first, second = halves
    tokens, transfer = list(range(12)), secrets.token_bytes(16)
    lives = first.rows.renew([0, 1, 2]).tolist()
    first.compute(tokens, [0, 1, 2], 0, 12)
    first.rows.renew([1])
    first.compute([7] * 12, [0, 1, 2], 4, 8)
    first.crossing.lender.lend(transfer, 0, first.keyed(tokens, [0, 1, 2], 0), lives, 12)
    landing = second.rows.renew([3, 4, 5]).tolist()
    wanted = second.keyed(tokens, [3, 4, 5], 0)
    second.crossing.borrower.fetch(transfer, first.crossing.address, 0, wanted, landing, 12)
    came = second.ended()
    assert isinstance(came, Came)
    assert (dict(came.why), came.kv) == ({1: "absent"}, frozenset({0, 2}))
    assert second.right(tokens, [3, 4, 5]) == [0, 1, 2, 3, 8, 9, 10, 11]
    first.ended()


def test_rows_of_kv_that_did_not_come_land_nowhere() -> None:
    """Goal: a block whose KV failed gets no row of it later. Method: two blocks are waited for, one of which is given
    up before prefill lends.
    """
    first, second = Half(kv=False), Half(kv=False)
    tokens, transfer = list(range(8)), secrets.token_bytes(16)
    lives = second.rows.renew([5, 6]).tolist()
    wanted = second.keyed(tokens, [5, 6], 0)
    second.crossing.borrower.fetch(transfer, first.crossing.address, 0, wanted, lives, 8)
    second.crossing.borrower.give_up({6, 9})
    second.rows.forget([6])
    first.rows.renew([0, 1])
    first.compute(tokens, [0, 1], 0, 8)
    first.lend(transfer, tokens, [0, 1], 0, 8)
    came = second.ended()
    assert isinstance(came, Came)
    assert dict(came.why) == {1: "stale"}
    assert second.right(tokens, [5, 6]) == [0, 1, 2, 3]
    first.close()
    second.close()


def test_a_fetch_that_is_given_up_as_a_whole_is_over(halves: tuple[Half, Half]) -> None:
    """Goal: landing blocks of a request that was aborted are free at once. Method: prefill has opened its offer and
    never goes on; decode gives up one of two blocks, then both.
    """
    first, second = halves
    tokens, transfer = list(range(8)), secrets.token_bytes(16)
    told = second.crossing.node.counters.told_later
    first.crossing.lender.lend(transfer, 0, {}, [], 0, last=False)
    lives = second.rows.renew([5, 6]).tolist()
    wanted = second.keyed(tokens, [5, 6], 0)
    second.crossing.borrower.fetch(transfer, first.crossing.address, 0, wanted, lives, 8)
    node = second.crossing.node
    until(lambda: node.counters.told_later > told)
    second.crossing.borrower.give_up({6, 9})
    assert node.counters.pulls_in_flight == 1
    second.crossing.borrower.give_up({5})
    came = second.ended()
    assert isinstance(came, Came)
    assert (dict(came.why), came.kv) == (dict.fromkeys((0, 1), "aborted"), frozenset())
    assert isinstance(first.ended(), Release)


def test_lent_copies_are_bounded_by_their_bytes() -> None:
    """Goal: rows and KV that are not fetched take no more memory than configured. Method: room for two blocks and a
    half; a prompt that does not fit is refused whole, also when its transfer has begun, and decode is told; a transfer
    that ends makes room."""
    second = Half()
    nbytes = second.block_nbytes
    first = Half(lent_nbytes_max=nbytes * 5 // 2)
    tokens, names = list(range(12)), [secrets.token_bytes(16) for _ in range(4)]
    first.rows.renew([0, 1, 2])
    first.compute(tokens, [0, 1, 2], 0, 12)
    first.lend(names[0], tokens, [0, 1, 2], 0, 4)
    assert first.crossing.lender.lent_nbytes == nbytes
    with pytest.raises(NodeFullError, match=f"lent_nbytes_max: wanted at most {nbytes * 5 // 2}, got {nbytes * 3}"):
        first.lend(names[0], tokens, [0, 1, 2], 4, 12)
    ended = first.ended()
    assert isinstance(ended, Release)
    assert (ended.transfer, ended.outcome, first.crossing.lender.lent_nbytes) == (names[0], Outcome.ABORTED, 0)
    first.lend(names[1], tokens[:8], [0, 1], 0, 8)
    with pytest.raises(NodeFullError):
        first.lend(names[2], tokens[:4], [0], 0, 4)
    lives = second.rows.renew([5, 6]).tolist()
    wanted = second.keyed(tokens[:8], [5, 6], 0)
    for name, why in ((names[0], {"gone: aborted"}), (names[1], set())):
        second.crossing.borrower.fetch(name, first.crossing.address, 0, wanted, lives, 8)
        came = second.ended()
        assert isinstance(came, Came)
        assert set(came.why.values()) == why
    first.ended()
    assert first.crossing.lender.lent_nbytes == 0
    first.lend(names[3], tokens[:8], [0, 1], 0, 8)
    first.close()
    second.close()


@pytest.mark.parametrize("begun", [False, True])
def test_a_transfer_that_failed_is_lent_no_further(begun: bool) -> None:
    """Goal: decode never takes the rest of a prompt for its whole. Method: there is no room for a prompt's first
    blocks, or for its second ones; then there is, and more of it is filled. Its last block ends it."""
    other = Half()
    first = Half(lent_nbytes_max=2 * other.block_nbytes)
    other.close()
    lender, ends, tokens, blocks = first.crossing.lender, list[Any](), list(range(16)), [0, 1, 2, 3]
    name, before = secrets.token_bytes(16), secrets.token_bytes(16)
    first.rows.renew(blocks)
    first.compute(tokens, blocks, 0, 16)
    if begun:
        first.lend(name, tokens, blocks, 0, 4)
    first.lend(before, tokens, blocks, 0, 4 if begun else 8)
    with pytest.raises(NodeFullError):
        first.lend(name, tokens, blocks, 4, 8)
    lender.withdraw(before, "to make room")
    until(lambda: ends.extend(first.crossing.poll()) or len(ends) == 1 + begun)
    assert lender.lent_nbytes == 0
    for start, stop in ((8, 12), (12, 16)):
        with pytest.raises(NodeClosedError, match="not lent any more"):
            first.lend(name, tokens, blocks, start, stop)
    assert lender.lent_nbytes == 0
    first.lend(name, tokens, blocks, 0, 4)
    assert lender.lent_nbytes > 0 or isinstance(first.ended(), Release), "it is another offer, or one too many"
    first.close()


@pytest.mark.parametrize("kv", [False, True])
def test_ranks_that_are_not_alike(kv: bool) -> None:
    """Goal: rows are the same in all ranks behind the router, KV is not. Method: prefill has four ranks and decode two,
    which fetches from the third one: rows alone come; with KV the refusal names the field and both values.
    """
    first, second = Half(kv=kv, rank=2, world=4), Half(kv=kv, rank=1, world=2)
    tokens, transfer = list(range(7)), secrets.token_bytes(16)
    first.rows.renew([0, 1])
    first.compute(tokens, [0, 1], 0, 7)
    first.lend(transfer, tokens, [0, 1], 0, 7)
    lives = second.rows.renew([5, 6]).tolist()
    wanted = second.keyed(tokens, [5, 6], 0)
    second.crossing.borrower.fetch(transfer, first.crossing.address, 0, wanted, lives, 7)
    came = second.ended()
    assert isinstance(came, Came)
    if kv:
        assert set(came.why) == {0, 1}
        assert came.why[0] == "refused: peer's namespace.rank: wanted 1, got 2"
        assert second.right(tokens, [5, 6]) == []
    else:
        assert came.why == {}
        assert second.right(tokens, [5, 6]) == list(range(7))
    first.close()
    second.close()

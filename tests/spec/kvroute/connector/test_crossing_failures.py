"""What fails on either side of the crossing, by a mistake of this side or bad luck: it costs that, and no more."""

from __future__ import annotations

import secrets
import threading
from typing import Any

import pytest
from kv import SlotKV
from waiting import until

import kvroute
from cache_manager.errors import BlockBusyError, ConfigError
from kvroute.connector.crossing import Came, Crossing, link_of
from tests.spec.kvroute.connector.test_crossing_kv import SIZE, Half
from transfer import Finished, TransferId

TOKENS = list(range(2 * SIZE))


@pytest.fixture
def two_halves() -> Any:
    made = Half(), Half()
    yield made
    for each in made:
        each.close()


def fetched(first: Half, second: Half, blocks: list[int]) -> Came:
    """``first`` lends its blocks 0 and 1, and ``second`` fetches them into these."""
    transfer = secrets.token_bytes(16)
    lives = second.rows.renew(blocks).tolist()
    first.rows.renew([0, 1])
    first.compute(TOKENS, [0, 1], 0, len(TOKENS))
    first.lend(transfer, TOKENS, [0, 1], 0, len(TOKENS))
    wanted = second.keyed(TOKENS, blocks, 0)
    second.crossing.borrower.fetch(transfer, first.crossing.address, 0, wanted, lives, len(TOKENS))
    came = second.ended()
    assert isinstance(came, Came)
    return came


def test_kv_that_is_half_written_has_no_rows(two_halves: tuple[Half, Half], monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no row stands beside KV of no computation. Method: the device fails in the middle of one block's KV, whose
    rows cross, too."""
    first, second = two_halves
    fill = SlotKV.fill

    def fails(self: SlotKV, blocks: Any, given: Any) -> None:
        if 5 in blocks:
            self.device[5, : SIZE // 2] = 9
            raise OSError("the device has failed")
        fill(self, blocks, given)

    monkeypatch.setattr(SlotKV, "fill", fails)
    came = fetched(first, second, [5, 6])
    assert came.kv == {1}
    assert set(came.why) == {0}
    assert "failed" in came.why[0]
    assert second.right(TOKENS, [5, 6]) == list(range(SIZE, 2 * SIZE))
    (origin,) = second.rows.exchange.origins([5])
    assert origin not in first.rows.exchange.origins([0, 1])
    second.rows.assert_consistent()


def test_a_block_keeps_its_life_while_kv_is_moved(
    two_halves: tuple[Half, Half], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: KV goes out of and into the lives that were named. Method: the port tries to give the block out in the
    middle of both."""
    first, second = two_halves
    refused = list[str]()
    take, fill = SlotKV.take, SlotKV.fill

    def tried(half: Half, what: str) -> None:
        with pytest.raises(BlockBusyError):
            half.rows.renew([0, 5])
        refused.append(what)

    def taking(self: SlotKV, *args: Any) -> None:
        tried(first, "take")
        take(self, *args)

    def filling(self: SlotKV, *args: Any) -> None:
        tried(second, "fill")
        fill(self, *args)

    monkeypatch.setattr(SlotKV, "take", taking)
    monkeypatch.setattr(SlotKV, "fill", filling)
    came = fetched(first, second, [5, 6])
    assert (dict(came.why), refused) == ({}, ["take", "fill", "fill"])
    assert second.right(TOKENS, [5, 6]) == list(range(2 * SIZE))


def test_what_decode_has_fetched_makes_room_at_once() -> None:
    """Goal: a prompt is lent if its copies fit beside those that may still be sent. Method: there is room for one
    prompt; it is fetched, and the next is lent before anybody polls."""
    second = Half()
    first = Half(lent_nbytes_max=2 * second.block_nbytes)
    ends = list[Any]()
    for blocks in ([3, 4], [5, 6]):
        assert dict(fetched(first, second, blocks).why) == {}
        until(lambda: first.crossing.node.counters.offers_in_flight == 0)
        assert first.crossing.lender.lent_nbytes == 0
    until(lambda: ends.extend(first.crossing.poll()) or len(ends) == 2)  # an end is told after it is counted
    first.close()
    second.close()


def test_a_fetch_that_ends_in_a_bug_is_over(two_halves: tuple[Half, Half], monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: every fetch ends, and may be tried again. Method: the node's own call raises what nobody expects; then an
    end comes that belongs to no fetch, beside others."""
    first, second = two_halves
    transfer, lives = secrets.token_bytes(16), second.rows.renew([5, 6]).tolist()
    wanted = second.keyed(TOKENS, [5, 6], 0)
    node, borrower = second.crossing.node, second.crossing.borrower
    with monkeypatch.context() as broken:
        broken.setattr(node, "pull", lambda *_: len(None))  # type: ignore[arg-type]
        borrower.fetch(transfer, first.crossing.address, 0, wanted, lives, len(TOKENS))
    came = second.ended()
    assert isinstance(came, Came)
    assert all("TypeError" in why for why in came.why.values())
    assert set(came.why) == {0, 1}
    borrower.fetch(transfer, first.crossing.address, 0, wanted, lives, len(TOKENS))
    node.abort(TransferId(transfer), "it was never lent")
    came = second.ended()
    assert isinstance(came, Came)
    assert set(came.why.values()) == {"aborted"}, "it is under way no more"
    with monkeypatch.context() as foreign:
        foreign.setattr(node, "poll", lambda: [Finished(TransferId(transfer), 0, ())])
        assert second.crossing.poll() == []
    assert dict(fetched(first, second, [5, 6]).why) == {}


@pytest.mark.parametrize("model", ["m", "m" * 2000])
def test_a_crossing_that_cannot_start_closes_its_link(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Goal: the address is free for the next try. Method: a process without room for a thread; a model's name that no
    message has room for."""
    spec = kvroute.AuxBlockDataSpec("routing", row_shape=(2,), dtype="uint8", block_tokens=SIZE)
    with kvroute.AuxBlocks([spec], blocks=4, namespace=kvroute.Namespace(model, 1)) as blocks:
        link = link_of("tcp://127.0.0.1:*")
        start = threading.Thread.start

        def no_room(self: threading.Thread) -> None:
            if self.name == "kvroute-node":
                raise RuntimeError("can't start new thread")
            start(self)

        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", no_room)
            with pytest.raises((RuntimeError, ConfigError)):
                Crossing(blocks, link)
        again = link_of(link.address)
        again.close(0.0)

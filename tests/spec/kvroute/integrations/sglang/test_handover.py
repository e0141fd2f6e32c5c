"""Prefill and decode of SGLang apart: rows are lent with a prompt's KV, and fetched into the pages that it comes to.

Two engines' rows in one process, over links of their own; passes of other requests are in flight. Every row has the
salt of the pass that made it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from waiting import GIVE_UP_S, until

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from kvroute import routing_spec
from kvroute.connector.carriers.by_transfer import LATE
from kvroute.connector.limits import Limits
from kvroute.connector.settings import Lending
from kvroute.connector.tickets import MIXED, NO_TICKET
from kvroute.integrations.sglang import versions
from kvroute.integrations.sglang.aside import Aside
from kvroute.integrations.sglang.capturer import ASIDE, Capturer
from kvroute.integrations.sglang.handover import (
    NOT_ASKED,
    NOT_LENT,
    OTHER_PROMPT,
    Handover,
    PackedTicket,
    PrefillTickets,
    ip_and_port,
    lend_of_rank,
)
from kvroute.integrations.sglang.hooks import HOOKS, TICKETS
from kvroute.integrations.sglang.passes import Launched
from kvroute.integrations.sglang.rows import RoutedRows
from transfer import TransferLimits

PAGE, PAGES = 4, 8
SPEC = routing_spec(num_experts=250, top_k=2, layer_ids=[1, 2], num_layers=3, block_tokens=PAGE)
PROMPT = list(range(100, 110))  # two pages and a half
ROOM = 1 << 60
HASTY = Limits(fetch_s=0.2, transfer=TransferLimits(retry_s=0.1, retries_max=100))


class Side:
    """An engine's rows, with their hand-over."""

    def __init__(self, version: int = 1, limits: Limits = HASTY, rank: int = 0, **settings: Any) -> None:
        given = Lending(strict=True, **settings)
        self.rows = RoutedRows(SPEC, PAGES, Namespace("m", version), given)
        self.handover = Handover(self.rows, given, limits, rank=rank)

    def launch(self, slots: np.ndarray[Any, Any], salt: int) -> Launched:
        one = torch.tensor([salt, 100 + salt], dtype=torch.int32)
        return self.rows.launch(torch.from_numpy(slots), one.expand(len(slots), 3, 2).clone())

    def prefilled(self, slots: np.ndarray[Any, Any], salt: int = 7) -> PackedTicket:
        """The ticket of a prompt that lies in ``slots`` now, as decode reads it."""
        self.launch(slots, salt).finalize()
        return PackedTicket.read(self.handover.lend(PROMPT, slots, ROOM).words())

    def salts(self, slots: np.ndarray[Any, Any], why: Mapping[int, str] | None = None) -> tuple[list[int], Any]:
        """The salt of each row, 0 if it is missing, and the gaps."""
        routes, _, gaps = self.rows.read(slots, 0, why or {}).routes()
        assert (routes.ids[:, :, 1] == routes.ids[:, :, 0] + 100)[routes.valid].all()
        return np.where(routes.valid, routes.ids[:, 0, 0].astype(int), 0).tolist(), gaps

    def close(self) -> None:
        self.handover.close()
        self.rows.close()


@pytest.fixture
def two() -> Iterator[tuple[Side, Side]]:
    sides = Side(), Side()
    yield sides
    for side in sides:
        side.close()


def slots_of(*pages: int, tokens: int = len(PROMPT)) -> Any:
    return np.array([page * PAGE + i for page in pages for i in range(PAGE)], np.int64)[:tokens]


HERE, THERE = slots_of(1, 2, 3), slots_of(5, 1, 4)


def test_rows_come_into_the_pages_that_the_kv_has_come_to(two: tuple[Side, Side]) -> None:
    """Goal: decode has prefill's rows, and its own behind them in the same page. Method: prefill gives its pages out
    again before decode asks; decode's pages have another request's rows, for which a pass is still in flight."""
    prefill, decode = two
    ticket = prefill.prefilled(HERE)
    prefill.launch(HERE, 50).finalize()
    decode.launch(slots_of(4, 5, 6), 9).finalize()
    late = decode.launch(slots_of(5, tokens=2), 10)  # of a request that has ended
    arrival = decode.handover.receive(ticket, PROMPT, THERE, wanted=True)
    assert not decode.handover.goes_on(arrival), "its pages have not begun their lives"
    late.finalize()
    until(lambda: decode.handover.goes_on(arrival) and arrival.over)
    behind = np.array([THERE[-1] + 1])
    decode.launch(behind, 11).finalize()
    assert decode.salts(np.concatenate([THERE, behind]), arrival.why) == ([7] * 10 + [11], [])
    assert decode.rows.meter.missing == {}
    until(lambda: prefill.handover.poll() or not prefill.handover.crossing.lender.lent_nbytes)


def test_rows_that_do_not_come_in_time_are_missing_until_they_land() -> None:
    """Goal: a request waits for its rows, and no longer than the limit; late ones land behind what decode has computed
    since. Method: a pass that holds the fetch back."""
    prefill, decode = Side(), Side()
    ticket = prefill.prefilled(HERE)
    held = decode.launch(slots_of(6), 9)
    arrival = decode.handover.receive(ticket, PROMPT, THERE, wanted=True)
    until(lambda: decode.handover.goes_on(arrival))
    behind = np.array([THERE[-1] + 1])
    own = decode.launch(behind, 11)
    held.finalize()
    own.finalize()
    all_of = np.concatenate([THERE, behind])
    if not arrival.over:
        salts, gaps = decode.salts(all_of, arrival.why)
        assert set(salts) <= {0, 7, 11}
        assert all(why == LATE.format(HASTY.fetch_s) for *_, why in gaps)
    until(lambda: decode.handover.poll() or arrival.over)
    salts, gaps = decode.salts(all_of, arrival.why)
    assert (salts[:8], salts[10]) == ([7] * 8, 11)
    assert (salts[8:10], gaps) in (([7, 7], []), ([0, 0], [(8, 10, "stale")])), "decode has computed in this page"
    prefill.close()
    decode.close()


def test_what_lands_in_another_life_is_dropped(two: tuple[Side, Side]) -> None:
    """Goal: rows of a request that has ended are never another one's. Method: its pages are given to a request of which
    nothing is computed yet, while the rows are on their way."""
    prefill, decode = two
    arrival = decode.handover.receive(prefill.prefilled(HERE), PROMPT, THERE, wanted=True)
    decode.rows.came(THERE[::PAGE] // PAGE, lambda: None)
    until(lambda: decode.handover.poll() or arrival.over)
    assert decode.salts(THERE)[0] == [0] * 10


def test_a_prefill_that_is_gone_costs_its_rows_and_no_more(two: tuple[Side, Side]) -> None:
    prefill, decode = two
    ticket = prefill.prefilled(HERE)
    prefill.handover.close()
    arrival = decode.handover.receive(ticket, PROMPT, THERE, wanted=True)
    until(lambda: decode.handover.goes_on(arrival))
    salts, gaps = decode.salts(THERE, arrival.why)
    assert (salts, [gap[:2] for gap in gaps]) == ([0] * 10, [(0, 10)])
    assert gaps[0][2] == LATE.format(HASTY.fetch_s)


def test_why_there_is_no_ticket() -> None:
    """Goal: the reason goes with the KV. Method: weights that changed while KV was kept, copies beyond the limit, a
    prefill that was not asked, and one without kvroute, which leaves SGLang's words at 0."""
    prefill, decode = Side(lent_nbytes_max=1), Side()
    full = prefill.prefilled(HERE)
    prefill.rows.weights.changed(2)
    mixed = prefill.prefilled(HERE)
    stock = PackedTicket.read(np.zeros(7, np.uint64))
    unasked = PackedTicket.read(PackedTicket(why=NOT_ASKED).words())
    for ticket, why in ((full, NOT_LENT), (mixed, MIXED), (stock, NO_TICKET), (unasked, NOT_ASKED)):
        decode.launch(THERE, 9).finalize()
        arrival = decode.handover.receive(ticket, PROMPT, THERE, wanted=True)
        assert decode.handover.goes_on(arrival)
        assert decode.salts(THERE, arrival.why) == ([0] * 10, [(0, 10, why)]), "the rows of the request before are gone"
        assert decode.rows.meter.missing[why.partition(":")[0]] == 10
    prefill.close()
    decode.close()


def test_a_ticket_of_another_prompt_brings_nothing(two: tuple[Side, Side]) -> None:
    """Goal: no row of other tokens. Method: a look when the transfer is over and prefill's copy gone."""
    prefill, decode = two
    arrival = decode.handover.receive(prefill.prefilled(HERE), [*PROMPT[:-1], 1], THERE, wanted=True)
    assert decode.handover.goes_on(arrival)
    until(lambda: prefill.handover.poll() or decode.handover.poll() or not prefill.handover.crossing.lender.lent_nbytes)
    assert decode.salts(THERE, arrival.why) == ([0] * 10, [(0, 10, OTHER_PROMPT)])


def test_rows_that_nobody_wants_are_given_back(two: tuple[Side, Side]) -> None:
    """Goal: prefill keeps no copies for a request without rows. Method: the lease is longer than this test."""
    prefill, decode = two
    ticket = prefill.prefilled(HERE)
    assert prefill.handover.crossing.lender.lent_nbytes
    assert decode.handover.goes_on(decode.handover.receive(ticket, PROMPT, THERE, wanted=False))
    until(lambda: prefill.handover.poll() or not prefill.handover.crossing.lender.lent_nbytes)
    assert decode.rows.meter.missing == {}


def test_engines_of_other_weights_exchange_nothing(two: tuple[Side, Side]) -> None:
    """Goal: rows of other weights are missing with the reason. Method: decode's weights get another version."""
    prefill, decode = two
    decode.rows.followers.append(decode.handover.crossing.follow)
    decode.rows.weights.changed(2)
    ticket = prefill.prefilled(HERE)
    arrival = decode.handover.receive(ticket, PROMPT, THERE, wanted=True)
    until(lambda: decode.handover.poll() or arrival.over)
    salts, ((start, stop, why),) = decode.salts(THERE, arrival.why)
    assert (salts, start, stop) == ([0] * 10, 0, 10)
    assert "namespace" in why


@pytest.mark.parametrize("version", [None, 3])
def test_a_retracted_request_has_its_rows_again(two: tuple[Side, Side], version: int | None) -> None:
    """Goal: what SGLang copies aside with a request's KV comes back into other pages. Method: the last pass of the
    request is over after its KV was copied, and its pages are given out before; one row is missing, and stays so."""
    _, decode = two
    rows = decode.rows
    if version is not None:
        rows.weights.changed(version)
    late = decode.launch(HERE, 7)
    aside = Aside()
    aside.keep(rows, HERE[:-1])
    other = decode.launch(slots_of(1, 2), 9)
    aside.bring_back(rows, THERE[:-1])
    late.ids[3, 2] = 251  # type: ignore[index]  # no expert
    late.finalize()
    other.finalize()
    assert decode.salts(THERE[:-1])[0] == [7, 7, 7, 0, *[7] * 5]
    labels = rows.read(THERE[:-1], 0).routes()[0].weights_versions
    assert [tuple(span) for span in labels] == ([] if version is None else [(0, 3, version), (4, 9, version)])


@pytest.mark.parametrize("copied", [True, False])
def test_rows_go_aside_with_a_copy_of_the_kv_alone(
    two: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    """Goal: a request keeps no rows that nothing brings back. Method: SGLang says that a request is backed up, with a
    copy of its KV, or because it computes it again."""
    _, decode = two
    capturer = Capturer(SimpleNamespace(device_cache=SimpleNamespace(buffer=torch.zeros(1, 3, 2))), decode.rows)
    capturer.hand_over(decode.handover, SimpleNamespace(req_to_token=torch.from_numpy(HERE)[None]))
    monkeypatch.setattr(versions, "experts_capturer", lambda: capturer)
    kv = SimpleNamespace(req_pool_idx=0, retraction_backup="a copy" if copied else None)
    req = SimpleNamespace(kv=kv, return_routed_experts=True, seqlen=len(HERE))
    decode.launch(HERE, 7).finalize()
    HOOKS["put_aside"](lambda *_: True, req)
    assert hasattr(req, ASIDE) is copied


def test_a_request_is_followed_through_sglang_s_queues(two: tuple[Side, Side]) -> None:
    """Goal: the ticket goes in SGLang's own words, beside its own, and each transfer of a request is received once."""
    ours = [
        Capturer(SimpleNamespace(device_cache=SimpleNamespace(buffer=torch.zeros(1, 3, 2))), side.rows) for side in two
    ]
    for side, capturer, slots in zip(two, ours, (HERE, THERE), strict=True):
        table = torch.zeros(2, 16, dtype=torch.int32)
        table[1, : len(slots)] = torch.from_numpy(slots)
        capturer.hand_over(side.handover, SimpleNamespace(req_to_token=table))
    two[0].launch(HERE, 7).finalize()
    words = torch.zeros(3, 8, dtype=torch.uint64)
    words[2, 0] = 41
    buffers = SimpleNamespace(bootstrap_room=words)
    req = SimpleNamespace(
        origin_input_ids=PROMPT,
        output_ids=[],
        return_routed_experts=True,
        bootstrap_room=41,
        metadata_buffer_index=2,
        kv=SimpleNamespace(req_pool_idx=1, kv_committed_len=len(PROMPT)),
    )
    ours[0].lend(req, buffers)
    assert int(words[2, 0]) == 41
    waiting = SimpleNamespace(req=req, kv_receiver="its first", metadata_buffer_index=2)
    until(lambda: ours[1].goes_on(waiting, buffers))
    assert two[1].salts(THERE)[0] == [7] * 10
    req.return_routed_experts = False
    ours[0].lend(req, buffers)
    req.return_routed_experts, waiting.kv_receiver = True, "its second"
    assert ours[1].goes_on(waiting, buffers)
    assert two[1].salts(THERE, req.kvroute_arrival.why) == ([0] * 10, [(0, 10, NOT_ASKED)])


@dataclass
class OtherRank:
    """A rank of prefill that has a part of the KV, and no rows; it drives kvroute's hook."""

    scheduler: Any

    @classmethod
    def of(cls, first: PrefillTickets) -> OtherRank:
        """Both ranks learn what the other one says, as when their schedulers start."""
        meeting = threading.Barrier(2, timeout=GIVE_UP_S)
        said: list[Any] = []

        def least(values: Any) -> Any:
            said.append(values)
            meeting.wait()
            return np.minimum.reduce(said)

        with ThreadPoolExecutor(2) as ranks:
            agreed = [ranks.submit(PrefillTickets.agreed, own, least) for own in (first, None)]
            tickets = [each.result(GIVE_UP_S) for each in agreed]
        buffers = SimpleNamespace(bootstrap_room=torch.zeros(3, 8, dtype=torch.uint64))
        return cls(SimpleNamespace(**{TICKETS: tickets[1]}, disagg_metadata_buffers=buffers))

    def sends(self, prompt: list[int], *, room: int = ROOM, wanted: bool = True) -> PackedTicket:
        """What decode reads after this rank has written its message, too."""
        req = SimpleNamespace(
            origin_input_ids=prompt, return_routed_experts=wanted, bootstrap_room=room, metadata_buffer_index=1
        )
        sent: list[Any] = []
        HOOKS["handed"](lambda *given, **_: sent.append(given), self.scheduler, req, last_chunk=True)
        assert sent == [(self.scheduler, req, True)], "SGLang's function is called"
        return PackedTicket.read(self.scheduler.disagg_metadata_buffers.bootstrap_room[1, 1:].numpy())


@pytest.fixture
def rank_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kvroute's hooks find in the process of such a rank."""
    monkeypatch.setattr(versions, "experts_capturer", lambda: None)


@pytest.mark.usefixtures("rank_without_rows")
def test_every_rank_of_prefill_writes_the_same_ticket(two: tuple[Side, Side]) -> None:
    """Goal: decode has its rows whichever rank of prefill has written its message last. Method: a rank of decode that
    has its KV from two ranks of prefill reads the ticket of the second, which has no rows."""
    prefill, decode = two
    other = OtherRank.of(prefill.handover.tickets)
    tickets = [prefill.prefilled(HERE)]
    assert other.sends(PROMPT) == tickets[0]
    arrival = decode.handover.receive(tickets[0], PROMPT, THERE, wanted=True)
    until(lambda: decode.handover.goes_on(arrival))
    assert decode.salts(THERE, arrival.why) == ([7] * 10, [])
    assert other.sends(PROMPT, wanted=False).why == NOT_ASKED
    for _ in range(2):  # the same prompt and room again: another computation
        tickets.append(prefill.prefilled(HERE))
        assert other.sends(PROMPT) == tickets[-1]
    assert len({ticket.transfer for ticket in tickets}) == 3


@pytest.mark.usefixtures("rank_without_rows")
@pytest.mark.parametrize("other_room", [False, True])
def test_a_rank_that_has_sent_other_prompts_names_no_rows(two: tuple[Side, Side], other_room: bool) -> None:
    """Goal: no row is of another prompt, or of another computation, where two ranks of prefill do not send the same.
    Method: the second one has left a prompt out, and so counts another one in its place, which has the same tokens in
    another room, or others in the same."""
    prefill, decode = two
    other = OtherRank.of(prefill.handover.tickets)
    prefill.prefilled(HERE, 7)
    prompt = PROMPT if other_room else [*PROMPT[:-1], 1]
    arrival = decode.handover.receive(other.sends(prompt, room=ROOM + other_room), prompt, THERE, wanted=True)
    until(lambda: decode.handover.goes_on(arrival))
    salts, ((start, stop, why),) = decode.salts(THERE, arrival.why)
    assert (salts, start, stop) == ([0] * 10, 0, 10)
    assert why == LATE.format(HASTY.fetch_s)


@pytest.mark.usefixtures("rank_without_rows")
def test_what_the_first_rank_has_not_lent_is_missing(two: tuple[Side, Side]) -> None:
    """Goal: a reason, where the other rank's ticket says that rows are lent. Method: no room for a copy."""
    prefill, decode = Side(lent_nbytes_max=1), two[1]
    other = OtherRank.of(prefill.handover.tickets)
    assert prefill.prefilled(HERE).why == NOT_LENT
    arrival = decode.handover.receive(other.sends(PROMPT), PROMPT, THERE, wanted=True)
    until(lambda: decode.handover.goes_on(arrival))
    salts, ((start, stop, why),) = decode.salts(THERE, arrival.why)
    assert (salts, start, stop) == ([0] * 10, 0, 10)
    assert why == LATE.format(HASTY.fetch_s)
    prefill.close()


@pytest.mark.usefixtures("rank_without_rows")
def test_a_rank_of_decode_without_rows_waits_for_none() -> None:
    """Goal: no rank waits for a message of ours, but the first. Method: SGLang's question on a rank without rows, whose
    KV has come."""
    polls = [versions.TRANSFERRED]
    HOOKS["gated"](lambda *_: None, polls, [SimpleNamespace()], SimpleNamespace())
    assert polls == [versions.TRANSFERRED]


@pytest.mark.parametrize(
    "address", ["ipc:///tmp/a", "tcp://localhost:7010", "tcp://0.0.0.0:7010", "tcp://[::]:*", "127.0.0.1:7"]
)
def test_an_address_without_a_place_in_a_ticket_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^lend: wanted tcp://IP:PORT"):
        ip_and_port(address, "lend")


def test_replicas_lend_at_ports_of_their_own() -> None:
    """Goal: replicas of one setting do not fight for its port, each one's tickets name its own address, and a port that
    is not there is refused by the setting's name. Method: two on a port that was free, lent at by both at once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = min(free.getsockname()[1], 65_000)
    lend = f"tcp://127.0.0.1:{port}"
    sides = [Side(lend=lend, rank=rank) for rank in (0, 1)]
    slots = np.arange(PAGE, PAGE + len(PROMPT))
    assert [side.prefilled(slots).address for side in sides] == [lend, f"tcp://127.0.0.1:{port + 1}"]
    for side in sides:
        side.close()
    assert lend_of_rank("tcp://127.0.0.1:65535", 0) == "tcp://127.0.0.1:65535"
    with pytest.raises(ConfigError, match=r"^lend: wanted a port of at most 65534, or \*: 2 ranks lend, got .*65535"):
        lend_of_rank("tcp://127.0.0.1:65535", 1)


def test_a_replica_has_no_rows_of_anothers_prompt() -> None:
    """Goal: a wrong replica lends nothing. Method: two replicas that had the same prompts in the same order and rooms,
    with other rows; a ticket of the first one, with the address of the second."""
    first, second, decode = Side(), Side(rank=1), Side()
    slots = np.arange(PAGE, PAGE + len(PROMPT))
    ticket, other = first.prefilled(slots, 7), second.prefilled(slots, 9)
    assert ticket.transfer != other.transfer
    arrival = decode.handover.receive(replace(ticket, address=other.address), PROMPT, THERE, wanted=True)
    until(lambda: decode.handover.goes_on(arrival))
    salts, gaps = decode.salts(THERE, arrival.why)
    assert salts == [0] * len(PROMPT)
    assert [(start, stop) for start, stop, _ in gaps] == [(0, len(PROMPT))]
    assert all(why for _, _, why in gaps)
    for side in (first, second, decode):
        side.close()


@pytest.mark.parametrize("address", ["tcp://10.1.2.3:65535", "tcp://[2001:db8::7]:1", "tcp://127.0.0.1:7010"])
def test_a_ticket_keeps_its_address(address: str) -> None:
    ticket = PackedTicket(bytes(range(16)), address, bytes(range(16, 32)))
    assert PackedTicket.read(ticket.words()) == ticket

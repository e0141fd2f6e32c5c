"""An engine goes on where another has stopped: the same tokens, the same rows, whatever of it arrives and when."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from serving import DEADLINE_S, Plain, completion, plain_model, prompt, wait_until

from cache_manager.errors import BlockBusyError, InvalidInputError
from cache_manager.keys import Namespace
from cache_manager.record import RecordHeader
from paged_engine.engine.decode import DecodeEngine
from paged_engine.engine.prefill import PrefillEngine
from paged_engine.engine.request import EngineConfig, FinishReason, Output, Request
from paged_engine.engine.sequence import Handover, State
from paged_engine.engine.transfer_blocks import KV, ROWS
from paged_engine.serving.bodies import DRAW
from transfer.actions import Finished, WantedBlock
from transfer.identity import Identity
from transfer.limits import TransferLimits
from transfer.messages import BootId, TransferId
from transfer.node import BlockSink, Node
from transfer.zmq_link import ZmqLink
from transfer.zmq_settings import ZmqSettings

MODEL = plain_model()
NAMESPACE = Namespace("m", weights_version=3)
PATIENT = TransferLimits(lease_s=120.0, retry_s=0.2, retries_max=1000)
HASTY = TransferLimits(retry_s=0.2, retries_max=3)
SMALL = EngineConfig(device_blocks=16, host_blocks=16, sequences_max=4)

Place = tuple[int, int]
"""Part and block index."""


@dataclass(slots=True, eq=False)
class FaultyPulls:
    """A real node, whose records are refused where ``lost`` says so, and come later where ``late`` says so.

    With a ``gate``, each record is held up on its way into its block until that is open.
    """

    node: Node
    lost: Callable[[Place], bool] = lambda _: False
    late: Callable[[Place], bool] = lambda _: False
    gate: threading.Event | None = None
    entered: threading.Event = field(default_factory=threading.Event)

    def pull(self, transfer: TransferId, address: str, wanted: Sequence[WantedBlock], sink: BlockSink) -> None:
        self.node.pull(transfer, address, wanted, _FaultySink(self, sink))

    def abort(self, transfer: TransferId, reason: str) -> None:
        self.node.abort(transfer, reason)

    def poll(self) -> list[Finished]:
        return self.node.poll()


@dataclass(slots=True, eq=False)
class _FaultySink:
    pulls: FaultyPulls
    sink: BlockSink

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        self.pulls.entered.set()
        assert self.pulls.gate is None or self.pulls.gate.wait(DEADLINE_S)
        if self.pulls.late((part, index)):
            raise BlockBusyError("block", "to be asked for again", "not yet")
        return not self.pulls.lost((part, index)) and self.sink.install(part, index, header, payload)


@dataclass(slots=True, eq=False)
class Pair:
    """Prefill and decode engines in this thread, real nodes between them."""

    prefill: PrefillEngine
    decode: DecodeEngine
    offers: Node
    pulls: FaultyPulls
    number: int = 0

    def hand_over(self, request: Request) -> Handover:
        self.prefill.add(request)
        outputs = sorted(self.prefill.run(), key=lambda output: output.sample)
        transfer = self.prefill.transfer_of(request.id)
        assert transfer is not None
        return Handover(transfer, self.offers.address, tuple(output.tokens[0] for output in outputs))

    def begin(self, body: dict[str, Any]) -> str:
        """Let decode take over a completion that prefill has computed; its id."""
        self.number += 1
        request = Request(
            f"r{self.number}", tuple(body["prompt"]), body["max_tokens"], n=body.get("n", 1),
            temperature=body["temperature"], seed=body["seed"], draw=DRAW,
        )  # fmt: skip
        self.decode.take_over(request, self.hand_over(request))
        return request.id

    def finish(self) -> list[Output]:
        """What decode has to say, when both engines hold nothing any more."""
        outputs = []
        wait_until(lambda: bool(outputs.extend(self.decode.step()) or not self.decode.busy), "decode has ended")
        wait_until(lambda: bool(self.prefill.step() or not self.prefill.waits), "prefill has its blocks back")
        for engine in (self.prefill, self.decode):
            assert not engine.waits
            engine.manager.assert_consistent()
            assert engine.manager.free_device_blocks == engine.config.device_blocks
        return sorted(outputs, key=lambda output: (output.request.id, output.sample))


def identity_of(engine: PrefillEngine | DecodeEngine) -> Identity:
    return Identity(BootId(secrets.token_bytes(16)), engine.aux.namespace, engine.transfer_blocks.parts)


@contextmanager
def pair(config: EngineConfig = SMALL, limits: TransferLimits = PATIENT, **faults: Any) -> Iterator[Pair]:
    with PrefillEngine(MODEL, config, NAMESPACE) as prefill, DecodeEngine(MODEL, config, NAMESPACE) as decode:
        offers = Node(ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*")), identity_of(prefill), limits)
        node = Node(ZmqLink(ZmqSettings()), identity_of(decode), limits)
        pulls = FaultyPulls(node, **faults)
        prefill.attach(offers)
        decode.attach(pulls)
        try:
            yield Pair(prefill, decode, offers, pulls)
        finally:
            assert node.close()
            assert not offers.alive or offers.close()


def missing_rows(plain: Plain, body: dict[str, Any], outputs: list[Output]) -> int:
    """How many rows are missing of ``outputs``, whose tokens and other rows must be right."""
    missing = 0
    for expected, output in zip(plain({**body, "ignore_eos": True}), outputs, strict=True):
        assert output.tokens == expected.tokens
        valid = output.routes.valid
        assert len(valid) == len(expected.routes.valid)
        assert np.array_equal(output.routes.ids[valid], expected.routes.ids[valid])
        assert sum(gap.stop - gap.start for gap in output.gaps) == int((~valid).sum())
        missing += int((~valid).sum())
    return missing


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 48, 70])
def test_nothing_is_computed_twice_and_every_row_is_there(plain: Plain, tokens: int, n: int) -> None:
    """Goal: decode continues. Method: prompts that end inside, at and behind a block's end, and no prompt computed."""
    body = completion(tokens, prompt=prompt(tokens, tokens), n=n)
    with pair() as engines:
        engines.begin(body)
        assert missing_rows(plain, body, engines.finish()) == 0
        counters = engines.decode.decode_counters
        assert counters.prefill_recomputed_tokens == 0
        assert counters.transferred_rows == counters.prompt_rows == tokens


def test_what_decode_has_itself_is_not_asked_for(plain: Plain) -> None:
    """Goal: the rows of the KV in use. Method: the same prompt again; only its last block crosses."""
    body = completion(1, prompt=prompt(1, 40))
    with pair() as engines:
        for _ in range(2):
            engines.begin(body)
            assert missing_rows(plain, body, engines.finish()) == 0
        assert engines.decode.decode_counters.transferred_rows == 40 + 8
        assert engines.decode.manager.counters.prefix_hit_tokens == 32


@examples(20)
@given(lost=st.sets(st.tuples(st.sampled_from([ROWS, KV]), st.integers(0, 4))), n=st.sampled_from([1, 2]))
def test_what_does_not_come_is_computed_or_reported(plain: Plain, lost: set[Place], n: int) -> None:
    """Goal: never wrong, never silent. Method: any records are refused; what comes out is still the plain engine's."""
    body = completion(7, prompt=prompt(7, 70), n=n, max_tokens=6)
    with pair(lost=lambda place: place in lost) as engines:
        engines.begin(body)
        missing = missing_rows(plain, body, engines.finish())
        recomputed = engines.decode.decode_counters.prefill_recomputed_tokens
        first = min((index for _, index in lost), default=5)
        if missing:  # all KV came, decode went on, and the rows did not come any more
            assert n == 1
            assert not any(part == KV for part, _ in lost)
            assert missing == sum(min(16, 70 - 16 * index) for _, index in lost)
        else:  # computed again from the first gap on, so that its rows are there
            assert recomputed == max(0, 70 - 16 * first)


def test_rows_may_come_after_decoding_has_begun(plain: Plain) -> None:
    """Goal: decode waits for KV only, and ends only with its rows. Method: rows are late until all is generated."""
    body = completion(3, prompt=prompt(3, 40), max_tokens=9)
    waiting = [True]
    with pair(late=lambda place: place[0] == ROWS and waiting[0]) as engines:
        engines.begin(body)
        (sequence,) = engines.decode.scheduler.unfinished
        wait_until(lambda: bool(engines.decode.step() or sequence.state is State.SETTLING), "all is generated")
        assert len(sequence.generated) == 9
        assert engines.decode.busy
        assert engines.decode.step() == []
        waiting[0] = False
        assert missing_rows(plain, body, engines.finish()) == 0
        assert engines.decode.decode_counters.prefill_recomputed_tokens == 0


def test_samples_wait_for_the_rows_that_they_will_share(plain: Plain) -> None:
    """Goal: late rows reach every sample. Method: two samples, rows late although all KV has come: they do not fork."""
    body = completion(3, prompt=prompt(3, 40), n=2)
    waiting = [True]
    with pair(late=lambda place: place[0] == ROWS and waiting[0]) as engines:
        engines.begin(body)
        (sequence,) = engines.decode.scheduler.unfinished
        wait_until(lambda: bool(engines.decode.step() or metric(engines, "transferred_blocks") == 3), "all KV has come")
        for _ in range(3):
            engines.decode.step()
        assert sequence.state is State.LANDING
        waiting[0] = False
        assert missing_rows(plain, body, engines.finish()) == 0


def metric(engines: Pair, name: str) -> int:
    return int(getattr(engines.decode.decode_counters, name))


def test_rows_that_never_come_are_missing_with_a_reason(plain: Plain) -> None:
    """Goal: never silent. Method: rows are held back until prefill has gone; decode has ended with the KV by then."""
    body = completion(3, prompt=prompt(3, 40), max_tokens=9)
    with pair(late=lambda place: place == (ROWS, 1)) as engines:
        engines.begin(body)
        (sequence,) = engines.decode.scheduler.unfinished
        wait_until(lambda: bool(engines.decode.step() or sequence.state is State.SETTLING), "all is generated")
        engines.offers.withdraw(TransferId(sequence.handover.transfer), "gone")
        outputs = engines.finish()
        assert missing_rows(plain, body, outputs) == 16
        (gap,) = outputs[0].gaps
        assert (gap.start, gap.stop) == (16, 32)
        assert gap.reason.startswith("gone")


def test_more_conversations_than_fit(plain: Plain) -> None:
    """Goal: pressure on both pools. Method: twelve prompts at once on 16 blocks each, with preemption by swap."""
    bodies = {}
    with pair(replace(SMALL, device_blocks=20, sequences_max=6)) as engines:
        for number in range(12):
            body = completion(number, prompt=prompt(number, 30 + 3 * number), max_tokens=30)
            bodies[engines.begin(body)] = body
            engines.decode.step()
        outputs = {output.request.id: output for output in engines.finish()}
        for request_id, body in bodies.items():
            assert missing_rows(plain, body, [outputs[request_id]]) == 0
        assert engines.decode.manager.counters.preemptions > 0


def test_a_sequence_with_rows_on_their_way_stays_where_it_is(plain: Plain) -> None:
    """Goal: nothing lands in a block that was moved. Method: the earlier of two needs room."""
    bodies = [completion(number, prompt=prompt(number, 40), max_tokens=40) for number in (14, 15)]
    waiting = [False]
    with pair(replace(SMALL, device_blocks=7), late=lambda place: place[0] == ROWS and waiting[0]) as engines:
        engines.begin(bodies[0])
        (first,) = engines.decode.scheduler.unfinished
        wait_until(
            lambda: bool(engines.decode.step() or (first.state is State.RUNNING and not first.arriving)), "it runs"
        )
        waiting[0] = True
        engines.begin(bodies[1])
        second = engines.decode.scheduler.unfinished[1]
        wait_until(lambda: bool(engines.decode.step() or State.SWAPPED in (first.state, second.state)), "no room")
        assert first.state is State.SWAPPED
        assert second.arriving
        waiting[0] = False
        outputs = engines.finish()
        assert [missing_rows(plain, body, [output]) for body, output in zip(bodies, outputs, strict=True)] == [0, 0]


def test_an_abort_while_blocks_are_landing_gives_everything_back(plain: Plain) -> None:
    """Goal: no block is given away while something lands in it. Method: abort while a record is on its way in."""
    gate = threading.Event()
    with pair(gate=gate) as engines:
        request_id = engines.begin(completion(2))
        engines.decode.step()
        assert engines.pulls.entered.wait(DEADLINE_S)
        engines.decode.abort(request_id)
        (output,) = engines.decode.step()
        assert output.reason is FinishReason.ABORT
        landing = engines.decode.config.device_blocks - engines.decode.manager.free_device_blocks
        assert landing == 3
        gate.set()
        wait_until(lambda: bool(engines.decode.step() or not engines.decode.waits), "the pull has ended")
        body = completion(5)
        engines.begin(body)
        assert missing_rows(plain, body, engines.finish()) == 0


def test_a_partial_block_is_named_by_its_own_tokens() -> None:
    tokens = prompt(1, 40)
    with DecodeEngine(MODEL, SMALL, NAMESPACE) as engine:
        engine.manager.allocate("a", tokens)
        *full, partial = engine.manager.keys("a", tokens)
        assert full == engine.aux.keys.keys(tokens)
        assert partial == engine.aux.keys.key(full[-1], tokens[32:])


def test_blocks_on_offer_are_not_given_away(plain: Plain) -> None:
    """Goal: decode gets what was offered, however late it comes. Method: prefill's pool is used up three times over."""
    body = completion(20)
    with pair(replace(SMALL, device_blocks=8, host_blocks=0)) as engines:
        engines.begin(body)
        for number in range(21, 24):
            other = Request(f"other-{number}", tuple(prompt(number, 70)), 1, draw=DRAW)
            engines.offers.withdraw(TransferId(engines.hand_over(other).transfer), "not wanted")
            free = engines.prefill.manager
            wait_until(lambda free=free: bool(engines.prefill.step() or free.free_device_blocks == 5), "it is back")
        assert missing_rows(plain, body, engines.finish()) == 0
        assert engines.decode.decode_counters.prefill_recomputed_tokens == 0


def test_prefill_gone_before_the_pull(plain: Plain) -> None:
    """Goal: a request does not die with prefill. Method: its node is closed before decode asks."""
    body = completion(4)
    with pair(limits=HASTY) as engines:
        engines.begin(body)
        assert engines.offers.close()
        outputs = []
        wait_until(lambda: bool(outputs.extend(engines.decode.step()) or not engines.decode.busy), "decode has ended")
        assert missing_rows(plain, body, outputs) == 0
        assert engines.decode.decode_counters.prefill_recomputed_tokens == 40


def test_an_unknown_transfer_is_computed_here(plain: Plain) -> None:
    body = completion(6)
    request = Request("r", tuple(body["prompt"]), body["max_tokens"], temperature=0.8, seed=6, draw=DRAW)
    with pair() as engines:
        handover = replace(engines.hand_over(request), transfer=secrets.token_bytes(16))
        engines.decode.take_over(request, handover)
        outputs = []
        wait_until(lambda: bool(outputs.extend(engines.decode.step()) or not engines.decode.busy), "decode has ended")
        assert missing_rows(plain, body, outputs) == 0
        engines.offers.withdraw(*[TransferId(t) for t in engines.prefill._leased], "the test is over")
        engines.finish()


def test_a_prefill_that_gives_up_in_the_middle_is_not_believed(plain: Plain) -> None:
    """Goal: decode goes on from what it has verified only. Method: the offer is aborted while its first record lands;
    the others are lost.
    """
    body = completion(21, prompt=prompt(21, 70), max_tokens=6)
    gate = threading.Event()
    with pair(gate=gate, lost=lambda place: place[1] > 1) as engines:
        engines.begin(body)
        engines.decode.step()
        assert engines.pulls.entered.wait(DEADLINE_S)
        (sequence,) = engines.decode.scheduler.unfinished
        assert engines.decode.step() == [], "nothing is generated from blocks that are not there"
        assert sequence.state is State.LANDING
        engines.offers.withdraw(TransferId(sequence.handover.transfer), "the request was cancelled")
        gate.set()
        assert missing_rows(plain, body, engines.finish()) == 0
        assert engines.decode.decode_counters.prefill_recomputed_tokens >= 70 - 32


def test_blocks_that_are_landing_are_found_by_nobody(plain: Plain) -> None:
    """Goal: no prefix hit on a block that has not come. Method: the same prompt again while the first one's blocks are
    on their way; and they never come.
    """
    body = completion(22, prompt=prompt(22, 40), max_tokens=6)
    gate = threading.Event()
    with pair(gate=gate, lost=lambda place: place[0] == KV) as engines:
        engines.begin(body)
        engines.decode.step()
        assert engines.pulls.entered.wait(DEADLINE_S)
        engines.begin(body)
        engines.decode.step()
        assert engines.decode.manager.counters.prefix_hit_tokens == 0
        gate.set()
        for output in engines.finish():
            assert missing_rows(plain, body, [output]) == 0


def test_one_transfer_is_taken_over_once(plain: Plain) -> None:
    """Goal: a transfer named twice overwrites nothing. Method: a second request with the first one's handover."""
    body = completion(23)
    gate = threading.Event()
    with pair(gate=gate) as engines:
        engines.begin(body)
        (sequence,) = engines.decode.scheduler.unfinished
        for _ in range(2):  # while it waits, and while it is pulled
            with pytest.raises(InvalidInputError, match="transfer"):
                engines.decode.take_over(replace(sequence.request, id="again"), sequence.handover)
            engines.decode.step()
        assert engines.pulls.entered.wait(DEADLINE_S)
        gate.set()
        assert missing_rows(plain, body, engines.finish()) == 0

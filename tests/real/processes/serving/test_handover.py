"""An engine goes on where another has stopped: the same tokens and rows, whichever data arrives and when."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from budget import examples
from engine_runs import after
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from ports import hold_port
from serving import DEADLINE_S, Plain, completion, plain_model, prompt

from cache_manager.errors import InvalidInputError
from cache_manager.keys import Namespace
from paged_engine.handover import DecodeEngine, PrefillEngine
from paged_engine.processes import until
from paged_engine.request import EngineConfig, FinishReason, Output, Request
from paged_engine.sequence import State
from transfer import TransferLimits, ZmqLink, ZmqSettings

MODEL = plain_model()
NAMESPACE = Namespace("m", weights_version=3)
LIMITS = TransferLimits(retry_s=0.2, retries_max=5)
SMALL = EngineConfig(device_blocks=16, host_blocks=16, sequences_max=4)


@dataclass(slots=True)
class Pair:
    """Prefill and decode engines in this thread, real nodes between them."""

    prefill: PrefillEngine
    decode: DecodeEngine
    number: int = 0
    bodies: dict[str, dict[str, Any]] = field(default_factory=dict)

    def begin(self, body: dict[str, Any], **change: Any) -> str:
        """Let decode take over a completion that prefill has computed; its id. ``change`` is of the handover."""
        self.number += 1
        request = Request(
            f"r{self.number}", tuple(body["prompt"]), body["max_tokens"], n=body.get("n", 1),
            temperature=body["temperature"], seed=body["seed"],
        )  # fmt: skip
        self.decode.add(request, structs.replace(self.prefill.lend(request), **change))
        self.prefill.step()
        self.bodies[request.id] = body
        return request.id

    def finish(self) -> list[Output]:
        """Decode's output, when it holds no blocks any more."""
        outputs = []

        def ended() -> bool:
            self.prefill.step()
            outputs.extend(self.decode.step())
            return not (self.prefill.busy or self.decode.busy or self.decode.waits)

        until(ended, "both have ended, and no fetch is under way", DEADLINE_S)
        for engine in (self.prefill, self.decode):
            engine.manager.assert_consistent()
            assert engine.manager.free_device_blocks == engine.config.device_blocks
        return sorted(outputs, key=lambda output: (output.request.id, output.sample))

    def judge(self, plain: Plain) -> list[Output]:
        """:meth:`finish`; every token is right, every row is there and right."""
        outputs = self.finish()
        expected = [each for body in self.bodies.values() for each in plain({**body, "ignore_eos": True})]
        for mine, output in zip(
            expected, sorted(outputs, key=lambda o: (int(o.request.id[1:]), o.sample)), strict=True
        ):
            assert output.tokens == mine.tokens
            assert output.routes.complete
            assert np.array_equal(output.routes.ids, mine.routes.ids)
        self.bodies.clear()
        return outputs


@contextmanager
def pair(
    config: EngineConfig = SMALL, lost: frozenset[int] = frozenset(), prefills: Namespace = NAMESPACE
) -> Iterator[Pair]:
    """``lost``: after each pass of prefill the rows of these blocks of the prompt are gone, as if never captured."""
    links = ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*")), ZmqLink(ZmqSettings())

    def forget() -> None:
        for sequence in prefill.scheduler.unfinished if lost else ():
            prefill.aux.forget([b for at, b in enumerate(prefill.manager.table(sequence.owner)) if at in lost])

    with (
        PrefillEngine(MODEL, config, prefills, link=links[0], limits=LIMITS, observer=after(forget)) as prefill,
        DecodeEngine(MODEL, config, NAMESPACE, link=links[1], limits=LIMITS) as decode,
    ):
        yield Pair(prefill, decode)


def nobody() -> str:
    """An address without a server: a fetch from there is in flight until the retries are over."""
    return f"tcp://127.0.0.1:{hold_port()}"


@pytest.mark.parametrize(("tokens", "n"), [(1, 3), (15, 1), (16, 3), (17, 1), (70, 3)])
def test_nothing_is_computed_twice_and_every_row_is_there(plain: Plain, tokens: int, n: int) -> None:
    """Goal: decode continues. Method: prompts that end inside, at and behind a block's end, and no prompt computed."""
    with pair() as engines:
        engines.begin(completion(tokens, prompt=prompt(tokens, tokens), n=n))
        assert {output.note for output in engines.judge(plain)} == {""}
        counters = engines.decode.crossed
        assert (counters.prefill_recomputed_tokens, counters.transferred_rows) == (0, tokens - 1)


def test_blocks_cross_while_the_prompt_is_computed(plain: Plain) -> None:
    """Goal: after the last chunk one block is left. Method: a prompt of seven chunks; decode has all but the last block
    before prefill computes the last chunk. It had nothing: blocks were offered when the prompt was done."""
    with pair(replace(SMALL, step_tokens=16)) as engines:
        engines.begin(completion(8, prompt=prompt(8, 100)))
        installed = lambda: engines.decode.step() or engines.decode.aux.counters.rows_installed  # noqa: E731
        for chunk in range(2, 7):
            until(lambda chunk=chunk: installed() == 16 * (chunk - 1), "the chunk before has come", DEADLINE_S)
            engines.prefill.step()
        until(lambda: installed() == 96, "all but the last block has come", DEADLINE_S)
        assert engines.prefill.computed_tokens == 96
        engines.judge(plain)


def test_nothing_is_computed_for_a_client_that_has_left() -> None:
    """Goal: decode's client leaves, prefill stops. Method: abort at decode when one chunk of seven is computed."""
    with pair(replace(SMALL, step_tokens=16)) as engines:
        request_id = engines.begin(completion(9, prompt=prompt(9, 100)))
        decode = engines.decode
        until(lambda: bool(decode.step() or decode.aux.counters.rows_installed == 16), "a block has come", DEADLINE_S)
        engines.decode.abort(request_id)
        node = engines.prefill.crossing.node
        until(lambda: not node.counters.offers_in_flight, "prefill's node has been told", DEADLINE_S)
        engines.bodies.clear()
        engines.finish()
        assert engines.prefill.computed_tokens == 16


def test_what_decode_has_itself_is_not_asked_for(plain: Plain) -> None:
    """Goal: the rows of the KV in use. Method: the same prompt again; only its last block crosses."""
    with pair() as engines:
        for _ in range(2):
            engines.begin(completion(1, prompt=prompt(1, 40)))
            engines.judge(plain)
        assert engines.decode.crossed.transferred_blocks == 3 + 1
        assert engines.decode.manager.counters.prefix_hit_tokens == 32


@examples(8)
@given(lost=st.frozensets(st.integers(0, 4)), n=st.sampled_from([1, 2]))
def test_what_does_not_come_is_computed_or_reported(plain: Plain, lost: frozenset[int], n: int) -> None:
    """Goal: never wrong, never silent. Method: prefill has lost rows of any blocks; decode computes from the first gap
    on, reports it, and its output is that of the plain engine."""
    with pair(lost=lost) as engines:
        engines.begin(completion(7, prompt=prompt(7, 70), n=n, max_tokens=6))
        outputs = engines.judge(plain)
        first = min(lost, default=5)
        assert engines.decode.crossed.prefill_recomputed_tokens == max(0, 69 - 16 * first)
        assert outputs[0].note.startswith(f"computed here from position {16 * first} on: " if lost else "")


def test_an_abort_while_blocks_are_landing_gives_everything_back(plain: Plain) -> None:
    """Goal: no block is given away while something may land in it. Method: abort while a fetch is under way; its blocks
    are held until it is over."""
    with pair() as engines:
        request_id = engines.begin(completion(2), address=nobody())
        engines.decode.step()
        engines.decode.abort(request_id)
        assert engines.decode.config.device_blocks - engines.decode.manager.free_device_blocks == 3
        (output,) = engines.decode.step()
        assert output.reason is FinishReason.ABORT
        engines.bodies.clear()
        engines.finish()
        engines.begin(completion(5))
        engines.judge(plain)


def test_new_weights_while_blocks_are_landing_compute_the_prompt(plain: Plain) -> None:
    """Goal: decode never continues from data of older weights. Method: a reset in the middle of a fetch; all of the
    prompt is computed here, with rows of the new version alone, and no first token of prefill's is taken."""
    with pair() as engines:
        body = completion(6)
        engines.begin(body, address=nobody())
        engines.decode.step()
        (sequence,) = engines.decode.scheduler.unfinished
        assert sequence.state is State.LANDING
        engines.decode.reset(weights_version=4)
        (output,) = engines.judge(plain)
        assert output.routes.weights_versions == ((0, len(output.routes), 4),)


def test_blocks_that_are_given_out_again_cross_as_they_were(plain: Plain) -> None:
    """Goal: decode gets the lent blocks, however late it asks. Method: prefill's pool is used up three times over
    before decode asks."""
    with pair(replace(SMALL, device_blocks=8, host_blocks=0)) as engines:
        engines.begin(completion(20))
        for number in range(21, 24):
            engines.prefill.lend(Request(f"other-{number}", tuple(prompt(number, 70)), 1))
            engines.prefill.step()
        engines.judge(plain)
        assert engines.decode.crossed.prefill_recomputed_tokens == 0


@pytest.mark.parametrize("how", ["nobody listens", "gone", "unknown", "other weights"])
def test_prefill_gone_before_the_pull(plain: Plain, how: str) -> None:
    """Goal: decode always answers. Method: the address has no server, or prefill has ended, knows no such transfer, or
    has other weights by now; decode computes the prompt and reports why."""
    change = {"nobody listens": {"address": nobody()}, "unknown": {"transfer": b"?" * 16}}.get(how, {})
    with pair() as engines:
        engines.begin(completion(21), **change)
        if how == "gone":
            engines.prefill.crossing.close()
        if how == "other weights":
            engines.prefill.reset(weights_version=4)
        (output,) = engines.judge(plain)
        assert engines.decode.crossed.prefill_recomputed_tokens == 39
        assert output.note.startswith("computed here from position 0 on: ")


def test_prefill_of_other_ranks_is_refused(plain: Plain) -> None:
    """Goal: KV of another tensor-parallel degree is not taken, and the reason names field and values. Method: prefill
    is the second of two ranks, decode the only one; decode computes the prompt."""
    with pair(prefills=replace(NAMESPACE, rank=1, world=2)) as engines:
        engines.begin(completion(26))
        (output,) = engines.judge(plain)
        assert output.note == "computed here from position 0 on: refused: peer's namespace.rank: wanted 0, got 1"


def test_prefill_gone_when_all_was_fetched(plain: Plain) -> None:
    """Goal: blocks that have arrived are used. Method: prefill ends between the last record and decode's first pass."""
    with pair() as engines:
        engines.begin(completion(24))

        def landed() -> bool:
            engines.prefill.step()
            return bool(engines.decode.step()) or all(
                s.state is not State.LANDING for s in engines.decode.scheduler.unfinished
            )

        engines.decode.step()
        until(landed, "the fetch is over", DEADLINE_S)
        engines.prefill.crossing.close()
        (output,) = engines.judge(plain)
        assert output.note == ""


@pytest.mark.parametrize("fails", [{0}, {1}, {0, 1, 2}])
def test_rows_came_and_their_kv_did_not(plain: Plain, fails: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: rows are not handed out where their KV is missing. Method: KV records that cannot be placed; decode
    computes from the first of them on."""
    with pair() as engines:
        count, fill = itertools.count(), engines.decode.kv.fill

        def failing(blocks: Any, given: Any) -> None:
            if next(count) in fails:
                raise RuntimeError("no copy, on purpose")
            fill(blocks, given)

        monkeypatch.setattr(engines.decode.kv, "fill", failing)
        engines.begin(completion(25))
        (output,) = engines.judge(plain)
        assert output.note.startswith("computed here from position ")


def test_landing_blocks_are_not_found_in_the_prefix_cache(plain: Plain) -> None:
    """Goal: no prefix hit on a block that has not come. Method: the same prompt again while the first one's blocks are
    on their way; and they never come."""
    with pair() as engines:
        for _ in range(2):
            engines.begin(completion(22, prompt=prompt(22, 40), max_tokens=6), address=nobody())
            engines.decode.step()
        assert engines.decode.manager.counters.prefix_hit_tokens == 0
        engines.judge(plain)


def test_one_transfer_is_taken_over_once(plain: Plain) -> None:
    """Goal: a transfer named twice overwrites nothing. Method: a second request with the first one's handover, while
    the first waits, and while it is fetched; and one with too few first tokens."""
    with pair() as engines:
        engines.begin(completion(23))
        (sequence,) = engines.decode.scheduler.unfinished
        handover = sequence.handover
        assert handover is not None
        for _ in range(2):
            with pytest.raises(InvalidInputError, match="transfer: wanted one that is not in use"):
                engines.decode.add(replace(sequence.request, id="again"), handover)
            engines.decode.step()
        engines.judge(plain)

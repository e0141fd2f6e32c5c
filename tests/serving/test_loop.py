"""The engine's thread: everything asked of it ends, with an answer or a reason."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from serving import DEADLINE_S, plain_model, prompt, wait_until

from cache_manager.keys import Namespace
from paged_engine.engine.engine import Engine, Span
from paged_engine.engine.request import EngineConfig, FinishReason, Output, Request
from paged_engine.serving.errors import BusyError, DrainingError, EngineFailedError
from paged_engine.serving.loop import EngineLoop

MODEL = plain_model()


class Gate:
    """Sees every forward pass: lets it go on when it is open, fails it when told to."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.failure: Exception | None = None
        self.passes = 0

    def begin(self, _spans: Sequence[Span]) -> None:
        self.passes += 1
        assert self.open.wait(DEADLINE_S)
        if self.failure is not None:
            raise self.failure

    def end(self) -> None: ...


@contextmanager
def looping(requests_max: int = 4) -> Iterator[tuple[EngineLoop, Engine, Gate]]:
    gate = Gate()
    engine = Engine(MODEL, EngineConfig(device_blocks=32), Namespace("m", weights_version=0), observer=gate)
    loop = EngineLoop(engine, requests_max=requests_max)
    loop.start()
    try:
        yield loop, engine, gate
    finally:
        gate.open.set()
        assert loop.close(DEADLINE_S)
        engine.close()


def request(number: int, **more: Any) -> Request:
    return Request(f"r{number}", tuple(prompt(number, 20)), more.pop("max_tokens", 6), **more)


def submit(loop: EngineLoop, engine: Engine, asked: Request, **more: Any) -> Future[tuple[Output, ...]]:
    return loop.submit(asked, lambda: engine.add(asked), lambda outputs: outputs, **more)


def test_answers_are_those_of_the_engine_alone() -> None:
    asked = [request(number, n=1 + number % 2) for number in range(4)]
    with looping() as (loop, engine, _):
        futures = [submit(loop, engine, each) for each in asked]
        found = [[output.tokens for output in future.result(DEADLINE_S)] for future in futures]
        assert (loop.counters.submitted, loop.counters.answered) == (4, 4)
    with Engine(MODEL, EngineConfig(device_blocks=32), Namespace("m", weights_version=0)) as alone:
        for each in asked:
            alone.add(each)
        outputs = {(output.request.id, output.sample): output.tokens for output in alone.run()}
    assert found == [[outputs[each.id, sample] for sample in range(each.n)] for each in asked]


def test_samples_that_end_apart_are_answered_together() -> None:
    with looping() as (loop, engine, _):
        first, second = submit(loop, engine, request(1, n=2, temperature=0.8)).result(DEADLINE_S)
        stop = next(token for token in first.tokens[:-1] if token not in second.tokens)
        asked = request(1, n=2, temperature=0.8, stop_tokens=frozenset({stop}))
        outputs = submit(loop, engine, asked).result(DEADLINE_S)
        assert [len(output.tokens) for output in outputs] == [first.tokens.index(stop) + 1, 6]


def test_tokens_are_told_as_they_come_each_once() -> None:
    told: dict[int, list[tuple[int, ...]]] = {0: [], 1: []}
    with looping() as (loop, engine, _):
        future = submit(loop, engine, request(1, n=2), tell=lambda sample, new: told[sample].append(new))
        outputs = future.result(DEADLINE_S)
    for output in outputs:
        assert tuple(token for new in told[output.sample] for token in new) == output.tokens
        assert len(told[output.sample]) > 1


def test_a_full_queue_refuses_and_takes_again() -> None:
    """Goal: full is a normal result. Method: a held engine with two requests in flight; the third is told at once."""
    with looping(requests_max=2) as (loop, engine, gate):
        gate.open.clear()
        futures = [submit(loop, engine, request(number)) for number in range(2)]
        with pytest.raises(BusyError, match="2 requests are in flight already"):
            submit(loop, engine, request(2))
        gate.open.set()
        for future in futures:
            future.result(DEADLINE_S)
        assert submit(loop, engine, request(3)).result(DEADLINE_S)
        assert loop.counters.refused == 1


def test_an_abort_ends_a_request_wherever_it_is() -> None:
    with looping() as (loop, engine, gate):
        gate.open.clear()
        running = submit(loop, engine, request(1, max_tokens=300, n=2))
        waiting = submit(loop, engine, request(2, max_tokens=300))
        wait_until(lambda: gate.passes > 0, "a pass has begun")
        loop.abort("r1")
        loop.abort("r2")
        loop.abort("nobody")
        gate.open.set()
        for future in (running, waiting):
            assert all(output.reason is FinishReason.ABORT for output in future.result(DEADLINE_S))
        assert engine.manager.free_device_blocks == 32


def test_a_failed_engine_answers_everybody() -> None:
    """Goal: no request hangs. Method: a pass raises; those in flight fail with the reason, later ones at once."""
    with looping() as (loop, engine, gate):
        gate.open.clear()
        futures = [submit(loop, engine, request(number)) for number in range(3)]
        gate.failure = MemoryError("no memory left")
        gate.open.set()
        for future in futures:
            with pytest.raises(EngineFailedError, match="MemoryError: no memory left"):
                future.result(DEADLINE_S)
        wait_until(lambda: loop.failure is not None, "the failure is known")
        with pytest.raises(EngineFailedError, match="no memory left"):
            submit(loop, engine, request(9))


def test_one_bad_request_harms_no_other() -> None:
    with looping() as (loop, engine, _):
        too_long = submit(loop, engine, request(1, max_tokens=100_000))
        asked = request(2)
        unspeakable: Future[Any] = loop.submit(asked, lambda: engine.add(asked), lambda _: 1 // 0)
        with pytest.raises(ValueError, match="max_tokens of at most"):
            too_long.result(DEADLINE_S)
        with pytest.raises(ZeroDivisionError):
            unspeakable.result(DEADLINE_S)
        assert submit(loop, engine, request(3)).result(DEADLINE_S)
        assert loop.counters.failed == 2


def open_when_closing(loop: EngineLoop, engine: Engine, gate: Gate) -> None:
    """Let the pass go on when the loop takes nothing any more: what is in it has not ended by itself."""

    def closing() -> bool:
        try:
            submit(loop, engine, request(1))
        except DrainingError:
            return True
        except BusyError:  # r1 is in flight
            return False
        raise AssertionError("a request twice")

    wait_until(closing, "it is closing")
    gate.open.set()


def test_closing_ends_what_is_in_care() -> None:
    with looping() as (loop, engine, gate):
        gate.open.clear()
        future = submit(loop, engine, request(1, max_tokens=300))
        wait_until(lambda: gate.passes > 0, "a pass has begun")
        opener = threading.Thread(target=open_when_closing, args=(loop, engine, gate), daemon=True)
        opener.start()
        assert loop.close(DEADLINE_S)
        opener.join(DEADLINE_S)
        with pytest.raises(DrainingError):
            future.result(DEADLINE_S)
        with pytest.raises(DrainingError):
            submit(loop, engine, request(2))

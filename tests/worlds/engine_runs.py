"""Requests that press an engine, what it must answer to them, and what it must leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from cache_manager.keys import Namespace
from paged_engine import text
from paged_engine.engine import Engine, Observer
from paged_engine.judge import Checker, SecondRun, Verdict
from paged_engine.models import build_model
from paged_engine.request import EngineConfig, Output, Request
from paged_engine.scheduler import Work

PLAIN = EngineConfig(device_blocks=300, caching=False)
TIGHT = EngineConfig(device_blocks=40, host_blocks=20)
NAMESPACE = Namespace("tests", weights_version=3)


def requests_of(count: int = 8, max_tokens: int = 20) -> list[Request]:
    return [
        Request(
            f"r{i}",
            tuple(text.opening(text.paragraphs()[i % 2]) + text.turn(text.questions()[i])),
            max_tokens,
            n=1 + i % 2,
            temperature=0.8 * (i % 3 > 0),
            seed=5,
        )
        for i in range(count)
    ]


def run(engine: Engine, requests: Sequence[Request]) -> dict[tuple[str, int], Output]:
    for request in requests:
        engine.add(request)
    outputs = {}
    while engine.busy:
        outputs |= {(o.request.id, o.sample): o for o in engine.step()}
        engine.manager.assert_consistent()
    assert engine.drain()
    assert_empty(engine)
    return outputs


def assert_empty(engine: Engine) -> None:
    assert not engine.manager.owners
    assert engine.manager.free_device_blocks == engine.config.device_blocks
    assert engine.manager.free_host_blocks == engine.config.host_blocks
    assert engine.aux.in_flight == 0


def after(act: Callable[[], None], observer: Observer = nullcontext) -> Observer:
    """An observer that acts when ``observer`` has left a pass."""

    @contextmanager
    def observe(work: list[Work]) -> Iterator[None]:
        with observer(work):
            yield
        act()

    return observe


def assert_same(one: dict[tuple[str, int], Output], other: dict[tuple[str, int], Output]) -> None:
    assert one.keys() == other.keys()
    for key, output in one.items():
        assert output.tokens == other[key].tokens, key
        assert output.reason is other[key].reason
        assert output.routes == other[key].routes, key


def judged(checker: Checker, model_name: str, outputs: dict[tuple[str, int], Output]) -> Verdict:
    second_run = SecondRun(build_model(model_name, seed=0, vocab_size=text.VOCAB_SIZE))
    return sum((checker.judge(output, second_run) for output in outputs.values()), Verdict())

"""The engine over a store: it continues from stored blocks, and no store loses a row or delays the engine."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from engine_runs import NAMESPACE, PLAIN, TIGHT, assert_empty, assert_same, judged, requests_of, run
from gate import Gate, GatedStore
from torch import nn
from waiting import until

from cache_manager.errors import BlockStateError
from cache_manager.jobs import JobLimits
from cache_manager.storage import open_store
from paged_engine.engine import Engine
from paged_engine.judge import Checker
from paged_engine.request import Output, Request
from paged_engine.sequence import State


def test_a_damaged_store_costs_time_and_never_a_row(qwen: nn.Module, tmp_path: Path) -> None:
    """Goal: a damaged record is a miss. Method: flip bits all over the extents, then run from that store."""
    url = tmp_path.joinpath("store").as_uri()
    checker, restored, results = Checker(), [], []
    for life in range(3):
        store = open_store(url)
        with checker.watching(qwen), Engine(qwen, TIGHT, NAMESPACE, store=store, observer=checker.observe) as engine:
            results.append(run(engine, requests_of(4)))
            restored.append(engine.manager.counters.restored_tokens)
            assert engine.manager.counters.store_failures == 0
        store.close()
        if life == 1:
            _flip_bits(tmp_path / "store", every=50_000)
    assert_same(results[0], results[2])
    assert all(o.routes.complete for o in results[2].values())
    verdict = judged(checker, "qwen3_moe", results[2])
    assert (verdict.rows_wrong, verdict.rows_missing) == (0, 0)
    assert restored[2] < restored[1] / 2


def _flip_bits(directory: Path, every: int) -> None:
    draw = random.Random(0)
    for extent in directory.glob("extent-*"):
        content = bytearray(extent.read_bytes())
        for at in range(4096 + draw.randrange(every), len(content), every):
            content[at] ^= 1 << draw.randrange(8)
        extent.write_bytes(content)


def _gated(url: str) -> tuple[GatedStore, Gate]:
    """The store at ``url``, which is read and written only when the test lets it."""
    store = GatedStore(open_store(url))
    store.gate = gate = Gate()
    return store, gate


def _until_answered(engine: Engine, outputs: list[Output], *requests: Request) -> None:
    samples = {(request.id, sample) for request in requests for sample in range(request.n)}
    for _ in range(2000):
        outputs += engine.step()
        engine.manager.assert_consistent()
        if samples <= {(o.request.id, o.sample) for o in outputs}:
            return
    raise AssertionError(f"not answered: {engine.scheduler.counts()}")


def pair() -> list[Request]:
    """A request that reads from the store, and one without a full block to read."""
    wanting, other = requests_of(2)
    return [wanting, replace(other, prompt=other.prompt[:15])]


@pytest.fixture
def stored(qwen: nn.Module, tmp_path: Path) -> tuple[str, dict[tuple[str, int], Output]]:
    """A store that knows the first one of the pair, and what the pair gets without any."""
    url = tmp_path.joinpath("store").as_uri()
    with Engine(qwen, PLAIN, NAMESPACE) as engine:
        plain = run(engine, pair())
    store = open_store(url)
    with Engine(qwen, TIGHT, NAMESPACE, store=store) as engine:
        run(engine, requests_of(1))
    store.close()
    return url, plain


def test_a_store_that_hangs_delays_only_requests_that_need_it(
    qwen: nn.Module, stored: tuple[str, dict[tuple[str, int], Output]]
) -> None:
    """Goal: a step never waits for the store. Method: its reads hang until the test lets them go; no clock."""
    url, plain = stored
    store, gate = _gated(url)
    outputs: list[Output] = []
    with Engine(qwen, replace(TIGHT, restore_wait_s=1e9), NAMESPACE, store=store) as engine:
        wanting, other = pair()
        engine.add(wanting)
        engine.add(other)
        _until_answered(engine, outputs, other)
        assert engine.scheduler.counts()[State.RESTORING] == 1
        assert {o.request.id for o in outputs} == {other.id}
        assert engine.manager.counters.restored_tokens == 0
        gate.open()
        _until_answered(engine, outputs, wanting)
        assert engine.manager.counters.restored_tokens > 0
        assert engine.drain()
        assert_empty(engine)
    store.close()
    assert_same(plain, {(o.request.id, o.sample): o for o in outputs})


def test_a_store_that_hangs_for_too_long_is_given_up(
    qwen: nn.Module, stored: tuple[str, dict[tuple[str, int], Output]]
) -> None:
    """Goal: no request waits for ever, and no block is taken from the store before its job is done. Method: a wait of
    zero seconds."""
    url, plain = stored
    store, gate = _gated(url)
    outputs: list[Output] = []
    config = replace(TIGHT, restore_wait_s=0.0, jobs=JobLimits(close_s=0.0))
    engine = Engine(qwen, config, NAMESPACE, store=store)
    for request in pair():
        engine.add(request)
    _until_answered(engine, outputs, *pair())
    assert engine.manager.counters.restored_tokens == 0
    with pytest.raises(BlockStateError, match=r"close: wanted nothing in flight, got 0 steps and moves, \d+ jobs"):
        engine.close()
    gate.open()
    until(engine.drain, what="the store does not end")
    engine.close()
    store.close()
    assert_same(plain, {(o.request.id, o.sample): o for o in outputs})


@pytest.mark.parametrize("seed", range(2))
def test_abort_while_the_store_is_asked_leaves_nothing_behind(
    qwen: nn.Module, stored: tuple[str, dict[tuple[str, int], Output]], seed: int
) -> None:
    """Goal: abort, preemption and reset are safe beside a job. Method: release store calls, abort and reset at
    random."""
    draw, (store, gate) = random.Random(seed), _gated(stored[0])
    requests = requests_of(8)
    outputs: list[Output] = []
    with Engine(qwen, replace(TIGHT, device_blocks=30), NAMESPACE, store=store) as engine:
        for request in requests:
            engine.add(request)
        for _ in range(60):
            outputs += engine.step()
            if draw.random() < 0.2:
                engine.abort(draw.choice(requests).id)
            if draw.random() < 0.2 and gate.waiting:
                gate.let_go()
            if draw.random() < 0.03:
                engine.reset(weights_version=engine.aux.namespace.weights_version + 1)
            engine.manager.assert_consistent()
        gate.open()
        outputs += engine.run()
        assert engine.drain()
        assert_empty(engine)
    store.close()
    assert {o.request.id for o in outputs} == {r.id for r in requests}

"""The engine under pressure must be the engine without it: same tokens, same routes, nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from engine_runs import NAMESPACE, PLAIN, TIGHT, after, assert_empty, assert_same, judged, requests_of, run
from torch import nn

from cache_manager.errors import InvalidInputError
from paged_engine import text
from paged_engine.drivers import move_routers
from paged_engine.engine import Engine
from paged_engine.judge import Checker, Verdict
from paged_engine.models import build_model
from paged_engine.request import EngineConfig, FinishReason, Output, Request
from paged_engine.scheduler import Work
from paged_engine.sequence import State


def test_swap_prefix_cache_and_copy_on_write_change_no_token_and_no_row(qwen: nn.Module) -> None:
    """Goal: pressure is invisible. Method: the same requests with and without, every way of moving a row used."""
    with Engine(qwen, PLAIN, NAMESPACE) as engine:
        plain = run(engine, requests_of())
    with Engine(qwen, TIGHT, NAMESPACE) as engine:
        tight = run(engine, requests_of())
        blocks, rows = engine.manager.counters, engine.aux.counters
    assert_same(plain, tight)
    assert min(blocks.prefix_hit_tokens, rows.swapped_out_rows, rows.swapped_in_rows, rows.copied_rows) > 0
    assert blocks.evicted_blocks > 0
    for output in tight.values():
        assert output.routes.complete
        assert len(output.routes) == len(output.sequence) - 1  # the last sampled token has no row
        assert output.routes.weights_versions == ((0, len(output.routes), 3),)


@pytest.mark.parametrize("change", [{"device_blocks": 32}, {"device_blocks": 300, "step_tokens": 15}])
def test_neither_a_full_host_nor_a_step_s_budget_shows(qwen: nn.Module, change: dict[str, int]) -> None:
    """Goal: sequences that are dropped or cut into chunks give the same results. Method: no host blocks; budgets around
    a block."""
    with Engine(qwen, PLAIN, NAMESPACE) as engine:
        plain = run(engine, requests_of(6, max_tokens=12))
    with Engine(qwen, replace(TIGHT, host_blocks=0, **change), NAMESPACE) as engine:
        assert_same(plain, run(engine, requests_of(6, max_tokens=12)))
        assert engine.computed_tokens <= engine.steps * engine.config.step_tokens
        assert (engine.scheduler.dropped > 0) == (engine.config.device_blocks == 32)


def test_a_sample_stops_at_a_token_or_its_length(qwen: nn.Module) -> None:
    """Method: let it run once, then ask it to stop at what it said."""
    request = replace(requests_of(2)[1], n=1)
    with Engine(qwen, PLAIN, NAMESPACE) as engine:
        said = run(engine, [request])["r1", 0].tokens
        stop = next(i for i, t in enumerate(said) if t not in said[:i] and i > 3)
        asked = [
            replace(request, stop_tokens=frozenset({said[stop]})),
            replace(request, max_tokens=stop + 1),
        ]
        found = [run(engine, [each])["r1", 0] for each in asked]
    assert [o.tokens for o in found] == [said[: stop + 1]] * 2
    assert [o.reason for o in found] == [FinishReason.STOP, FinishReason.LENGTH]
    assert {len(o.routes) for o in found} == {len(request.prompt) + stop}


def test_noise_depends_on_seed_sample_and_position(qwen: nn.Module) -> None:
    """Goal: what else is in a batch changes no token. Method: twenty samples, more than the tables of a manager have;
    three of them beside other requests and under another name; another seed."""
    request = replace(requests_of(3)[1], n=20, max_tokens=8, temperature=1.0)
    with Engine(qwen, EngineConfig(device_blocks=400), NAMESPACE) as engine:
        alone = run(engine, [request])
        crowd = run(engine, [*requests_of(5)[2:], replace(request, id="again", n=3)])
        other = run(engine, [replace(request, n=1, seed=6)])
    assert len({alone["r1", s].tokens for s in range(20)}) == 20
    assert all(alone["r1", s].tokens == crowd["again", s].tokens for s in range(3))
    assert alone["r1", 0].tokens != other["r1", 0].tokens


@pytest.mark.parametrize("seed", range(2))
def test_abort_at_any_time_leaves_nothing_behind(qwen: nn.Module, seed: int) -> None:
    """Goal: an abort is safe in every state, also before, in and after a pass. Method: abort at random, look at every
    block."""
    draw, requests = random.Random(seed), requests_of(8)
    checker, states = Checker(), set()
    engine: Engine

    def abort_one() -> None:
        if draw.random() < 0.2:
            engine.abort(draw.choice(requests).id)

    @contextmanager
    def observe(work: list[Work]) -> Iterator[None]:
        with checker.observe(work):
            abort_one()
            yield
        abort_one()

    with checker.watching(qwen), Engine(qwen, TIGHT, NAMESPACE, observer=observe) as engine:
        for request in requests:
            engine.add(request)
        outputs = []
        while engine.busy:
            outputs += engine.step()
            engine.manager.assert_consistent()
            if draw.random() < 0.1:
                victim = draw.choice(requests).id
                states |= {s.state for s in engine.scheduler.of(victim)}
                engine.abort(victim)
                engine.abort(victim)
                engine.manager.assert_consistent()
        assert_empty(engine)
    assert len({(o.request.id, o.sample) for o in outputs}) == len(outputs)
    assert {o.request.id for o in outputs} == {r.id for r in requests}
    assert any(o.reason is FinishReason.ABORT for o in outputs)
    for output in outputs:
        verdict = checker.judge(output)
        assert (output.routes.complete, verdict.rows_wrong, verdict.rows_judged_by_recompute) == (True, 0, 0)


def test_an_aborted_sleeper_keeps_its_rows_and_a_waiting_one_has_none(qwen: nn.Module) -> None:
    """Goal: rows are collected from whichever tier the sequence is in, and from the journal when it is in none."""
    with Engine(qwen, TIGHT, NAMESPACE) as engine:
        for request in requests_of(8):
            engine.add(request)
        dropped = None
        while dropped is None or not engine.scheduler.counts()[State.SWAPPED]:
            engine.step()
            waiting = [s for s in engine.scheduler.unfinished if s.state is State.WAITING]
            dropped = next((s for s in waiting if s.journal is not None and s.generated), None)
        asleep = next(s for s in engine.scheduler.unfinished if s.state is State.SWAPPED)
        fresh = next(s for s in waiting if s.journal is None)
        ends = asleep, dropped, fresh
        for sequence in ends:
            engine.abort(sequence.request.id)
        ended = {(o.request.id, o.sample): o.routes for o in engine.step()}
    slept, lost, never = (ended[s.request.id, s.sample] for s in ends)
    assert (len(slept), slept.complete) == (asleep.computed, True)
    assert (len(lost), lost.complete) == (len(dropped.tokens) - 1, True)
    assert len(never) == 0


def test_a_failing_pass_commits_nothing_and_the_engine_goes_on(qwen: nn.Module) -> None:
    """Goal: an exception leaves no row of the pass behind. Method: raise once in the middle, then step again."""
    requests, failures = requests_of(3), iter([True])

    def fail() -> None:
        if engine.steps == 4 and next(failures, False):
            raise RuntimeError("device lost")

    with Engine(qwen, PLAIN, NAMESPACE) as engine:
        plain = run(engine, requests)
    with Engine(qwen, PLAIN, NAMESPACE, observer=after(fail)) as engine:
        for request in requests:
            engine.add(request)
        outputs: list[Output] = []
        while engine.steps < 4:
            outputs += engine.step()
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
        assert engine.aux.steps == []
        outputs += engine.run()
    assert_same(plain, {(o.request.id, o.sample): o for o in outputs})


# The judge itself -------------------------------------------------------------------------------------------------


def test_the_checker_sees_a_row_that_was_changed(qwen: nn.Module) -> None:
    """Goal: the judge is worth its name. Method: swap two bytes of a row behind kvroute's back in mid-run."""
    checker = Checker()

    def tamper() -> None:
        if engine.steps == 6:
            rows = engine.aux.region("device").rows[engine.manager.table("r0#0")[0]]
            rows[0], rows[1] = int(rows[1]), int(rows[0])

    with checker.watching(qwen), Engine(qwen, PLAIN, NAMESPACE, observer=after(tamper, checker.observe)) as engine:
        engine.add(replace(requests_of(1)[0], n=1))
        (output,) = engine.run()
    verdict = judged(checker, "qwen3_moe", {("r0", 0): output})
    assert (verdict.rows_wrong, verdict.rows_missing) == (1, 0)


# Rows that tokens were sampled with ---------------------------------------------------------------------------------


def test_rows_are_those_that_the_tokens_were_sampled_with() -> None:
    """Goal: a sequence that is computed again under other weights keeps the rows that its tokens came from.

    Method: two updates of real router weights in the middle of generation, under pressure that swaps and drops too.
    The judge saw every pass and knows which row of each position came first.
    """
    model, checker = build_model("qwen3_moe", seed=0, vocab_size=text.VOCAB_SIZE), Checker()
    outputs, updates, config = list[Output](), [9, 40], replace(TIGHT, device_blocks=36, host_blocks=8)
    with checker.watching(model), Engine(model, config, NAMESPACE, observer=checker.observe) as engine:
        for request in requests_of(8):
            engine.add(request)
        while engine.busy:
            if updates and engine.steps == updates[0]:
                version = NAMESPACE.weights_version + 3 - len(updates)
                updates.pop(0)
                move_routers(model, version)
                engine.reset(weights_version=version)
                checker.weights_changed()
                engine.manager.assert_consistent()
            outputs += engine.step()
        assert_empty(engine)
    verdict = sum((checker.judge(output) for output in outputs), Verdict())
    assert (verdict.rows_wrong, verdict.rows_missing, verdict.rows_judged_by_recompute) == (0, 0, 0)
    assert len(checker.computed_differently) > 100  # otherwise the run has shown nothing
    versions = [[version for _, _, version in output.routes.weights_versions] for output in outputs]
    assert max(map(len, versions)) > 1
    for found, output in zip(versions, outputs, strict=True):
        assert found == sorted(found)
        output.routes.validate(output.sequence, rows=len(output.sequence) - 1)


def test_a_request_that_cannot_run_is_refused_and_changes_nothing(qwen: nn.Module) -> None:
    fields: list[dict[str, object]] = [{"id": ""}, {"prompt": ()}, {"max_tokens": 0}, {"n": 0}, {"temperature": -1.0}]
    for broken in fields:
        with pytest.raises(InvalidInputError, match=next(iter(broken))):
            replace(Request("r", (1,), 1), **broken)
    with Engine(qwen, TIGHT, NAMESPACE) as engine:
        with pytest.raises(InvalidInputError, match="at most 640 tokens together"):
            engine.add(Request("long", tuple(range(600)), 41))
        engine.add(Request("one", (3, 4), 2))
        with pytest.raises(InvalidInputError, match="not in use"):
            engine.add(Request("one", (3, 4), 2))
        assert len(engine.run()) == 1

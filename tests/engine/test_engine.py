"""The engine under pressure must be the engine without it: same tokens, same routes, nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from gate import Gate, GatedStore, until
from torch import nn

from cache_manager.errors import BlockStateError, ConfigError, InvalidInputError
from cache_manager.jobs import JobLimits
from cache_manager.keys import Namespace
from kvroute.demo.checker import Checker, SecondRun, Verdict
from kvroute.demo.update import move_routers
from kvroute.engine import text
from kvroute.engine.engine import Engine, Span
from kvroute.engine.models import build_model
from kvroute.engine.request import EngineConfig, FinishReason, Output, Request
from kvroute.engine.sequence import State
from kvroute.engine.stores import EngineStores

PLAIN = EngineConfig(device_blocks=300, caching=False)
TIGHT = EngineConfig(device_blocks=40, host_blocks=20)
NAMESPACE = Namespace("tests", weights_version=3)


def _requests(count: int = 8, max_tokens: int = 20) -> list[Request]:
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


def _run(engine: Engine, requests: Sequence[Request]) -> dict[tuple[str, int], Output]:
    for request in requests:
        engine.add(request)
    outputs = {}
    while engine.busy:
        outputs |= {(o.request.id, o.sample): o for o in engine.step()}
        engine.manager.assert_consistent()
    assert engine.drain()
    _assert_empty(engine)
    return outputs


def _assert_empty(engine: Engine) -> None:
    assert not engine.manager.owners
    assert engine.manager.free_device_blocks == engine.config.device_blocks
    assert engine.manager.free_host_blocks == engine.config.host_blocks
    assert engine.aux.in_flight == 0


@dataclass
class Hook:
    """An observer made of two functions."""

    on_begin: Callable[[Sequence[Span]], None] = field(default=lambda _: None)
    on_end: Callable[[], None] = field(default=lambda: None)

    def begin(self, spans: Sequence[Span]) -> None:
        self.on_begin(spans)

    def end(self) -> None:
        self.on_end()


def _same(one: dict[tuple[str, int], Output], other: dict[tuple[str, int], Output]) -> None:
    assert one.keys() == other.keys()
    for key, output in one.items():
        assert output.tokens == other[key].tokens, key
        assert output.reason is other[key].reason
        assert output.routes == other[key].routes, key


def test_swap_prefix_cache_and_copy_on_write_change_no_token_and_no_row(model: nn.Module) -> None:
    """Goal: pressure is invisible. Method: the same requests with and without, every way of moving a row used."""
    with Engine(model, PLAIN, NAMESPACE) as engine:
        plain = _run(engine, _requests())
    with Engine(model, TIGHT, NAMESPACE) as engine:
        tight = _run(engine, _requests())
        blocks, rows = engine.manager.counters, engine.aux.counters
    _same(plain, tight)
    assert min(blocks.prefix_hit_tokens, rows.swapped_out_rows, rows.swapped_in_rows, rows.copied_rows) > 0
    assert blocks.evicted_blocks > 0
    for output in tight.values():
        assert output.routes.complete
        assert len(output.routes) == len(output.sequence) - 1  # the last sampled token has no row
        assert output.routes.weights_versions == ((0, len(output.routes), 3),)


def test_without_room_on_the_host_sequences_are_computed_again(model: nn.Module) -> None:
    with Engine(model, PLAIN, NAMESPACE) as engine:
        plain = _run(engine, _requests(6))
    with Engine(model, replace(TIGHT, device_blocks=32, host_blocks=0), NAMESPACE) as engine:
        dropping = _run(engine, _requests(6))
        assert engine.scheduler.dropped > 0
    _same(plain, dropping)


@pytest.mark.parametrize("step_tokens", [2, 15, 17, 256])
def test_the_budget_of_a_step_shows_nowhere(qwen: nn.Module, step_tokens: int) -> None:
    requests = _requests(3, max_tokens=6)
    with Engine(qwen, PLAIN, NAMESPACE) as engine:
        plain = _run(engine, requests)
    with Engine(qwen, replace(PLAIN, step_tokens=step_tokens), NAMESPACE) as engine:
        _same(plain, _run(engine, requests))
        assert engine.computed_tokens <= engine.steps * step_tokens


def test_one_sequence_may_fill_the_device(qwen: nn.Module) -> None:
    request = _requests(1)[0]
    blocks = -(-(len(request.prompt) + request.max_tokens) // 16)
    with Engine(qwen, EngineConfig(device_blocks=blocks, host_blocks=1), NAMESPACE) as engine:
        again = replace(request, id="again", n=2, temperature=1.0)
        assert {o.reason for o in _run(engine, [request, again]).values()} == {FinishReason.LENGTH}


def test_a_sample_stops_at_a_token_a_sequence_or_its_length(qwen: nn.Module) -> None:
    """Method: let it run once, then ask it to stop at what it said."""
    request = replace(_requests(2)[1], n=1)
    with Engine(qwen, PLAIN, NAMESPACE) as engine:
        said = _run(engine, [request])["r1", 0].tokens
        stop = next(i for i, t in enumerate(said) if t not in said[:i] and i > 3)
        asked = [
            replace(request, stop_tokens=frozenset({said[stop]})),
            replace(request, stop_sequences=((said[stop - 1], said[stop]),)),
            replace(request, max_tokens=stop + 1),
        ]
        found = [_run(engine, [each])["r1", 0] for each in asked]
    assert [o.tokens for o in found] == [said[: stop + 1]] * 3
    assert [o.reason for o in found] == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    assert {len(o.routes) for o in found} == {len(request.prompt) + stop}


def test_noise_depends_on_seed_request_sample_and_nothing_else(qwen: nn.Module) -> None:
    request = replace(_requests(3)[1], n=3, temperature=1.0)
    with Engine(qwen, PLAIN, NAMESPACE) as engine:
        alone = _run(engine, [request])
        crowd = _run(engine, [*(replace(r, id=f"other-{r.id}") for r in _requests(5)), request])
        other = _run(engine, [replace(request, seed=6)])
    assert len({alone["r1", s].tokens for s in range(3)}) == 3
    assert all(alone["r1", s].tokens == crowd["r1", s].tokens for s in range(3))
    assert alone["r1", 0].tokens != other["r1", 0].tokens


@pytest.mark.parametrize("seed", range(4))
def test_abort_at_any_time_leaves_nothing_behind(qwen: nn.Module, seed: int) -> None:
    """Goal: an abort is safe in every state, also while a pass runs. Method: abort at random, look at every block."""
    draw, requests = random.Random(seed), _requests(8)
    checker, states = Checker(), set()
    checker.attach(qwen)
    engine: Engine

    def abort_one() -> None:
        checker.end()
        if draw.random() < 0.3:
            engine.abort(draw.choice(requests).id)

    with Engine(qwen, TIGHT, NAMESPACE, observer=Hook(checker.begin, abort_one)) as engine:
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
        _assert_empty(engine)
    checker.detach()
    assert len({(o.request.id, o.sample) for o in outputs}) == len(outputs)
    assert {o.request.id for o in outputs} == {r.id for r in requests}
    assert any(o.reason is FinishReason.ABORT for o in outputs)
    for output in outputs:
        again = np.full((len(output.routes), *output.routes.ids.shape[1:]), -1, np.int32)
        verdict = checker.judge(output.sequence, output.routes, len(output.routes), again)
        assert (verdict.wrong, verdict.missing, verdict.judged_by_recompute) == (0, 0, 0)


@pytest.mark.parametrize("when", ["on_begin", "on_end"])
def test_an_abort_during_a_pass_drops_the_rows_of_that_pass(qwen: nn.Module, when: str) -> None:
    request = replace(_requests(1)[0], n=1)
    engine: Engine

    def give_up(*_: object) -> None:
        if engine.steps == 5:
            engine.abort(request.id)

    with Engine(qwen, TIGHT, NAMESPACE, observer=Hook(**{when: give_up})) as engine:
        engine.add(request)
        (output,) = engine.run()
        assert engine.aux.counters.late_writes_dropped == 1
        _assert_empty(engine)
    assert output.reason is FinishReason.ABORT
    assert len(output.routes) == len(output.sequence) - 1
    assert output.routes.complete


def test_an_aborted_sleeper_keeps_its_rows_and_a_waiting_one_has_none(qwen: nn.Module) -> None:
    """Goal: rows are collected from whichever tier the sequence is in, and from the journal when it is in none."""
    with Engine(qwen, TIGHT, NAMESPACE) as engine:
        for request in _requests(8):
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
    requests, failures = _requests(3), iter([True])

    def fail() -> None:
        if engine.steps == 4 and next(failures, False):
            raise RuntimeError("device lost")

    with Engine(qwen, PLAIN, NAMESPACE) as engine:
        plain = _run(engine, requests)
    with Engine(qwen, PLAIN, NAMESPACE, observer=Hook(on_end=fail)) as engine:
        for request in requests:
            engine.add(request)
        outputs: list[Output] = []
        while engine.steps < 4:
            outputs += engine.step()
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
        assert engine.aux.counters.steps_aborted == 1
        outputs += engine.run()
    _same(plain, {(o.request.id, o.sample): o for o in outputs})


# The store --------------------------------------------------------------------------------------------------------


def _judged(checker: Checker, model_name: str, outputs: dict[tuple[str, int], Output]) -> Verdict:
    second_run, verdict = SecondRun(build_model(model_name, seed=0, vocab_size=text.VOCAB_SIZE)), Verdict()
    for o in outputs.values():
        verdict += checker.judge(o.sequence, o.routes, len(o.sequence) - 1, second_run(o.sequence))
    return verdict


def test_a_new_engine_goes_on_from_the_store(model: nn.Module, tmp_path: Path) -> None:
    outputs = []
    computed = []
    for _ in range(2):
        stores = EngineStores.open(tmp_path.joinpath("store").as_uri())
        with Engine(model, TIGHT, NAMESPACE, stores=stores) as engine:
            outputs.append(_run(engine, _requests(5)))
            computed.append(engine.computed_tokens)
            restored = engine.manager.counters.restored_tokens
        stores.close()
    _same(outputs[0], outputs[1])
    assert restored > 200  # how much more depends on which restores are under way at once: half of the blocks at most
    assert computed[1] < computed[0] - 100


def test_other_weights_find_nothing_in_the_store(qwen: nn.Module, tmp_path: Path) -> None:
    for version in (3, 4):
        stores = EngineStores.open(tmp_path.joinpath("store").as_uri())
        namespace = replace(NAMESPACE, weights_version=version)
        with Engine(qwen, TIGHT, namespace, stores=stores) as engine:
            _run(engine, _requests(2))
            assert engine.manager.counters.restored_tokens == 0
            assert engine.manager.counters.persisted_blocks > 0
        stores.close()


@pytest.mark.parametrize("damaged", ["rows", "kv"])
def test_a_damaged_store_costs_time_and_never_a_row(qwen: nn.Module, tmp_path: Path, damaged: str) -> None:
    """Goal: what is not sound is a miss. Method: flip bits all over the segments, then run from that store."""
    url = tmp_path.joinpath("store").as_uri()
    checker, restored = Checker(), []
    checker.attach(qwen)
    results = []
    for life in range(3):
        stores = EngineStores.open(url)
        with Engine(qwen, TIGHT, NAMESPACE, stores=stores, observer=Hook(checker.begin, checker.end)) as engine:
            results.append(_run(engine, _requests(4)))
            restored.append(engine.manager.counters.restored_tokens)
            assert engine.manager.counters.store_failures == 0
        stores.close()
        if life == 1:
            _flip_bits(tmp_path / "store" / damaged, every=1000 if damaged == "rows" else 50_000)
    checker.detach()
    _same(results[0], results[2])
    assert all(o.routes.complete for o in results[2].values())
    verdict = _judged(checker, "qwen3_moe", results[2])
    assert (verdict.wrong, verdict.missing) == (0, 0)
    assert restored[2] < restored[1] / 2


def _flip_bits(directory: Path, every: int) -> None:
    draw = random.Random(0)
    for segment in directory.glob("segment-*"):
        content = bytearray(segment.read_bytes())
        for at in range(4096 + draw.randrange(every), len(content), every):
            content[at] ^= 1 << draw.randrange(8)
        segment.write_bytes(content)


def _gated(url: str) -> tuple[EngineStores, Gate]:
    """The stores at ``url``, whose rows are read and written only when the test lets them."""
    stores = EngineStores.open(url)
    rows = GatedStore(stores.rows)
    rows.gate = gate = Gate()
    return replace(stores, rows=rows), gate


def _until_answered(engine: Engine, outputs: list[Output], *requests: Request) -> None:
    samples = {(request.id, sample) for request in requests for sample in range(request.n)}
    for _ in range(2000):
        outputs += engine.step()
        engine.manager.assert_consistent()
        if samples <= {(o.request.id, o.sample) for o in outputs}:
            return
    raise AssertionError(f"not answered: {engine.scheduler.counts()}")


@pytest.fixture
def stored(qwen: nn.Module, tmp_path: Path) -> tuple[str, dict[tuple[str, int], Output]]:
    """A store that knows the first request of the usual ones, and what two of them get without any."""
    url = tmp_path.joinpath("store").as_uri()
    with Engine(qwen, PLAIN, NAMESPACE) as engine:
        plain = _run(engine, _requests(2))
    stores = EngineStores.open(url)
    with Engine(qwen, TIGHT, NAMESPACE, stores=stores) as engine:
        _run(engine, _requests(1))
    stores.close()
    return url, plain


def test_a_store_that_hangs_holds_up_nobody_but_those_who_want_from_it(
    qwen: nn.Module, stored: tuple[str, dict[tuple[str, int], Output]]
) -> None:
    """Goal: a step never waits for the store. Method: its reads hang until the test lets them go; no clock."""
    url, plain = stored
    stores, gate = _gated(url)
    outputs: list[Output] = []
    with Engine(qwen, replace(TIGHT, restore_wait_s=1e9), NAMESPACE, stores=stores) as engine:
        wanting, other = _requests(2)
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
        _assert_empty(engine)
    stores.close()
    _same(plain, {(o.request.id, o.sample): o for o in outputs})


def test_a_store_that_hangs_for_too_long_is_given_up(
    qwen: nn.Module, stored: tuple[str, dict[tuple[str, int], Output]]
) -> None:
    """Goal: nobody waits for ever, and nothing is taken from the store before it is done. Method: wait for no time."""
    url, plain = stored
    stores, gate = _gated(url)
    outputs: list[Output] = []
    config = replace(TIGHT, restore_wait_s=0.0, jobs=JobLimits(close_s=0.0))
    engine = Engine(qwen, config, NAMESPACE, stores=stores)
    for request in _requests(2):
        engine.add(request)
    _until_answered(engine, outputs, *_requests(2))
    assert engine.scheduler.given_up > 0
    with pytest.raises(
        BlockStateError, match=r"close: wanted nothing in flight, got restore of .* blocks \(carrying\)"
    ):
        engine.close()
    gate.open()
    until(engine.drain, "the store does not end")
    engine.close()
    stores.close()
    _same(plain, {(o.request.id, o.sample): o for o in outputs})


@pytest.mark.parametrize("seed", range(3))
def test_abort_while_the_store_is_asked_leaves_nothing_behind(
    qwen: nn.Module, stored: tuple[str, dict[tuple[str, int], Output]], seed: int
) -> None:
    """Goal: abort, preemption and reset are safe beside a job. Method: let calls go, abort, reset at random."""
    draw, (stores, gate) = random.Random(seed), _gated(stored[0])
    requests = _requests(8)
    outputs: list[Output] = []
    with Engine(qwen, replace(TIGHT, device_blocks=30), NAMESPACE, stores=stores) as engine:
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
        _assert_empty(engine)
    stores.close()
    assert {o.request.id for o in outputs} == {r.id for r in requests}


# The judge itself -------------------------------------------------------------------------------------------------


def test_the_checker_sees_a_row_that_was_changed_in_memory(qwen: nn.Module) -> None:
    """Goal: the judge is worth its name. Method: swap two bytes of a row behind kvroute's back, in mid-run."""
    checker = Checker()
    checker.attach(qwen)

    def tamper() -> None:
        checker.end()
        if engine.steps == 6:
            block = engine.manager.table("r0#0")[0]
            rows = engine.aux.region("device").rows[block]
            rows[0], rows[1] = int(rows[1]), int(rows[0])

    with Engine(qwen, PLAIN, NAMESPACE, observer=Hook(checker.begin, tamper)) as engine:
        outputs = _run(engine, [replace(_requests(1)[0], n=1)])
    checker.detach()
    verdict = _judged(checker, "qwen3_moe", outputs)
    assert (verdict.wrong, verdict.missing) == (1, 0)


def test_the_checker_counts_what_is_missing(qwen: nn.Module) -> None:
    checker = Checker()
    checker.attach(qwen)
    with Engine(qwen, PLAIN, NAMESPACE, observer=Hook(checker.begin, checker.end)) as engine:
        engine.add(replace(_requests(1)[0], n=1))
        for _ in range(6):
            engine.step()
        engine.manager.reset(weights_version=4)
        (output,) = engine.run()
    checker.detach()
    verdict = _judged(checker, "qwen3_moe", {("r0", 0): output})
    assert verdict.wrong == 0
    assert verdict.missing == int((~output.routes.valid).sum()) > 100


# Rows that tokens were sampled with ---------------------------------------------------------------------------------


@dataclass
class Updated:
    """What came of a run with weight updates in its middle."""

    checker: Checker
    outputs: dict[tuple[str, int], Output]
    recomputed_rows: int

    @property
    def verdict(self) -> Verdict:
        verdict = Verdict()
        for o in self.outputs.values():
            again = np.full((len(o.routes), *o.routes.ids.shape[1:]), -1, np.int32)
            owner, prompt = f"{o.request.id}#{o.sample}", len(o.request.prompt)
            verdict += self.checker.judge(o.sequence, o.routes, len(o.sequence) - 1, again, owner=owner, prompt=prompt)
        return verdict


def _run_with_updates(config: EngineConfig, requests: Sequence[Request], at_steps: Sequence[int]) -> Updated:
    model, checker = build_model("qwen3_moe", seed=0, vocab_size=text.VOCAB_SIZE), Checker()
    checker.attach(model)
    with Engine(model, config, NAMESPACE, observer=Hook(checker.begin, checker.end)) as engine:
        for request in requests:
            engine.add(request)
        outputs, recomputed, version = dict[tuple[str, int], Output](), 0, NAMESPACE.weights_version
        while engine.busy:
            if engine.steps in at_steps and version == NAMESPACE.weights_version + at_steps.index(engine.steps):
                version += 1
                move_routers(model, version)
                engine.reset(weights_version=version)
                checker.weights_changed()
                engine.manager.assert_consistent()
            journals = {(s.request.id, s.sample): s for s in engine.scheduler.unfinished}
            for output in engine.step():
                key = output.request.id, output.sample
                outputs[key] = output
                journal = journals[key].journal if key in journals else None
                recomputed += sum(b - a for a, b in journal.recomputed) if journal else 0
        _assert_empty(engine)
    checker.detach()
    return Updated(checker, outputs, recomputed)


def test_rows_are_those_that_the_tokens_were_sampled_with() -> None:
    """Goal: a sequence that is computed again under other weights keeps the rows that its tokens came from.

    Method: two updates of real router weights in the middle of generation, under pressure that swaps and drops too.
    The judge saw every pass and knows which row of each position came first.
    """
    updated = _run_with_updates(replace(TIGHT, device_blocks=36, host_blocks=8), _requests(8), (9, 40))
    verdict = updated.verdict
    assert (verdict.wrong, verdict.missing, verdict.judged_by_recompute) == (0, 0, 0)
    assert updated.recomputed_rows > 100  # otherwise the run has shown nothing
    crossing = [o for o in updated.outputs.values() if len(o.routes.weights_versions) > 1]
    assert crossing
    for output in updated.outputs.values():
        versions = [version for _, _, version in output.routes.weights_versions]
        assert versions == sorted(versions)
        output.routes.validate(output.sequence, rows=len(output.sequence) - 1)


def test_recomputed_rows_are_another_choice_and_the_judge_sees_the_difference() -> None:
    """Goal: the choice is explicit, and the judge is worth its name.

    Method: the same run, asked for the rows that were computed last.
    """
    updated = _run_with_updates(replace(PLAIN, rows="recomputed"), _requests(4), (12,))
    verdict = updated.verdict
    assert verdict.missing == 0
    assert verdict.wrong > 100


# Inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field_name", "value"),
    [("block_tokens", 12), ("block_tokens", 0), ("device_blocks", 0), ("host_blocks", -1), ("step_tokens", 0)],
)
def test_a_config_that_cannot_be_names_its_field(field_name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=field_name):
        EngineConfig(**{field_name: value})


def test_a_request_that_cannot_run_is_refused_and_changes_nothing(qwen: nn.Module) -> None:
    with Engine(qwen, TIGHT, NAMESPACE) as engine:
        with pytest.raises(InvalidInputError, match="at most 640 tokens together"):
            engine.add(Request("long", tuple(range(600)), 41))
        engine.add(Request("one", (3, 4), 2))
        with pytest.raises(InvalidInputError, match="not in use"):
            engine.add(Request("one", (3, 4), 2))
        assert len(engine.run()) == 1


@pytest.mark.parametrize(
    "broken",
    [{"id": ""}, {"prompt": ()}, {"max_tokens": 0}, {"n": 0}, {"temperature": -1.0}, {"stop_sequences": ((),)}],
)
def test_a_request_that_makes_no_sense_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        replace(Request("r", (1,), 1), **broken)

"""Rows of a pipeline: each stage has its layers, in a region and at a time of its own; they are read joined."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from toy_requests import Asked
from waiting import GIVE_UP_S

from cache_manager.errors import ConfigError, RegionMissingError
from cache_manager.keys import Namespace
from cache_manager.publish import Rows
from cache_manager.regions.view import RegionView
from kvroute.connector import Engine, Key, Limits, SchedulerRows, Settings, StepMeta, Tokens, routes
from kvroute.connector.settings import VERSION
from kvroute.connector.stages import NoView, StageViews, stage_spec
from kvroute.connector.worker import WorkerRows
from kvroute.rollout import open_rollouts
from kvroute.routing import ROUTING, routing_spec

BLOCKS, TOKENS, EXPERTS = 5, 4, 64
LAYERS = (0, 1, 3, 4)  # of five; the third one is dense
STAGES = (range(2), range(2, 5))
ELSEWHERE = f"kvroute-{os.getuid()}-{32 * '0'}-device"
"""The name of a region that is not on this host."""


def rows_of(serials: NDArray[np.int64], layers: Sequence[int]) -> NDArray[np.int64]:
    """What routers choose for tokens with these numbers, ``[n, layers, 2]``: another pair for each of 4,032."""
    first = serials % EXPERTS
    pairs = np.stack([first, (first + 1 + serials // EXPERTS % (EXPERTS - 1)) % EXPERTS], axis=1)
    return np.stack([(pairs + 7 * layer) % EXPERTS for layer in layers], axis=1)


@dataclass
class Sent:
    meta: StepMeta
    slots: list[int]
    serials: list[int]


class Pipeline:
    """A scheduler, and stages that run the steps that they were sent in order, when a test says so."""

    def __init__(self, late: bool = False, rollouts: str = "response:", **limits: Any) -> None:
        spec = routing_spec(EXPERTS, 2, LAYERS, num_layers=5, block_tokens=TOKENS)
        settings = Settings.of({"strict": True, "weights": "m", "weights_version": 0, "rollouts": rollouts})
        self.engine = Engine(settings, spec, Namespace("m", 0), BLOCKS, 64, stages=2, limits=Limits(**limits))
        self.workers = list[WorkerRows]()
        for layers in STAGES:
            part = stage_spec(spec, layers)
            assert part is not None
            kv = {f"layers.{layer}": torch.zeros(BLOCKS, 1, TOKENS, 8) for layer in layers}
            self.workers.append(WorkerRows(replace(self.engine, spec=part), kv, late=late))
        self.scheduler = SchedulerRows(self.engine)
        self.scheduler.attach(*(worker.handshake() for worker in self.workers))
        self.under_way: list[deque[Sent]] = [deque() for _ in STAGES]
        self.table: list[int] = []
        self.scheduler.blocks_of = lambda _name, first, last: self.table[first:last]
        self.count = 0  # of tokens that were sent

    def send(self, slots: list[int], name: str = "r") -> list[int]:
        """A step that computes a new token at each of these slots; the tokens' numbers."""
        meta = self.scheduler.step({name: len(slots)} if slots else {})
        serials = list(range(self.count, self.count + len(slots)))
        self.count += len(slots)
        for queue in self.under_way:
            queue.append(Sent(meta, slots, serials))
        return serials

    def run(self, stage: int) -> None:
        """The stage runs its next step, if it was sent one."""
        if not self.under_way[stage]:
            return
        sent, worker = self.under_way[stage].popleft(), self.workers[stage]
        worker.begin(sent.meta)
        if sent.slots:
            layers = worker.engine.spec.attrs["layer_ids"]
            chosen = rows_of(np.array(sent.serials), layers)
            for i, layer in enumerate(layers):
                worker.ids.hook(layer)(torch.from_numpy(chosen[:, i].copy()))
            worker.slots = torch.tensor(sent.slots)
        worker.end()

    def run_all(self) -> None:
        for stage, queue in enumerate(self.under_way):
            for _ in range(len(queue)):
                self.run(stage)

    def read(self, name: str = ROUTING) -> Rows:
        """The rows of all slots in the lives that the scheduler means."""
        assert not isinstance(self.scheduler.view, NoView)
        blocks = np.arange(BLOCKS)
        lives = self.scheduler.feed.generations[blocks]
        rows = self.scheduler.view.read(name, blocks, generations=lives)
        slots = np.arange(BLOCKS * TOKENS)
        same = self.scheduler.view.read_slots(name, slots, generations=lives.repeat(TOKENS))
        np.testing.assert_array_equal(rows.valid, same.valid)
        np.testing.assert_array_equal(rows.values, same.values)
        return rows

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture
def pipeline() -> Iterator[Callable[..., Pipeline]]:
    made = list[Pipeline]()

    def start(**arguments: Any) -> Pipeline:
        made.append(Pipeline(**arguments))
        return made[-1]

    yield start
    for each in made:
        each.close()


SLOTS = st.lists(st.integers(0, BLOCKS * TOKENS - 1), unique=True, max_size=6)
ACTIONS = st.one_of(
    st.tuples(st.just("run"), st.integers(0, 1)),
    st.tuples(st.just("step"), SLOTS),
    st.tuples(st.just("give"), st.lists(st.integers(0, BLOCKS - 1), unique=True, min_size=1, max_size=2)),
    st.tuples(st.just("copy"), st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1))),
    st.tuples(st.just("update"), st.sampled_from([None, 1, 2])),
)


@examples(150)
@given(st.lists(ACTIONS, min_size=4, max_size=30))
def test_a_row_is_of_one_token_in_one_life_and_of_one_version(actions: list[tuple[str, Any]]) -> None:
    """Goal: the parts of a row that is handed out are of one token, which was sent to that slot in this life of its
    block, and its label is that of its step; when all stages are done, the last token of each slot is there. Method:
    any steps, lives, copies and updates, which the stages run when they like; slots are also written twice in a life,
    as rejected drafts are.
    """
    pipeline = Pipeline()
    held: list[list[int]] = [[] for _ in range(BLOCKS * TOKENS)]  # the tokens of a slot in its life, in order
    versions = dict[int, int | None]()
    version: int | None = 0
    lives = set[int]()
    try:
        for action, value in actions:
            if action == "run":
                pipeline.run(value)
            elif action == "step":
                slots = [slot for slot in value if slot // TOKENS in lives]
                for slot, serial in zip(slots, pipeline.send(slots), strict=True):
                    held[slot].append(serial)
                    versions[serial] = version
            elif action == "update":
                version = value
                pipeline.scheduler.weights.changed(value)
            elif action == "give":
                lives.update(value)
                pipeline.scheduler.given(value)
                pipeline.send([])
                for block in value:
                    held[block * TOKENS : (block + 1) * TOKENS] = [[] for _ in range(TOKENS)]
            elif value[0] in lives and value[0] != value[1]:
                source, target = value
                lives.add(target)
                pipeline.scheduler.given([target])
                pipeline.send([])
                pipeline.scheduler.feed.copy([(source, target)])
                pipeline.send([])
                for offset in range(TOKENS):
                    held[target * TOKENS + offset] = held[source * TOKENS + offset][-1:]
            _check(pipeline, held, versions)
        pipeline.run_all()
        rows = _check(pipeline, held, versions)
        assert rows.valid.tolist() == [bool(serials) for serials in held]
        last = np.array([serials[-1] for serials in held if serials], np.int64)
        np.testing.assert_array_equal(rows.values[rows.valid], rows_of(last, LAYERS))
        for worker in pipeline.workers:
            worker.blocks.assert_consistent()
    finally:
        pipeline.close()


def _check(pipeline: Pipeline, held: list[list[int]], versions: dict[int, int | None]) -> Rows:
    rows, labels = pipeline.read(), pipeline.read(VERSION)
    assert (rows.values[~rows.valid] == 255).all()
    for slot in np.flatnonzero(rows.valid).tolist():
        expected = {tuple(rows_of(np.array([serial]), LAYERS).ravel()): serial for serial in held[slot]}
        serial = expected.get(tuple(rows.values[slot].ravel().tolist()))
        assert serial is not None, (slot, rows.values[slot], held[slot])
        assert (int(labels.values[slot]) if labels.valid[slot] else None) == versions[serial]
    return rows


def admitted(pipeline: Pipeline, tokens: int, blocks: list[int]) -> Asked:
    """A request of so many tokens that has these blocks."""
    request = Asked("r", list(range(tokens)))
    pipeline.table = blocks
    pipeline.scheduler.given(blocks)
    assert pipeline.scheduler.matched(request, 0, 0, later=False) == 0
    pipeline.scheduler.admitted(request, blocks, 0)
    return request


def answered(pipeline: Pipeline, request: Asked) -> Any:
    """The future of what a client will be told of the request, all of whose tokens were sent."""
    tokens = list(request.tokens)
    ended = pipeline.scheduler.forget("r")
    return pipeline.scheduler.finished(Key("r"), pipeline.table, len(tokens), Tokens(tokens, len(tokens)), ended=ended)


@pytest.mark.parametrize("slower", [0, 1])
def test_an_answer_waits_for_the_slowest_stage(pipeline: Callable[..., Pipeline], slower: int) -> None:
    """Goal: no row is missing because a stage is behind, whichever it is. Method: a request ends when one stage has run
    its steps and the other has run one of two; its blocks are given out before that stage goes on."""
    toy = pipeline()
    request = admitted(toy, 6, [3, 1])
    serials = toy.send([3 * TOKENS + i for i in range(4)])
    request.num_computed_tokens = 4
    serials = [*serials, *toy.send([1 * TOKENS, 1 * TOKENS + 1])]
    request.num_computed_tokens = 6
    for stage in (slower, 1 - slower, 1 - slower):
        toy.run(stage)
    answer = answered(toy, request)
    toy.scheduler.given([1])
    toy.send([1 * TOKENS], "other")
    assert not answer.done()
    toy.run_all()
    found = routes({"kv_transfer_params": answer.result(GIVE_UP_S)})
    assert found.complete
    np.testing.assert_array_equal(found.ids, rows_of(np.array(serials), LAYERS))


def test_a_process_of_its_own_reads_the_rows_of_all_stages(pipeline: Callable[..., Pipeline], tmp_path: Path) -> None:
    """Goal: rollouts apart are those of all layers, before and after a weight update, which has other namespaces.
    Method: two requests, other weights between them; the engine's process reads none of their rows."""
    toy = pipeline(rollouts=f"apart:file://{tmp_path}")
    with closing(open_rollouts(f"file://{tmp_path}")) as store:
        for blocks, version in (([3, 1], 0), ([2, 4], 2)):
            if version:
                toy.scheduler.weights.changed(version)
                toy.scheduler.reset()
            request = admitted(toy, 6, blocks)
            serials = toy.send([blocks[i // TOKENS] * TOKENS + i % TOKENS for i in range(6)])
            request.num_computed_tokens = 6
            toy.run_all()
            found = routes({"kv_transfer_params": answered(toy, request).result(GIVE_UP_S)}, rollouts=store)
            assert found.complete
            assert found.weights_versions == ((0, 6, version),)
            np.testing.assert_array_equal(found.ids, rows_of(np.array(serials), LAYERS))
    assert toy.scheduler.meter.take()["kvroute:events_total"] == {"rollouts/stored": 2}


def test_rows_of_a_stage_that_does_not_come_are_missing(pipeline: Callable[..., Pipeline]) -> None:
    """Goal: an answer, with the reason. Method: the second stage never runs."""
    toy = pipeline(answer_s=0.05)
    request = admitted(toy, 3, [2])
    toy.send([2 * TOKENS + i for i in range(3)])
    request.num_computed_tokens = 3
    toy.run(0)
    answer = answered(toy, request).result(GIVE_UP_S)
    assert "a worker that is behind" in str(answer)
    assert not toy.read().valid.any()


@pytest.mark.parametrize("ahead", [0, 1])
def test_parts_of_two_steps_are_no_row(pipeline: Callable[..., Pipeline], ahead: int) -> None:
    """Goal: a row is of one token, where a slot is written twice in a life, as a rejected draft's is. Method: one stage
    has run the second step, and then the other."""
    toy = pipeline()
    toy.scheduler.given([0])
    toy.send([0])
    toy.run_all()
    (serial,) = toy.send([0])
    toy.run(ahead)
    assert not toy.read().valid.any()
    toy.run(1 - ahead)
    np.testing.assert_array_equal(toy.read().values[:1], rows_of(np.array([serial]), LAYERS))


class Between(RegionView):
    """A view of a stage's region, whose reading of rows something comes before."""

    comes: Callable[[], object] = bool

    def read(self, name: str, *arguments: Any, **named: Any) -> Rows:
        if name == ROUTING:
            self.comes()
        return super().read(name, *arguments, **named)

    def read_slots(self, name: str, *arguments: Any, **named: Any) -> Rows:
        if name == ROUTING:
            self.comes()
        return super().read_slots(name, *arguments, **named)


@pytest.mark.parametrize("call", ["read", "read_slots"])
@pytest.mark.parametrize("stages", [[1], [0, 1]])
def test_parts_that_are_read_while_a_step_is_written_are_no_row(
    pipeline: Callable[..., Pipeline], call: str, stages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: two looks at the steps, before and after the rows. Method: between the reading of the first stage's part
    and the second's, the second stage or both of them write the slot anew."""
    views = list[Between]()

    def watched(*arguments: Any, **named: Any) -> Between:
        views.append(Between(*arguments, **named))
        return views[-1]

    monkeypatch.setattr("kvroute.connector.stages.RegionView", watched)
    toy = pipeline()
    toy.scheduler.given([0])
    toy.send([0])
    toy.run_all()
    toy.send([0])
    view = toy.scheduler.view
    assert isinstance(view, StageViews)
    views[1].comes = lambda: [toy.run(stage) for stage in stages]
    lives = toy.scheduler.feed.generations[:1]
    if call == "read":
        assert not view.read(ROUTING, [0], 0, 1, generations=lives).valid.any()
    else:
        assert not view.read_slots(ROUTING, [0], generations=lives).valid.any()


def test_a_row_that_one_stage_has_not_is_missing(pipeline: Callable[..., Pipeline]) -> None:
    """Goal: a row of some layers is none. Method: one stage's router names an expert that there is not, for one
    token."""
    for stage in range(2):
        toy = pipeline()
        toy.scheduler.given([0])
        toy.send([0, 1, 2])
        toy.under_way[stage][0] = replace(toy.under_way[stage][0], serials=[0, 1, 2])
        worker = toy.workers[stage]
        hook, layer = worker.ids.hook, worker.engine.spec.attrs["layer_ids"][0]

        def spoiled(of: int, hook: Any = hook, layer: int = layer) -> Any:
            def keep(ids: torch.Tensor) -> None:
                if of == layer:
                    ids[1] = EXPERTS
                hook(of)(ids)

            return keep

        worker.ids.hook = spoiled  # type: ignore[method-assign]
        toy.run_all()
        assert toy.read().valid[:TOKENS].tolist() == [True, False, True, False]


def test_each_layer_is_in_one_stage(pipeline: Callable[..., Pipeline]) -> None:
    """Goal: layers are never missing silently, nor twice. Method: the handshakes of one stage alone, of one twice, and
    of one whose region is not on this host; in any order the layers are those of the spec."""
    toy = pipeline()
    first, second = (worker.handshake() for worker in toy.workers)
    scheduler = SchedulerRows(toy.engine)
    for stages in ([first], [first, first], [first, second, second]):
        with pytest.raises(ConfigError, match=r"stages: wanted each of the layers \[0, 1, 3, 4\] in one of them, got"):
            scheduler.attach(*stages)
    with pytest.raises(RegionMissingError):
        scheduler.attach(first, replace(second, region=ELSEWHERE))
    scheduler.attach(second, first)
    toy.scheduler.given([0])
    toy.send([0])
    toy.run_all()
    assert scheduler.view is not None
    lives = toy.scheduler.feed.generations[:1]
    np.testing.assert_array_equal(
        scheduler.view.read(ROUTING, [0], 0, 1, generations=lives).values, rows_of(np.array([0]), LAYERS)
    )
    scheduler.close()


def test_after_a_reset_nothing_older_is_read(pipeline: Callable[..., Pipeline]) -> None:
    """Goal: a reset holds although a stage has not heard of it. Method: one stage runs it, then the other; rows written
    since are read."""
    toy = pipeline()
    toy.scheduler.given([0])
    toy.send([0, 1])
    toy.run_all()
    assert toy.read().valid.sum() == 2
    toy.scheduler.weights.changed(7)
    toy.scheduler.reset()
    toy.scheduler.given([0])
    (serial,) = toy.send([0])
    for stage in range(2):
        assert not toy.read().valid.any()
        toy.run(stage)
    rows = toy.read()
    assert np.flatnonzero(rows.valid).tolist() == [0]
    np.testing.assert_array_equal(rows.values[:1], rows_of(np.array([serial]), LAYERS))


@pytest.mark.parametrize("name", [ROUTING, VERSION])
def test_rows_of_no_block_are_no_rows(pipeline: Callable[..., Pipeline], name: str) -> None:
    """Goal: an answer without a row, or a reset while it waits, is not an error. Method: both reads, of nothing; a
    bug that was found: numpy cannot reshape the labels of nothing."""
    made = pipeline()
    assert isinstance(made.scheduler.view, StageViews)
    for rows in (
        made.scheduler.view.read(name, [], generations=[]),
        made.scheduler.view.read_slots(name, [], generations=[]),
    ):
        assert (len(rows.values), rows.valid.tolist()) == (0, [])


def test_joined_rows_lie_in_one_piece(pipeline: Callable[..., Pipeline]) -> None:
    """Goal: whoever gets them may cast or encode them, as those of one stage."""
    toy = pipeline()
    toy.scheduler.given([0])
    toy.send([0, 1, 2])
    toy.run_all()
    rows = toy.read()
    assert rows.valid[:3].all()
    assert rows.values.flags.c_contiguous


def test_a_stage_of_dense_layers_has_no_part() -> None:
    spec = routing_spec(EXPERTS, 2, LAYERS, num_layers=5, block_tokens=TOKENS)
    assert stage_spec(spec, range(2, 3)) is None
    whole = stage_spec(spec, range(5))
    assert whole == spec


def test_views_of_a_stage_that_is_not_there_leave_none_open(pipeline: Callable[..., Pipeline]) -> None:
    toy = pipeline()
    spec, namespace = toy.engine.spec, toy.engine.namespace.fingerprint
    region = toy.workers[0].handshake().region
    assert region is not None
    with pytest.raises(RegionMissingError):
        StageViews(spec, [(region, LAYERS[:2]), (ELSEWHERE, LAYERS[2:])], namespace=namespace)

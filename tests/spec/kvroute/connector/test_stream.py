"""The stream of rows beside a worker that is behind: what waits, what is lost, and that its spare blocks come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

import kvroute
from kvroute.connector import stream
from kvroute.connector.limits import Limits
from kvroute.connector.spares import SpareBlocks
from kvroute.connector.step_rows import Outcome, StepRows
from kvroute.connector.stream import RowStream

SPEC = kvroute.AuxBlockDataSpec("routing", row_shape=(2,), dtype="uint8", block_tokens=4)
CLOCK, SPARES = 8, range(9, 12)
LIMITS = Limits()


class Request:
    def __init__(self, name: str, tokens: int) -> None:
        self.request_id, self.num_tokens = name, tokens


class Clock:
    """The time of the stream's waits: while it sleeps, the next thing happens."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.meanwhile: list[Callable[[], object]] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 0.1)
        if self.meanwhile:
            self.meanwhile.pop(0)()


class Engine:
    """A scheduler whose steps each write one value, and a worker that does them when it is told to."""

    def __init__(self) -> None:
        blocks = SPARES.stop
        self.feed = kvroute.BlockFeed(blocks)
        self.worker = kvroute.AuxBlocks([SPEC], blocks=blocks, namespace=kvroute.Namespace("m", 1), memory="shared")
        self.spares = SpareBlocks(self.feed, SPARES)
        self.view = kvroute.RegionView(self.worker.region("device").name)  # type: ignore[union-attr]
        self.tables: dict[str, list[int]] = {}
        self.why: dict[int, str] = {}
        self.stream = RowStream(
            SPEC,
            self.feed,
            self.spares,
            CLOCK,
            LIMITS,
            blocks_of=lambda name, first, last: self.tables[name][first:last],
            doubts=lambda *_: None,
            why=lambda _: self.why,
        )
        self.stream.attach(self.view, late=True)
        self.number = 0
        self.sent: list[tuple[int, kvroute.BlockBatch, list[int]]] = []

    def schedules(self, slots: list[int], given: list[int]) -> None:
        """A step that computes these slots, after these blocks were given out."""
        self.number += 1
        self.stream.given(given, self.number)
        self.feed.renew(given)
        self.sent.append((self.number, self.feed.take(), slots))

    def works(self) -> None:
        """The worker does the next step."""
        number, batch, slots = self.sent.pop(0)
        self.worker.apply(batch)
        self.worker.write_step(slots, {"routing": np.full((len(slots), 2), number, np.uint8)})
        self.worker.renew([CLOCK], [number])

    def ended(self, name: str, block: int) -> StepRows:
        """A request whose four rows are computed by the step that is scheduled here, and that ends with it."""
        self.tables[name] = [block]
        self.schedules([4 * block + i for i in range(4)], [block])
        self.stream.ended(Request(name, 5), 0, [block], self.number)
        return self.stream.take([(name, None)], self.number, start=lambda _: 0)

    def ended_at_once(self, name: str, block: int) -> StepRows:
        """As :meth:`ended`, and the worker has done the step."""
        step = self.ended(name, block)
        self.works()
        return step

    def is_given(self, block: int) -> None:
        self.schedules([], [block])

    def reads(self, step: StepRows) -> Outcome:
        outcomes, _ = self.stream.read(step, apart=True)
        (outcome,) = outcomes
        return outcome


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    return clock


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.view.close()
    engine.worker.close()


def assert_rows(outcome: Outcome, value: int) -> None:
    assert outcome.rows is not None, outcome.gaps
    assert (outcome.rows == value).all()


@pytest.mark.parametrize("moves", [1, 2])
def test_a_block_is_given_out_while_its_rows_are_waited_for(engine: Engine, clock: Clock, moves: int) -> None:
    """Goal: the copy that takes the rows along is waited for, too. Method: while the sender sleeps its block is given
    out, once or twice over, and the worker does the steps after that, one at each look."""
    step = engine.ended("a", 0)
    (batch,) = step.batches()

    def given_again() -> None:
        engine.is_given(0)
        if moves > 1:
            engine.is_given(next(iter(batch.blocks)))

    clock.meanwhile = [given_again, *[engine.works] * (1 + moves)]
    assert_rows(engine.reads(step), 1)
    assert not clock.meanwhile, "it has waited for the last of them"
    assert len(engine.spares) == len(SPARES)


def test_rows_that_were_given_up_keep_no_spare_block(engine: Engine, clock: Clock) -> None:
    """Goal: spare blocks come back, so that later rows have some. Method: more requests than spares, each moved to one,
    and each given up because the worker is behind or because its step is lost."""
    for i in range(2 * len(SPARES)):
        step = engine.ended(f"a{i}", i % 4)
        engine.is_given(i % 4)
        assert len(engine.spares) == len(SPARES) - 1
        if i % 2:
            (outcome,) = engine.stream.lose(step, "why")
        else:
            outcome = engine.reads(step)
        assert outcome.rows is None
        assert len(engine.spares) == len(SPARES)
    while engine.sent:
        engine.works()
    step = engine.ended("b", 5)
    engine.is_given(5)
    clock.meanwhile = [engine.works, engine.works]
    assert_rows(engine.reads(step), 2 * 2 * len(SPARES) + 1)


def test_a_worker_that_is_behind_holds_all_steps_together_for_ten_seconds(engine: Engine, clock: Clock) -> None:
    """Goal: messages behind a step that is given up do not wait for ten seconds each. Method: four steps wait together
    for a worker that does nothing; then it goes on, and the next step has its rows."""
    steps = [engine.ended(f"a{i}", i) for i in range(4)]
    begun_s = clock.now_s
    for step in steps:
        outcome = engine.reads(step)
        assert outcome.rows is None
        assert "10 s behind" in outcome.gaps[0][2]
    assert clock.now_s - begun_s < LIMITS.answer_s + 1
    clock.meanwhile = [engine.works] * 5
    assert_rows(engine.reads(engine.ended("b", 5)), 5)


@pytest.mark.parametrize("then", ["output", "preempted", "ended"])
def test_rows_under_way_that_an_output_has_are_read(engine: Engine, then: str) -> None:
    """Goal: what a preempted request's stale output has taken is the output's. Method: the request gets its next
    output, is preempted again or ends, before the sender reads; another batch wants the spare block meanwhile."""
    request = Request("a", 3)
    engine.tables["a"] = [0]
    engine.schedules([0, 1], [0])
    first = engine.stream.take([("a", request)], 1, start=lambda _: 0)
    engine.works()
    engine.reads(first)
    engine.schedules([2], [])
    engine.stream.preempted(request, 0, 3, 2)
    engine.is_given(0)
    request.num_tokens = 4
    stale = engine.stream.take([("a", request)], 2, start=lambda _: 0, stale={"a"})
    engine.tables["a"] = [3]
    engine.schedules([12, 13, 14, 15], [3])
    request.num_tokens = 5
    if then == "output":
        engine.stream.take([("a", request)], 4, start=lambda _: 0)
    elif then == "preempted":
        engine.stream.preempted(request, 0, 4, 4)
    else:
        engine.stream.ended(request, 0, [3], 4)
    engine.spares.take_over([5] * len(engine.spares))  # all that are free
    engine.sent.append((5, engine.feed.take(), []))
    while engine.sent:
        engine.works()
    assert_rows(engine.reads(stale), 2)


@pytest.mark.parametrize("apart", [False, True])
def test_nothing_comes_after_a_missing_row(engine: Engine, apart: bool) -> None:
    """Goal: rows are a whole beginning or none. Method: one of a request's first two rows is not written; its next
    outputs, whose rows are there, get none, and after its end nothing is remembered of it."""
    request = Request("a", 3)
    engine.tables["a"] = [0]
    engine.schedules([0, 1], [0])
    first = engine.stream.take([("a", request)], 1, start=lambda _: 0)
    number, batch, _ = engine.sent.pop(0)
    engine.sent.append((number, batch, [0]))
    engine.works()
    outcome = engine.reads(first)
    assert (outcome.rows, [gap[:2] for gap in outcome.gaps]) == (None, [(1, 2)])
    for number in (2, 3):
        engine.schedules([number], [])
        request.num_tokens += 1
        step = engine.stream.take([("a", request)], number, start=lambda _: 0)
        engine.works()
        assert engine.stream.read(step, apart=apart) == ([], None)
    engine.stream.ended(request, 0, [0], 3)
    assert engine.stream.read(engine.stream.take([], 3, start=lambda _: 0), apart=apart) == ([], None)
    assert_rows(engine.reads(engine.ended_at_once("a", 1)), 4)


def test_each_missing_row_has_a_reason(engine: Engine) -> None:
    """Goal: a row without a reason of another engine's is told beside those with one. Method: of two blocks one row
    each is not written, and the second block's did not cross."""
    engine.tables["a"] = [0, 1]
    engine.why = {1: "prefill has lost it"}
    engine.schedules(list(range(8)), [0, 1])
    step = engine.stream.take([("a", Request("a", 9))], 1, start=lambda _: 0)
    number, batch, _ = engine.sent.pop(0)
    engine.sent.append((number, batch, [0, 1, 3, 4, 6, 7]))
    engine.works()
    outcome = engine.reads(step)
    assert (outcome.rows, outcome.gaps) == (None, [(2, 3, stream.NOT_WRITTEN), (5, 6, "prefill has lost it")])


def test_a_request_that_was_refused_gets_no_rows_and_says_so_once(engine: Engine) -> None:
    """Goal: whoever cannot read rows gets none, and the others theirs. Method: two requests over three steps, the first
    one preempted before the last; one answer of a session ends, while the request goes on; then it ends itself."""
    requests = [Request("a", 2), Request("b", 2)]
    engine.tables |= {"a": [0], "b": [1]}
    engine.stream.refuse("a", "cannot read")
    outputs = [(request.request_id, request) for request in requests]
    for number in (1, 2, 3):
        if number == 3:
            engine.stream.preempted(requests[0], 0, 3, 2)
        slots = [number - 1, 4 + number - 1]
        engine.schedules(slots, [0, 1] if number == 1 else [])
        step = engine.stream.take(outputs, number, start=lambda _: 0)
        engine.works()
        outcomes, together = engine.stream.read(step, apart=True)
        rows = {outcome.piece.name: outcome.rows for outcome in outcomes}
        assert rows.pop("b").tolist() == [[number, number]]  # type: ignore[union-attr]
        assert together is None
        assert rows == ({"a": None} if number == 1 else {})
        for request in requests:
            request.num_tokens += 1
    step = engine.stream.take([("a", None)], 3, start=lambda _: 0)
    assert engine.stream.read(step, apart=True) == ([], None), "it has said so"
    engine.stream.ended(requests[0], 0, [0], 3)
    (outcome,), _ = engine.stream.read(engine.stream.take([("a", None)], 3, start=lambda _: 0), apart=True)
    assert (outcome.rows, [why for *_, why in outcome.gaps]) == (None, ["cannot read"])
    assert_rows(engine.reads(engine.ended_at_once("a", 3)), 4)


@pytest.mark.parametrize("lost", [0, 1])
def test_steady_outputs_of_which_one_has_lost_its_row(engine: Engine, lost: int) -> None:
    """Goal: rows that go out together are all there. Method: two requests with a row each in one step, of which one is
    not written; before that both have their rows together."""
    requests = [Request("a", 2), Request("b", 2)]
    engine.tables |= {"a": [0], "b": [1]}
    outputs = [(request.request_id, request) for request in requests]
    engine.schedules([0, 4], [0, 1])
    first = engine.stream.take(outputs, 1, start=lambda _: 0)
    engine.works()
    engine.stream.read(first, apart=False)
    for number in (2, 3):
        slots = [number - 1, 4 + number - 1]
        engine.schedules(slots, [])
        for request in requests:
            request.num_tokens += 1
        step = engine.stream.take(outputs, number, start=lambda _: 0)
        assert step.steady is not None
        if number == 3:
            sent, batch, _ = engine.sent.pop(0)
            engine.sent.append((sent, batch, [slots[1 - lost]]))
        engine.works()
        outcomes, together = engine.stream.read(step, apart=False)
        if number == 2:
            assert outcomes == []
            assert together is not None
            assert together.tolist() == [[2, 2], [2, 2]]
    assert together is None
    rows = {outcome.piece.name: outcome.rows for outcome in outcomes}
    there, missing = ("b", "a") if lost == 0 else ("a", "b")
    assert rows[missing] is None
    assert rows[there].tolist() == [[3, 3]]  # type: ignore[union-attr]

"""What the demo shows beside kvroute: a buffer keyed by slot, and the life of each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_runs import NAMESPACE, PLAIN, TIGHT, requests_of

from cache_manager.storage import open_store
from paged_engine.beside import Beside, whence
from paged_engine.engine import Engine
from paged_engine.judge import Checker
from paged_engine.lives import Event, Kind, Lives, bar, came_from, story
from paged_engine.request import EngineConfig, Output
from paged_engine.scheduler import Work
from paged_engine.slot_buffer import SlotBuffer


class Run:
    """Engines over one model, seen by a checker and by what is beside."""

    def __init__(self, model: Any) -> None:
        self.model, self.checker, self.beside = model, Checker(), Beside(16)
        self.outputs: dict[tuple[str, int], Output] = {}

    @contextmanager
    def observe(self, work: list[Work]) -> Iterator[None]:
        self.beside.about_to(work)
        with self.checker.observe(work):
            yield
        self.beside.passed(work, self.checker.routed)

    def serve(self, config: EngineConfig, count: int, **more: Any) -> Engine:
        """An engine of this run, closed, that has answered ``count`` requests."""
        with (
            self.checker.watching(self.model),
            Engine(self.model, config, NAMESPACE, observer=self.observe, around=self.beside.watch, **more) as engine,
        ):
            self.beside.begin(engine)
            for request in requests_of(count):
                engine.add(request)
            while engine.busy:
                for output in engine.step():
                    self.outputs[output.request.id, output.sample] = output
                    self.beside.ended(output)
            engine.drain()
        return engine

    def wrong(self) -> tuple[int, int]:
        """Wrong rows of kvroute and of the buffer."""
        verdicts = [self.checker.judge(output, None, self.beside.by_slot[key]) for key, output in self.outputs.items()]
        return sum(verdict.rows_wrong for verdict in verdicts), sum(verdict.slot_rows_wrong for verdict in verdicts)


@pytest.fixture
def run(qwen: Any) -> Run:
    return Run(qwen)


def test_a_buffer_keyed_by_slot_is_right_where_no_kv_moves(run: Run) -> None:
    """Goal: the comparison is fair. Method: blocks for all, no cache, no store. A request of two samples copies the
    block that they share, so those of one sample are judged."""
    run.serve(PLAIN, 6)
    alone = {key: output for key, output in run.outputs.items() if output.request.n == 1}
    verdicts = [run.checker.judge(output, None, run.beside.by_slot[key]) for key, output in alone.items()]
    assert len(verdicts) == 3
    assert all(verdict.rows_expected > 0 for verdict in verdicts)
    assert [(verdict.rows_wrong, verdict.slot_rows_wrong) for verdict in verdicts] == [(0, 0)] * 3


def test_a_buffer_keyed_by_slot_is_wrong_where_kv_moves(run: Run, tmp_path: Path) -> None:
    """Goal: the demo shows the bug that kvroute is for. Method: an engine short of blocks, and a second one that goes
    on from its store; the judge that found no wrong row of kvroute's finds the buffer's."""
    for _ in range(2):
        store = open_store(tmp_path.joinpath("store").as_uri())
        run.serve(TIGHT, 6, store=store)
        store.close()
    ours, by_slot = run.wrong()
    assert ours == 0
    assert by_slot > 0
    rows = run.beside.came_from
    assert set(rows) == {Kind.COMPUTED, Kind.SHARED, Kind.COPIED, Kind.SWAPPED_IN, Kind.RESTORED}
    told = run.beside.told
    assert told is not None
    assert (told.ours != told.by_slot).any()
    first, *life, kvroute, buffer = told.lines()
    assert first.startswith("one row through its life: position ")
    assert "computed for r" in life[0]
    assert any("restored from the store into block" in line for line in life)
    assert kvroute.startswith("  kvroute ")
    assert "<- wrong: " in buffer


def test_the_life_of_a_row_is_that_of_its_block_since_it_was_computed() -> None:
    """Goal: no event is told of a row that was not there yet, and none of an earlier use of the block. Method: moves of
    a block that is half full, filled after that, and used again."""
    lives = Lives(4)
    lives.computed("a", [7], 0, 2)
    lives.moved("device", "host", [7], [1])
    lives.moved("host", "device", [1], [5])
    lives.computed("a", [5], 2, 4)
    kv = np.arange(16, dtype=np.uint8).reshape(1, 16)
    lives.stored([5], kv)
    kinds = [[event.kind for event in lives.life([5], position)] for position in (1, 2)]
    assert kinds == [[Kind.COMPUTED, Kind.SWAPPED_OUT, Kind.SWAPPED_IN, Kind.STORED], [Kind.COMPUTED, Kind.STORED]]
    lives.computed("b", [5], 0, 1)
    assert [event.kind for event in lives.life([5], 0)] == [Kind.COMPUTED]
    lives.begin()
    lives.restored([3, 4], np.concatenate([kv, kv + 1]))
    lives.computed("c", [3, 4, 0], 8, 9)
    life = lives.life([3], 1)
    assert [event.kind for event in life][-3:] == [Kind.STORED, Kind.RESTORED, Kind.SHARED]
    assert (came_from(life, "a"), came_from(life[:-1], "c")) == (Kind.RESTORED, Kind.RESTORED)
    assert "by an earlier process" in lives.life([3, 4], 4)[0].text


def test_where_rows_came_from_is_the_last_thing_on_their_way() -> None:
    computed = Event(Kind.COMPUTED, 1, "computed", "a")
    found = Event(Kind.SHARED, 2, "found by b", "b")
    assert came_from([computed, found], "a") is Kind.COMPUTED
    assert came_from([computed, found], "b") is Kind.SHARED
    assert came_from([computed, Event(Kind.STORED, 3, "")], "a") is Kind.COMPUTED
    assert came_from([computed, Event(Kind.SWAPPED_OUT, 3, ""), Event(Kind.SWAPPED_IN, 4, "")], "b") is Kind.SWAPPED_IN
    assert story([computed, found, found._replace(passes=9)]) == [
        "  pass     1  computed",
        "  pass     9  found by b, the last of 2",
    ]


def test_a_bar_has_a_character_of_every_kind_that_there_is() -> None:
    counts = Counter({Kind.COMPUTED: 1, Kind.RESTORED: 999})
    assert bar(counts, 10) == "c" + 10 * "r"
    assert [line.split() for line in whence(counts)[2:]] == [
        ["c", "1", "computed", "for", "the", "sample", "itself"],
        ["r", "999", "restored", "from", "the", "store"],
    ]


def test_a_slot_has_what_was_written_there_last() -> None:
    buffer = SlotBuffer(8, (1, 2))
    buffer.write(np.array([3, 4]), np.array([[[1, 2]], [[3, 4]]], np.int32), "a")
    buffer.write(np.array([4]), np.array([[[5, 6]]], np.int32), "b")
    assert buffer.read(np.array([3, 4, 0])).tolist() == [[[1, 2]], [[5, 6]], [[0, 0]]]
    assert [buffer.writer(slot) for slot in (3, 4, 0)] == ["a", "b", ""]

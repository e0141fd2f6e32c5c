"""The rows of answers step by step, under the scheduler that acts at random: each once, in order, of its time.

Beside what :mod:`connector_house` does, each output of each step is given its rows; they are read
then, or much later, when their blocks may have been given out, copied and forgotten.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from budget import scaled
from connector_house import House, Kv, Running
from toy_engine import TOKENS, row_of

from kvroute.connector.step_rows import Outcome, Piece, StepRows
from kvroute.connector.stream import RowStream


class Output(NamedTuple):
    """An output that has not gone out, and the content of the slots that its rows are due from."""

    piece: Piece
    due: list[Kv]
    lossy: bool = False  # all was forgotten since, or some were never computed


class Streams(House):
    """Every second one has no spare blocks: rows of blocks that are given out too early are lost."""

    def __init__(self, seed: int, home: Path) -> None:
        self.scarce = seed % 2 == 1
        none = {"spares_max": 0, "field_spares_max": 0} if self.scarce else {}
        self.settings = {"field": True, "limits": {"forgetting_s": 0.01, **none}}
        super().__init__(seed, home)
        assert self.rows.stream is not None
        self.stream: RowStream = self.rows.stream
        self.held: list[tuple[StepRows, list[Output]]] = []
        self.sent, self.lost = Counter[str](), set[str]()
        self.count: Counter[str] = Counter()

    def _step(self, scheduled: dict[str, int], *args: Any, **kwargs: Any) -> None:
        before = {name: len(self.running[name].all_token_ids) for name in scheduled}
        super()._step(scheduled, *args, **kwargs)
        outputs = [self.running[name] for name, tokens in before.items() if self._now(name) > tokens]
        self._hold(self._taken([(each.request_id, Sized(each)) for each in outputs]))
        if self.random.random() < 0.5:
            self.send()

    def _now(self, name: str) -> int:
        return len(self.running[name].all_token_ids)

    def _taken(self, outputs: list[tuple[str, Sized | None]]) -> StepRows:
        return self.stream.take(outputs, self.rows.steps, start=lambda _: 0)

    def _hold(self, step: StepRows) -> None:
        pieces = [*step.pieces, *(step.steady.pieces() if step.steady else ())]
        self.held.append((step, [Output(piece, self._due(piece), self.scarce) for piece in pieces]))

    def _due(self, piece: Piece) -> list[Kv]:
        request = self.running.get(piece.name)
        if request is None or piece.batch is None:
            return []
        slots = [(request.table[i // TOKENS], i % TOKENS) for i in range(piece.start, piece.stop)]
        return [self.kv[slot] for slot in slots if slot in self.kv]  # the others were never computed

    def send(self) -> None:
        """The held outputs go out, in order."""
        if self.held:
            self.let_worker_go_on()
        held, self.held = self.held, []
        for step, outputs in held:
            found, together = self.stream.read(step, apart=self.random.random() < 0.3)
            if together is not None and step.steady is not None:
                self.count["steady"] += len(together)
                at = 0
                for piece in step.steady.pieces():
                    found.append(Outcome(piece, together[at : at + piece.stop - piece.start]))
                    at += piece.stop - piece.start
                assert at == len(together)
            outcomes = {each.piece.name: each for each in found}
            for output in outputs:
                name, outcome = output.piece.name, outcomes.get(output.piece.name)
                if outcome is None:
                    assert name in self.lost or output.piece.last
                    continue
                assert name not in self.lost, "nothing comes after a missing row"
                assert output.piece.start == self.sent[name]
                self.sent[name] = output.piece.stop
                if outcome.rows is None:
                    self.count["lost"] += 1
                    self.lost.add(name)
                    assert outcome.gaps
                    fine = output.lossy or any(kv.loaded for kv in output.due)
                    assert fine, f"{name}: missing without a reason, {outcome.gaps}"
                    continue
                self.count["rows"] += len(output.due)
                for kv, row in zip(output.due, outcome.rows, strict=True):
                    assert (np.asarray(row) == row_of(kv.prefix, kv.weights)).all(), f"{name}: a wrong row, due {kv}"

    def _preempt(self, request: Running) -> None:
        self.stream.preempted(Sized(request), 0, request.num_computed_tokens, self.rows.steps)
        super()._preempt(request)

    def is_over(self, request: Running) -> None:
        self.stream.ended(Sized(request), 0, list(request.table), self.rows.steps)
        name = request.request_id
        self._hold(self._taken([] if self.random.random() < 0.3 else [(name, None)]))
        if request.num_computed_tokens < len(request.all_token_ids) - 1:
            self.held.append(lossy(self.held.pop()))

    def forgets(self) -> None:
        if self.late:
            self.held = list(map(lossy, self.held))
        super().forgets()


def lossy(held: tuple[StepRows, list[Output]]) -> tuple[StepRows, list[Output]]:
    step, outputs = held
    return step, [output._replace(lossy=True) for output in outputs]


class Sized:
    """A request, with the count of its tokens."""

    def __init__(self, request: Running) -> None:
        self.request_id, self.num_tokens = request.request_id, len(request.all_token_ids)


@pytest.mark.parametrize("seed", range(scaled(24)))
def test_every_output_has_the_rows_of_its_tokens(seed: int, tmp_path: Path) -> None:
    """Goal: an output's rows are those of its tokens, computed when they were sampled; none comes twice, none is left
    out, and after a missing one none comes. Method: see the top of the file; a seed plays one life."""
    house = Streams(seed, tmp_path)
    try:
        house.lives(150)
        house.send()
        for request in list(house.running.values()):
            house.stream.ended(Sized(request), 0, list(request.table), house.rows.steps)
        house.stream.read(house._taken([]), apart=False)
        assert house.count["rows"] > 30
        assert house.count["steady"] > 5
        assert not house.stream._unread
        assert not house.stream._sequences
        assert not house.stream._lost
    finally:
        house.close()

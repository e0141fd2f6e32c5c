"""Judges each row: right, wrong, missing or unjudged. Pure: no server, no model.

With weights a forward pass gives the right rows. Without, rows are compared with the first ones that came for the same
tokens, and checked for choices that no router can make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache_manager.spec import AuxBlockDataSpec
from kvroute.verify.asking import EngineAnswer, RowIds, RowMask

if TYPE_CHECKING:
    from kvroute.verify.weights import Weights

Names = NDArray[np.str_]

ZEROS: Final = "zeros"
RANGE: Final = "no such expert"
DUPLICATE: Final = "an expert twice"
OTHER: Final = "other experts"
UNSAID: Final = "the answer does not say why"


@dataclass(frozen=True, slots=True)
class Wrong:
    """A wrong row: its answer, its place, the wanted and the received experts."""

    answer: EngineAnswer
    position: int
    layer: int
    wanted: tuple[int, ...]  # -1: the row is impossible by itself
    got: tuple[int, ...]
    fault: str


@dataclass(slots=True)
class Findings:
    """Rows by kind of question and verdict, wrong ones by fault, missing ones by cause, answers without any by reason.

    ``shortest`` is a wrong row of the shortest prompt that has one.
    """

    rows: dict[str, Counter[str]] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    shortest: Wrong | None = None

    def of(self, verdict: str) -> int:
        return sum(count[verdict] for count in self.rows.values())


def judge(
    answers: Sequence[EngineAnswer],
    spec: AuxBlockDataSpec,
    weights: Weights | None,
) -> Findings:
    """Judge every row of the answers, which are in the order in which they came."""
    findings = Findings()
    earlier = _Earlier()
    for answer in answers:
        impossible = _impossible(answer, spec)
        if weights is None:
            wanted, computed_before = earlier.of(answer, impossible == "")
            differs = answer.known & computed_before[:, None] & (answer.ids != wanted).any(axis=2)
            wrong = (differs.sum(axis=1) * 2 > answer.known.sum(axis=1)) | (impossible != "")
            unsure = (differs.any(axis=1) | ~computed_before) & ~wrong
        else:
            wanted = weights.routed(answer.tokens[:-1])
            differs = answer.known & (answer.ids != wanted).any(axis=2)
            close = weights.close(answer.ids, differs) & differs if differs.any() else differs
            # A row's later layers follow from a choice that was equally good.
            wrong = (differs & ~np.logical_or.accumulate(close, axis=1)).any(axis=1) | (impossible != "")
            unsure = differs.any(axis=1) & ~wrong
        missing = ~answer.known.all(axis=1) & ~wrong
        count = findings.rows.setdefault(answer.kind, Counter())
        unjudged = unsure & ~missing
        right = ~(wrong | missing | unjudged)
        count["right"] += int(right.sum())
        count["wrong"] += int(wrong.sum())
        count["missing"] += int(missing.sum())
        count["unjudged"] += int(unjudged.sum())
        if answer.refused:
            findings.refused[answer.refused] += 1
        for position in np.flatnonzero(missing).tolist():
            findings.causes[_cause(answer, position)] += 1
        for position in np.flatnonzero(wrong).tolist():
            findings.faults[str(impossible[position]) or OTHER] += 1
        shortest = findings.shortest
        if wrong.any() and (shortest is None or answer.prompt < shortest.answer.prompt):
            position = int(wrong.argmax())
            faulty = differs if differs[position].any() else answer.known
            layer = int(faulty[position].argmax())
            due, got = (tuple(ids[position, layer].tolist()) for ids in (wanted, answer.ids))
            fault = str(impossible[position]) or OTHER
            findings.shortest = Wrong(answer, position, layer, due, got, fault)
    return findings


def _cause(answer: EngineAnswer, position: int) -> str:
    """Why a row did not come: what the engine says of its position, without an address behind it, or of the answer."""
    reasons = [why.partition(":")[0] for start, stop, why in answer.gaps if start <= position < stop]
    return (reasons or [answer.refused])[0] or UNSAID


class _Earlier:
    """The first sound row for each prefix."""

    def __init__(self) -> None:
        self._rows: dict[bytes, RowIds] = {}

    def of(self, answer: EngineAnswer, sound: RowMask) -> tuple[RowIds, RowMask]:
        wanted = np.full_like(answer.ids, -1)
        computed_before = np.zeros(len(answer.ids), np.bool_)
        running = xxhash.xxh3_128()
        for position, token in enumerate(answer.tokens[:-1]):
            running.update(token.to_bytes(8, "little"))
            row = self._rows.get(key := running.digest())
            if row is not None:
                wanted[position] = row
                computed_before[position] = True
            elif sound[position] and answer.known[position].all():
                self._rows[key] = answer.ids[position]
        return wanted, computed_before


def _impossible(answer: EngineAnswer, spec: AuxBlockDataSpec) -> Names:
    """The fault of each row by itself ``[due]``: empty, or why no router can have chosen it."""
    ids = answer.ids
    known = answer.known
    faults = np.full(len(ids), "", "U16")
    twice = (ids[..., 1:] == ids[..., :-1]).any(axis=2)
    beyond = (ids >= spec.attrs["num_experts"]).any(axis=2)
    faults[(twice & known).any(axis=1)] = DUPLICATE
    faults[(beyond & known).any(axis=1)] = RANGE
    if spec.row_shape[1] > 1:
        zeros = (ids == 0).all(axis=2)
        faults[known.any(axis=1) & (zeros | ~known).all(axis=1)] = ZEROS
    return faults


__all__ = ["DUPLICATE", "OTHER", "RANGE", "UNSAID", "ZEROS", "Findings", "Wrong", "judge"]

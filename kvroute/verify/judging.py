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
from kvroute.verify.asking import Answer, Ids, Mask

if TYPE_CHECKING:
    from kvroute.verify.weights import Weights

Names = NDArray[np.str_]

ZEROS: Final = "zeros"
RANGE: Final = "no such expert"
TWICE: Final = "an expert twice"
OTHER: Final = "other experts"


@dataclass(frozen=True, slots=True)
class Wrong:
    """A wrong row: its answer, its place, the wanted and the received experts."""

    answer: Answer
    position: int
    layer: int
    wanted: tuple[int, ...]  # -1: the row is impossible by itself
    got: tuple[int, ...]
    fault: str


@dataclass(slots=True)
class Findings:
    """Rows by kind of question and verdict, and wrong ones by fault; ``shortest``: one of the shortest prompt."""

    rows: dict[str, Counter[str]] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    shortest: Wrong | None = None

    def of(self, verdict: str) -> int:
        return sum(count[verdict] for count in self.rows.values())


def judge(answers: Sequence[Answer], spec: AuxBlockDataSpec, weights: Weights | None) -> Findings:
    """Judge every row of the answers, which are in the order in which they came."""
    found, earlier = Findings(), _Earlier()
    for answer in answers:
        impossible = _impossible(answer, spec)
        if weights is None:
            wanted, there = earlier.of(answer, impossible == "")
            differs = answer.known & there[:, None] & (answer.ids != wanted).any(axis=2)
            wrong = (differs.sum(axis=1) * 2 > answer.known.sum(axis=1)) | (impossible != "")
            unsure = (differs.any(axis=1) | ~there) & ~wrong
        else:
            wanted = weights.routed(answer.tokens[:-1])
            differs = answer.known & (answer.ids != wanted).any(axis=2)
            close = weights.close(answer.ids, differs) & differs if differs.any() else differs
            # A row's later layers follow from a choice that was equally good.
            wrong = (differs & ~np.logical_or.accumulate(close, axis=1)).any(axis=1) | (impossible != "")
            unsure = differs.any(axis=1) & ~wrong
        missing = ~answer.known.all(axis=1) & ~wrong
        count = found.rows.setdefault(answer.what, Counter())
        unjudged = unsure & ~missing
        right = len(wrong) - int((wrong | missing | unjudged).sum())
        count.update(right=right, wrong=int(wrong.sum()), missing=int(missing.sum()), unjudged=int(unjudged.sum()))
        if answer.refused:
            found.refused[answer.refused] += 1
        found.faults.update(str(impossible[at]) or OTHER for at in np.flatnonzero(wrong).tolist())
        if wrong.any() and (found.shortest is None or answer.prompt < found.shortest.answer.prompt):
            at = int(wrong.argmax())
            layer = int((differs if differs[at].any() else answer.known)[at].argmax())
            due, got = (tuple(ids[at, layer].tolist()) for ids in (wanted, answer.ids))
            found.shortest = Wrong(answer, at, layer, due, got, str(impossible[at]) or OTHER)
    return found


class _Earlier:
    """The first sound row for each prefix."""

    def __init__(self) -> None:
        self._rows: dict[bytes, Ids] = {}

    def of(self, answer: Answer, sound: Mask) -> tuple[Ids, Mask]:
        wanted, there, running = np.full_like(answer.ids, -1), np.zeros(len(answer.ids), np.bool_), xxhash.xxh3_128()
        for at, token in enumerate(answer.tokens[:-1]):
            running.update(token.to_bytes(8, "little"))
            row = self._rows.get(key := running.digest())
            if row is not None:
                wanted[at], there[at] = row, True
            elif sound[at] and answer.known[at].all():
                self._rows[key] = answer.ids[at]
        return wanted, there


def _impossible(answer: Answer, spec: AuxBlockDataSpec) -> Names:
    """The fault of each row by itself ``[due]``: empty, or why no router can have chosen it."""
    ids, known = answer.ids, answer.known
    found = np.full(len(ids), "", "U16")
    found[(((ids[..., 1:] == ids[..., :-1]).any(axis=2)) & known).any(axis=1)] = TWICE
    found[((ids >= spec.attrs["num_experts"]).any(axis=2) & known).any(axis=1)] = RANGE
    if spec.row_shape[1] > 1:
        found[known.any(axis=1) & ((ids == 0).all(axis=2) | ~known).all(axis=1)] = ZEROS
    return found


__all__ = ["OTHER", "RANGE", "TWICE", "ZEROS", "Findings", "Wrong", "judge"]

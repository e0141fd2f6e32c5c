"""Routes for tests, whose ids say which position, layer and place they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvroute.routes import Routes
from kvroute.routes.routes import checked_routes


@dataclass(frozen=True)
class Shape:
    """What a model routes."""

    layer_ids: tuple[int, ...] = (1, 4)
    num_experts: int = 300
    num_layers: int = 6
    top_k: int = 3

    def ids(self, positions: Sequence[int] | range, salt: int = 0) -> NDArray[np.int64]:
        """Ids ``[n, layers, top_k]``, distinct in each row, and different for every position below 1,000."""
        at = np.asarray(positions, np.int64)[:, None, None]
        layers = np.array(self.layer_ids, np.int64)[None, :, None]
        step = self.num_experts // self.top_k
        return (at * 7 + layers * 31 + salt * 13 + np.arange(self.top_k) * step) % self.num_experts

    def routes(
        self,
        start: int,
        valid: Sequence[bool] | NDArray[np.bool_],
        salt: int = 0,
        versions: Any = (),
    ) -> Routes:
        """Routes of ``[start, start + len(valid))``; the memory of what is missing holds nonsense.

        ``valid`` is ``[n]`` or, cell by cell, ``[n, layers]``.
        """
        there = np.array(valid, dtype=bool)
        ids = self.ids(range(start, start + len(there)), salt)
        ids[~there] = -9
        return Routes(ids, there, self.layer_ids, self.num_experts, self.num_layers, start, versions)

    def whole(self, rows: int, start: int = 0, salt: int = 0) -> Routes:
        return self.routes(start, [True] * rows, salt)


def changed(routes: Routes, **fields: Any) -> Routes:
    """The same routes but for these fields."""
    same = {
        "ids": routes.ids,
        "valid": routes.known,
        "layer_ids": routes.layer_ids,
        "num_experts": routes.num_experts,
        "num_layers": routes.num_layers,
        "start": routes.start,
        "weights_versions": routes.weights_versions,
        "token_hashes": routes.token_hashes,
        "missing_layers": routes.missing_layers,
    }
    return Routes(**{**same, **fields})


SHAPES = (
    Shape(),
    Shape(layer_ids=(0, 1, 2, 3), num_experts=8, num_layers=4, top_k=2),  # every layer has experts
    Shape(layer_ids=(3, 4, 5, 6, 7), num_experts=256, num_layers=8, top_k=8),  # dense first
    Shape(layer_ids=(1, 3, 5, 7), num_experts=16, num_layers=8, top_k=1),  # every other
    Shape(layer_ids=(0, 2, 3, 7), num_experts=70_000, num_layers=9, top_k=2),  # irregular, and 32-bit ids
)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return draw(st.sampled_from(SHAPES))


Cells = dict[tuple[int, int], list[int]]
"""The ids of each known cell by position and layer id: an account without an array."""


def without_layers(shape: Shape, mask: NDArray[np.bool_], lost: Sequence[int], start: int = 0) -> Routes:
    """Routes whose known cells are ``mask`` ``[n, layers of the shape]``, without a column for the layers ``lost``."""
    kept = [i for i, layer in enumerate(shape.layer_ids) if layer not in lost]
    ids = shape.ids(range(start, start + len(mask)))
    ids[~mask] = -9
    layers = tuple(shape.layer_ids[i] for i in kept)
    fields = layers, shape.num_experts, shape.num_layers, start
    return Routes(ids[:, kept], mask[:, kept], *fields, missing_layers=tuple(lost))


def cells_of(shape: Shape, routes: Routes) -> Cells:
    """What ``routes`` say they know, with the ids that the shape has there: not those of the routes."""
    known = np.argwhere(routes.known).tolist()
    at = [(routes.start + i, routes.layer_ids[j]) for i, j in known]
    return {(p, layer): shape.ids([p])[0, shape.layer_ids.index(layer)].tolist() for p, layer in at}


@st.composite
def masks(draw: st.DrawFn, layers: int, rows_max: int = 12) -> NDArray[np.bool_]:
    """Which cells are known, ``[n, layers]``: rows that are whole, missing, or lack a layer, mostly in runs."""
    word = st.sampled_from(["whole"] * 3 + ["missing", "cells"])
    runs = draw(st.lists(st.tuples(word, st.integers(1, 5), st.lists(st.booleans(), min_size=layers, max_size=layers))))
    rows = [
        {"whole": [True] * layers, "missing": [False] * layers}.get(w, some) for w, n, some in runs for _ in range(n)
    ]
    return np.array(rows[:rows_max], bool).reshape(-1, layers)


@st.composite
def cellwise(draw: st.DrawFn, shape: Shape, rows_max: int = 12, start: int | None = None) -> Routes:
    """Routes of which any cells are known, and some layers none at all."""
    first = draw(st.integers(0, 6)) if start is None else start
    lost = draw(st.sets(st.sampled_from(shape.layer_ids), max_size=len(shape.layer_ids) - 1))
    return without_layers(shape, draw(masks(len(shape.layer_ids), rows_max)), sorted(lost), first)


@st.composite
def of_shapes(draw: st.DrawFn, rows_max: int = 12, start: int | None = None) -> tuple[Shape, Routes]:
    """Routes of any shape, with weights versions of some of their positions."""
    shape = draw(shapes())
    made = draw(cellwise(shape, rows_max, start))
    cuts = sorted(draw(st.sets(st.integers(made.start, made.stop), max_size=4)))
    versions = [(a, b, draw(st.integers(0, 2))) for a, b in pairwise(cuts) if draw(st.booleans())]
    return shape, checked_routes(made.layout, made.ids.copy(), made.mask, made.start, versions)

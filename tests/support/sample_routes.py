"""Routes for tests, whose ids say which position, layer and place they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvroute.routes import Routes


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
        valid: Sequence[bool],
        salt: int = 0,
        versions: Any = (),
    ) -> Routes:
        """Routes of ``[start, start + len(valid))``; the memory of missing rows holds nonsense."""
        there = np.array(valid, dtype=bool)
        ids = self.ids(range(start, start + len(there)), salt)
        ids[~there] = -9
        return Routes(ids, there, self.layer_ids, self.num_experts, self.num_layers, start, versions)

    def whole(self, rows: int, start: int = 0, salt: int = 0) -> Routes:
        return self.routes(start, [True] * rows, salt)


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

"""Routing weights: by how much each expert's output counts, beside the ids of the same pass, bit for bit.

A weight carries no gradient. Only a trainer whose routers are frozen may take weights as constants; any other computes
its own from the replayed ids, and gets :attr:`RoutingWeights.routes` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import RowError
from cache_manager.publish import Rows
from cache_manager.spec import AuxBlockDataSpec
from kvroute.routes.routes import Routes


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RoutingWeights:
    """Routes, and a float32 weight for each of their ids: of one pass, or neither.

    ``weights[i, l, k]`` belongs to ``routes.ids[i, l, k]``. Where that is missing the weight is NaN, all ones in
    binary. The array is a read-only copy.

    Raises :class:`RowError` for arrays that do not fit, for another dtype, which would be rounded, and for a weight of
    a known id that is not finite; the error names the position and the layer id.
    """

    routes: Routes
    weights: NDArray[np.float32]  # [n, layers, top_k]

    def __post_init__(self) -> None:
        given = np.asarray(self.weights)
        ids = self.routes.ids
        if given.shape != ids.shape or given.dtype != np.float32:
            wanted = f"float32 {list(ids.shape)}"
            got = f"{given.dtype} {list(given.shape)}"
            raise RowError("routing weights", wanted, got)
        weights = given.copy()
        weights.view(np.uint32)[~self.routes.known] = np.iinfo(np.uint32).max
        wrong = self.routes.known & ~np.isfinite(weights).all(axis=2)
        if wrong.any():
            row, layer = (int(i) for i in np.argwhere(wrong)[0])
            where = f"position {self.routes.start + row} layer {self.routes.layer_ids[layer]}"
            wanted = "finite numbers"
            raise RowError(f"routing weights of {where}", wanted, weights[row, layer].tolist())
        weights.flags.writeable = False
        object.__setattr__(self, "weights", weights)

    @classmethod
    def from_rows(
        cls,
        spec: AuxBlockDataSpec,
        ids: Rows,
        weights: Rows,
        start: int = 0,
        **more: Any,
    ) -> RoutingWeights:
        """What ``AuxBlocks.read`` returned for the ids of ``spec`` and for their weights, at the same positions.

        A row that lacks one of both is missing. ``more`` is for :meth:`Routes.from_rows`.
        """
        if len(ids.valid) != len(weights.valid):
            wanted = f"{len(ids.valid)}, as there are ids"
            raise RowError("routing weights rows", wanted, len(weights.valid))
        both = Rows(ids.values, ids.valid & weights.valid)
        return cls(Routes.from_rows(spec, both, start, **more), weights.values)

    def __len__(self) -> int:
        return len(self.weights)

    def __eq__(self, other: object) -> bool:
        """Equal routes, and equal bits of the weights."""
        if not isinstance(other, RoutingWeights):
            return NotImplemented
        return self.routes == other.routes and self.weights.tobytes() == other.weights.tobytes()

    __hash__ = None  # type: ignore[assignment]  # arrays inside

    def __repr__(self) -> str:
        return f"RoutingWeights({self.routes!r})"


__all__ = ["RoutingWeights"]

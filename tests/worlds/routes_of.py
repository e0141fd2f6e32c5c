"""Routes whose every id is a function of what it belongs to, so that a shifted or foreign row is seen by its value."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvroute.routes import Routes


def expert_rows(
    sample: int, positions: NDArray[Any], layer_ids: tuple[int, ...], experts: int, top_k: int
) -> NDArray[Any]:
    """Distinct experts ``[n, layers, top_k]`` drawn from a seed of sample, position and layer."""
    rows = [
        [np.random.default_rng((sample, int(p), layer)).permutation(experts)[:top_k] for layer in layer_ids]
        for p in positions
    ]
    return np.array(rows, np.int64).reshape(len(positions), len(layer_ids), top_k)


def made_routes(
    sample: int,
    rows: int,
    *,
    layer_ids: tuple[int, ...] = (1, 2, 3),
    num_layers: int = 4,
    experts: int = 16,
    top_k: int = 4,
    holes: tuple[int, ...] = (),
) -> Routes:
    """The routes of a sample's first ``rows`` positions but for ``holes``. The first layer is dense, unless said."""
    valid = np.ones(rows, np.bool_)
    valid[list(holes)] = False
    ids = expert_rows(sample, np.arange(rows), layer_ids, experts, top_k)
    return Routes(ids, valid, layer_ids, experts, num_layers)

"""Pictures of routes. Needs matplotlib, which is imported where it is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import InvalidInputError
from kvroute.routes import Routes


def expert_load(routes: Iterable[Routes]) -> NDArray[np.float64]:
    """The share of routed tokens that each layer's experts got, ``[layers, experts]``; missing rows do not count.

    A layer's shares add up to ``top_k``: a token goes to so many experts. Raises :class:`InvalidInputError` when the
    routes are of different layers or experts, or there is no row at all.

    >>> import numpy as np
    >>> routes = Routes(np.array([[[1, 0]], [[1, 3]]]), np.array([True, True]), (0,), num_experts=4, num_layers=1)
    >>> expert_load([routes]).tolist()
    [[0.5, 1.0, 0.0, 0.5]]
    """
    counts, rows, shape = None, 0, None
    for each in routes:
        if shape is None:
            shape = (each.layer_ids, each.num_experts)
            counts = np.zeros((len(each.layer_ids), each.num_experts))
        elif shape != (each.layer_ids, each.num_experts):
            raise InvalidInputError("routes", f"layers and experts {shape}", (each.layer_ids, each.num_experts))
        assert counts is not None
        for layer in range(len(each.layer_ids)):
            counts[layer] += np.bincount(each.ids[each.valid, layer].ravel(), minlength=each.num_experts)
        rows += int(np.count_nonzero(each.valid))
    if counts is None or not rows:
        raise InvalidInputError("routes", "at least one row", "none")
    return counts / rows


def heat_map(load: NDArray[np.float64], layer_ids: Sequence[int], path: Path, *, title: str, note: str = "") -> None:
    """Write a PNG of :func:`expert_load`: a line per layer, a column per expert, per cent of the layer's tokens."""
    from matplotlib.figure import Figure

    layers, experts = load.shape
    figure = Figure(figsize=(max(7.0, 0.55 * experts + 2.5), max(3.2, 0.55 * layers + 2.2)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(100 * load, cmap="viridis", vmin=0.0, aspect="auto")
    axes.set_title(title)
    axes.set_xlabel("expert id" + (f"\n{note}" if note else ""))
    axes.set_ylabel("decoder layer")
    axes.set_xticks(range(0, experts, max(1, experts // 16)))
    axes.set_yticks(range(layers), [str(layer) for layer in layer_ids])
    if load.size <= 512:
        for layer, expert in np.ndindex(load.shape):
            share = 100 * load[layer, expert]
            colour = "black" if share > 65 * load.max() else "white"
            axes.text(expert, layer, f"{share:.0f}", ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, ax=axes, label="share of the layer's tokens (%)")
    figure.savefig(path, dpi=150)

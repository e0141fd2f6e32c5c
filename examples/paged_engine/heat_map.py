"""A picture of routes. Needs matplotlib, which is imported where it is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvroute.routes import Routes


def draw_load(routes: Sequence[Routes], path: Path, *, title: str) -> None:
    """Write a PNG: a line per layer, a column per expert, per cent of the layer's tokens; missing rows do not count."""
    from matplotlib.figure import Figure

    first, ids = routes[0], np.concatenate([each.ids[each.valid] for each in routes])  # [rows, layers, top_k]
    load = np.stack([np.bincount(layer.ravel(), minlength=first.num_experts) for layer in ids.swapaxes(0, 1)])
    share = 100 * load / len(ids)
    layers, experts = share.shape
    figure = Figure(figsize=(max(7.0, 0.55 * experts + 2.5), max(3.2, 0.55 * layers + 2.2)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(share, cmap="viridis", vmin=0.0, aspect="auto")
    axes.set_title(f"Expert load: {title}, {len(ids):,} rows, top {first.top_k} of {experts}")
    axes.set_xlabel(f"expert id\nan even load would be {100 * first.top_k / experts:.0f} %")
    axes.set_ylabel("decoder layer")
    axes.set_xticks(range(experts))
    axes.set_yticks(range(layers), [str(layer) for layer in first.layer_ids])
    figure.colorbar(image, ax=axes, label="share of the layer's tokens (%)")
    figure.savefig(path, dpi=150)

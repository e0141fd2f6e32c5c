"""What is known of a row, layer by layer. A *cell* is the ids of one position in one layer.

Almost every row is whole or missing. Then ``valid`` ``[n]`` says everything, ``known`` is ``None``, and nothing here is
computed. Only where some row has cells of some layers is there a mask ``known`` ``[n, layers]``. Outside memory that is
a bit a position, whether *anything* of its row is known, and the spans in which a layer is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import RowError
from kvroute import spans

Known = NDArray[np.bool_] | None
"""``[n, layers]``; ``None`` where every row is whole or missing."""

UnknownSpan = tuple[int, int, int]
"""A layer id, and positions ``[start, stop)`` of which other layers are known, but not this one."""

Gap = tuple[int, int | None]
"""A position, and the first layer that is missing there; no layer: nothing of its row is known."""


def split(given: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], Known]:
    """``valid`` ``[n]`` and ``known`` of a mask ``[n]`` or ``[n, layers]``. They may share its memory."""
    if given.ndim == 1:
        return given, None
    valid = np.logical_and.reduce(given, axis=1)
    return valid, given if (some(valid, given) != valid).any() else None


def some(valid: NDArray[np.bool_], known: Known) -> NDArray[np.bool_]:
    """Of which rows anything is known: bool ``[n]``."""
    return valid if known is None else np.logical_or.reduce(known, axis=1)


def only_known(ids: NDArray[Any], mask: NDArray[np.bool_]) -> NDArray[Any]:
    """``ids`` ``[n, layers, top_k]``; unknown cells of a ``mask`` ``[n, layers]`` name experts that pass any check."""
    return ids if mask.ndim == 1 else np.where(mask[..., None], ids, np.arange(ids.shape[2]))


def unknown_spans(known: Known, layer_ids: Sequence[int], start: int) -> tuple[UnknownSpan, ...]:
    """The unknown cells of rows of which something is known, as maximal ranges, layer by layer."""
    if known is None:
        return ()
    there = known.any(axis=1)
    found = ((layer, spans.runs(there & ~known[:, i])) for i, layer in enumerate(layer_ids))
    return tuple((layer, start + a, start + b) for layer, ranges in found for a, b in ranges)


def mask_of(
    there: NDArray[np.bool_], unknown: Sequence[UnknownSpan], layer_ids: Sequence[int], start: int
) -> NDArray[np.bool_]:
    """The mask ``[n]``, or ``[n, layers]``, of rows of which something is known and :func:`unknown_spans`.

    Raises :class:`RowError` for spans that are not exactly those of some rows. The work is one pass over the mask,
    whatever the spans claim.
    """
    if not unknown:
        return there
    stop, place = start + len(there), {layer: i for i, layer in enumerate(layer_ids)}
    known = np.repeat(there[:, None], len(place), axis=1)
    before: tuple[int, int] = (-1, 0)
    for layer, a, b in unknown:
        if layer not in place or not start <= a < b <= stop or (layer, a) < before:
            wanted = f"increasing (layer of {tuple(layer_ids)}, start, stop) inside [{start}, {stop})"
            raise RowError("routes.unknown", wanted, (layer, a, b))
        known[a - start : b - start, place[layer]] = False
        before = layer, b
    if unknown_spans(known, layer_ids, start) != tuple(unknown):
        raise RowError("routes.unknown", "the unknown cells of rows of which something is known", "others")
    return known


def lacking(gap: Gap, wanted: str) -> RowError:
    """What a caller hears of the first ``gap`` in what it ``wanted``."""
    position, layer = gap
    if layer is None:
        return RowError(f"row {position}", wanted, "none")
    return RowError(f"row {position} layer {layer}", wanted, "one without this layer")


def missing_layers(given: Iterable[int], layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """``given``, in order; :class:`RowError` unless they are layers of the model that are not in ``layer_ids``."""
    layers = tuple(given)
    sound = all(isinstance(n, (int, np.integer)) and 0 <= n < num_layers and n not in layer_ids for n in layers)
    if not sound or len(set(layers)) < len(layers):
        wanted = f"distinct layers in [0, {num_layers}) that are not in layer_ids {tuple(layer_ids)}"
        raise RowError("routes.missing_layers", wanted, layers)
    return tuple(sorted(int(n) for n in layers))


__all__ = [
    "Gap",
    "Known",
    "UnknownSpan",
    "lacking",
    "mask_of",
    "missing_layers",
    "only_known",
    "some",
    "split",
    "unknown_spans",
]

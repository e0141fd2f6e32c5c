"""Several parts of one sequence's routes made one, by absolute position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import RowError
from kvroute import spans
from kvroute.spans import UNKNOWN, WeightsSpan

if TYPE_CHECKING:
    from kvroute.routes import Routes


def merged(parts: Sequence[Routes]) -> tuple[NDArray[Any], NDArray[np.bool_], int, tuple[WeightsSpan, ...]]:
    """Ids, valid mask, start and weights versions of the union of ``parts``, in new memory.

    A position that several parts have a row for must have the same one in all of them, computed by one weights version
    as far as the versions are known: :class:`RowError` names the position, and the layer, of the first that differs.
    Positions between the parts are missing. One pass over the bytes; only rows that two parts have are compared.
    """
    first = parts[0]
    for other in parts[1:]:
        for name in ("layer_ids", "num_experts", "num_layers", "top_k"):
            if getattr(first, name) != getattr(other, name):
                raise RowError(f"routes.{name}", getattr(first, name), getattr(other, name))
    ordered = sorted((p for p in parts if len(p)), key=lambda p: p.start)
    if not ordered:
        return first.ids, first.valid, min(p.start for p in parts), first.weights_versions
    start, stop = ordered[0].start, max(p.stop for p in ordered)
    ids = np.empty((stop - start, *first.ids.shape[1:]), first.ids.dtype)
    valid = np.zeros(stop - start, np.bool_)
    versions = _Versions(start, stop)
    reached = start  # what lies before has been filled
    for part in ordered:
        if part.start > reached:
            ids[reached - start : part.start - start] = np.iinfo(ids.dtype).max
            reached = part.start
        both = min(reached, part.stop) - part.start  # how many of its positions are there already
        here = slice(part.start - start, part.start - start + both)
        if both:
            versions.settle(part, valid[here], both)  # first: it looks at what was valid before
            _join(ids[here], valid[here], part, both)
        if part.stop > reached:
            after = slice(reached - start, part.stop - start)
            ids[after], valid[after] = part.ids[both:], part.valid[both:]
            versions.extend(part, reached)
            reached = part.stop
    return ids, valid, start, versions.found()


def _join(ids: NDArray[Any], valid: NDArray[np.bool_], part: Routes, count: int) -> None:
    """Put the first ``count`` rows of ``part`` into ``ids`` and ``valid``, which have rows of the same positions."""
    new_ids, new_valid = part.ids[:count], part.valid[:count]
    twice = valid & new_valid
    whole = bool(twice.all())  # then there is nothing to pick out, and nothing to copy
    same = np.array_equal(ids, new_ids) if whole else np.array_equal(ids[twice], new_ids[twice])
    if not same:
        differs = (ids != new_ids).any(axis=2) & twice[:, None]
        row, layer = np.argwhere(differs)[0].tolist()
        where = f"row {part.start + row} layer {part.layer_ids[layer]}"
        raise RowError(where, f"{ids[row, layer].tolist()}, as in an earlier part", new_ids[row, layer].tolist())
    fills = new_valid & ~valid
    if fills.any():
        ids[fills] = new_ids[fills]
        valid |= fills


class _Versions:
    """The weights version of every position. An array only where parts overlap: otherwise the ranges follow."""

    def __init__(self, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._spans: list[WeightsSpan] = []
        self._array: NDArray[np.int64] | None = None

    def extend(self, part: Routes, reached: int) -> None:
        """The positions ``[reached, part.stop)``, which nobody had, are those of ``part``."""
        clipped = [(max(a, reached), b, v) for a, b, v in part.weights_versions if b > reached]
        if self._array is None:
            self._spans += clipped
            return
        for a, b, version in clipped:
            self._array[a - self._start : b - self._start] = version

    def settle(self, part: Routes, valid: NDArray[np.bool_], count: int) -> None:
        """The first ``count`` positions of ``part`` had versions; ``valid`` says where they had rows."""
        if not self._spans and not part.weights_versions and self._array is None:
            return
        if self._array is None:
            self._array = spans.by_position(self._spans, self._start, self._stop)
        held = self._array[part.start - self._start :][:count]
        new = spans.by_position(part.weights_versions, part.start, part.stop)[:count]
        new_valid = part.valid[:count]
        differs = (held != UNKNOWN) & (new != UNKNOWN) & (held != new) & (valid == new_valid)
        if differs.any():
            row = int(differs.argmax())
            raise RowError(f"weights version of row {part.start + row}", int(held[row]), int(new[row]))
        takes = (new_valid & ~valid) | ((new_valid == valid) & (held == UNKNOWN))
        held[takes] = new[takes]

    def found(self) -> tuple[WeightsSpan, ...]:
        if self._array is None:
            return spans.joined(self._spans)
        return spans.from_positions(self._array, self._start)

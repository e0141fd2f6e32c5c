"""Ids by position and layer, and which of them are known. A *cell* is the ids of one position in one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import RowError
from kvroute.checks import check_ids, whole
from kvroute.routes.layout import Layout
from kvroute.routes.parts import cells_of
from kvroute.routes.spans import (
    STOP_MAX,
    UNKNOWN,
    Span,
    WeightsSpan,
    by_position,
    checked_versions,
    from_positions,
    runs,
)
from kvroute.routes.token_hash import TokenHash, joined_hashes

Mask = NDArray[np.bool_]
"""``[n]``: which rows are known; or ``[n, layers]``: which cells."""

MissingCell = tuple[int, int | None]
"""A position, and the first layer that is missing there; ``None``: the whole row is missing."""

C = TypeVar("C", bound="Cells")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cells:
    """The fields of :class:`~kvroute.routes.Routes`, whose docstring explains them."""

    layout: Layout
    ids: NDArray[Any]  # [n, layers, top_k]  uint8 | uint16 | uint32
    mask: Mask  # [n] if every row is whole or missing, else [n, layers]; read-only
    start: int = 0
    weights_versions: tuple[WeightsSpan, ...] = ()
    token_hashes: tuple[TokenHash, ...] = ()

    def __post_init__(self) -> None:
        """Check all fields but the ids' values; arrays of the right dtype are taken over."""
        layout = self.layout
        ids = self.ids
        mask = self.mask
        start = _check_shape(layout, ids, mask, self.start)
        versions = checked_versions(self.weights_versions, start, start + len(ids))
        if ids.dtype != layout.dtype:
            ids = ids.astype(layout.dtype)
        blank(ids, mask)
        self._take(layout, ids, mask, start, versions, joined_hashes(self.token_hashes))

    def _take(self, layout: Layout, ids: NDArray[Any], mask: Mask, *more: Any) -> None:
        """Take over checked fields, in their order; ids of unknown cells are all ones."""
        if mask.ndim == 2 and ((rows_known := some_known(mask)) == mask.all(axis=1)).all():
            mask = rows_known
        ids.flags.writeable = mask.flags.writeable = False
        for name, value in zip(Cells.__slots__, (layout, ids, mask, *more), strict=True):
            object.__setattr__(self, name, value)

    def __setstate__(self, state: Sequence[Any]) -> None:
        self._take(*state)  # arrays that were pickled or copied are writable

    # ---------------------------------------------------------------- what there is

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Which rows are whole, bool ``[n]``: all layers of ``layer_ids`` are known."""
        return self.mask if self.mask.ndim == 1 else np.logical_and.reduce(self.mask, axis=1)

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which cells are known, bool ``[n, layers]``, read-only."""
        if self.mask.ndim == 2:
            return self.mask
        return np.broadcast_to(self.mask[:, None], self.ids.shape[:2])

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + len(self.ids)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing: no row, and no layer."""
        return not self.layout.missing_layers and bool(self.mask.all())

    @property
    def missing(self) -> tuple[Span, ...]:
        """The positions that lack a row, or a routed layer of it, as maximal ranges ``[start, stop)`` in order."""
        lost = np.full(len(self.ids), True) if self.layout.missing_layers else ~self.valid
        return tuple((self.start + a, self.start + b) for a, b in runs(lost))

    def first_gap(
        self,
        stop: int,
        start: int = 0,
        layers: Sequence[int] | None = None,
    ) -> MissingCell | None:
        """The first position in ``[start, stop)`` at which one of ``layers`` (all routed ones) is missing, and which.

        The layer is ``None`` if the whole row is missing; ``layers`` without a router are ignored.
        """
        if start >= stop:
            return None
        if not self.start <= start < self.stop:
            return start, None
        layout = self.layout
        part = slice(start - self.start, min(stop, self.stop) - self.start)
        chosen = layout.routed_layers if layers is None else layers
        lost = list[int]()
        known_rows = self.mask[part]
        if layout.missing_layers:
            lost = [n for n in layout.missing_layers if n in chosen]
        if known_rows.ndim == 2:
            is_chosen = [n in chosen for n in layout.layer_ids]
            all_chosen = known_rows[:, is_chosen].all(axis=1)
            known_rows = all_chosen & some_known(known_rows)
        if not lost and np.count_nonzero(known_rows) == len(known_rows):
            return None if stop <= self.stop else (self.stop, None)
        row = 0 if lost else int(known_rows.argmin())
        cells = self.known[part][row]
        lost += [n for n, known in zip(layout.layer_ids, cells, strict=True) if not known and n in chosen]
        return start + row, min(lost) if cells.any() else None


def replaced(cells: C, **fields: Any) -> C:
    """These cells with other ``fields``, which were checked before; arrays are taken over."""
    values = [fields[name] if name in fields else getattr(cells, name) for name in Cells.__slots__]
    made = object.__new__(type(cells))
    made._take(*values)
    return made


def known_stop(cells: Cells) -> int:
    """The position after the last row with a known cell; 0 if there is none."""
    rows = last_of(some_known(cells.mask))
    return cells.start + rows if rows else 0


def some_known(mask: Mask) -> NDArray[np.bool_]:
    """Which rows have a known cell: bool ``[n]``."""
    return mask if mask.ndim == 1 else np.logical_or.reduce(mask, axis=1)


def last_of(mask: NDArray[np.bool_]) -> int:
    """The index after the last true of ``mask`` ``[n]``; 0 if there is none."""
    if len(mask) and mask[-1]:
        return len(mask)
    rows = np.flatnonzero(mask)
    return int(rows[-1]) + 1 if len(rows) else 0


def blank(ids: NDArray[Any], mask: Mask) -> None:
    """Make the ids ``[n, layers, top_k]`` of unknown cells all ones, in place."""
    if not mask.all():
        ids[~mask] = np.iinfo(ids.dtype).max


def _check_shape(layout: Layout, ids: NDArray[Any], mask: Mask, start: int) -> int:
    """``start``; :class:`RowError` unless these are integers for the layers of ``layout``, a mask of them, and a
    position."""
    shape = (len(layout.layer_ids), layout.top_k)
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or ids.shape[1:] != shape:
        wanted = f"integers [n, {shape[0]} layers as in layer_ids, {shape[1]}]"
        raise RowError("routes.ids", wanted, f"{ids.dtype} of shape {ids.shape}")
    if mask.dtype != np.bool_ or mask.shape not in (ids.shape[:1], ids.shape[:2]):
        wanted = f"bool of shape {ids.shape[:1]} or {ids.shape[:2]}"
        raise RowError("routes.valid", wanted, f"{mask.dtype} of shape {mask.shape}")
    first = whole("routes.start", start, error=RowError)
    if first + len(ids) > STOP_MAX:
        wanted = f"the first of {len(ids)} positions before {STOP_MAX}"
        raise RowError("routes.start", wanted, first)
    return first


def check_known(layout: Layout, ids: NDArray[Any], mask: Mask, start: int) -> None:
    """Raise :class:`RowError` for a known cell that no router can have chosen; ``start`` is the first position."""
    start = _check_shape(layout, ids, mask, start)
    kept = np.flatnonzero(some_known(mask))
    if len(kept) < len(ids):
        ids = ids[kept]
        mask = mask[kept]
    if mask.ndim == 2:  # unknown cells name experts that pass any check
        ids = np.where(mask[..., None], ids, np.arange(layout.top_k))
    check_ids(ids, layout.num_experts, layout.layer_ids, kept + start)


def missing_error(gap: MissingCell, wanted: str) -> RowError:
    """The error for the first ``gap`` in what a caller ``wanted``."""
    position, layer = gap
    if layer is None:
        return RowError(f"row {position}", wanted, "none")
    return RowError(f"row {position} layer {layer}", wanted, "one without this layer")


def union(parts: Sequence[C], **fields: Any) -> C:
    """The union of ``parts`` of one sequence and model, in new memory; other ``fields`` are given, or the first part's.

    A cell known in several parts must be the same in all of them, with equal weights versions if they are known:
    :class:`RowError` names the position and layer of the first that differs. A row has a version if each of its cells
    is in a part that knows it; a missing row has none. Positions between the parts are missing.
    One pass over the bytes; only rows that two parts have are compared.
    """
    layer_ids = {layer for part in parts for layer in part.layout.layer_ids}
    layout = parts[0].layout.only(tuple(sorted(layer_ids)))
    by_start = sorted(parts, key=lambda part: part.start)
    ordered = [part for part in by_start if len(part.ids)] or by_start[:1]
    by_row = all(p.mask.ndim == 1 and p.layout.layer_ids == layout.layer_ids for p in parts)
    start = ordered[0].start
    stop = max(p.stop for p in ordered)
    ids = np.empty((stop - start, len(layout.layer_ids), layout.top_k), layout.dtype)
    known = np.zeros((len(ids), 1 if by_row else ids.shape[1]), np.bool_)
    versions = np.full(len(ids), UNKNOWN) if any(p.weights_versions for p in ordered) else None
    labelled = np.zeros(known.shape, np.bool_)  # cells whose version some part knows
    reached = start  # positions before it have been filled
    for part in ordered:
        part_layers = part.layout.layer_ids
        part_known = part.mask[:, None] if by_row else part.known
        whole = part_layers == layout.layer_ids  # ids are then copied and compared as bytes, cells are slower
        columns = slice(None) if whole else [layout.layer_ids.index(layer) for layer in part_layers]
        to, its_ids = (ids, part.ids) if whole else (cells_of(ids), cells_of(part.ids))
        first = part.start - start
        old = min(max(reached - part.start, 0), len(part_known))  # so many rows are there already
        overlap = slice(first, first + old)
        beyond = slice(first + old, first + len(part_known))
        if versions is not None:
            labels = np.where(some_known(part.mask), by_position(part.weights_versions, part.start, part.stop), UNKNOWN)
            _settle(versions[overlap], labels[:old], part.start)
            versions[beyond] = labels[old:]
            if not by_row:
                labelled[first : first + len(part_known), columns] |= part_known & (labels != UNKNOWN)[:, None]
        if old:
            held = known[overlap, columns]
            new = part_known[:old]
            if not (whole and np.array_equal(ids[overlap], part.ids[:old])):
                cells = cells_of(ids)
                its_cells = cells_of(part.ids)[:old]
                differs = (cells[overlap, columns] != its_cells) & held & new
                if differs.any():
                    row, i = np.argwhere(differs)[0].tolist()
                    layer = part_layers[i]
                    earlier = ids[first + row, layout.layer_ids.index(layer)]
                    where = f"row {part.start + row} layer {layer}"
                    wanted = f"{earlier.tolist()}, as in an earlier part"
                    raise RowError(where, wanted, part.ids[row, i].tolist())
                cells[overlap, columns] = np.where(new, its_cells, cells[overlap, columns])
            known[overlap, columns] = held | new
        to[beyond, columns] = its_ids[old:]
        known[beyond, columns] = part_known[old:]
        reached = max(reached, part.stop)
    if versions is not None and not by_row:
        versions[(known & ~labelled).any(axis=1)] = UNKNOWN
    mask = known[:, 0] if by_row else known
    blank(ids, mask)
    spans = () if versions is None else from_positions(versions, start)
    return replaced(parts[0], layout=layout, ids=ids, mask=mask, start=start, weights_versions=spans, **fields)


def _settle(held: NDArray[np.int64], new: NDArray[np.int64], start: int) -> None:
    """Put ``new`` versions ``[n]`` into ``held`` ones of the same rows, from position ``start`` on."""
    differs = (held != UNKNOWN) & (new != UNKNOWN) & (held != new)
    if differs.any():
        row = int(differs.argmax())
        raise RowError(f"weights version of row {start + row}", int(held[row]), int(new[row]))
    np.maximum(held, new, out=held)  # unknown ones are below all others

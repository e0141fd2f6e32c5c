"""Ids by position and layer, and which of them are known. A *cell* is the ids of one position in one layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import RowError
from kvroute.checks import check_ids, whole
from kvroute.routes.layout import Layout
from kvroute.routes.spans import Span, WeightsSpan, checked_versions, runs
from kvroute.routes.token_hash import TokenHash, joined_hashes

Mask = NDArray[np.bool_]
"""``[n]``: which rows are known; or ``[n, layers]``: which cells."""

Gap = tuple[int, int | None]
"""A position, and the first layer that is missing there; ``None``: the whole row is missing."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cells:
    """The fields of :class:`~kvroute.routes.Routes`, whose docstring explains them."""

    layout: Layout
    ids: NDArray[Any]  # [n, layers, top_k]  uint8 | uint16 | uint32
    mask: Mask  # [n] if every row is whole or missing, else [n, layers]; read-only
    start: int
    weights_versions: tuple[WeightsSpan, ...]
    token_hashes: tuple[TokenHash, ...]

    def _settle(
        self,
        layout: Layout,
        ids: NDArray[Any],
        mask: Mask,
        start: int,
        weights_versions: Iterable[WeightsSpan],
        token_hashes: Iterable[TokenHash],
        *,
        checked: bool,
        own: bool = False,
    ) -> None:
        """Check all fields, the ids' values unless ``checked``, and set them: as copies, unless ``own``."""
        shape = (len(layout.layer_ids), layout.top_k)
        if ids.ndim != 3 or ids.dtype.kind not in "iu" or ids.shape[1:] != shape:
            wanted = f"integers [n, {shape[0]} layers as in layer_ids, {shape[1]}]"
            raise RowError("routes.ids", wanted, f"{ids.dtype} of shape {ids.shape}")
        if mask.dtype != np.bool_ or mask.shape not in (ids.shape[:1], ids.shape[:2]):
            wanted = f"bool of shape {ids.shape[:1]} or {ids.shape[:2]}"
            raise RowError("routes.valid", wanted, f"{mask.dtype} of shape {mask.shape}")
        start = whole("routes.start", start, error=RowError)
        versions = checked_versions(weights_versions, start, start + len(ids))
        if not checked:
            check_known(layout, ids, mask, start)
        if not own or ids.dtype != layout.dtype:
            ids = np.array(ids, layout.dtype, order="C")  # known ids fit
        blank(ids, mask)
        self._take(layout, ids, mask if own else mask.copy(), start, versions, joined_hashes(token_hashes))

    def _take(self, layout: Layout, ids: NDArray[Any], mask: Mask, *more: Any) -> None:
        """Take over checked fields, in their order; ids of unknown cells are all ones."""
        if mask.ndim == 2 and ((there := some(mask)) == mask.all(axis=1)).all():
            mask = there
        ids.flags.writeable = mask.flags.writeable = False
        for name, value in zip(Cells.__slots__, (layout, ids, mask, *more), strict=True):
            object.__setattr__(self, name, value)

    def _with(self, **fields: Any) -> Self:
        """These cells with other fields, which were checked before; arrays are taken over."""
        made = object.__new__(type(self))
        made._take(*(fields[name] if name in fields else getattr(self, name) for name in Cells.__slots__))
        return made

    # ---------------------------------------------------------------- what there is

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Which rows are whole, bool ``[n]``: all layers of ``layer_ids`` are known."""
        return self.mask if self.mask.ndim == 1 else np.logical_and.reduce(self.mask, axis=1)

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which cells are known, bool ``[n, layers]``, read-only."""
        return np.broadcast_to(self.mask[:, None], self.ids.shape[:2]) if self.mask.ndim == 1 else self.mask

    @property
    def some(self) -> NDArray[np.bool_]:
        """Which rows have a known cell, bool ``[n]``."""
        return some(self.mask)

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + len(self.ids)

    @property
    def end(self) -> int:
        """The position after the last row with a known cell; 0 if there is none."""
        there = self.some
        if len(there) and there[-1]:
            return self.stop
        return self.start + int(rows[-1]) + 1 if len(rows := np.flatnonzero(there)) else 0

    @property
    def complete(self) -> bool:
        """Whether nothing is missing: no row, and no layer."""
        return not self.layout.missing_layers and bool(self.mask.all())

    @property
    def missing(self) -> tuple[Span, ...]:
        """The positions that lack a row, or a routed layer of it, as maximal ranges ``[start, stop)`` in order."""
        lost = np.full(len(self.ids), True) if self.layout.missing_layers else ~self.valid
        return tuple((self.start + a, self.start + b) for a, b in runs(lost))

    def first_gap(self, stop: int, start: int = 0, layers: Sequence[int] | None = None) -> Gap | None:
        """The first position in ``[start, stop)`` at which one of ``layers`` (all routed ones) is missing, and which.

        The layer is ``None`` if the whole row is missing; ``layers`` without a router are ignored.
        """
        if start >= stop:
            return None
        if not self.start <= start < self.stop:
            return start, None
        layout, at = self.layout, slice(start - self.start, min(stop, self.stop) - self.start)
        chosen, lost, there = layout.routed_layers if layers is None else layers, list[int](), self.mask[at]
        if layout.missing_layers:
            lost = [n for n in layout.missing_layers if n in chosen]
        if there.ndim == 2:
            there = there[:, [n in chosen for n in layout.layer_ids]].all(axis=1) & some(there)
        if not lost and np.count_nonzero(there) == len(there):
            return None if stop <= self.stop else (self.stop, None)
        row = 0 if lost else int(there.argmin())
        here = self.known[at][row]
        lost += [n for n, known in zip(layout.layer_ids, here, strict=True) if not known and n in chosen]
        return start + row, min(lost) if here.any() else None


def some(mask: Mask) -> NDArray[np.bool_]:
    """Which rows have a known cell: bool ``[n]``."""
    return mask if mask.ndim == 1 else np.logical_or.reduce(mask, axis=1)


def blank(ids: NDArray[Any], mask: Mask) -> None:
    """Make the ids ``[n, layers, top_k]`` of unknown cells all ones, in place."""
    if not mask.all():
        ids[~mask] = np.iinfo(ids.dtype).max


def check_known(layout: Layout, ids: NDArray[Any], mask: Mask, start: int) -> None:
    """Raise :class:`RowError` for a known cell that no router can have chosen; ``start`` is the first position."""
    kept = np.flatnonzero(some(mask))
    if len(kept) < len(ids):
        ids, mask = ids[kept], mask[kept]
    if mask.ndim == 2:  # unknown cells name experts that pass any check
        ids = np.where(mask[..., None], ids, np.arange(layout.top_k))
    check_ids(ids, layout.num_experts, layout.layer_ids, kept + start)


def lacking(gap: Gap, wanted: str) -> RowError:
    """The error for the first ``gap`` in what a caller ``wanted``."""
    position, layer = gap
    if layer is None:
        return RowError(f"row {position}", wanted, "none")
    return RowError(f"row {position} layer {layer}", wanted, "one without this layer")

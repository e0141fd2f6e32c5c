"""Ids by position and layer, and which of them are known. A *cell* is the ids of one position in one layer.

Almost every row is whole or missing: then ``valid`` ``[n]`` says everything. Only where some row has cells of some
layers is there a mask ``[n, layers]``. Outside memory that is a bit a position, whether *anything* of its row is known,
and the spans in which a layer is not.
"""

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

UnknownSpan = tuple[int, int, int]
"""A layer id, and positions ``[start, stop)`` of which other layers are known, but not this one."""

Gap = tuple[int, int | None]
"""A position, and the first layer that is missing there; no layer: nothing of its row is known."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cells:
    """What :class:`~kvroute.routes.Routes` are made of; its docstring says what each field is.

    Where ``cells`` is ``None`` every row is whole or missing.
    """

    layout: Layout
    ids: NDArray[Any]  # [n, layers, top_k]  uint8 | uint16 | uint32
    valid: NDArray[np.bool_]  # [n]
    cells: NDArray[np.bool_] | None  # [n, layers]
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
        """Check all fields, the ids' values unless ``checked``, and take them: as copies, unless they are its own."""
        shape = (len(layout.layer_ids), layout.top_k)
        if ids.ndim != 3 or ids.dtype.kind not in "iu" or ids.shape[1:] != shape:
            wanted = f"integers [n, {shape[0]} layers as in layer_ids, {shape[1]}]"
            raise RowError("routes.ids", wanted, f"{ids.dtype} of shape {ids.shape}")
        if mask.dtype != np.bool_ or mask.shape not in (ids.shape[:1], ids.shape[:2]):
            wanted = f"bool of shape {ids.shape[:1]} or {ids.shape[:2]}"
            raise RowError("routes.valid", wanted, f"{mask.dtype} of shape {mask.shape}")
        start = whole("routes.start", start, error=RowError)
        if not checked:
            check_known(layout, ids, mask, start)
        owned = ids if own and ids.dtype == layout.dtype else np.array(ids, layout.dtype, order="C")  # known ids fit
        if not mask.all():
            owned[~mask] = np.iinfo(owned.dtype).max
        self._take(
            layout=layout,
            ids=owned,
            mask=mask if own else mask.copy(),
            start=start,
            weights_versions=checked_versions(weights_versions, start, start + len(ids)),
            token_hashes=joined_hashes(token_hashes),
        )

    def _take(self, *, ids: NDArray[Any], mask: Mask, **fields: Any) -> None:
        """Take over checked fields; whatever is not known is all ones."""
        valid, cells = split(mask)
        fields |= {"ids": ids, "valid": valid, "cells": cells}
        for array in (ids, valid, cells):
            if array is not None:
                array.flags.writeable = False
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _with(self, **fields: Any) -> Self:
        """These with other fields, checked before; arrays are taken over, and ``mask`` is one as given."""
        made = object.__new__(type(self))
        fields.setdefault("mask", self.mask)
        for name in ("layout", "ids", "start", "weights_versions", "token_hashes"):
            fields.setdefault(name, getattr(self, name))
        made._take(**fields)
        return made

    # ---------------------------------------------------------------- what there is

    @property
    def mask(self) -> Mask:
        """What is known: ``[n]`` where every row is whole or missing, else ``[n, layers]``; read-only."""
        return self.valid if self.cells is None else self.cells

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which cells are there, bool ``[n, layers]``, read-only."""
        return np.broadcast_to(self.valid[:, None], self.ids.shape[:2]) if self.cells is None else self.cells

    @property
    def some(self) -> NDArray[np.bool_]:
        """Of which rows anything is known, bool ``[n]``."""
        return some(self.mask)

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + len(self.ids)

    @property
    def end(self) -> int:
        """The position after the last row of which anything is known; 0 when there is none."""
        some = self.some
        if len(some) and some[-1]:
            return self.stop
        return self.start + int(there[-1]) + 1 if len(there := np.flatnonzero(some)) else 0

    @property
    def unknown(self) -> tuple[UnknownSpan, ...]:
        """``(layer id, start, stop)``: where other layers of a row are known but not this one, as maximal ranges."""
        return unknown_spans(self.mask, self.layout.layer_ids, self.start)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing: no row, and no layer."""
        return not self.layout.missing_layers and bool(self.valid.all())

    @property
    def missing(self) -> tuple[Span, ...]:
        """The positions that lack a row, or a routed layer of it, as maximal ranges ``[start, stop)`` in order."""
        if self.layout.missing_layers:
            return ((self.start, self.stop),) if len(self.ids) else ()
        return tuple((self.start + a, self.start + b) for a, b in runs(~self.valid))

    def first_gap(self, stop: int, start: int = 0, layers: Sequence[int] | None = None) -> Gap | None:
        """The first position in ``[start, stop)`` at which one of ``layers`` (all routed ones) is missing, and which.

        The layer is ``None`` where nothing of the row is known; of ``layers`` those without a router do not count.
        """
        if start >= stop:
            return None
        if not self.start <= start < self.stop:
            return start, None
        layout, at = self.layout, slice(start - self.start, min(stop, self.stop) - self.start)
        chosen = layout.routed_layers if layers is None else layers
        whole = self.valid[at]
        if self.cells is not None:
            cells = self.cells[at]
            wanted = cells[:, [n in chosen for n in layout.layer_ids]]
            whole = np.logical_and.reduce(wanted, axis=1) & some(cells)
        lost = [n for n in layout.missing_layers if n in chosen]
        if whole.all() and not lost:
            return None if stop <= self.stop else (self.stop, None)
        row = 0 if lost else int(whole.argmin())
        here = self.known[at][row]
        lost += [n for n, there in zip(layout.layer_ids, here, strict=True) if not there and n in chosen]
        return start + row, min(lost) if here.any() else None


# Masks ----------------------------------------------------------------------------------------------------------------


def split(mask: Mask) -> tuple[NDArray[np.bool_], NDArray[np.bool_] | None]:
    """Which rows are whole, ``[n]``, and the mask if some row is neither whole nor missing. They may share memory."""
    if mask.ndim == 1:
        return mask, None
    valid = np.logical_and.reduce(mask, axis=1)
    return valid, mask if (some(mask) != valid).any() else None


def some(mask: Mask) -> NDArray[np.bool_]:
    """Of which rows anything is known: bool ``[n]``."""
    return mask if mask.ndim == 1 else np.logical_or.reduce(mask, axis=1)


def only_known(ids: NDArray[Any], mask: Mask) -> NDArray[Any]:
    """``ids`` ``[n, layers, top_k]``; unknown cells of a ``mask`` ``[n, layers]`` name experts that pass any check."""
    return ids if mask.ndim == 1 else np.where(mask[..., None], ids, np.arange(ids.shape[2]))


def check_known(layout: Layout, ids: NDArray[Any], mask: Mask, start: int) -> None:
    """Raise :class:`RowError` for a known cell that no router can have chosen; ``start`` is the first position."""
    kept = np.flatnonzero(some(mask))
    if len(kept) < len(ids):
        ids, mask = ids[kept], mask[kept]
    check_ids(only_known(ids, mask), layout.num_experts, layout.layer_ids, kept + start)


def unknown_spans(mask: Mask, layer_ids: Sequence[int], start: int) -> tuple[UnknownSpan, ...]:
    """The unknown cells of rows of which something is known, as maximal ranges, layer by layer."""
    if mask.ndim == 1:
        return ()
    there = some(mask)
    found = ((layer, runs(there & ~mask[:, i])) for i, layer in enumerate(layer_ids))
    return tuple((layer, start + a, start + b) for layer, ranges in found for a, b in ranges)


def mask_of(there: NDArray[np.bool_], unknown: Sequence[UnknownSpan], layer_ids: Sequence[int], start: int) -> Mask:
    """The mask of rows of which something is known, ``there`` ``[n]``, and :func:`unknown_spans`.

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


__all__ = ["Cells", "Gap", "Mask", "UnknownSpan", "lacking", "mask_of", "only_known", "some", "split"]

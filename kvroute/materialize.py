"""Routes as the arrays that trainers take: absolute positions, their layer axis, their dtype, their word for "missing".

Trainers spell a row that is not there in five incompatible ways. Zeros are the dangerous one: a router that gathers
them sends the token to one expert ``top_k`` times, so nothing here makes zeros unless they are asked for, but for dense
layers. A cell that is not known, of a layer that a row lacks, is spelled as the whole row would be. The spread ids
follow the padding that keeps expert-parallel ranks balanced: consecutive ids go to consecutive *ranks*, and are
distinct within a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import RowError
from kvroute.cells import lacking

if TYPE_CHECKING:
    from kvroute.routes import Routes

Layers = Literal["all", "moe"] | Sequence[int]
Filler = Literal["zero", "arange", "minus1", "spread"]
Missing = Literal["error"] | Filler

FILLERS: tuple[str, ...] = get_args(Filler)


def materialized(
    routes: Routes,
    rows: int,
    layers: Layers,
    dtype: np.dtype[Any],
    missing: Missing,
    required: int | None,
    pad: Filler | None,
    ep: int,
    out: NDArray[Any] | None,
) -> NDArray[Any]:
    """See :meth:`kvroute.routes.Routes.materialize`."""
    if rows < 0:
        raise RowError("rows", "0 or more", rows)
    plan = Plan(routes.routed_layers, routes.num_layers, routes.num_experts, routes.top_k, layers, dtype, ep)
    needed = rows if required is None else required
    if not 0 <= needed <= rows:
        raise RowError("required", f"0 to {rows} rows", required)
    if pad is None:
        if missing == "error" and needed < rows:
            raise RowError("pad", f"a spelling for the rows [{needed}, {rows}): " + ", ".join(FILLERS), None)
        pad = "zero" if missing == "error" else missing
    plan.check(missing, pad)
    shape = (rows, len(plan.layers), routes.top_k)
    if out is None:
        out = np.empty(shape, dtype)
    elif out.shape != shape or out.dtype != dtype:
        raise RowError("out", f"{dtype} of shape {shape}", f"{out.dtype} of shape {out.shape}")
    plan.fill(out[:needed], routes, 0, missing)
    plan.fill(out[needed:], routes, needed, pad)
    return out


class _Columns(NamedTuple):
    """Where the chosen layers are in routes of certain layers: pairs of slices, of places in the array and there."""

    copies: list[tuple[slice, slice]]
    dense: list[tuple[slice, slice]]
    lacks: bool  # a chosen layer, which is a missing one


class Plan:
    """How rows of one model become rows of ``layers`` and ``dtype``: which layers go where, and what fills the rest.

    ``routed`` are the model's layers with a router. Made once for many pieces of one array, or for many sequences.
    Raises :class:`RowError` for a layer that is not there, and a dtype that cannot hold the ids.
    """

    def __init__(
        self,
        routed: Sequence[int],
        num_layers: int,
        num_experts: int,
        top_k: int,
        layers: Layers,
        dtype: np.dtype[Any],
        ep: int = 1,
    ) -> None:
        if dtype.kind not in "iu" or np.iinfo(dtype).max < num_experts - 1:
            raise RowError("dtype", f"an integer that holds {num_experts - 1}", dtype)
        if ep < 1 or num_experts % ep:
            raise RowError("ep", f"a divisor of {num_experts} experts", ep)
        self.layers = chosen_layers(layers, routed, num_layers)
        self.dtype, self._experts, self._top_k, self._ep = dtype, num_experts, top_k, ep

    def check(self, *words: str) -> None:
        """Raise :class:`RowError` for a spelling that there is not, or that the dtype cannot hold."""
        for word in words:
            if word != "error" and word not in FILLERS:
                raise RowError("missing", "error, " + ", ".join(FILLERS), repr(word))
            if word == "minus1" and self.dtype.kind == "u":
                raise RowError("dtype", "a signed integer, for rows of -1", self.dtype)

    def fill(self, out: NDArray[Any], routes: Routes, first: int, missing: Missing) -> None:
        """Put positions ``first ..`` into ``out`` ``[n, layers, top_k]``; what is not there as ``missing`` says.

        :class:`RowError` naming the first such position, and layer, when that is ``"error"``; ``out`` is as it was
        then. The spelling has been checked.
        """
        last = first + len(out)
        if missing == "error" and (gap := routes.first_gap(last, first, self.layers)) is not None:
            raise lacking(gap, f"a row for each of the positions [{first}, {last})")
        a, b = min(max(first, routes.start), last), max(min(last, routes.stop), first)
        if a >= b:
            self.filler(out, missing, first)
            return
        self.filler(out[: a - first], missing, first)
        self.filler(out[b - first :], missing, b)
        columns, here = _columns(self.layers, routes.layer_ids, routes.missing_layers), out[a - first : b - first]
        at = slice(a - routes.start, b - routes.start)
        for to, of in columns.copies:
            here[:, to] = routes.ids[at, of]
        for to, _ in columns.dense:
            here[:, to] = 0
        if missing == "error":
            return
        if routes.cellwise or columns.lacks:
            self._spell_cells(here, routes.known[at], columns, missing, a)
        elif not (valid := routes.valid[at]).all():
            holes = np.flatnonzero(~valid)
            filled = np.empty((len(holes), *out.shape[1:]), self.dtype)
            self.filler(filled, missing, holes + a)
            here[holes] = filled

    def _spell_cells(
        self, out: NDArray[Any], known: NDArray[np.bool_], columns: _Columns, missing: Missing, first: int
    ) -> None:
        """Spell the cells of ``out`` that ``known`` ``[n, layers of the routes]`` lacks, of positions ``first ..``.

        A dense layer is not spelled, but in a row of which nothing is known.
        """
        there = np.zeros(out.shape[:2], np.bool_)
        for to, of in columns.copies:
            there[:, to] = known[:, of]
        some = known.any(axis=1, keepdims=True)
        for to, _ in columns.dense:
            there[:, to] = some
        holes = np.flatnonzero(~there.all(axis=1))
        filled = np.empty((len(holes), *out.shape[1:]), self.dtype)
        self.filler(filled, missing, holes + first)
        out[holes] = np.where(there[holes][..., None], out[holes], filled)

    def filler(self, out: NDArray[Any], missing: Missing, positions: int | NDArray[np.int64]) -> None:
        """Fill ``out`` ``[n, layers, top_k]`` with rows that are not there: of ``positions``, or from that one on."""
        if not len(out):
            return
        if missing == "zero":
            out[...] = 0
        elif missing == "minus1":
            out[...] = -1
        elif missing == "arange":
            out[...] = np.arange(self._top_k)
        else:
            at = np.arange(positions, positions + len(out)) if isinstance(positions, int) else positions
            out[...] = self._spread(at)

    def _spread(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Distinct ids ``[n, layers, top_k]`` that visit every rank once before any twice, from a place of their own.

        ``a`` counts choices; rank ``a % ep`` gets it, and among that rank's experts it is their turn's. As ``a`` runs
        through ``num_experts`` values every expert comes once, so ``top_k`` consecutive ones are distinct.
        """
        k, ep, experts = self._top_k, self._ep, self._experts
        base = positions[:, None] * k + np.array(self.layers, np.int64)[None, :] * (ep * k)
        a = base[:, :, None] + np.arange(k)
        per_rank = experts // ep
        spread: NDArray[np.int64] = a % ep * per_rank + a // ep % per_rank
        return spread


@lru_cache(maxsize=256)
def _columns(layers: tuple[int, ...], layer_ids: tuple[int, ...], missing_layers: tuple[int, ...]) -> _Columns:
    """Where each of the chosen ``layers`` is in routes of ``layer_ids``."""
    place = {layer: i for i, layer in enumerate(layer_ids)}
    copies = _slices([(to, place[layer]) for to, layer in enumerate(layers) if layer in place])
    dense = [(to, to) for to, layer in enumerate(layers) if layer not in place and layer not in missing_layers]
    return _Columns(copies, _slices(dense), not set(missing_layers).isdisjoint(layers))


def chosen_layers(layers: Layers, routed: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layer ids that ``layers`` means; :class:`RowError` for one that the model does not have, or twice."""
    if isinstance(layers, str):
        if layers not in ("all", "moe"):
            raise RowError("layers", "all, moe or a sequence of layer ids", repr(layers))
        return tuple(range(num_layers)) if layers == "all" else tuple(routed)
    chosen = tuple(int(layer) for layer in layers)
    for layer in chosen:
        if not 0 <= layer < num_layers:
            raise RowError("layers", f"layer ids in [0, {num_layers})", layer)
    if len(set(chosen)) < len(chosen):
        raise RowError("layers", "distinct layer ids", chosen)
    return chosen


def _slices(pairs: Sequence[tuple[int, int]]) -> list[tuple[slice, slice]]:
    """``pairs`` of places as few pairs of slices: runs in which both step by a constant."""
    found: list[tuple[slice, slice]] = []
    at = 0
    while at < len(pairs):
        end = at + 1
        step = (1, 1)
        if end < len(pairs):
            step = pairs[end][0] - pairs[at][0], pairs[end][1] - pairs[at][1]
        if step[0] > 0 and step[1] > 0:
            while end < len(pairs) and (pairs[end][0] - pairs[end - 1][0], pairs[end][1] - pairs[end - 1][1]) == step:
                end += 1
        else:
            step = (1, 1)
        (to, of), (last_to, last_of) = pairs[at], pairs[end - 1]
        found.append((slice(to, last_to + 1, step[0]), slice(of, last_of + 1, step[1])))
        at = end
    return found

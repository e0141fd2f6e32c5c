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
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import RowError
from kvroute.checks import whole
from kvroute.routes.cells import Cells, lacking
from kvroute.routes.layout import Layers, Layout

Filler = Literal["zero", "arange", "minus1", "spread"]
Missing = Literal["error"] | Filler

FILLERS: Final[tuple[str, ...]] = get_args(Filler)


class _Columns(NamedTuple):
    """Where the chosen layers are in routes of certain layers: pairs of slices, of places in the array and there."""

    copies: list[tuple[slice, slice]]
    dense: list[tuple[slice, slice]]
    lacks: bool  # a chosen layer, which is a missing one


class Plan:
    """How rows of one model become rows of ``layers`` and ``dtype``: which layers go where, and what fills the rest.

    Made once for many pieces of one array, or for many sequences. Raises :class:`RowError` for a layer that is not
    there, for a spelling that there is not, and for a dtype that cannot hold it or the ids.
    """

    def __init__(
        self, layout: Layout, layers: Layers, dtype: np.dtype[Any], ep: int, missing: Missing, pad: Filler
    ) -> None:
        experts = layout.num_experts
        if dtype.kind not in "iu" or np.iinfo(dtype).max < experts - 1:
            raise RowError("dtype", f"an integer that holds {experts - 1}", dtype)
        if experts % whole("ep", ep, 1, error=RowError):
            raise RowError("ep", f"a divisor of {experts} experts", ep)
        self.layers = layout.chosen(layers)
        self.dtype, self._experts, self._top_k, self._ep = dtype, experts, layout.top_k, ep
        for name, word, words in (("missing", missing, ("error", *FILLERS)), ("pad", pad, FILLERS)):
            if word not in words:
                raise RowError(name, ", ".join(words), repr(word))
            if word == "minus1" and dtype.kind == "u":
                raise RowError("dtype", "a signed integer, for rows of -1", dtype)

    def fill(self, out: NDArray[Any], routes: Cells, first: int, missing: Missing) -> None:
        """Put positions ``first ..`` into ``out`` ``[n, layers, top_k]``; what is not there as ``missing`` says.

        :class:`RowError` naming the first such position, and layer, when that is ``"error"``; ``out`` is as it was
        then.
        """
        last = first + len(out)
        if missing == "error" and (gap := routes.first_gap(last, first, self.layers)) is not None:
            raise lacking(gap, f"a row for each of the positions [{first}, {last})")
        a, b = min(max(first, routes.start), last), max(min(last, routes.stop), first)
        if a >= b:
            self.filler(out, missing, first)
            return
        if (a, b) != (first, last):
            self.filler(out[: a - first], missing, first)
            self.filler(out[b - first :], missing, b)
        columns = _columns(self.layers, routes.layout.layer_ids, routes.layout.missing_layers)
        here, at = out[a - first : b - first], slice(a - routes.start, b - routes.start)
        for to, of in columns.copies:
            here[:, to] = routes.ids[at, of]
        for to, _ in columns.dense:
            here[:, to] = 0
        if missing != "error":
            self._spell(here, routes, at, columns, missing, a)

    def _spell(
        self, out: NDArray[Any], routes: Cells, at: slice, columns: _Columns, missing: Missing, first: int
    ) -> None:
        """Spell what the rows ``at`` lack, in ``out``, of positions ``first ..``.

        A dense layer is not spelled, but in a row of which nothing is known.
        """
        cellwise = routes.cells is not None or columns.lacks
        whole = there = routes.valid[at]  # [n], or [n, layers of out]
        if cellwise:
            known = routes.known[at]
            there = np.zeros(out.shape[:2], np.bool_)
            for to, of in columns.copies:
                there[:, to] = known[:, of]
            for to, _ in columns.dense:
                there[:, to] = known.any(axis=1, keepdims=True)
            whole = np.logical_and.reduce(there, axis=1)
        if whole.all():
            return
        holes = np.flatnonzero(~whole)
        filled = np.empty((len(holes), *out.shape[1:]), self.dtype)
        self.filler(filled, missing, holes + first)
        out[holes] = np.where(there[holes][..., None], out[holes], filled) if cellwise else filled

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


def _slices(pairs: Sequence[tuple[int, int]]) -> list[tuple[slice, slice]]:
    """``pairs`` of places as few pairs of slices: runs in which both step by a constant."""
    found: list[tuple[slice, slice]] = []
    at = 0
    while at < len(pairs):
        end, step = at + 1, (1, 1)
        if end < len(pairs):
            step = pairs[end][0] - pairs[at][0], pairs[end][1] - pairs[at][1]
        if min(step) > 0:
            while end < len(pairs) and (pairs[end][0] - pairs[end - 1][0], pairs[end][1] - pairs[end - 1][1]) == step:
                end += 1
        else:
            step = (1, 1)
        (to, of), (last_to, last_of) = pairs[at], pairs[end - 1]
        found.append((slice(to, last_to + 1, step[0]), slice(of, last_of + 1, step[1])))
        at = end
    return found

"""Routes as the arrays that trainers take: absolute positions, their layer axis, their dtype, their word for "missing".

Trainers spell a row that is not there in five incompatible ways. Zeros are the dangerous one: a router that gathers
them sends the token to one expert ``top_k`` times, so nothing here makes zeros unless they are asked for. The spread
ids follow the padding that keeps expert-parallel ranks balanced: consecutive ids go to consecutive *ranks*, and are
distinct within a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import RowError

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
    plan = Plan(routes.layer_ids, routes.num_layers, routes.num_experts, routes.top_k, layers, dtype, ep)
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


class Plan:
    """How rows of one layout become rows of ``layers`` and ``dtype``: which layers go where, and what fills the rest.

    Made once for many pieces of one array, or for many sequences. Raises :class:`RowError` for a layer that is not
    there, and a dtype that cannot hold the ids.
    """

    def __init__(
        self,
        layer_ids: Sequence[int],
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
        self.layers = chosen_layers(layers, layer_ids, num_layers)
        self.dtype, self._experts, self._top_k, self._ep = dtype, num_experts, top_k, ep
        self._num_layers = num_layers
        place = {layer: i for i, layer in enumerate(layer_ids)}
        self._copies = _slices([(to, place[layer]) for to, layer in enumerate(self.layers) if layer in place])
        self._dense = _slices([(to, to) for to, layer in enumerate(self.layers) if layer not in place])

    def check(self, *words: str) -> None:
        """Raise :class:`RowError` for a spelling that there is not, or that the dtype cannot hold."""
        for word in words:
            if word != "error" and word not in FILLERS:
                raise RowError("missing", "error, " + ", ".join(FILLERS), repr(word))
            if word == "minus1" and self.dtype.kind == "u":
                raise RowError("dtype", "a signed integer, for rows of -1", self.dtype)

    def fill(self, out: NDArray[Any], routes: Routes, first: int, missing: Missing) -> None:
        """Put positions ``first ..`` into ``out`` ``[n, layers, top_k]``; a row that is not there as ``missing`` says.

        :class:`RowError` naming the first such position, when that is ``"error"``; ``out`` is as it was then. The
        spelling has been checked.
        """
        last = first + len(out)
        if missing == "error" and (gap := routes.first_missing(last, first)) is not None:
            raise RowError(f"row {gap}", f"a row for each of the positions [{first}, {last})", "none")
        a, b = min(max(first, routes.start), last), max(min(last, routes.stop), first)
        if a >= b:
            self.filler(out, missing, first)
            return
        self.filler(out[: a - first], missing, first)
        self.filler(out[b - first :], missing, b)
        self._copy(out[a - first : b - first], routes.ids[a - routes.start : b - routes.start])
        if missing != "error" and not (valid := routes.valid[a - routes.start : b - routes.start]).all():
            holes = np.flatnonzero(~valid)
            filled = np.empty((len(holes), *out.shape[1:]), self.dtype)
            self.filler(filled, missing, holes + a)
            out[holes + (a - first)] = filled

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

    def _copy(self, out: NDArray[Any], ids: NDArray[Any]) -> None:
        for to, of in self._copies:
            out[:, to] = ids[:, of]
        for to, _ in self._dense:
            out[:, to] = 0


def chosen_layers(layers: Layers, layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layer ids that ``layers`` means; :class:`RowError` for one that the model does not have, or twice."""
    if isinstance(layers, str):
        if layers not in ("all", "moe"):
            raise RowError("layers", "all, moe or a sequence of layer ids", repr(layers))
        return tuple(range(num_layers)) if layers == "all" else tuple(layer_ids)
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

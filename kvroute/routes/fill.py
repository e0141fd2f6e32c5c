"""Routes as trainers' arrays: with absolute positions, the trainer's layer axis, dtype and word for "missing".

Trainers spell a missing row in five incompatible ways. Zeros are the dangerous one: a router that gathers them sends
the token to one expert ``top_k`` times, so this module makes zeros only on request and for dense layers. An unknown
cell, of a layer that a row lacks, is spelled as in a missing row. The spread ids keep expert-parallel ranks balanced:
consecutive ids go to consecutive *ranks*, and are distinct within a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cache_manager.errors import InvalidInputError, RowError
from kvroute.checks import whole
from kvroute.routes.cells import Cells, missing_error
from kvroute.routes.layout import Layers, Layout, check_alike
from kvroute.routes.split import TAIL, Shard, Split, count_places

PaddedSide = Literal["left", "right"]
Order = Literal["sequence", "batch"]
Filler = Literal["zero", "arange", "minus1", "spread"]
Missing = Literal["error"] | Filler

FILLERS: Final[tuple[str, ...]] = get_args(Filler)

_Slices = list[tuple[slice, slice]]


class FillPlan:
    """How rows of one model become rows of ``layers`` and ``dtype``: which layers go where, and how holes are filled.

    Made once for many pieces of one array, or for many sequences. Raises :class:`RowError` for a layer or a spelling
    that does not exist, and for a dtype that cannot hold the spelling or the ids.
    """

    def __init__(
        self,
        layout: Layout,
        layers: Layers,
        dtype: np.dtype[Any],
        ep: int,
        missing: Missing,
        pad: Filler = "spread",
    ) -> None:
        experts = layout.num_experts
        if dtype.kind not in "iu" or np.iinfo(dtype).max < experts - 1:
            raise RowError("dtype", f"an integer that holds {experts - 1}", dtype)
        if experts % whole("ep", ep, 1, error=RowError):
            raise RowError("ep", f"a divisor of {experts} experts", ep)
        self.layers = layout.chosen(layers)
        self.dtype = dtype
        self._experts = experts
        self._top_k = layout.top_k
        self._ep = ep
        self.missing = missing
        self.pad = pad
        self._of = layout, _columns(self.layers, layout.layer_ids, layout.missing_layers)
        for name, word, words in (("missing", missing, ("error", *FILLERS)), ("pad", pad, FILLERS)):
            if word not in words:
                raise RowError(name, ", ".join(words), repr(word))
            if word == "minus1" and dtype.kind == "u":
                raise RowError("dtype", "a signed integer, for rows of -1", dtype)

    def place(
        self,
        out: NDArray[Any],
        routes: Cells,
        first: int,
        needed: int,
        end: int,
    ) -> None:
        """Put positions ``first ..`` into ``out`` ``[n, layers, top_k]``.

        Missing cells of positions before ``needed`` are spelled as ``missing`` says, others as ``pad`` says. Positions
        before 0, and those from ``end`` on, whatever is there, are padding.
        """
        begin = min(max(-first, 0), len(out))
        needed = min(max(needed - first, begin), len(out))
        end = min(max(end - first, needed), len(out))
        self.fill(out[begin:needed], routes, first + begin, self.missing)
        if needed - begin < len(out):
            self.filler(out[:begin], self.pad, first)
            self.fill(out[needed:end], routes, first + needed, self.pad)
            self.filler(out[end:], self.pad, first + end)

    def fill(
        self,
        out: NDArray[Any],
        routes: Cells,
        first: int,
        missing: Missing,
    ) -> None:
        """Put positions ``first ..`` into ``out`` ``[n, layers, top_k]``; missing cells as ``missing`` says.

        If that is ``"error"``, :class:`RowError` names the first such position and layer; ``out`` is then unchanged.
        """
        last = first + len(out)
        if missing == "error" and (gap := routes.first_gap(last, first, self.layers)) is not None:
            raise missing_error(gap, f"a row for each of the positions [{first}, {last})")
        a = min(max(first, routes.start), last)
        b = max(min(last, routes.stop), first)
        if a >= b:
            self.filler(out, missing, first)
            return
        if (a, b) != (first, last):
            self.filler(out[: a - first], missing, first)
            self.filler(out[b - first :], missing, b)
        layout, columns = self._of
        if routes.layout is not layout and routes.layout != layout:
            columns = _columns(self.layers, routes.layout.layer_ids, routes.layout.missing_layers)
        copies, dense, lacks = columns
        target = out[a - first : b - first]
        rows = slice(a - routes.start, b - routes.start)
        for to, source in copies:
            target[:, to] = routes.ids[rows, source]
        for to, _ in dense:
            target[:, to] = 0
        if missing == "error":
            return
        present = routes.mask[rows]  # [n], or [n, layers of out]
        if present.all() and not lacks:
            return
        if lacks or present.ndim == 2:
            known = routes.known[rows]
            present = np.zeros(target.shape[:2], np.bool_)
            for to, source in copies:
                present[:, to] = known[:, source]
            for to, _ in dense:  # zeros, except in a row without a known cell
                present[:, to] = known.any(axis=1, keepdims=True)
        holes = np.flatnonzero(~present.reshape(len(present), -1).all(axis=1))
        filled = np.empty((len(holes), *target.shape[1:]), self.dtype)
        self.filler(filled, missing, holes + a)
        target[holes] = filled if present.ndim == 1 else np.where(present[holes][..., None], target[holes], filled)

    def filler(
        self,
        out: NDArray[Any],
        missing: Missing,
        positions: int | NDArray[np.int64],
    ) -> None:
        """Fill ``out`` ``[n, layers, top_k]`` with missing rows: at ``positions``, or from that position on.

        The spread ids visit every rank once before any twice: ``a`` counts choices; rank ``a % ep`` gets it, and its
        experts take turns. As ``a`` runs through ``num_experts`` values every expert comes once, so ``top_k``
        consecutive ones are distinct.
        """
        if not len(out):
            return
        k = self._top_k
        ep = self._ep
        experts = self._experts
        if missing == "spread":
            indices = np.arange(positions, positions + len(out)) if isinstance(positions, int) else positions
            base = indices[:, None] * k + np.array(self.layers, np.int64) * (ep * k)
            a = base[:, :, None] + np.arange(k)
            out[...] = a % ep * (experts // ep) + a // ep % (experts // ep)
        else:
            out[...] = np.arange(k) if missing == "arange" else {"zero": 0, "minus1": -1}[missing]


@lru_cache(maxsize=256)
def _columns(
    layers: tuple[int, ...], layer_ids: tuple[int, ...], missing_layers: tuple[int, ...]
) -> tuple[_Slices, _Slices, bool]:
    """Where the chosen ``layers`` are in routes of ``layer_ids``: pairs of slices, in the array and in the routes.

    First those to copy, then the dense ones; and whether one of ``layers`` is a missing one.
    """
    place = {layer: i for i, layer in enumerate(layer_ids)}
    copies = [(to, place[layer]) for to, layer in enumerate(layers) if layer in place]
    dense = [(to, to) for to, layer in enumerate(layers) if layer not in place and layer not in missing_layers]
    return _slices(copies), _slices(dense), not set(missing_layers).isdisjoint(layers)


def _slices(pairs: Sequence[tuple[int, int]]) -> _Slices:
    """``pairs`` of places as few pairs of slices: runs in which both go up by a constant, as where every other layer
    has a router."""
    slices = _Slices()
    remaining = np.array(pairs, np.int64).reshape(-1, 2)
    while len(remaining):
        steps = np.diff(remaining, axis=0)
        same = (steps > 0).all(axis=1) & (steps == steps[:1]).all(axis=1)
        n = 1 + (len(same) if same.all() else int(same.argmin()))
        by = steps[0] if n > 1 else np.ones(2, np.int64)
        last = remaining[n - 1]
        bounds = np.stack([remaining[0], last + 1, by], axis=1)
        to, source = (slice(*of_side) for of_side in bounds.tolist())
        slices.append((to, source))
        remaining = remaining[n:]
    return slices


# A rank's rows of a batch ---------------------------------------------------------------------------------------------


def shard_packed(
    parts: Sequence[Cells],
    tokens: Sequence[int],
    split: Split,
    layers: Layers = "moe",
    dtype: DTypeLike = "int64",
    missing: Missing = "error",
    *,
    pad: Filler = "spread",
    ep: int = 1,
) -> NDArray[Any]:
    """One rank's rows ``[local tokens, layers, top_k]`` of a packed batch, in C order.

    ``tokens[i]`` is how many tokens sequence ``i`` has; its first ``tokens[i] - 1`` rows are needed; missing ones are
    spelled as ``missing`` says. A missing row of the last token, and all padding, is spelled as ``pad`` says.
    ``layers`` are cut to those of the pipeline stage: ``"all"`` gives the stage's layers, ``"moe"`` those of them with
    experts; a sequence of layer ids is used unchanged.

    Raises :class:`RowError` for a missing row when ``missing`` is ``"error"``, naming the sequence, the position and
    the layer; and for sequences of unlike layers, experts or top-k.
    """
    plan = _plan(parts, tokens, split, layers, dtype, ep, missing, pad)
    shards = split.packed(tokens)
    out = np.empty((count_places(shards), len(plan.layers), parts[0].layout.top_k), plan.dtype)
    _place(plan, out, parts, tokens, shards)
    return out


def shard_padded(
    parts: Sequence[Cells],
    tokens: Sequence[int],
    split: Split,
    *,
    width: int,
    side: PaddedSide = "right",
    order: Order = "sequence",
    layers: Layers = "moe",
    dtype: DTypeLike = "int64",
    missing: Missing = "error",
    pad: Filler = "spread",
    ep: int = 1,
) -> NDArray[Any]:
    """One rank's rows of a padded batch ``[batch, width]``, padded on its ``side``.

    ``order="sequence"`` gives ``[local width, batch, layers, top_k]``, which a router of Megatron flattens; ``"batch"``
    gives ``[batch, local width, layers, top_k]``, as transformers models need. Other arguments are as in
    :func:`shard_packed`; here context and sequence parallelism cut the columns, padding included.
    """
    for name, word, words in (("side", side, get_args(PaddedSide)), ("order", order, get_args(Order))):
        if word not in words:
            raise InvalidInputError(name, " or ".join(words), repr(word))
    plan = _plan(parts, tokens, split, layers, dtype, ep, missing, pad)
    columns = split.columns(width)
    by_sample = [len(parts), count_places(columns)]
    row_shape = len(plan.layers), parts[0].layout.top_k
    if order == "sequence":
        out = np.empty((*reversed(by_sample), *row_shape), plan.dtype)
        targets = out.swapaxes(0, 1)
    else:
        out = np.empty((*by_sample, *row_shape), plan.dtype)
        targets = out
    for i, (count, target) in enumerate(zip(tokens, targets, strict=True)):
        if whole(f"tokens of sequence {i}", count) > width:
            wanted = f"{width} at most, the width of the batch"
            raise InvalidInputError(f"tokens of sequence {i}", wanted, count)
        shift = width - count if side == "left" else 0
        _place(plan, target, parts, tokens, [Shard(i, start - shift, stop - shift) for _, start, stop in columns])
    return out


def _place(
    plan: FillPlan,
    out: NDArray[Any],
    parts: Sequence[Cells],
    tokens: Sequence[int],
    shards: Sequence[Shard],
) -> None:
    """Put the positions of ``shards`` into ``out``, one after another; positions without a token are padding."""
    place = 0
    for sequence, first, stop in shards:
        target = out[place : (place := place + stop - first)]
        if sequence == TAIL:
            plan.filler(target, plan.pad, first)
            continue
        count = tokens[sequence]
        try:  # routes may go on after the tokens that the trainer has kept; those rows do not belong to it
            plan.place(target, parts[sequence], first, count - 1, count)
        except RowError as error:
            raise RowError(f"sequence {sequence} {error.field}", error.wanted, error.got) from error


def _plan(
    parts: Sequence[Cells],
    tokens: Sequence[int],
    split: Split,
    layers: Layers,
    dtype: DTypeLike,
    *more: Any,
) -> FillPlan:
    if not parts or len(parts) != len(tokens):
        raise RowError("tokens", f"one number for each of {len(parts)} routes, at least one", len(tokens))
    check_alike(parts)
    wanted = layers if isinstance(layers, str) else tuple(layers)
    plan_key = (parts[0].layout, split, wanted, np.dtype(dtype), *more)
    try:
        return _plan_of(*plan_key)
    except TypeError:  # an argument cannot be hashed: the plan itself raises for it
        return _plan_of.__wrapped__(*plan_key)


@lru_cache(maxsize=64)
def _plan_of(layout: Layout, split: Split, layers: Layers, *more: Any) -> FillPlan:
    """A rank's plan, which is the same for every batch."""
    if isinstance(layers, str):
        chosen = set(layout.chosen(layers))
        layers = tuple(layer for layer in split.layers(layout.num_layers) if layer in chosen)
    return FillPlan(layout, layers, *more)

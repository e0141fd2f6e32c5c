"""A rank's rows of a batch of sequences: at the positions of :mod:`kvroute.routes.split`, filled as trainers want."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cache_manager.errors import InvalidInputError, RowError
from kvroute.checks import whole
from kvroute.routes.cells import Cells
from kvroute.routes.fill import Filler, Missing, Plan
from kvroute.routes.layout import Layers, Layout, check_alike
from kvroute.routes.split import TAIL, Shard, Split, places

Side = Literal["left", "right"]
Order = Literal["sequence", "batch"]


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
    out = np.empty((places(shards), len(plan.layers), parts[0].layout.top_k), plan.dtype)
    _place(plan, out, parts, tokens, shards)
    return out


def shard_padded(
    parts: Sequence[Cells],
    tokens: Sequence[int],
    split: Split,
    *,
    width: int,
    side: Side = "right",
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
    for name, word, words in (("side", side, get_args(Side)), ("order", order, get_args(Order))):
        if word not in words:
            raise InvalidInputError(name, " or ".join(words), repr(word))
    plan = _plan(parts, tokens, split, layers, dtype, ep, missing, pad)
    columns = split.columns(width)
    shape = [len(parts), places(columns)]
    out = np.empty(
        (*(reversed(shape) if order == "sequence" else shape), len(plan.layers), parts[0].layout.top_k), plan.dtype
    )
    for i, (count, mine) in enumerate(zip(tokens, out.swapaxes(0, 1) if order == "sequence" else out, strict=True)):
        if whole(f"tokens of sequence {i}", count) > width:
            raise InvalidInputError(f"tokens of sequence {i}", f"{width} at most, the width of the batch", count)
        left = width - count if side == "left" else 0
        _place(plan, mine, parts, tokens, [Shard(i, start - left, stop - left) for _, start, stop in columns])
    return out


def _place(
    plan: Plan, out: NDArray[Any], parts: Sequence[Cells], tokens: Sequence[int], shards: Sequence[Shard]
) -> None:
    """Put the positions of ``shards`` into ``out``, one after another; positions without a token are padding."""
    at = 0
    for sequence, first, stop in shards:
        here = out[at : (at := at + stop - first)]
        if sequence == TAIL:
            plan.filler(here, plan.pad, first)
            continue
        count = tokens[sequence]
        try:  # routes may go on after the tokens that the trainer has kept; those rows do not belong to it
            plan.place(here, parts[sequence], first, count - 1, count)
        except RowError as error:
            raise RowError(f"sequence {sequence} {error.field}", error.wanted, error.got) from error


def _plan(
    parts: Sequence[Cells], tokens: Sequence[int], split: Split, layers: Layers, dtype: DTypeLike, *more: Any
) -> Plan:
    if not parts or len(parts) != len(tokens):
        raise RowError("tokens", f"one number for each of {len(parts)} routes, at least one", len(tokens))
    check_alike([part.layout for part in parts])
    wanted = layers if isinstance(layers, str) else tuple(layers)
    asked = (parts[0].layout, split, wanted, np.dtype(dtype), *more)
    try:
        return _plan_of(*asked)
    except TypeError:  # an argument cannot be hashed: the plan itself raises for it
        return _plan_of.__wrapped__(*asked)


@lru_cache(maxsize=64)
def _plan_of(layout: Layout, split: Split, layers: Layers, *more: Any) -> Plan:
    """A rank's plan, which is the same for every batch."""
    if isinstance(layers, str):
        chosen = set(layout.chosen(layers))
        layers = tuple(layer for layer in split.layers(layout.num_layers) if layer in chosen)
    return Plan(layout, layers, *more)

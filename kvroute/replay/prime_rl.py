"""Routes and sampling supports for prime-rl: bytes with shape and dtype, one row per token, every layer of the model.

prime-rl asserts as many rows as tokens and replays them all, so a hole, a missing row or layer of one, is an error
unless ``missing`` spells it. prime-rl's own filling is zeros; here the row of the last token has distinct experts,
because a row of zeros sends the token to expert 0 ``top_k`` times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvroute.replay.rows import ReplayError, counted, read_rows
from kvroute.routes import Routes, RoutingWeights, SamplingSupport, Split, shard_packed
from kvroute.routes.fill import Missing


def routed_experts(
    routes: Routes,
    tokens: int,
    *,
    missing: Missing = "error",
) -> dict[str, Any]:
    """``TrainingSample.routed_experts``: ``data`` (bytes in C order), ``shape`` ``[tokens, num_layers, top_k]``,
    ``dtype`` uint8, or uint16 if the model has more than 256 experts.

    The fields of prime-rl's ``RoutedExperts``, by their names.
    """
    if routes.num_experts > 1 << 16:
        wanted = "at most 65536 for prime-rl"
        raise ReplayError("num_experts", wanted, routes.num_experts)
    dtype = "uint8" if routes.num_experts <= 1 << 8 else "uint16"
    rows = shard_packed([routes], [read_rows(tokens) + 1], Split(), "all", dtype, missing)
    return {"data": rows.tobytes(), "shape": list(rows.shape), "dtype": dtype}


def routed_experts_and_weights(
    weights: RoutingWeights,
    tokens: int,
    *,
    frozen_router: bool,
) -> dict[str, Any]:
    """``routed_experts`` of prime-rl's drafts of "Total Router Recall" (#3509, #3523): ``data``, ``shape`` ``[tokens,
    num_layers, 2 * top_k]`` and ``dtype`` int32: the ids of a layer, then the bits of their float32 weights.

    No release of prime-rl reads that yet. Its trainer takes the weights as constants, so its routers must be frozen:
    :class:`ReplayError` unless ``frozen_router``. The row of the last token, which is not trained, has the experts
    ``0 .. top_k - 1``, and layers without a router have zeros, both with equal weights. :class:`RowError` names a
    missing row, which nothing can spell here.
    """
    if not frozen_router:
        wanted = "frozen_router=True: a trained router would get no gradient through constants"
        raise ReplayError("routing weights", wanted, f"frozen_router={frozen_router}")
    routes = weights.routes
    rows = read_rows(tokens)
    ids = routes.materialize(rows, "all", "int32")
    last = np.broadcast_to(np.arange(routes.top_k, dtype=np.int32), (1, *ids.shape[1:]))
    ids = np.concatenate([ids, last])
    coefficients = np.full(ids.shape, 1 / routes.top_k, np.float32)
    coefficients[routes.start : rows, list(routes.layer_ids)] = weights.weights[: rows - routes.start]
    data = np.concatenate([ids, coefficients.view(np.int32)], axis=-1)
    return {"data": data.tobytes(), "shape": list(data.shape), "dtype": "int32"}


def sampling_mask(support: SamplingSupport, mask: Sequence[bool]) -> dict[str, bytes]:
    """``TrainingSample.sampling_mask``: ``counts``, int32 for each token of the sample, and ``ids``, int32, of all
    tokens one after another; both in this machine's byte order, as prime-rl reads them.

    A support is at its own token, as prime-rl's log probabilities are. ``mask`` ``[tokens]`` is the sample's: which
    tokens are trained. The names are those of prime-rl's ``SamplingMask``, without its optional ``logprobs``.

    prime-rl normalises a token without a support over the whole vocabulary, in silence, and so one whose support has
    not its token. :class:`RowError` names a trained token without one; ``ReplayError`` if the supports go on behind the
    sample. Its tokens are for :meth:`SamplingSupport.validate` to compare.
    """
    tokens = counted("mask", len(mask))
    if support.stop > tokens:
        wanted = f"{support.stop} tokens or more, as there are supports"
        raise ReplayError("mask", wanted, tokens)
    support.check_losses(mask)
    counts, ids = support.over(0, tokens)
    return {"ids": ids.tobytes(), "counts": counts.tobytes()}

"""Routes for prime-rl: bytes with their shape and dtype, one row per token, every layer of the model.

prime-rl asserts as many rows as tokens and replays them all, so a hole, a missing row or layer of one, is an error
unless ``missing`` spells it. prime-rl's own filling is zeros; here the row of the last token has distinct experts,
because a row of zeros sends the token to expert 0 ``top_k`` times.
"""

from __future__ import annotations

from typing import Any

from kvroute.replay.rows import ReplayError, read_rows
from kvroute.routes import Routes, Split, shard_packed
from kvroute.routes.fill import Missing


def routed_experts(routes: Routes, tokens: int, *, missing: Missing = "error") -> dict[str, Any]:
    """``TrainingSample.routed_experts``: ``data`` (bytes in C order), ``shape`` ``[tokens, num_layers, top_k]``,
    ``dtype`` uint8, or uint16 if the model has more than 256 experts.

    The fields of prime-rl's ``RoutedExperts``, by their names.
    """
    if routes.num_experts > 1 << 16:
        raise ReplayError("num_experts", "at most 65536 for prime-rl", routes.num_experts)
    dtype = "uint8" if routes.num_experts <= 1 << 8 else "uint16"
    rows = shard_packed([routes], [read_rows(tokens) + 1], Split(), "all", dtype, missing)
    return {"data": rows.tobytes(), "shape": list(rows.shape), "dtype": dtype}

"""Routes for NeMo-RL, whose Megatron policy lets the router choose for a row of -1, and for NeMo-Automodel's replay.

NeMo-RL carries one row per token in a signed dtype: -1 for a row, or a layer of it, that was not captured, and ``0 ..
top_k - 1`` for the last token and for padding. It accepts either the routed layers only or every layer of the model,
and tells them apart by number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from kvroute.replay.rows import ReplayError, check_batch, checked_ids, counted, layer_in_name, read_rows, replaying
from kvroute.routes import Routes, Split, shard_padded

if TYPE_CHECKING:
    import torch
    from torch import nn


def sequence(
    routes: Routes,
    tokens: int,
    *,
    layers: Literal["moe", "all"] = "moe",
) -> torch.Tensor:
    """The rows of one sample, ``[tokens, layers, top_k]``, in the narrowest of int8, int16 and int32.

    Cut it at the ends of the messages for ``message["routed_experts"]``; ``kvroute.encodings`` makes the string
    that NeMo-Gym passes on.
    """
    return batch([routes], [tokens], tokens, layers=layers)[0]


def batch(
    routes: Sequence[Routes],
    tokens: Sequence[int],
    width: int,
    *,
    layers: Literal["moe", "all"] = "moe",
) -> torch.Tensor:
    """The batch's ``routed_experts``, ``[batch, width, layers, top_k]``, padded on the right."""
    import torch

    check_batch(routes, tokens=tokens)
    for count in tokens:
        if read_rows(count) >= counted("width", width):
            wanted = f"at least {count}, the tokens of the longest sample"
            raise ReplayError("width", wanted, width)
    experts = routes[0].num_experts
    how: dict[str, Any] = {"width": width, "order": "batch", "missing": "minus1", "pad": "arange", "layers": layers}
    how["dtype"] = "int8" if experts <= 1 << 7 else "int16" if experts <= 1 << 15 else "int32"
    return torch.from_numpy(shard_padded(routes, tokens, Split(), **how))


@contextmanager
def automodel(model: nn.Module, rows: torch.Tensor) -> Iterator[None]:
    """Within the block, the gates of a NeMo-Automodel model use ``rows`` ``[tokens, routed layers, top_k]``.

    Tokens are the flattened ``[batch, sequence]``; layers are the model's gates in the order of their layer, found by
    walking the model, not in Automodel's list of all gates ever built. Automodel replays every row: none may be
    missing. The same rows serve the recomputation of activation checkpointing, so the backward pass belongs in the
    block too: a recomputation after the block, or in another micro-batch's, raises :class:`ReplayError`.

    Raises :class:`ReplayError` also for rows that do not fit, for a model that was built without
    ``enable_routing_replay``, and inside another such block of its gates, which would end with this one.
    """
    from kvroute.replay.passes import one_pass
    from kvroute.replay.watching import note_installed, note_over

    gates = replaying([model], layer_in_name, "gate", "enable_routing_replay")
    ids = checked_ids(rows, "rows", tuple(gates))
    replays = [gate.router_replay for gate in gates.values()]
    busy = [layer for layer, gate in gates.items() if gate.router_replay.mode is not None]
    if busy:
        wanted = "no replay or recording in progress"
        raise ReplayError("model", wanted, f"one on layers {busy}")
    mode = sys.modules[type(replays[0]).__module__].RouterReplayMode.REPLAY
    try:
        for index, replay in enumerate(replays):
            replay.set_target(ids[:, index].contiguous())
            replay.mode = mode
        with one_pass(gates):
            note_installed(gates, ids)
            yield
    finally:
        note_over(gates)
        for replay in replays:
            replay.mode = None
            replay.clear()

"""Routes for Megatron-core's own ``RouterReplay``: the routers of *this* model, by layer number, in its token order.

Megatron keeps its replay objects in one global list, in the order of their construction. That list also holds the
routers of multi-token prediction, whose layer numbers start again at 1, and of every model that was built and dropped;
so this module ignores it. It walks the model instead, and knows each router by its ``layer_number``.

    with schedule(model):                                   # one pipeline schedule, forward only or not
        for batch in micro_batches:
            install(model, packed(model, routes, tokens, split))
            loss = forward(batch)
            backward(model)                                 # no forward pass of this micro-batch from here on
            loss.backward()

A recomputation, in whatever order backward passes run, uses the experts of its own forward pass, or is refused.

Works for Megatron-core 0.16 and later, and for verl's own class: neither is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from kvroute.replay.passes import Model, known_passes, passes_of
from kvroute.replay.rows import ReplayError, check_stage, checked_ids, own_layer, replaying
from kvroute.replay.watching import note_installed, note_over
from kvroute.routes import Routes, Split, shard_packed, shard_padded
from kvroute.routes.fill import Filler, Missing, PaddedSide

_SCHEDULED: WeakSet[nn.Module] = WeakSet()
"""Routers inside a schedule."""


def layer_ids(model: Model) -> tuple[int, ...]:
    """The layers, counted from 0 over the whole model, whose routers this rank has; increasing.

    A stage of dense layers only, or of the embedding or the loss, has none: there is nothing to replay, and its rows
    are ``[tokens, 0, top_k]``. Raises :class:`ReplayError` when the model was built without
    ``moe_enable_routing_replay``, and when two routers have the same layer number: one would get the other's routes.
    """
    return tuple(_routers(model))


def packed(
    model: Model,
    routes: Sequence[Routes],
    tokens: Sequence[int],
    split: Split,
    *,
    missing: Missing = "error",
    pad: Filler = "spread",
    ep: int = 1,
) -> torch.Tensor:
    """This rank's routers' rows of a packed batch: ``[local tokens, layers, top_k]`` int64, for :func:`install`.

    ``layers`` are :func:`layer_ids`: the model itself says which its pipeline stage has. ``split`` is this rank's place
    in the token-wise groups. Padding is spread over the experts of ``ep`` ranks, each row with distinct ids: a padding
    row that names one expert ``top_k`` times breaks the dispatcher's count, and one that names the first ``top_k``
    every time overloads one rank.

    Raises ``RowError`` naming the position and layer of a missing row, unless ``missing`` says how to spell it, and for
    unlike samples; :class:`ReplayError` for a router on a layer that is dense in the routes.
    """
    layers = _layers_of(model, routes, split)
    return torch.from_numpy(shard_packed(routes, tokens, split, layers, "int64", missing, pad=pad, ep=ep))


def padded(
    model: Model,
    routes: Sequence[Routes],
    tokens: Sequence[int],
    width: int,
    split: Split,
    *,
    side: PaddedSide,
    missing: Missing = "error",
    pad: Filler = "spread",
    ep: int = 1,
) -> torch.Tensor:
    """As :func:`packed`, for a batch ``[sequence, batch]`` padded to ``width`` on its ``side``.

    The rows are in the order in which a router flattens ``[sequence, batch, hidden]``: the sequence outermost.
    """
    layers = _layers_of(model, routes, split)
    how: dict[str, Any] = {"layers": layers, "missing": missing, "pad": pad, "ep": ep}
    rows = shard_padded(routes, tokens, split, width=width, side=side, order="sequence", **how)
    return torch.from_numpy(rows.reshape(-1, *rows.shape[2:]))


def install(
    model: Model,
    rows: torch.Tensor | NDArray[Any],  # [local tokens, layers, top_k]  any integer dtype
) -> None:
    """Make the next forward pass of ``model`` use the experts in ``rows``; ``layers`` are those of :func:`layer_ids`.

    A recomputation inside a backward pass uses the rows of its own forward pass, whichever micro-batch that was; they
    are kept until :func:`clear` or the end of the :func:`schedule`. Megatron's first-in-first-out list is not read.

    Raises :class:`ReplayError`, with nothing installed, for rows that do not fit; for an id outside the experts, -1
    included (Megatron would gather out of bounds); for an id twice in a row (its dispatcher would lose a token); and
    for a fused router, which does not ask for replayed ids at all.
    """
    routers = _routers(model)
    given = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
    for layer, router in routers.items():
        if getattr(router.config, "moe_router_fusion", False):
            wanted = "moe_router_fusion=False: a fused router ignores replay"
            raise ReplayError(f"router of layer {layer}", wanted, True)
    limits: dict[str, Any] = {}
    for router in routers.values():
        limits = {"top_k": router.config.moe_router_topk, "experts": router.config.num_moe_experts}
    ids = checked_ids(given, "rows", tuple(routers), **limits)
    for index, router in enumerate(routers.values()):
        router_ids = ids[:, index].contiguous()
        router.router_replay.set_target_indices(router_ids)
        _replay_forward(router)
        passes_of(router, _before_forward).begin(router_ids)
    note_installed(routers, ids)


def backward(model: Model) -> None:
    """The installed rows have had their forward pass; from here on, routers compute again until the next installation.

    A forward pass before that raises :class:`ReplayError`.
    """
    routers = _routers(model)
    for router in routers.values():
        passes = known_passes(router)
        if passes is not None:
            passes.end()
    note_over(routers)


def clear(model: Model) -> None:
    """Let the routers choose for themselves, and forget every installed and recorded row.

    A recomputation of a forward pass whose rows are forgotten raises :class:`ReplayError`.
    """
    routers = _routers(model)
    for router in routers.values():
        router.router_replay.clear_router_replay_action()
        router.router_replay.clear_indices()
        passes = known_passes(router)
        if passes is not None:
            passes.finish()
    note_over(routers)


@contextmanager
def schedule(model: Model) -> Iterator[None]:
    """Keep the rows of one pipeline schedule apart from those of earlier and later ones.

    Raises :class:`ReplayError` inside another schedule of the same routers: it would forget that one's rows.

    Rows are kept until its end, for recomputations; a backward pass after it that recomputes is an error.
    """
    routers = list(_routers(model).values())
    if not _SCHEDULED.isdisjoint(routers):
        wanted = "one schedule of a model at a time"
        raise ReplayError("schedule", wanted, "another that is not over")
    _SCHEDULED.update(routers)
    try:
        clear(model)
        yield
    finally:
        _SCHEDULED.difference_update(routers)
        clear(model)


def _layers_of(model: Model, routes: Sequence[Routes], split: Split) -> tuple[int, ...]:
    """:func:`layer_ids`, all of which have to be layers with a router in the routes."""
    layers = layer_ids(model)
    check_stage(layers, routes, split)
    return layers


def _before_forward(router: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Before a router's forward pass: give it the rows of the pass that it computes again, and count its tokens."""
    if torch.compiler.is_compiling() or (passes := known_passes(router)) is None:
        return
    replay: Any = router.router_replay
    number: Any = router.layer_number
    where = f"router of layer {number - 1}"
    installed = passes.recomputed(where)
    if installed is not None:
        if not torch.is_grad_enabled():
            wanted = "no recomputation inside a recomputation"
            raise ReplayError(where, wanted, "a checkpoint in one")
        _replay_forward(router)
    elif not passes.replaying or getattr(replay.router_replay_action, "name", "") != "REPLAY_FORWARD":
        return
    else:
        installed = passes.current
    if installed is None:
        wanted = "rows for a forward pass, by install"
        raise ReplayError(where, wanted, "none since backward")
    assert installed.ids is not None
    hidden = inputs[0]  # [..., hidden size]
    tokens = hidden.shape[:-1].numel()
    if tokens != len(installed.ids):
        wanted = f"{len(installed.ids)} local tokens, as rows were installed"
        raise ReplayError(where, wanted, tokens)
    replay.target_topk_idx = installed.ids


def _routers(model: Model) -> dict[int, Any]:
    """The routers with a replay object by layer id, in increasing order, without those of multi-token prediction."""
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    return replaying(chunks, own_layer, "router", "moe_enable_routing_replay")


def _replay_forward(router: Any) -> None:
    # The actions are an enumeration beside the class; verl has its own.
    actions = sys.modules[type(router.router_replay).__module__].RouterReplayAction
    router.router_replay.set_router_replay_action(actions.REPLAY_FORWARD)

"""Where a watch looks: the routers of a model, and what shows which experts their tokens go to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvroute.capture.capture import find_routers
from kvroute.capture.errors import CaptureError
from kvroute.replay.rows import ReplayError, layer_in_name, numbered, own_layer

Matches = Callable[[Any, torch.Tensor], torch.Tensor]
"""``matches(used, ids)``: which tokens have the experts ``ids`` ``[tokens, top_k]``; bool ``[tokens]``."""


@dataclass(frozen=True, slots=True)
class SeenRouter:
    """A router, and where and how it is seen which experts its tokens go to."""

    router: nn.Module
    module: nn.Module
    enters: bool
    """Whether the module takes what is looked at, or returns it."""
    place: int
    """Which of the module's arguments or answers it is."""
    matches: Matches
    experts: int | None = None
    """Over how many experts the router chooses, where comparing needs it."""


def watched_routers(chunks: Sequence[nn.Module]) -> dict[int, SeenRouter]:
    """The routers of a model, by layer, of the first kind that it has."""
    megatron = sys.modules.get("megatron.core.transformer.moe.router")
    if megatron is not None:
        found = numbered(chunks, lambda each: isinstance(each, megatron.TopKRouter), own_layer, "router")
        if found or _stage_without_routers(chunks):
            return {
                layer: SeenRouter(router, router, False, 1, _by_map, router.config.num_moe_experts)
                for layer, router in found.items()
            }
    automodel = sys.modules.get("nemo_automodel.components.moe.layers")
    if automodel is not None:
        found = numbered(chunks, lambda each: isinstance(each, automodel.Gate), layer_in_name, "gate")
        if found:
            return {layer: SeenRouter(gate, gate, False, 1, _by_ids) for layer, gate in found.items()}
    if len(chunks) != 1:
        raise ReplayError("model", "chunks with routers of Megatron-core", "others")
    try:
        routers = find_routers(chunks[0])
    except CaptureError as error:
        raise ReplayError(error.field, error.wanted, error.got) from error
    blocks = {id(child): block for block in chunks[0].modules() for child in block.children()}
    experts = {layer: blocks[id(router)].get_submodule("experts") for layer, router in routers.items()}
    return {layer: SeenRouter(router, experts[layer], True, 1, _by_ids) for layer, router in routers.items()}


def routers_ahead(chunks: Sequence[nn.Module]) -> dict[int, tuple[str, nn.Module]]:
    """Name and router of multi-token prediction of Megatron's, by the layer of the decoder that has its number."""
    megatron = sys.modules.get("megatron.core.transformer.moe.router")
    if megatron is None:
        return {}
    return {
        own_layer(name, module): (name, module)
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, megatron.TopKRouter) and "mtp" in name.split(".") and module.layer_number is not None
    }


def _stage_without_routers(chunks: Sequence[nn.Module]) -> bool:
    """Whether this is a stage of a Megatron model with experts, whose routers are in other stages."""
    modules = [(name.split("."), module) for chunk in chunks for name, module in chunk.named_modules()]
    if any(path[-1] == "router" and "mtp" not in path for path, _ in modules):
        return False
    return any(getattr(getattr(module, "config", None), "num_moe_experts", None) for _, module in modules)


def _by_map(used: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``used`` is Megatron's map, bool ``[tokens, experts]``: exactly the experts of ``ids``, in whatever order."""
    wanted = torch.zeros_like(used).scatter_(1, ids.to(torch.int64), True)
    return (wanted == used).all(dim=1)


def _by_ids(used: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``used`` are ids ``[tokens, top_k]``, in the same order: sums in bfloat16 depend on it."""
    if used.shape != ids.shape:
        return torch.zeros_like(ids[:, 0], dtype=torch.bool)
    return (used == ids).all(dim=1)


__all__ = ["SeenRouter", "routers_ahead", "watched_routers"]

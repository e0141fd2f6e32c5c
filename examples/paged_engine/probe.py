"""What a model hands to the paged attention, and whether that is all that its tokens know of each other.

It is asked, not read off a configuration, whose names differ from family to family: passes in which paged attention
lets every token see itself alone, and one token is not a number. What is not a number in another token's logits has
gone past the block tables and would be wrong without a word: through a recurrent state, a convolution, an attention
that the engine does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from cache_manager.errors import InvalidInputError
from paged_engine.attention import ATTENTION, Reach
from paged_engine.kv import KVShape

TOKENS: Final = 4


class _EachToItself:
    """A :class:`~paged_engine.attention.Paged` without a cache; it keeps what each layer hands over."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.shapes: list[KVShape] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: Reach
    ) -> torch.Tensor:
        self.layers.append(layer)
        self.shapes.append(KVShape(1, key.shape[1], key.shape[3], value.shape[3], key.dtype))
        parts = zip(*(each.split(1, dim=2) for each in (query, key, value)), strict=True)
        return torch.cat([reach.attend(*alone) for alone in parts], dim=2).transpose(1, 2).contiguous()


def kv_shape(model: nn.Module) -> KVShape:
    """The keys and values of ``model``, which the engine can run.

    The model's hooks do not see the pass. Raises :class:`InvalidInputError`, by the model's name, for one whose
    attention is not the paged one or differs in shape from layer to layer, and for one with any other way from token to
    token.
    """
    named = f"model {type(model).__name__}"
    tokens = torch.arange(TOKENS, device=next(model.parameters()).device)[None]
    with _unwatched(model), torch.inference_mode():
        for spoilt in (0, TOKENS - 1):
            found, given = _EachToItself(), model.get_input_embeddings()(tokens).clone()  # type: ignore[operator]
            given[0, spoilt] = torch.nan
            logits = model(inputs_embeds=given, position_ids=tokens, use_cache=False, paged=found).logits[0]
            if not found.layers:
                raise InvalidInputError(named, f"_attn_implementation {ATTENTION}", model.config._attn_implementation)  # type: ignore[union-attr]
            if bool(logits[tokens[0] != spoilt].isnan().any()):
                wanted = "tokens that know of each other by paged attention alone"
                raise InvalidInputError(named, wanted, "another way: a recurrent state, or an attention of its own")
    if sorted(found.layers) != list(range(len(found.layers))):
        raise InvalidInputError(named, "paged attention in layers 0, 1 and so on, once in each", sorted(found.layers))
    if different := set(found.shapes) - {found.shapes[0]}:
        wanted = f"keys and values as in layer {found.layers[0]} in all layers: {found.shapes[0]}"
        raise InvalidInputError(named, wanted, different.pop())
    return replace(found.shapes[0], layers=len(found.layers))


@contextmanager
def _unwatched(model: nn.Module) -> Iterator[None]:
    """Without the hooks of those who watch the engine's passes."""
    every: list[dict[int, Any]] = [h for m in model.modules() for h in (m._forward_pre_hooks, m._forward_hooks)]
    kept = [dict(hooks) for hooks in every]
    for hooks in every:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, was in zip(every, kept, strict=True):
            hooks.update(was)

"""A paged KV cache, and attention over it, plugged into transformers' attention interface.

A forward pass carries one flat row of tokens, ``[1, tokens]``, that belong to several sequences: whole prompts, chunks
of prompts and single decode tokens side by side. All that attention needs to know about them is in one
:class:`PagedBatch`, passed to the model's ``forward`` as the keyword ``paged``; transformers passes it on to every
attention layer unread. There is no other state. transformers prepares no mask for an attention that it does not know,
so the only mask is that of a sequence's own chunk: causal, and limited to the layer's window if it has one. Keys and
values behind a window stay in the cache.

One block of the cache is one contiguous record ``[block_tokens, layers, kv_heads * (k_dim + v_dim)]``, so that
swapping, copying and storing a block is one copy whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cache_manager.errors import InvalidInputError
from cache_manager.ports import TierName
from cache_manager.spec import AuxBlockDataSpec
from paged_engine.request import EngineConfig

ATTENTION: Final = "kvroute_paged"
"""The name under which :func:`paged_attention` is registered with transformers."""
_WITHOUT_EFFECT: Final = frozenset({"position_ids", "use_cache", "output_attentions", "output_router_logits"})
"""Keywords that models pass to every attention and that do not change its result."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one token's keys and values, the same in every attention layer of a model: see ``kv_shape``.

    Latent attention passes expanded heads.
    """

    layers: int
    heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return self.heads * (self.k_dim + self.v_dim)


class PagedKV:
    """Device and host KV blocks of one model, a :class:`~cache_manager.ports.KVBlocks`.

    The content of a block that was never written is undefined. Device blocks are on ``device``, by default the CPU.
    """

    def __init__(self, shape: KVShape, config: EngineConfig, device: torch.device | None = None) -> None:
        row = (config.block_tokens, shape.layers, shape.width)  # both tiers: [blocks, block_tokens, layers, width]
        dims = {"heads": shape.heads, "k_dim": shape.k_dim, "v_dim": shape.v_dim}
        dtype = str(shape.dtype).removeprefix("torch.")
        self.moved_blocks = 0
        """Blocks that a process beside the engine has copied."""
        self.shape, self.spec = shape, AuxBlockDataSpec("kv", row[1:], dtype, config.block_tokens, dims)
        self.device = torch.zeros((config.device_blocks, *row), dtype=shape.dtype, device=device)
        self.host = torch.zeros((config.host_blocks, *row), dtype=shape.dtype)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer's keys ``[slots, heads, k_dim]`` and values ``[slots, heads, v_dim]`` on the device."""
        shape, slots = self.shape, self.device.view(-1, self.shape.layers, self.shape.width)[:, index]
        split = shape.heads * shape.k_dim
        return slots[:, :split].unflatten(1, (shape.heads, -1)), slots[:, split:].unflatten(1, (shape.heads, -1))

    def close(self) -> None:
        """Free what is not this process's own memory."""

    # ---------------------------------------------------------------- KVBlocks: KV moves where rows move

    def copy(self, source: TierName, target: TierName, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        tiers = {"device": self.device, "host": self.host}
        given, into = tiers[source], tiers[target]
        moved = given[torch.from_numpy(sources).to(given.device)]
        into[torch.from_numpy(targets).to(into.device)] = moved.to(into.device)

    def take(self, blocks: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
        chosen = self.device[torch.from_numpy(blocks).to(self.device.device)].view(torch.uint8)
        into[:] = chosen.cpu().numpy().reshape(into.shape)

    def fill(self, blocks: NDArray[np.int64], given: NDArray[np.uint8]) -> None:
        into = self.device.view(torch.uint8)
        raw = torch.from_numpy(np.ascontiguousarray(given)).view(-1, *into.shape[1:])
        into[torch.from_numpy(blocks).to(into.device)] = raw.to(into.device)


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """How a layer attends: to the last ``window`` positions or to all, with or without ``sinks``.

    A sink is one more logit in a head's softmax, without a value.
    """

    scaling: float
    window: int | None = None
    sinks: torch.Tensor | None = None  # [heads]

    def attend(
        self,
        query: torch.Tensor,  # [batch, heads, tokens, k_dim]
        key: torch.Tensor,  # [batch, kv_heads, context, k_dim]
        value: torch.Tensor,  # [batch, kv_heads, context, v_dim]
    ) -> torch.Tensor:
        """The output ``[batch, heads, tokens, v_dim]`` of the last tokens of a context; each sees its past."""
        batch, heads, tokens, _ = query.shape
        context = key.shape[2]
        at = torch.arange(context, device=query.device)
        seen = at <= (queries := at[context - tokens :, None])  # bool [tokens, context]
        if self.window is not None:
            seen &= at > queries - self.window
        if self.sinks is not None:  # a key and a value of zeros: the mask adds the logit
            mask = query.new_zeros(batch, heads, tokens, context).masked_fill(~seen, -torch.inf)
            logits = self.sinks.to(query.dtype)[:, None, None].expand(batch, heads, tokens, 1)
            seen = torch.cat([mask, logits], dim=-1)
            key, value = (functional.pad(each, (0, 0, 0, 1)) for each in (key, value))
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=self.scaling, enable_gqa=True
        )


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """One forward pass: chunks of sequences, back to back, then padding; and the paged cache that they use.

    A chunk is its number of tokens, and the slots of positions ``[0, stop)`` of its sequence, its own included.
    """

    kv: PagedKV
    chunks: tuple[tuple[int, torch.Tensor], ...]
    slots: torch.Tensor  # [tokens] int64: where each token's key and value go; padding has none
    positions: torch.Tensor  # [1, tokens + padding] int64; padding stands at position 0

    @classmethod
    def of(cls, kv: PagedKV, spans: Sequence[tuple[int, torch.Tensor]], *, multiple_of: int = 1) -> PagedBatch:
        """The batch of ``spans``: for each sequence the first position to compute, and the slots of ``[0, stop)``.

        It is padded to a multiple of ``multiple_of`` tokens, and is on the cache's device.
        """
        given = [(start, context.to(kv.device.device)) for start, context in spans]
        slots = torch.cat([context[start:] for start, context in given])
        positions = torch.cat([torch.arange(start, len(context), device=slots.device) for start, context in given])
        positions = functional.pad(positions, (0, -len(slots) % multiple_of))
        return cls(kv, tuple((len(context) - start, context) for start, context in given), slots, positions[None])

    @property
    def padding(self) -> int:
        return self.positions.shape[1] - len(self.slots)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: Reach
    ) -> torch.Tensor:
        """Put keys and values ``[1, kv_heads, tokens, dim]`` into the cache; returns ``[1, tokens, heads, v_dim]``."""
        (keys, values), written, first = self.kv.layer(layer), len(self.slots), 0
        keys[self.slots] = key[0, :, :written].transpose(0, 1)
        values[self.slots] = value[0, :, :written].transpose(0, 1)
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        for count, context in self.chunks:
            tokens = slice(first, first + count)
            cached = (each[context].transpose(0, 1)[None] for each in (keys, values))
            out[:, tokens] = reach.attend(query[:, :, tokens], *cached).transpose(1, 2)
            first += count
        return out


class EachToItself:
    """In place of a batch: every token sees only itself. It records the KV shape of each layer."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, KVShape]] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: Reach
    ) -> torch.Tensor:
        self.shapes.append((layer, KVShape(1, key.shape[1], key.shape[3], value.shape[3], key.dtype)))
        parts = zip(*(each.split(1, dim=2) for each in (query, key, value)), strict=True)
        return torch.cat([reach.attend(*alone) for alone in parts], dim=2).transpose(1, 2).contiguous()


def kv_shape(model: nn.Module) -> KVShape:
    """The shape of the keys and values of ``model``, which is run to find it and to check that the engine supports it.

    Every token of the pass sees only itself, and the embedding of one token of each of its two sequences is NaN. NaN in
    another token's logits has bypassed the block tables, and would silently be wrong: through a recurrent state, a
    convolution, another attention. Raises :class:`InvalidInputError`, with the model's name, for such a model, and if
    its attention is not the paged one or differs in shape between layers.
    """
    named, found, device = f"model {type(model).__name__}", EachToItself(), next(model.parameters()).device
    at, spoilt = torch.arange(4, device=device), torch.zeros(2, 4, dtype=torch.bool, device=device)
    spoilt[0, 0] = spoilt[1, 3] = True
    with torch.inference_mode():
        given = model.get_input_embeddings()(at.expand(2, 4)).masked_fill(spoilt[..., None], torch.nan)  # type: ignore[operator]
        logits = model(inputs_embeds=given, position_ids=at[None], use_cache=False, paged=found).logits
    if not found.shapes:
        raise InvalidInputError(named, f"_attn_implementation {ATTENTION}", model.config._attn_implementation)  # type: ignore[union-attr]
    if bool(logits[~spoilt].isnan().any()):
        wanted = "tokens that depend on each other by paged attention alone"
        raise InvalidInputError(named, wanted, "another way: a recurrent state, or another attention")
    layers, shapes = [layer for layer, _ in found.shapes], [shape for _, shape in found.shapes]
    if sorted(layers) != list(range(len(layers))):
        raise InvalidInputError(named, "paged attention in layers 0, 1 and so on, once in each", sorted(layers))
    if different := set(shapes) - {shapes[0]}:
        raise InvalidInputError(named, f"keys and values as in layer 0 in all layers: {shapes[0]}", different.pop())
    return replace(shapes[0], layers=len(layers))


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, k_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, k_dim]
    value: torch.Tensor,  # [1, kv_heads, tokens, v_dim]
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    paged: PagedBatch | EachToItself | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output ``[1, tokens, heads, v_dim]``; the keys and values of this step are in the cache afterwards.

    Padding neither reads nor writes the cache; its output is zero. Without ``paged`` this is plain attention over the
    one sequence given: the same arithmetic, unpaged. Raises :class:`InvalidInputError` for a layer with an unknown kind
    of attention.
    """
    more |= {"dropout": dropout or None, "attention_mask": attention_mask}  # a paged batch has its own causality
    more["is_causal=False"] = None if getattr(module, "is_causal", True) else True
    if unknown := sorted(name for name in more.keys() - _WITHOUT_EFFECT if more[name] is not None):
        wanted = "causal attention, with a window, with sinks, or without"
        raise InvalidInputError(type(module).__name__, wanted, ", ".join(unknown))
    reach = Reach(scaling, sliding_window, s_aux)
    if paged is None:
        return reach.attend(query, key, value).transpose(1, 2).contiguous(), None
    return paged.attend(int(module.layer_idx), query, key, value, reach), None  # type: ignore[arg-type]


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, paged_attention)

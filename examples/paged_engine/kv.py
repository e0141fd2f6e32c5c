"""The paged KV cache: the tensors, and how their blocks are copied, taken out and filled.

One block is one contiguous record ``[block_tokens, layers, kv_heads * (k_dim + v_dim)]``, so that swapping, copying
and storing a block is one copy whatever the number of layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.ports import TierName
from cache_manager.spec import AuxBlockDataSpec
from paged_engine.request import EngineConfig


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

    def spec(self, block_tokens: int) -> AuxBlockDataSpec:
        """The row layout under which KV blocks are stored."""
        return AuxBlockDataSpec(
            "kv",
            row_shape=(self.layers, self.width),
            dtype=str(self.dtype).removeprefix("torch."),
            block_tokens=block_tokens,
            attrs={"heads": self.heads, "k_dim": self.k_dim, "v_dim": self.v_dim},
        )


class PagedKV:
    """Device and host KV blocks of one model, a :class:`~cache_manager.ports.KVBlocks`.

    The content of a block that was never written is undefined. Device blocks are on ``device``, by default the CPU.
    """

    def __init__(self, shape: KVShape, config: EngineConfig, device: torch.device | None = None) -> None:
        row = (config.block_tokens, shape.layers, shape.width)  # both tiers: [blocks, block_tokens, layers, width]
        self.shape, self.spec = shape, shape.spec(config.block_tokens)
        self.device = torch.zeros((config.device_blocks, *row), dtype=shape.dtype, device=device)
        self.host = torch.zeros((config.host_blocks, *row), dtype=shape.dtype)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer's keys ``[slots, heads, k_dim]`` and values ``[slots, heads, v_dim]`` on the device."""
        shape, slots = self.shape, self.device.view(-1, self.shape.layers, self.shape.width)[:, index]
        split = shape.heads * shape.k_dim
        return slots[:, :split].unflatten(1, (shape.heads, -1)), slots[:, split:].unflatten(1, (shape.heads, -1))

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

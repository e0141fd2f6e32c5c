"""The paged KV cache: the tensors, and how their blocks are copied, taken out and filled.

One block is one contiguous record ``[block_tokens, layers, kv_heads * (k_dim + v_dim)]``, so that swapping, copying
and storing a block is one copy whatever the number of layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.ports import TierName
from cache_manager.regions import SharedRegion
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from paged_engine.engine.request import EngineConfig
from paged_engine.engine.swap_stream import SwapStream


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's keys and values are, in every attention layer of a model: see ``kv_shape``.

    Latent attention hands over expanded heads.
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
        """The row layout under which KV blocks are stored; bfloat16, which NumPy lacks, is stored as its bits."""
        bits = {"bits": "bfloat16"} if self.dtype is torch.bfloat16 else {}
        return AuxBlockDataSpec(
            "kv",
            row_shape=(self.layers, self.width),
            dtype="uint16" if bits else str(self.dtype).removeprefix("torch."),
            block_tokens=block_tokens,
            attrs={"heads": self.heads, "k_dim": self.k_dim, "v_dim": self.v_dim, **bits},
        )


@dataclass(frozen=True, slots=True, eq=False)
class KVLayer:
    """One layer's view of the device blocks: tokens by slot."""

    keys: torch.Tensor  # [slots, heads, k_dim]
    values: torch.Tensor  # [slots, heads, v_dim]

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[slots] = keys
        self.values[slots] = values

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[slots], self.values[slots]


class PagedKV:
    """Device and host KV blocks of one model, a :class:`~cache_manager.ports.KVBlocks`.

    Content of a block that nobody wrote is undefined.

    Device blocks lie on ``device``, the CPU if not given; beside a GPU host blocks are pinned. With ``regions``, those
    of records of ``shape.spec(block_tokens)``, they lie there; the caller closes them when the tensors are gone.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        block_tokens: int,
        device_blocks: int,
        host_blocks: int,
        device: torch.device | None = None,
        regions: tuple[SharedRegion, SharedRegion | None] | None = None,
    ) -> None:
        row = (block_tokens, shape.layers, shape.width)  # of both: [blocks, block_tokens, layers, width]
        self.shape = shape
        self.block_tokens = block_tokens
        self.spec = shape.spec(block_tokens)
        if regions is not None:
            self.device = _blocks_in(regions[0], (device_blocks, *row), shape.dtype)
            self.host = _blocks_in(regions[1], (host_blocks, *row), shape.dtype)
        else:
            self.device = torch.zeros((device_blocks, *row), dtype=shape.dtype, device=device)
            self.host = torch.zeros((host_blocks, *row), dtype=shape.dtype, pin_memory=self.device.is_cuda)
        self._swaps = SwapStream(self.device, self.host) if self.device.is_cuda and host_blocks else None
        slots = self.device.view(device_blocks * block_tokens, shape.layers, shape.width)
        split = shape.heads * shape.k_dim
        self._layers = tuple(
            KVLayer(
                slots[:, layer, :split].view(-1, shape.heads, shape.k_dim),
                slots[:, layer, split:].view(-1, shape.heads, shape.v_dim),
            )
            for layer in range(shape.layers)
        )

    @classmethod
    def of(
        cls,
        shape: KVShape,
        config: EngineConfig,
        *,
        device: torch.device | None = None,
        regions: tuple[SharedRegion, SharedRegion | None] | None = None,
    ) -> PagedKV:
        """The cache of an engine of ``config``."""
        sizes = {name: getattr(config, name) for name in ("block_tokens", "device_blocks", "host_blocks")}
        return cls(shape, **sizes, device=device, regions=regions)

    def layer(self, index: int) -> KVLayer:
        return self._layers[index]

    # ---------------------------------------------------------------- KVBlocks: where rows go, KV goes

    def copy(self, source: TierName, target: TierName, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """On a GPU in the order of the stream at hand, and the host waits for none: see :class:`SwapStream`."""
        tiers = {"device": self.device, "host": self.host}
        if not self.device.is_cuda:
            tiers[target][torch.from_numpy(targets)] = tiers[source][torch.from_numpy(sources)]
            return
        pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
        if self._swaps is not None and source != target:
            (self._swaps.leave if target == "host" else self._swaps.come)(pairs)
            return
        for given, taken in pairs:
            tiers[target][taken].copy_(tiers[source][given], non_blocking=True)

    def take(self, blocks: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
        chosen = self.device[torch.from_numpy(blocks).to(self.device.device)].view(torch.uint8)
        into[:] = chosen.cpu().numpy().reshape(into.shape)

    def fill(self, blocks: NDArray[np.int64], given: NDArray[np.uint8]) -> None:
        into = self.device.view(torch.uint8)
        raw = torch.from_numpy(np.ascontiguousarray(given)).view(-1, *into.shape[1:])
        into[torch.from_numpy(blocks).to(into.device)] = raw.to(into.device)

    def bytes_of(self, block: int) -> NDArray[np.uint8]:
        """A device block's bytes: the block itself on a CPU, else a copy."""
        raw: NDArray[np.uint8] = self.device[block].view(torch.uint8).cpu().numpy().reshape(-1)
        return raw


def prefix_valid(layout: RecordLayout, tokens: int) -> bytes:
    """A record's validity words where the first ``tokens`` tokens of the one spec are there."""
    return ((1 << tokens) - 1).to_bytes(8 * layout.valid_words, "little")


def _blocks_in(region: SharedRegion | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Blocks ``shape`` in a region's rows; without a region there are none."""
    if region is None:
        return torch.zeros((0, *shape[1:]), dtype=dtype)
    blocks = torch.from_numpy(region.rows).view(dtype)
    assert blocks.shape == (shape[0], math.prod(shape[1:])), "a record without padding: it is contiguous"
    return blocks.view(shape)


__all__ = ["KVLayer", "KVShape", "PagedKV", "prefix_valid"]

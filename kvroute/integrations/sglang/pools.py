"""What SGLang keeps of a prefix, in pools of several kinds: KV of layers that attend to all tokens, by whose slots rows
go, because each token has one; beside it the KV of windows, and states.

This module imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.errors import ConfigError
from cache_manager.spec import AuxBlockDataSpec

FULL: Final = "kv"
WINDOWS: Final = "swa"
STATES: Final = "mamba"
"""SGLang's names of the pools."""
POOLS: Final = ("MHATokenToKVPool", "MLATokenToKVPool")
"""SGLang's pools whose pages are keys and values, and nothing beside them: no scales, no index of sparse attention."""
SCALES: Final = ("k_scale_buffer", "native_k_scale_buffer")
SIDE_STATES: Final = ("mamba_ckpt_pool", "short_conv_pool", "ngram_pool")
"""Further states of a request, beside those of its layers."""


class PagedBytes:
    """The bytes of blocks in several buffers, each ``[blocks, ...]``: a ``KVBlocks`` without copies.

    ``named`` is the name of its spec, of ``tokens`` tokens a block.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], named: str, tokens: int, shapes: Sequence[Any]) -> None:
        self._pages = [_bytes_of(buffer) for buffer in buffers]
        self._widths = [pages.shape[1] for pages in self._pages]
        width, rest = divmod(sum(self._widths), tokens)
        if rest or not width:
            raise ConfigError(named, f"a multiple of {tokens} bytes a block", sum(self._widths))
        self.spec = AuxBlockDataSpec(named, (width,), "uint8", tokens, {"buffers": list(shapes)})

    @property
    def blocks(self) -> int:
        return min(len(pages) for pages in self._pages)

    def take(self, blocks: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
        indices = torch.from_numpy(blocks).to(self._pages[0].device)
        into[:] = torch.cat([pages[indices] for pages in self._pages], dim=1).cpu().numpy()

    def fill(self, blocks: NDArray[np.int64], kv: NDArray[np.uint8]) -> None:
        indices = torch.from_numpy(blocks).to(self._pages[0].device)
        parts = torch.tensor(kv, device=indices.device).split(self._widths, dim=1)
        for pages, part in zip(self._pages, parts, strict=True):
            pages[indices] = part


def _bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    """The buffer itself as bytes ``[blocks, n]``; never a copy."""
    return buffer.view(len(buffer), -1).view(torch.uint8)


def halves_of(pool: Any) -> list[Any]:
    """Of a pool of keys and values: by half the buffers of its layers."""
    return [pool.k_buffer, pool.v_buffer] if hasattr(pool, "k_buffer") else [pool.kv_buffer]


def kv_layers(pool: Any, page: int) -> list[list[torch.Tensor]]:
    """By layer its halves, each ``[pages, page, ...]``."""
    layers = [list(layer) for layer in zip(*halves_of(pool), strict=True)]
    return [[half.view(len(half) // page, page, *half.shape[1:]) for half in layer] for layer in layers]


def kv_bytes(pool: Any, page: int, named: str) -> PagedBytes:
    """The keys and values of a pool's pages, layer by layer."""
    halves = [half for layer in kv_layers(pool, page) for half in layer]
    return PagedBytes(halves, named, page, [[str(half.dtype), *half.shape[2:]] for half in halves])


def state_bytes(pool: Any) -> PagedBytes:
    """The states of a pool's slots, kind by kind and layer by layer."""
    cache = pool.mamba_cache
    states = [state[layer] for state in (cache.temporal, *cache.conv) if state.numel() for layer in range(len(state))]
    return PagedBytes(states, STATES, 1, [[str(state.dtype), *state.shape[1:]] for state in states])


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools of an engine, by what SGLang's ``components`` say."""

    full: Any
    sides: dict[str, PagedBytes] = field(default_factory=dict)
    """Windows and states, by their names."""
    is_last_full: bool = True
    """Whether the model's last layer attends to all tokens: then the KV of a page shows what its other layers chose."""


def is_last_full(kvcache: Any, states: Any = None) -> bool:
    """:attr:`Pools.is_last_full` of SGLang's pool of KV on the device, and of that of ``states``, if there is one."""
    forgetting: list[int] = [] if states is None else list(states.mamba_layer_ids)
    if hasattr(kvcache, "layers_mapping"):  # by layer its index, and whether it has a window
        full = [layer for layer, (_, has_window) in kvcache.layers_mapping.items() if not has_window]
        forgetting += set(kvcache.layers_mapping) - set(full)
    else:
        full = list(getattr(kvcache, "full_attention_layer_id_mapping", ()))
    return not forgetting or (bool(full) and max(full) > max(forgetting))


def _judged_kv(pool: Any, argument: str) -> Any:
    """A pool of keys and values; :class:`ConfigError` for one whose pages are more than these."""
    name = type(pool).__name__
    scales = [scale for scale in SCALES if getattr(pool, scale, None) is not None]
    if name not in POOLS or scales:
        got = ", ".join([name, *scales])
        raise ConfigError(argument, f"pages of keys and values alone, in {' or '.join(POOLS)}", got)
    return pool


def pools_of(params: Any, components: Any, argument: str) -> Pools:
    """The pools behind SGLang's ``params`` of a cache, whose ``components`` are named there.

    :class:`ConfigError`, of ``argument``, for layers or pages of other kinds.
    """
    names = sorted(str(getattr(component, "name", component)) for component in components)
    if "FULL" not in names or set(names) - {"FULL", "SWA", "MAMBA"}:
        wanted = "a model whose layers attend to all tokens, to windows, or keep states"
        raise ConfigError(argument, wanted, ", ".join(names))
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    page = params.page_size
    sides = dict[str, PagedBytes]()
    states = None
    full = kvcache
    if len(names) > 1:
        full = kvcache.full_kv_pool
        if "SWA" in names:
            sides[WINDOWS] = kv_bytes(_judged_kv(kvcache.swa_kv_pool, argument), page, WINDOWS)
        if "MAMBA" in names:
            states = _judged_states(params.req_to_token_pool, argument)
            sides[STATES] = state_bytes(states)
    return Pools(_judged_kv(full, argument), sides, is_last_full(kvcache, states))


def _judged_states(requests: Any, argument: str) -> Any:
    """The pool of the states of ``requests``; :class:`ConfigError` where a request has others beside them."""
    for name in SIDE_STATES:
        other = getattr(requests, name, None)
        if other is not None and getattr(other, "enabled", True):
            raise ConfigError(argument, "states of layers alone", name)
    pool = requests.mamba_pool
    further = [name for name in vars(pool.mamba_cache) if name.startswith("replayssm") and _has_state(pool, name)]
    if type(pool).__name__ != "MambaPool" or further:
        raise ConfigError(argument, "states in MambaPool, as they are", ", ".join([type(pool).__name__, *further]))
    return pool


def _has_state(pool: Any, name: str) -> bool:
    return getattr(pool.mamba_cache, name) is not None


__all__ = [
    "FULL",
    "POOLS",
    "STATES",
    "WINDOWS",
    "PagedBytes",
    "Pools",
    "halves_of",
    "is_last_full",
    "kv_bytes",
    "kv_layers",
    "pools_of",
    "state_bytes",
]

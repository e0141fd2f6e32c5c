"""Rows as one more layer of paged KV: whatever moves the KV of a block moves its rows with it, unknowing.

A page has, for each token of a block, a sum and the row that it is of. Rows of KV that came from elsewhere are taken
out of their pages: they are of the computation that made this KV, the last router's choice too, because both were in
one place all along. A row that was not captured has a sum of zero and is missing; so is a row whose bytes have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.errors import ConfigError
from cache_manager.spec import AuxBlockDataSpec, align
from kvroute.connector.folds import folded_on_device, keys_on, to_host
from kvroute.witness import WORD_NBYTES, fold_keys, folded

NAME: Final = "model.kvroute.{}.rows"
"""The layer's name has one integer, as vLLM wants it: the first that is no layer of the model."""

_STORED: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By the bytes of an id: its lower bits are the row's, whatever the sign."""


def page_name(spec: AuxBlockDataSpec) -> str:
    """What an engine calls the layer of a model whose rows ``spec`` describes."""
    return NAME.format(spec.attrs["num_layers"])


def token_nbytes(spec: AuxBlockDataSpec) -> int:
    """Bytes of one token in a page: its sum, and its row up to a whole word."""
    return WORD_NBYTES + align(spec.row_nbytes, WORD_NBYTES)


class Pages:
    """The pages ``uint8 [blocks, 1, tokens, token_nbytes]`` on the engine's device, which stay the engine's."""

    def __init__(self, cache: torch.Tensor, spec: AuxBlockDataSpec) -> None:
        wanted = (1, spec.block_tokens, token_nbytes(spec))
        if cache.dtype != torch.uint8 or cache.shape[1:] != wanted:
            got = f"{cache.dtype} of shape {tuple(cache.shape)}"
            raise ConfigError("pages of rows", f"uint8 [blocks, {', '.join(map(str, wanted))}]", got)
        self.cache, self._spec = cache, spec
        self._words = token_nbytes(spec) // WORD_NBYTES
        self._keys = keys_on(cache.device, 0, self._words - 1)

    def put(self, slots: torch.Tensor, ids: torch.Tensor | None, keep: torch.Tensor | None = None) -> None:
        """Rows ``ids [T, layers, top_k]`` at ``slots`` int64 ``[T]`` (negative: padding), both on the pages' device.

        Rows with an id that is none are missing, those not to ``keep`` bool ``[T]``, and without ``ids`` all. What lay
        there before is gone in any case. Waits for nothing.
        """
        if not len(slots):
            return
        spec, packed = self._spec, torch.zeros(len(slots), self._words, dtype=torch.int64, device=slots.device)
        if ids is not None:
            flat = ids.reshape(len(slots), -1)
            good = ((flat >= 0) & (flat < spec.attrs["num_experts"])).all(1)
            if keep is not None:
                good &= keep
            rows = flat.to(_STORED[np.dtype(spec.dtype).itemsize]).view(torch.uint8)
            packed.view(torch.uint8)[:, WORD_NBYTES : WORD_NBYTES + spec.row_nbytes] = rows
            packed[:, 0] = folded_on_device(packed[:, 1:], self._keys) | 1
            packed *= good[:, None]
        # To leave padding out, the device would have to say how much there is: it writes what one token writes, again.
        real = slots >= 0
        one = real.int().argmax(keepdim=True)
        blocks, offsets = self._at(torch.where(real, slots, slots[one]))
        rows = torch.where(real[:, None], packed, packed[one]).view(torch.uint8)
        self.cache[blocks, 0, offsets] = torch.where(real.any(), rows, self.cache[blocks, 0, offsets])

    def _at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks and offsets ``[T]`` of tokens ``slots [T]``."""
        tokens = self._spec.block_tokens
        return slots.div(tokens, rounding_mode="floor"), slots.remainder(tokens)

    def clear(self, blocks: Sequence[int]) -> None:
        """These blocks were given out: no row of an earlier life is in them, captured anew or not."""
        self.cache[torch.tensor(blocks).to(self.cache.device, non_blocking=True), :, :, :WORD_NBYTES] = 0

    def get(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """What lies at ``slots [T]``, for :meth:`rows`: in host memory, and there when the device is done."""
        return to_host(self.cache[:, 0][self._at(torch.from_numpy(slots).to(self.cache.device, non_blocking=True))])

    def rows(self, got: torch.Tensor) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The rows ``[T, layers, top_k]`` of what was :meth:`got`, and which are there and sound."""
        raw, spec = np.ascontiguousarray(got.numpy()), self._spec
        rows, packed = raw[:, WORD_NBYTES : WORD_NBYTES + spec.row_nbytes], raw.view(np.uint64)
        ids: NDArray[Any] = np.ascontiguousarray(rows).view(spec.dtype).reshape(-1, *spec.row_shape)
        sums = folded(packed[:, 1:], fold_keys(0, self._words - 1)) | np.uint64(1)  # never zero
        return ids, packed[:, 0] == sums


def slots_of(blocks: NDArray[np.int64], tokens: int, count: int) -> NDArray[np.int64]:
    """The first ``count`` slots of successive blocks of ``tokens`` each."""
    slots: NDArray[np.int64] = (blocks[:, None] * tokens + np.arange(tokens)).reshape(-1)[:count]
    return slots


__all__ = ["Pages", "page_name", "slots_of", "token_nbytes"]

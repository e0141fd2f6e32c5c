"""Rows as one more layer of vLLM's paged KV: whatever moves the KV of a block moves its rows with it, unknowing.

A page has, for each token of a block, a sum and the row that it is of. Rows of KV that came from elsewhere are taken
out of their pages: they are of the computation that made this KV, the last router's choice too, because both were in
one place all along. A row that was not captured has a sum of zero and is missing; so is a row whose bytes have changed.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.errors import ConfigError
from cache_manager.spec import AuxBlockDataSpec, align
from kvroute.witness import WORD_NBYTES, fold_reference

NAME: Final = "model.kvroute.{}.rows"
"""The layer's name has, as vLLM wants it, one integer: the first that is no layer of the model."""


def page_name(spec: AuxBlockDataSpec) -> str:
    """What vLLM calls the layer of a model whose rows ``spec`` describes."""
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

    def put(self, slots: NDArray[np.int64], ids: NDArray[Any] | None, keep: NDArray[np.bool_] | None = None) -> None:
        """Rows ``ids [T, layers, top_k]`` at ``slots [T]`` (negative: padding); those not to ``keep`` are missing.

        Without ``ids`` all of them are. What lay there before is gone in any case.
        """
        real = slots >= 0
        at = torch.from_numpy(slots[real]).to(self.cache.device, non_blocking=True)
        packed = np.zeros((int(real.sum()), token_nbytes(self._spec)), np.uint8)
        if ids is not None:
            rows = (
                np.ascontiguousarray(ids[real].astype(self._spec.dtype))
                .view(np.uint8)
                .reshape(len(packed), self._spec.row_nbytes)
            )
            packed[:, WORD_NBYTES : WORD_NBYTES + self._spec.row_nbytes] = rows
            packed[:, :WORD_NBYTES] = _sums(packed).view(np.uint8).reshape(-1, WORD_NBYTES)
            if keep is not None:
                packed[~keep[real]] = 0
        size = self._spec.block_tokens
        self.cache[at // size, 0, at % size] = torch.from_numpy(packed).to(self.cache.device, non_blocking=True)

    def clear(self, blocks: NDArray[np.int64]) -> None:
        """These blocks were given out: no row of an earlier life is in them, captured anew or not."""
        self.cache[torch.from_numpy(blocks).to(self.cache.device), :, :, :WORD_NBYTES] = 0

    def get(self, slots: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The rows ``[T, layers, top_k]`` at ``slots [T]``, and which are there and sound; waits for the device."""
        at, size = torch.from_numpy(slots).to(self.cache.device), self._spec.block_tokens
        packed = np.ascontiguousarray(self.cache[at // size, 0, at % size].cpu().numpy())
        rows = packed[:, WORD_NBYTES : WORD_NBYTES + self._spec.row_nbytes]
        sums = np.ascontiguousarray(packed[:, :WORD_NBYTES]).view(np.uint64)[:, 0]
        ids: NDArray[Any] = np.ascontiguousarray(rows).view(self._spec.dtype).reshape(-1, *self._spec.row_shape)
        return ids, sums == _sums(packed)


def _sums(packed: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Of each token's row ``[T, token_nbytes]``, never zero."""
    return fold_reference(packed[:, WORD_NBYTES:]) | np.uint64(1)


def slots_of(blocks: NDArray[np.int64], tokens: int, count: int) -> NDArray[np.int64]:
    """The first ``count`` slots of successive blocks of ``tokens`` each."""
    slots: NDArray[np.int64] = (blocks[:, None] * tokens + np.arange(tokens)).reshape(-1)[:count]
    return slots


__all__ = ["Pages", "page_name", "slots_of", "token_nbytes"]

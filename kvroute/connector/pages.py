"""Rows as one more layer of paged KV: whatever moves the KV of a block moves its rows with it, unknowing.

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
from kvroute.witness import WORD_NBYTES, fold_keys, folded

NAME: Final = "model.kvroute.{}.rows"
"""The layer's name has one integer, as vLLM wants it: the first that is no layer of the model."""


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
        self._host = cache.device.type == "cpu"
        self._pages: Any = cache.numpy() if self._host else cache  # the same memory
        self._words = token_nbytes(spec) // WORD_NBYTES
        self._keys = fold_keys(0, self._words - 1)

    def put(self, slots: NDArray[np.int64], ids: NDArray[Any] | None, keep: NDArray[np.bool_] | None = None) -> None:
        """Rows ``ids [T, layers, top_k]`` at ``slots [T]`` (negative: padding); those not to ``keep`` are missing.

        Without ``ids`` all of them are. What lay there before is gone in any case.
        """
        spec, packed = self._spec, np.zeros((len(slots), self._words), np.uint64)
        if ids is not None:
            rows = np.ascontiguousarray(ids, spec.dtype).reshape(len(slots), -1).view(np.uint8)
            packed.view(np.uint8)[:, WORD_NBYTES : WORD_NBYTES + spec.row_nbytes] = rows
            packed[:, 0] = self._sums(packed)
            if keep is not None:
                packed[~keep] = 0
        if slots.size and slots.min() < 0:
            slots, packed = slots[slots >= 0], packed[slots >= 0]
        self._pages[self._at(slots)] = self._there(packed.view(np.uint8))

    def _there(self, array: NDArray[Any]) -> Any:
        """``array`` as what indexes the pages, or goes into them."""
        return array if self._host else torch.from_numpy(array).to(self.cache.device, non_blocking=True)

    def _at(self, slots: NDArray[np.int64]) -> tuple[Any, int, Any]:
        """The index of tokens ``slots [T]``, each ``[token_nbytes]`` there."""
        blocks, offsets = np.divmod(slots, self._spec.block_tokens)
        return self._there(blocks), 0, self._there(offsets)

    def clear(self, blocks: NDArray[np.int64]) -> None:
        """These blocks were given out: no row of an earlier life is in them, captured anew or not."""
        self._pages[self._there(blocks), :, :, :WORD_NBYTES] = 0

    def get(self, slots: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The rows ``[T, layers, top_k]`` at ``slots [T]``, and which are there and sound; waits for the device."""
        raw = np.ascontiguousarray(torch.as_tensor(self._pages[self._at(slots)]).cpu().numpy())
        rows, packed = raw[:, WORD_NBYTES : WORD_NBYTES + self._spec.row_nbytes], raw.view(np.uint64)
        ids: NDArray[Any] = np.ascontiguousarray(rows).view(self._spec.dtype).reshape(-1, *self._spec.row_shape)
        return ids, packed[:, 0] == self._sums(packed)

    def _sums(self, packed: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Of each token's row, the words behind the first of ``packed [T, words]``; never zero."""
        return folded(packed[:, 1:], self._keys) | np.uint64(1)


def slots_of(blocks: NDArray[np.int64], tokens: int, count: int) -> NDArray[np.int64]:
    """The first ``count`` slots of successive blocks of ``tokens`` each."""
    slots: NDArray[np.int64] = (blocks[:, None] * tokens + np.arange(tokens)).reshape(-1)[:count]
    return slots


__all__ = ["Pages", "page_name", "slots_of", "token_nbytes"]

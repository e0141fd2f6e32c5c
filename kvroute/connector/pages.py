"""Rows as one more layer of paged KV: any mover of a block's KV moves its rows too, without knowing about them.

A page has, for each token of a block, a sum, the name of the weights and the row. The sum covers the row, the name, the
token, its position and the token's K and V in the last layer. So a page that comes back proves for each row that it is
of these weights, of this token at this position, and of the computation that made the KV beside it. Rows without this
proof are missing, as are rows that were not captured: their sum is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.errors import ConfigError
from cache_manager.spec import AuxBlockDataSpec, align
from kvroute.connector.limits import LIMITS, Limits
from kvroute.connector.witness import folded_on_device, keys_on, to_host
from kvroute.witness import WORD_NBYTES, Run, fold_keys, folded

PAGE_NAME: Final = "model.kvroute.{}.rows"
"""The layer's name has one integer, as vLLM requires: the first number that no layer of the model has."""

NO_ROW: Final = "KV that was loaded came without a row"
OTHER_WEIGHTS: Final = "rows that came with KV are of other weights, or of weights of another name"
OTHER_KV: Final = "rows that came with KV are not of this token, position and KV"

_STORED: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By the bytes of an id: the lower bits are the id, whatever the sign."""
_FRONT: Final = 2  # words before a row: its sum, and the name of its weights
_BESIDE: Final = 3  # words that the sum covers but a page does not hold: the token, its position, the fold of its KV
_NO_TOKEN: Final = -1  # no token has this id


def page_name(spec: AuxBlockDataSpec) -> str:
    """The engine's name for the layer of rows that ``spec`` describes."""
    return PAGE_NAME.format(spec.attrs["num_layers"])


def token_nbytes(spec: AuxBlockDataSpec) -> int:
    """Bytes of one token in a page: its sum, the name of its weights, and its row up to a whole word."""
    return _FRONT * WORD_NBYTES + align(spec.row_nbytes, WORD_NBYTES)


def name_word(namespace: bytes) -> int:
    """The word that names the weights of a namespace, by its ``fingerprint``."""
    return int.from_bytes(namespace[:WORD_NBYTES], "little", signed=True)


class StepTokens:
    """The token ids and positions of a pass, on the device where it computes.

    The model calls :meth:`saw`, whose copies a CUDA graph replays without Python. :meth:`begin` empties the buffer, so
    that a pass whose tokens were not seen is recognised.
    """

    def __init__(self, max_tokens: int, device: torch.device | None = None) -> None:
        self._held = torch.full((2, max_tokens), _NO_TOKEN, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """A step begins."""
        self._held.fill_(_NO_TOKEN)

    def saw(self, token_ids: torch.Tensor | None, positions: torch.Tensor) -> None:
        """A pass begins: its tokens ``[n]`` at ``positions`` ``[n]``. Embeddings, which have no ids, are ignored."""
        most = self._held.shape[1]
        if token_ids is not None and token_ids.shape == positions.shape == (len(token_ids),) and len(token_ids) <= most:
            self._held[0, : len(token_ids)].copy_(token_ids)
            self._held[1, : len(token_ids)].copy_(positions)

    def first(self, tokens: int) -> torch.Tensor:
        """Ids and positions int64 ``[2, tokens]`` of the step's first tokens; negative if not seen."""
        if tokens > self._held.shape[1]:
            return torch.full((2, tokens), _NO_TOKEN, dtype=torch.int64, device=self._held.device)
        return self._held[:, :tokens]


class Look(NamedTuple):
    """The content of slots ``[T]``, in host memory when the device is done, with the expected tokens and positions."""

    slots: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    pages: torch.Tensor  # uint8 [T, token_nbytes]
    kv: torch.Tensor  # int64 [T], the folds of the K and V beside them


class Pages:
    """The pages ``uint8 [blocks, 1, tokens, token_nbytes]`` on the engine's device, which stay the engine's.

    ``kv`` is the last layer's KV ``[blocks, heads, tokens, values]``, where ``[block, :, offset]`` is one token's; with
    ``places`` int64 ``[tokens, values]`` a token has the values of those numbers among the ``tokens * values`` of a
    head. The model tells ``seen`` which tokens it computes. Raises :class:`ConfigError` for other shapes, and for
    tokens whose KV is not whole 8-byte words.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        spec: AuxBlockDataSpec,
        kv: torch.Tensor,
        seen: StepTokens,
        places: torch.Tensor | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        wanted = (1, spec.block_tokens, token_nbytes(spec))
        if cache.dtype != torch.uint8 or cache.shape[1:] != wanted:
            got = f"{cache.dtype} of shape {tuple(cache.shape)}"
            raise ConfigError("pages of rows", f"uint8 [blocks, {', '.join(map(str, wanted))}]", got)
        nbytes = kv[0, :, 0].numel() * kv.element_size() if kv.dim() == 4 else 0
        if not nbytes or nbytes % WORD_NBYTES or (kv.shape[0], kv.shape[2]) != (len(cache), spec.block_tokens):
            beside = f"[{len(cache)}, heads, {spec.block_tokens}, values], whole 8-byte words of each token"
            raise ConfigError("KV beside rows", beside, f"{kv.dtype} of shape {tuple(kv.shape)}")
        self.cache, self.seen, self._spec, self._limits = cache, seen, spec, limits
        self._words = token_nbytes(spec) // WORD_NBYTES
        self._keys = keys_on(cache.device, 0, self._words - 1 + _BESIDE)
        # float8 cannot be gathered everywhere
        self._kv, self._places = kv.view(torch.uint8) if kv.element_size() == 1 else kv, places
        self._kv_keys = keys_on(kv.device, 0, nbytes // WORD_NBYTES)

    def put(
        self, slots: torch.Tensor, ids: torch.Tensor | None, namespace: bytes, keep: torch.Tensor | None = None
    ) -> None:
        """Rows ``ids [T, layers, top_k]`` at ``slots`` int64 ``[T]`` (negative: padding), both on the pages' device.

        They are of the tokens that the model has seen since the step began, of the KV that lies there now, and of the
        weights that ``namespace``, a fingerprint, names. Missing are rows with an invalid id, rows without ``keep``
        bool ``[T]``, rows of tokens that were not seen, and, without ``ids`` or a ``namespace``, all rows. The old rows
        there are gone in any case. Waits for nothing.
        """
        if not len(slots):
            return
        spec, packed = self._spec, torch.zeros(len(slots), self._words, dtype=torch.int64, device=slots.device)
        # Leaving padding out would need its number from the device: instead padding repeats the write of one token.
        real = slots >= 0
        real_token = real.int().argmax(keepdim=True)
        blocks, offsets = self._at(torch.where(real, slots, slots[real_token]))
        if ids is not None and namespace:
            flat, seen = ids.reshape(len(slots), -1), self.seen.first(len(slots))
            good = ((flat >= 0) & (flat < spec.attrs["num_experts"])).all(1) & (seen >= 0).all(0)
            if keep is not None:
                good &= keep
            rows, first = flat.to(_STORED[np.dtype(spec.dtype).itemsize]).view(torch.uint8), _FRONT * WORD_NBYTES
            packed.view(torch.uint8)[:, first : first + spec.row_nbytes] = rows
            packed[:, 1] = name_word(namespace)
            covered = torch.cat([packed[:, 1:], seen.T, self._folds(blocks, offsets)[:, None]], 1)
            packed[:, 0] = folded_on_device(covered, self._keys) | 1  # never zero
            packed *= good[:, None]
        rows = torch.where(real[:, None], packed, packed[real_token]).view(torch.uint8)
        self.cache[blocks, 0, offsets] = torch.where(real.any(), rows, self.cache[blocks, 0, offsets])

    def outside(self, slots: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        """Which of ``slots [T]`` lie in none of these blocks: bool ``[T]`` on their device. Waits for nothing."""
        left_out = torch.tensor(blocks).to(slots.device, non_blocking=True)
        return ~torch.isin(self._at(slots)[0], left_out)

    def forget(self) -> None:
        """Forget every row in the pages. Waits for nothing."""
        self.cache[..., :WORD_NBYTES] = 0

    def _at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks and offsets ``[T]`` of tokens ``slots [T]``."""
        tokens = self._spec.block_tokens
        return slots.div(tokens, rounding_mode="floor"), slots.remainder(tokens)

    def _folds(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The folds int64 ``[T]`` of the K and V of these tokens."""
        step = max(1, self._limits.gather_nbytes_max // (self._kv_keys.shape[1] * WORD_NBYTES))
        parts = range(0, max(1, len(blocks)), step)
        return torch.cat([self._folded(blocks[i : i + step], offsets[i : i + step]) for i in parts])

    def _folded(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        if self._places is None:
            kv = self._kv[blocks, :, offsets]
        else:
            heads = torch.arange(self._kv.shape[1], device=blocks.device)[:, None]
            kv = self._kv.flatten(2)[blocks[:, None, None], heads, self._places[offsets][:, None]]
        return folded_on_device(kv.flatten(1).view(torch.int64), self._kv_keys)

    def look(self, runs: Sequence[Run], without: Iterable[int] = ()) -> Look:
        """Look at the loaded KV of ``runs``, for :meth:`rows`; blocks ``without`` got none."""
        size, parts = self._spec.block_tokens, []
        for run in runs:
            offsets = np.arange(len(run.token_ids))
            slots = np.array(run.blocks)[offsets // size] * size + offsets % size
            parts.append(np.stack([slots, run.token_ids, run.start + offsets]))
        columns = np.concatenate(parts, 1)
        return self.get(*columns[:, ~np.isin(columns[0] // size, list(without))])

    def get(self, slots: NDArray[np.int64], token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Look:
        """The content of ``slots [T]``, with the tokens and positions that it should be of."""
        blocks, offsets = self._at(torch.from_numpy(slots).to(self.cache.device, non_blocking=True))
        pages, kv = to_host(self.cache[blocks, 0, offsets]), to_host(self._folds(blocks, offsets))
        return Look(slots, token_ids, positions, pages, kv)

    def rows(self, look: Look, namespace: bytes) -> tuple[NDArray[Any], NDArray[np.bool_], dict[str, int]]:
        """The rows ``[T, layers, top_k]`` of a look, which are there and sound, and counts of the others by reason.

        A sound row is of its token and position, of the KV beside it and of the weights that ``namespace`` names.
        """
        raw, spec, first = np.ascontiguousarray(look.pages.numpy()), self._spec, _FRONT * WORD_NBYTES
        packed = raw.view(np.uint64)
        ids: NDArray[Any] = np.ascontiguousarray(raw[:, first : first + spec.row_nbytes]).view(spec.dtype)
        beside = np.stack([look.token_ids, look.positions, look.kv.numpy()], 1).view(np.uint64)
        covered = np.concatenate([packed[:, 1:], beside], 1)
        sums = folded(covered, fold_keys(0, covered.shape[1])) | np.uint64(1)
        present = packed[:, 0] != 0
        named = packed[:, 1] == np.uint64(name_word(namespace) % (1 << 64))
        good = present & named & (packed[:, 0] == sums)
        lost = {NO_ROW: ~present, OTHER_WEIGHTS: present & ~named, OTHER_KV: present & named & ~good}
        return ids.reshape(-1, *spec.row_shape), good, {why: n for why, mask in lost.items() if (n := int(mask.sum()))}


__all__ = ["NO_ROW", "OTHER_KV", "OTHER_WEIGHTS", "Look", "Pages", "StepTokens", "page_name", "token_nbytes"]

"""Passes that only decode, over static tables: on a GPU each is a CUDA graph.

A graph reads what its tables hold when it is replayed, and nothing else, so every pass of one size is one batch, filled
anew. Sizes are few: tokens and the length of the longest context are rounded up to powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paged_engine.engine.kv import PagedKV
from paged_engine.engine.models import BATCH_MULTIPLE
from paged_engine.engine.paged_attention import Reach

LENGTH_MIN: Final = 64
COLUMNS: Final = 4  # token, position, slot and source, before the context


class DecodeBatch:
    """One token of each of several sequences, then padding, in tables on the cache's device.

    Padding stands at position 0 of the first sequence. What it would write is the first token's, again: two writes of
    one value, whichever comes last.
    """

    def __init__(self, kv: PagedKV, tokens: int, length: int) -> None:
        self._kv = kv
        pinned = kv.device.is_cuda
        self._sent = torch.zeros((tokens, COLUMNS + length), dtype=torch.int64, pin_memory=pinned)
        self._table = self._sent.to(kv.device.device, copy=True)
        self.tokens, self.positions, self._slots, self._source = (self._table[:, i] for i in range(COLUMNS))
        self._context = self._table[:, COLUMNS:]  # [tokens, length] slots; those behind a token's position are masked
        self._columns = torch.arange(length, device=kv.device.device)
        self.graph: Any = None
        self.logits: torch.Tensor | None = None  # [tokens, vocabulary], of the graph

    def fill(self, tokens: Sequence[int], contexts: Sequence[NDArray[np.int64]]) -> None:
        """The next pass: of each sequence the token to compute, and the slots of its positions up to that token."""
        sent, count = self._sent.numpy(), len(tokens)
        sent[:count, 0] = tokens
        sent[:count, 1] = [len(context) - 1 for context in contexts]
        sent[:count, 2] = [context[-1] for context in contexts]
        sent[:count, 3] = np.arange(count)
        for row, context in zip(sent, contexts, strict=False):
            row[COLUMNS : COLUMNS + len(context)] = context
            row[COLUMNS + len(context) :] = context[0]  # has been written: masked, it must be a number still
        sent[count:] = contexts[0][0]
        sent[count:, :COLUMNS] = 0, 0, sent[0, 2], 0
        self._table.copy_(self._sent)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: Reach
    ) -> torch.Tensor:
        """As :meth:`PagedBatch.attend`."""
        cached = self._kv.layer(layer)
        cached.write(self._slots, key[0].transpose(0, 1)[self._source], value[0].transpose(0, 1)[self._source])
        keys, values = cached.read(self._context)  # [tokens, length, kv_heads, dim]
        seen = reach.sees(self.positions[:, None], self._columns)[:, None, None]
        out = reach.attend(query[0].transpose(0, 1)[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), seen)
        return out[None, :, :, 0]


class DecodePasses:
    """Runs the passes of ``model`` in which each sequence has one token, ``tokens_max`` at most.

    On a GPU the first pass of a size is captured as a CUDA graph: the model must not wait for the device in its
    forward. On a CPU the same batches run as they are.
    """

    def __init__(self, model: nn.Module, kv: PagedKV, tokens_max: int) -> None:
        self._model, self._kv, self._tokens_max = model, kv, tokens_max
        self._batches: dict[tuple[int, int], DecodeBatch] = {}
        self._pool: Any = None

    def size(self, tokens: int) -> int:
        """How many tokens a pass of ``tokens`` has with its padding."""
        return min(BATCH_MULTIPLE * _power_of_two(-(-tokens // BATCH_MULTIPLE)), self._tokens_max)

    def run(self, tokens: Sequence[int], contexts: Sequence[NDArray[np.int64]]) -> torch.Tensor:
        """Logits ``[len(tokens), vocabulary]``. ``contexts`` are each token's slots ``[position + 1]``."""
        longest = max(len(context) for context in contexts)
        size = self.size(len(tokens)), max(LENGTH_MIN, _power_of_two(longest))
        batch = self._batches.get(size)
        if batch is None:
            batch = self._batches[size] = DecodeBatch(self._kv, *size)
        batch.fill(tokens, contexts)
        if not self._kv.device.is_cuda:
            return self._forward(batch)[: len(tokens)]
        if batch.graph is None:
            self._capture(batch)
        batch.graph.replay()
        assert batch.logits is not None
        return batch.logits[: len(tokens)]

    def _forward(self, batch: DecodeBatch) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=batch.tokens[None], position_ids=batch.positions[None], use_cache=False, paged=batch
        ).logits[0]
        return logits

    def _capture(self, batch: DecodeBatch) -> None:
        """Run the pass once, for what is made on first use, and capture it; graphs share their memory."""
        cuda: Any = torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            self._forward(batch)
        cuda.current_stream().wait_stream(side)
        self._pool = self._pool or cuda.graph_pool_handle()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._pool):
            batch.logits = self._forward(batch)
        batch.graph = graph


def _power_of_two(n: int) -> int:
    """The smallest that is ``n`` or more."""
    return 1 << (n - 1).bit_length()


__all__ = ["DecodeBatch", "DecodePasses"]

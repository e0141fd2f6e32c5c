"""vLLM's own indexer for sparse attention, as it runs on a CPU: its choices as rows.

No model that vLLM serves on a CPU has one in front of attention without compressed states, so no engine is started: the
module that its models are made of is given queries, weights and a paged cache of keys.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.v1.attention.backends.mla.indexer import (
    DeepSeekV32IndexerDecodeMetadata,
    DeepseekV32IndexerMetadata,
    DeepseekV32IndexerPrefillChunkMetadata,
    DeepseekV32IndexerPrefillMetadata,
)

from kvroute import AuxBlocks, Namespace
from kvroute.indexer import canonical, indexer_spec, pack, unpack
from kvroute.replay.slime import miles_indexer_topk

pytestmark = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's kernels for its indexer")

LAYERS, HEADS, WIDTH, TOP_K, BLOCK = 2, 64, 128, 512, 64
TOKENS = 700
"""Of one sequence: of the first 512 each sees all before it, of the others not."""
PROMPT = 690
FP8 = torch.float8_e4m3fn


class Sequence:
    """A sequence whose keys lie in pages in any order, and one layer's indexer over it."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        pages = -(-TOKENS // BLOCK)
        self.table = torch.randperm(pages, generator=random).int()
        self.keys = torch.randn(TOKENS, WIDTH, generator=random).to(FP8)
        self.queries = torch.randn(TOKENS, HEADS, WIDTH, generator=random).to(FP8)
        self.weights = torch.randn(TOKENS, HEADS, generator=random)
        cache = torch.zeros(pages, BLOCK, WIDTH + 4, dtype=torch.uint8)
        flat = cache.view(pages, -1)  # of each page all keys, then a float32 scale for each
        ones = torch.ones(BLOCK).view(torch.uint8)
        for place, page in enumerate(self.table.tolist()):
            keys = self.keys[place * BLOCK : (place + 1) * BLOCK].view(torch.uint8).flatten()
            flat[page, : len(keys)] = keys
            flat[page, BLOCK * WIDTH :] = ones
        self.buffer = torch.empty(TOKENS, TOP_K, dtype=torch.int32)
        cached = SimpleNamespace(prefix="indexer", kv_cache=cache)
        shape = {"head_dim": WIDTH, "max_model_len": TOKENS, "max_total_seq_len": TOKENS}
        self.indexer = SparseAttnIndexer(
            cached, 128, "ue8m0", TOP_K, topk_indices_buffer=self.buffer, skip_k_cache_insert=True, **shape
        )

    def choices(self, start: int, stop: int) -> torch.Tensor:
        """What the indexer chooses for these tokens: a part of the prompt, or one that is decoded."""
        decodes = start >= PROMPT
        count = stop - start
        ends = torch.arange(start + 1, stop + 1).int()
        metadata: dict[str, Any] = {"seq_lens": ends[-1:], "max_seq_len": stop, "slot_mapping": ends}
        metadata |= dict.fromkeys(("num_decodes", "num_decode_tokens"), int(decodes))
        metadata |= {"num_prefills": int(not decodes), "num_prefill_tokens": 0 if decodes else count}
        whole = torch.tensor([0, stop]).int()
        if decodes:
            lens = torch.ones(1).int()
            metadata["decode"] = DeepSeekV32IndexerDecodeMetadata(self.table[None], ends, lens, False, lens)
        else:
            chunk = DeepseekV32IndexerPrefillChunkMetadata(
                self.table[None],
                torch.zeros_like(ends),
                ends,
                whole,
                torch.zeros_like(ends),
                stop,
                0,
                count,
                1,
                local_cu_seq_lens=whole,
                local_total_seq_lens=stop,
            )
            metadata["prefill"] = DeepseekV32IndexerPrefillMetadata([chunk])
        rows = np.s_[start:stop]
        with set_forward_context({"indexer": DeepseekV32IndexerMetadata(**metadata)}, VllmConfig()):
            self.indexer.forward_cpu(torch.zeros(count, 1), self.queries[rows], None, self.weights[rows])
        return self.buffer[:count].clone()

    def due(self, position: int) -> tuple[set[int], float]:
        """The positions that the token has to choose, and by how much the last of them is ahead of the next one."""
        products = torch.einsum("hd,td->th", self.queries[position].float(), self.keys[: position + 1].float())
        scores = (products.relu() * self.weights[position]).sum(1).sort(descending=True)
        if position < TOP_K:
            return set(range(position + 1)), float("inf")
        return set(scores.indices[:TOP_K].tolist()), float(scores.values[TOP_K - 1] - scores.values[TOP_K])


def test_vllms_choices_are_rows() -> None:
    """Goal: what vLLM's indexer leaves for its attention are positions of the sequence, and come back as they were from
    blocks, from packed bytes and as miles' array. Method: its own module and kernels, chunks of a prompt and decoded
    tokens; float64 of the same keys says what it has to choose, where that decides."""
    with set_current_vllm_config(VllmConfig()):
        layers = [Sequence(seed) for seed in range(LAYERS)]
    steps = [(0, 300), (300, PROMPT), *((n, n + 1) for n in range(PROMPT, TOKENS))]
    spec = indexer_spec(TOP_K, range(LAYERS), BLOCK)
    blocks = -(-TOKENS // BLOCK)
    aux = AuxBlocks([spec], blocks=blocks, namespace=Namespace("m", weights_version=1))
    try:
        lives = aux.renew(range(blocks))
        for start, stop in steps:
            chosen = np.stack([layer.choices(start, stop).numpy() for layer in layers], 1)
            positions = np.arange(start, stop)
            aux.write_step(positions, {spec.name: canonical(chosen, positions, TOP_K)})
        rows = aux.read(spec.name, list(range(blocks)), stop=TOKENS, generations=lives)
    finally:
        aux.close()
    assert rows.valid.all()
    decided = 0
    for number, layer in enumerate(layers):
        for position in range(TOKENS):
            due, lead = layer.due(position)
            if lead > 1e-2:
                decided += 1
                row = rows.values[position, number]
                assert set(row[row >= 0].tolist()) == due, (number, position)
    assert decided > 0.9 * LAYERS * TOKENS
    packed = pack(rows.values)
    assert unpack(packed).tobytes() == rows.values.tobytes()
    array = miles_indexer_topk(rows, TOKENS + 1)
    assert (array.dtype, array.shape) == (np.int32, (TOKENS, LAYERS, TOP_K))
    assert array.tobytes() == rows.values.tobytes()

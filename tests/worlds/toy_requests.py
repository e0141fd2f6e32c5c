"""What a small engine is asked, under the names that the connector asks for, and the rows that are due."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TOKENS, EXPERTS, TOP_K = 4, 8, 2


def seeded(tokens: Sequence[int], weights: int = 0) -> np.random.Generator:
    """Random numbers that are a function of the tokens and of the weights."""
    return np.random.default_rng(list(hashlib.blake2b(bytes(tokens), digest_size=8, salt=bytes([weights])).digest()))


def row_of(tokens: Sequence[int], weights: int = 0) -> NDArray[np.int64]:
    """What routers of these weights choose for the last of ``tokens``: ``[layers, top_k]``."""
    return np.stack([seeded(each, weights).permutation(EXPERTS)[:TOP_K] for each in (tokens, [*tokens, 1])])


def weights_of(tokens: Sequence[int], weights: int = 0) -> NDArray[np.float32]:
    """By what these routers count them: ``[layers, top_k]``."""
    sequences = ([*tokens, 2], [*tokens, 3])
    return np.stack([seeded(each, weights).random(TOP_K, np.float32) for each in sequences])


class Asked:
    """A request, under the names that the connector asks for."""

    def __init__(self, name: str, tokens: Sequence[int]) -> None:
        self.request_id, self.tokens, self.num_computed_tokens = name, tokens, 0
        self.all_token_ids, self.num_prompt_tokens = tokens, len(tokens)
        ends = range(TOKENS, len(tokens) + 1, TOKENS)
        self.block_hashes = [hashlib.sha256(bytes(tokens[:end])).digest() for end in ends]

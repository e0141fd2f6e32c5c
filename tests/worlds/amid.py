"""Something that happens amid a call of the blocks of an engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cache_manager.blocks import AuxBlocks
from cache_manager.spec import AuxBlockDataSpec


class _Amid:
    """KV of one byte a token. Whoever copies it does something first."""

    def __init__(self, tokens: int, act: Callable[[], object]) -> None:
        self.spec = AuxBlockDataSpec("kv", (), "uint8", tokens)
        self._act = act

    def take(self, _blocks: np.ndarray, _into: np.ndarray) -> None:
        self._act()


def amid_a_call(engine: AuxBlocks, act: Callable[[], object]) -> None:
    """Something happens while a call of this thread has the lock of the blocks."""
    kv = _Amid(engine.block_tokens, act)
    engine.exchange.take_kv(kv, [0], engine.generations([0]))  # type: ignore[arg-type]

"""Blocks of ours that take over rows whose block is given out before they have been read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache_manager.feed import BlockFeed


class SpareBlocks:
    """Blocks of ours that take over the rows of blocks that are given out before these rows have been read."""

    def __init__(self, feed: BlockFeed, blocks: Iterable[int]) -> None:
        self._feed = feed
        self._free = list(blocks)

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def take_over(self, blocks: Sequence[int]) -> dict[int, tuple[int, int]]:
        """The worker copies these blocks with its next step; by block its spare one and that one's life.

        Blocks for which there is no spare one are left out.
        """
        spares = [self._free.pop() for _ in range(min(len(blocks), len(self._free)))]
        if not spares:
            return {}
        lives = self._feed.renew(spares).tolist()
        pairs = list(zip(blocks, spares, strict=False))
        self._feed.copy(pairs)
        return {block: (spare, life) for (block, spare), life in zip(pairs, lives, strict=True)}

    def free(self, spares: Iterable[int]) -> None:
        self._free += spares


__all__ = ["SpareBlocks"]

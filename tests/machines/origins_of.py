"""The origins of blocks, looked at from inside: those that ``origins`` hands out end with that."""

from __future__ import annotations

from collections.abc import Sequence

from cache_manager.blocks import AuxBlocks
from cache_manager.ports import TierName


def origins_of(blocks_of: AuxBlocks, blocks: Sequence[int], tier: TierName = "device") -> list[int]:
    return blocks_of._tiers[tier].origins.names[list(blocks)].tolist()

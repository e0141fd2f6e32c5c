"""Something that happens when a move of blocks has copied bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from watched_region import watch_rows

from cache_manager.blocks import AuxBlocks
from cache_manager.ports import TierName


@contextmanager
def when_copied(engine: AuxBlocks, happens: Callable[[], object], tier: TierName = "device") -> Iterator[None]:
    """Within the body something happens once, when a move has copied bytes of a block into the tier."""
    left = [happens]
    region = engine.region(tier)
    watch_rows(region, lambda: left and left.pop()())
    yield
    watch_rows(region, None)
    assert not left, "nothing was copied"

"""Keys under which a store may have records, and which are no hits: what they name did not come, or differs."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from cache_manager.keys import BlockKey

GONE_MAX: Final = 1 << 16
"""With so many, the next ones take their place: a forgotten key is asked for again, and does not come again."""


class GoneKeys:
    """One thread changes them; any may ask ``key in gone``."""

    def __init__(self) -> None:
        self._keys: frozenset[BlockKey] = frozenset()  # replaced as a whole: others look at it meanwhile

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def add(self, keys: AbstractSet[BlockKey]) -> None:
        if keys:
            earlier = self._keys if len(self._keys) < GONE_MAX else frozenset[BlockKey]()
            self._keys = earlier.union(keys)

    def clear(self) -> None:
        self._keys = frozenset()


__all__ = ["GONE_MAX", "GoneKeys"]

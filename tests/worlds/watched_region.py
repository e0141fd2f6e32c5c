"""Regions that tell of each load and store, so that a reader and a writer can be anywhere in their work at a moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from cache_manager.regions import HeapRegion
from cache_manager.spec import RecordLayout

Who = Literal["reader", "writer"]
T = TypeVar("T")


def nothing(_: int) -> None: ...


class Watched(np.ndarray):  # type: ignore[type-arg]
    """An array of a region: ``loaded`` is called after a load by an array of indices, which hands out a plain copy,
    and ``stored`` after a store."""

    loaded: Callable[[], None]
    stored: Callable[[], None]

    def __array_finalize__(self, other: Any) -> None:
        self.loaded = getattr(other, "loaded", lambda: None)
        self.stored = getattr(other, "stored", lambda: None)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if not isinstance(key, np.ndarray):
            return found
        self.loaded()
        return np.asarray(found)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.stored()


def watch_rows(region: Any, stored: Callable[[], None] | None) -> None:
    """``stored`` is called after each store into the region's rows, as a move makes them; ``None`` ends that."""
    region.rows = np.asarray(region.rows)
    if stored is not None:
        region.rows = region.rows.view(Watched)
        region.rows.stored = stored


@dataclass
class WatchedRegion:
    """An embedder's own region. ``after_load`` and ``after_store`` are called with the number of loads or stores."""

    layout: RecordLayout
    blocks: int
    rows: Any
    words: Any
    valid: Any
    after_load: Callable[[int], None] = nothing
    after_store: Callable[[int], None] = nothing
    loads: int = 0
    stores: int = 0

    @classmethod
    def over(cls, region: HeapRegion) -> WatchedRegion:
        """The same memory."""
        arrays = (array.view(Watched) for array in (region.rows, region.words, region.valid))
        watched = cls(region.layout, region.blocks, *arrays)
        for array in (watched.rows, watched.words, watched.valid):
            array.loaded, array.stored = watched.count_load, watched.count_store
        return watched

    def count_load(self) -> None:
        self.loads += 1
        self.after_load(self.loads)

    def count_store(self) -> None:
        self.stores += 1
        self.after_store(self.stores)

    def renew(self, namespace: bytes) -> None: ...

    def close(self) -> None: ...


def interleave(
    turns: Sequence[Who], region: HeapRegion, read: Callable[[WatchedRegion], T], write: Callable[[WatchedRegion], None]
) -> T:
    """What ``read`` answers while ``write`` happens, by turns: one load, or one store. When all are gone, all stores
    that are left happen at once.

    What a writer stores does not depend on its readers: so it is done first, and done again store by store.
    """
    arrays = region.rows, region.words, region.valid
    before, states = [array.copy() for array in arrays], deque[list[Any]]()
    writer, reader, left = WatchedRegion.over(region), WatchedRegion.over(region), deque(turns)
    writer.after_store = lambda _: states.append([array.copy() for array in arrays])
    write(writer)

    def become(state: list[Any]) -> None:
        for array, was in zip(arrays, state, strict=True):
            array[...] = was

    def until_the_next_load(_: int = 0) -> None:
        while states and (not left or left.popleft() == "writer"):
            become(states.popleft())

    become(before)
    reader.after_load = until_the_next_load
    until_the_next_load()
    answer = read(reader)
    left.clear()
    until_the_next_load()
    return answer

"""Regions that tell of each load and store, so that a reader and a writer can be anywhere in their work at a moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from cache_manager.regions import HeapRegion
from cache_manager.spec import RecordLayout

Who = Literal["reader", "writer"]
WAIT_S = 30
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
            array.loaded, array.stored = watched._loaded, watched._stored
        return watched

    def _loaded(self) -> None:
        self.loads += 1
        self.after_load(self.loads)

    def _stored(self) -> None:
        self.stores += 1
        self.after_store(self.stores)

    def renew(self, namespace: bytes) -> None: ...

    def close(self) -> None: ...


class Turns:
    """Two threads of which one runs: a turn goes as far as the next load or store. When all are gone, writer first."""

    def __init__(self, turns: Sequence[Who]) -> None:
        self._turns = list(turns)
        self._changed = threading.Condition()
        self._running: Who | None = None
        self._ended = set[Who]()

    def wait(self, who: Who) -> None:
        """End the turn of ``who``, if it has one, and wait for the next."""

        def mine() -> bool:
            next_: Who = self._turns[0] if self._turns else "writer"
            return self._running is None and (next_ == who or next_ in self._ended)

        with self._changed:
            self._stop(who)
            assert self._changed.wait_for(mine, WAIT_S), f"the {who}'s turn never came"
            self._running = who
            del self._turns[:1]

    def end(self, who: Who) -> None:
        with self._changed:
            self._ended.add(who)
            self._stop(who)

    def _stop(self, who: Who) -> None:
        if self._running == who:
            self._running = None
        self._changed.notify_all()


def interleave(
    turns: Sequence[Who], region: HeapRegion, read: Callable[[WatchedRegion], T], write: Callable[[WatchedRegion], None]
) -> T:
    """What ``read`` answers while ``write`` runs in another thread, by turns."""
    taken = Turns(turns)
    reader, writer = WatchedRegion.over(region), WatchedRegion.over(region)
    reader.after_load = lambda _: taken.wait("reader")
    writer.after_store = lambda _: taken.wait("writer")
    failed: list[BaseException] = []

    def run() -> None:
        try:
            taken.wait("writer")
            write(writer)
        except BaseException as error:  # noqa: BLE001 - the thread that waits below raises it
            failed.append(error)
        finally:
            taken.end("writer")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        taken.wait("reader")
        return read(reader)
    finally:
        taken.end("reader")
        thread.join(WAIT_S)
        if failed:
            raise failed[0]

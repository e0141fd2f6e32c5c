"""The calls of a tiered store that are running: what a read has to know, and which puts wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from cache_manager.keys import BlockKey


class Reading:
    """A ``get_into`` that is running; ``changed`` are the keys that were deleted or stored since it began."""

    __slots__ = ("changed",)

    def __init__(self) -> None:
        self.changed: set[BlockKey] = set()


class Running:
    """Guarded by ``changed``, which all lanes of a store share."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._readings: set[Reading] = set()
        self._putting: set[BlockKey] = set()

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        reading = Reading()
        with self._changed:
            self._readings.add(reading)
        try:
            yield reading
        finally:
            with self._changed:
                self._readings.discard(reading)

    def tell_readings(self, keys: Collection[BlockKey]) -> None:
        """What was read of these keys may be out of date. Held."""
        for reading in self._readings:
            reading.changed.update(keys)

    @contextmanager
    def put(self, keys: Collection[BlockKey]) -> Iterator[None]:
        """No other put of these keys runs: the tiers get the records of a key in the order of the answers."""
        with self._changed:
            self._changed.wait_for(lambda: self._putting.isdisjoint(keys))
            self._putting.update(keys)
        try:
            yield
        finally:
            with self._changed:
                self._putting.difference_update(keys)
                self._changed.notify_all()


__all__ = ["Reading", "Running"]

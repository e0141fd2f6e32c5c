"""A tiered store over memory tiers that fail, stall, lie, lose and flip bits as they are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore
from cache_manager.storage.tiered import TieredStore
from cache_manager.testing.records import LAYOUT, key_of

ROOM_NBYTES = 1 << 20
WAIT_S = 30.0


class FaultyTier:
    """A memory store that does what it is told to do wrong; a fault lasts until it is taken away."""

    def __init__(self, capacity_nbytes: int = ROOM_NBYTES) -> None:
        self.real = MemoryStore(capacity_nbytes)
        self.failing = False
        self.slow_s = 0.0
        self.losing = False  # says True to a put and keeps nothing
        self.flipping: int | None = None  # this bit of every payload that is read
        self.lying = False  # answers with the header and bytes of other keys
        self.full = False
        self.gate = threading.Event()  # closed: puts wait
        self.gate.set()
        self.at_gate = threading.Event()
        self.during_get: Callable[[], object] | None = None  # called when a read has its answer
        self.puts = 0
        self.calls = 0

    def _met(self) -> None:
        self.calls += 1
        if self.slow_s:
            time.sleep(self.slow_s)
        if self.failing:
            raise StorageError("the tier fails on purpose")

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        self._met()
        if not self.gate.is_set():
            self.at_gate.set()
            assert self.gate.wait(WAIT_S)
        self.puts += len(headers)
        if self.full:  # what it has it keeps
            buffers = [memoryview(bytearray(header.payload_nbytes)) for header in headers]
            found = self.real.get_into([header.key for header in headers], buffers)
            return [None if isinstance(answer, Absence) else answer for answer in found]
        if self.losing:
            return list(headers)
        return self.real.put(headers, payloads, replace=replace)

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        self._met()
        found = self.real.get_into(keys, buffers)
        for i, header in enumerate(found):
            if isinstance(header, RecordHeader) and self.flipping is not None:
                buffers[i][self.flipping // 8 % len(buffers[i])] ^= 1 << self.flipping % 8
        if self.during_get:
            self.during_get()
        if self.lying and len(found) > 1:
            found = found[1:] + found[:1]
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._met()
        return self.real.contains(keys)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._met()
        self.real.delete(keys)

    def flush(self) -> None:
        self._met()

    def usage(self) -> Mapping[str, int]:
        if self.failing:
            raise StorageError("the tier fails on purpose")
        return self.real.usage()

    def close(self) -> None:
        self.real.close()

    def has(self, number: int) -> bool:
        return self.real.contains([key_of(number)])[0]


class Tiers:
    """A tiered store over faulty ones, and its front and back."""

    def __init__(self, *, pause_ms: int = 1, count: int = 2) -> None:
        self.tiers = [FaultyTier() for _ in range(count)]
        self.front, self.back = self.tiers[0], self.tiers[-1]
        self.backend = TieredStore({f"tier{i}": tier for i, tier in enumerate(self.tiers)}, pause_ms=pause_ms)
        self.store = RecordStore(self.backend, LAYOUT)

    def are_asked(self) -> bool:
        """Whether no tier is left in peace because it failed a moment ago."""
        return all(at_s <= time.monotonic() for tier in self.backend._tiers for at_s in tier.away_until_s.values())

    def end_pauses(self) -> None:
        for tier in self.backend._tiers:
            tier.away_until_s = dict.fromkeys(tier.away_until_s, 0.0)

    def mend(self) -> None:
        for tier in self.tiers:
            tier.failing = tier.losing = tier.lying = tier.full = False
            tier.slow_s, tier.flipping = 0.0, None
            tier.gate.set()

    def come_back(self) -> None:
        """No fault any more, no tier left in peace, nothing owed."""
        self.mend()
        self.end_pauses()
        self.backend.flush()

    def close(self) -> None:
        self.come_back()
        self.backend.close()


def check_counters(it: Tiers) -> None:
    """Every hit is one of some tier."""
    assert it.store.counters.hits == sum(tier.hits for tier in it.backend.counters)

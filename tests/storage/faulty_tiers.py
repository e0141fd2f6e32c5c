"""A tiered store over memory tiers that fail, lie, lose and flip bits as they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore
from cache_manager.storage.tiered import TieredStore
from cache_manager.testing.faults import FaultyStore
from cache_manager.testing.records import LAYOUT, key_of

WAIT_S = 30.0
FAULTS = ("failing", "losing", "lying", "full")


class FaultyTier(FaultyStore):
    """A memory store that does what it is told to do wrong; a fault lasts until it is taken away."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(1 << 20))
        self.gate = threading.Event()  # closed: puts wait
        self.at_gate = threading.Event()
        self.after_get: Callable[[], object] | None = None  # called when a read has its answer
        self.puts = 0
        self.mend()

    def mend(self) -> None:
        self.failing = False
        self.losing = False  # says that a put has stored, and keeps nothing
        self.lying = False  # answers with the header and bytes of other keys
        self.full = False
        self.flipping: int | None = None  # this bit of every payload that is read
        self.gate.set()

    def _met(self) -> None:
        if self.failing:
            raise StorageError("the tier fails on purpose")

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        self._met()
        self.at_gate.set()
        assert self.gate.wait(WAIT_S)
        self.puts += len(headers)
        if self.full:  # what it has it keeps
            found = self.backend.get_into(
                [h.key for h in headers], [memoryview(bytearray(h.payload_nbytes)) for h in headers]
            )
            return [None if isinstance(answer, Absence) else answer for answer in found]
        return list(headers) if self.losing else super().put(headers, payloads, replace=replace)

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        self._met()
        found = super().get_into(keys, buffers)
        for header, buffer in zip(found, buffers, strict=True):
            if isinstance(header, RecordHeader) and self.flipping is not None:
                buffer[self.flipping // 8 % len(buffer)] ^= 1 << self.flipping % 8
        if self.after_get:
            self.after_get()
        return found[1:] + found[:1] if self.lying else found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._met()
        return super().contains(keys)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._met()
        super().delete(keys)

    def flush(self) -> None:
        self._met()

    def usage(self) -> Mapping[str, int]:
        self._met()
        return super().usage()

    def has(self, number: int) -> bool:
        return self.backend.contains([key_of(number)])[0]


class Tiers:
    """A tiered store over faulty ones, and its front and back."""

    def __init__(self, count: int = 2) -> None:
        self.tiers = [FaultyTier() for _ in range(count)]
        self.front, self.back = self.tiers[0], self.tiers[-1]
        self.backend = TieredStore({str(i): tier for i, tier in enumerate(self.tiers)})
        self.store = RecordStore(self.backend, LAYOUT)

    def mend(self) -> None:
        for tier in self.tiers:
            tier.mend()

    def of_each(self, name: str) -> list[int]:
        usage = self.backend.usage()
        return [usage[f"tier{depth}_{name}"] for depth in range(len(self.tiers))]

"""Two engines' blocks of rows and KV, over stores that refuse and fail: content names the computation that it is of.

Every byte of a block, of rows and of KV, is a function of key and origin.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.mover import PairMover, RowsMover
from cache_manager.ports import Absence, BlockRecords, Found, HitPolicy, StorageBackend
from cache_manager.record import RecordHeader
from cache_manager.regions import HeapRegion
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage.records import RecordStore
from cache_manager.testing.faults import FaultyStore

TOKENS, KEYS, BLOCKS = 4, 5, 12
ROWS = RecordLayout(
    (AuxBlockDataSpec("extra", (2,), "uint8", TOKENS), AuxBlockDataSpec("routing", (3,), "uint8", TOKENS))
)
KV = RecordLayout((AuxBlockDataSpec("kv", (64,), "uint8", TOKENS),))
FULL = b"\x0f" + bytes(7)
NONE, EXTRA, PART, REQUIRED, BOTH = (
    bytes(16),
    FULL + bytes(8),
    bytes(8) + b"\x03" + bytes(7),
    bytes(8) + FULL,
    FULL + FULL,
)
"""Validity of a block's rows; ``routing`` is required."""


def key(n: int) -> BlockKey:
    return BlockKey(b"scope-of" + n.to_bytes(24, "big"))


@functools.cache
def content(n: int, origin: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng((n, origin)).integers(0, 256, nbytes, dtype=np.uint8)


class KVMover(RowsMover):
    """KV has all of its tokens, whatever rows there are."""

    def put(self, records: BlockRecords, *, replace: bool = False) -> list[Found | None]:
        whole = dataclasses.replace(records, valid=[FULL] * len(records.keys))
        return [found and Found(found.origin, b"") for found in super().put(whole, replace=replace)]


class FussyStore(FaultyStore):
    """Refuses what is new to it when told to, as a full store that may not evict."""

    refusing = False

    def put(self, headers, payloads, *, replace=False):
        if not self.refusing:
            return super().put(headers, payloads, replace=replace)
        if self.fail_put:
            raise StorageError("put failed on purpose")
        buffers = [memoryview(bytearray(header.payload_nbytes)) for header in headers]
        found = self.backend.get_into([header.key for header in headers], buffers)
        return [header if isinstance(header, RecordHeader) else None for header in found]


class Engine:
    """Device blocks of rows and KV over two stores that others use too."""

    def __init__(self, rows: StorageBackend, kv: StorageBackend, policy: HitPolicy) -> None:
        self.regions = HeapRegion(ROWS, BLOCKS), HeapRegion(KV, BLOCKS)
        self.movers = (
            RowsMover(self.regions[0], None, RecordStore(rows, ROWS)),
            KVMover(self.regions[1], None, RecordStore(kv, KV)),
        )
        self.pair = PairMover(*self.movers, policy, ROWS, required=[1])

    def compute(self, n: int, origin: int) -> None:
        """Block ``n`` has the rows and the KV of key ``n`` that the computation ``origin`` makes."""
        for region in self.regions:
            region.rows[n] = content(n, origin, region.layout.nbytes)

    def put(self, wanted: Sequence[int], origin: int, valid: bytes = BOTH) -> list[Found | None]:
        for n in wanted:
            self.compute(n, origin)
        count = len(wanted)
        keys = [key(n) for n in wanted]
        return self.pair.put(BlockRecords(keys, list(wanted), [origin] * count, [valid] * count, [1] * count))

    def get(self, wanted: Sequence[int]) -> list[Found | Absence]:
        """What comes back, which has to be rows and KV of the origin that is answered."""
        blocks = [KEYS + i for i in range(len(wanted))]
        for region in self.regions:
            region.rows[KEYS:] = 0xEE
        found = self.pair.get_into([key(n) for n in wanted], blocks)
        for n, block, answer in zip(wanted, blocks, found, strict=True):
            if isinstance(answer, Found):
                assert self.is_of(1, n, block, answer.origin), "KV of another computation"
                assert not answer.valid or self.is_of(0, n, block, answer.origin), "rows of another computation"
        return found

    def is_of(self, part: int, n: int, block: int, origin: int) -> bool:
        region = self.regions[part]
        return bool((region.rows[block] == content(n, origin, region.layout.nbytes)).all())

    def close(self) -> None:
        for region in self.regions:
            region.close()


def stored(backend: StorageBackend, layout: RecordLayout, n: int) -> RecordHeader | None:
    """What a store has under a key, past every mover."""
    (found,) = backend.get_into([key(n)], [memoryview(bytearray(layout.nbytes))])
    return found if isinstance(found, RecordHeader) else None

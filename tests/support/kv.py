"""An engine's KV for tests: arrays that hold, per slot, the digest of the token prefix that was computed there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, BlockRecords, Found, RecordCounters

NBYTES = 32


def prefix_digest(tokens: Sequence[int]) -> bytes:
    """What the KV of the last of ``tokens`` depends on."""
    return hashlib.sha256(repr(list(tokens)).encode()).digest()


class SlotKV:
    """A ``Mover`` of arrays ``[blocks, block_tokens]`` of prefix digests; it can be told to fail.

    ``stored`` is its store, by key: the origin and the digests of a block. It may outlive the mover.
    """

    def __init__(self, device_blocks: int, host_blocks: int, block_tokens: int) -> None:
        self.device = np.zeros((device_blocks, block_tokens, NBYTES), np.uint8)
        self.host = np.zeros((host_blocks, block_tokens, NBYTES), np.uint8)
        self.stored: dict[BlockKey, tuple[int, NDArray[np.uint8]]] = {}
        self.fail_next: type[Exception] | None = None
        self.fail_after: type[Exception] | None = None  # raised when the first half of the blocks has been copied
        self.copies: list[tuple[str, str, list[tuple[int, int]]]] = []

    @property
    def stores(self) -> bool:
        return True

    @property
    def counters(self) -> RecordCounters:
        return RecordCounters()

    def write(self, slots: Sequence[int], digests: Sequence[bytes]) -> None:
        """What a forward pass does."""
        flat = self.device.reshape(-1, NBYTES)
        for slot, digest in zip(slots, digests, strict=True):
            flat[slot] = np.frombuffer(digest, np.uint8)

    def digest(self, tier: str, block: int, offset: int) -> bytes:
        return (self.device if tier == "device" else self.host)[block, offset].tobytes()

    def _maybe_fail(self) -> None:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error("the KV copy failed on purpose")

    def copy(self, source: str, target: str, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        self._maybe_fail()
        self.copies.append((source, target, list(zip(sources.tolist(), targets.tolist(), strict=True))))
        read, written = (self.device if tier == "device" else self.host for tier in (source, target))
        half = len(sources) // 2 if self.fail_after else len(sources)
        written[targets[:half]] = read[sources[:half]]
        if self.fail_after is not None:
            error, self.fail_after = self.fail_after, None
            raise error("the KV copy failed half way on purpose")

    def put(self, records: BlockRecords, *, replace: bool = False) -> list[Found | None]:
        self._maybe_fail()
        for key, block, origin in zip(records.keys, records.blocks, records.origins, strict=True):
            if replace or key not in self.stored:
                self.stored[key] = (origin, self.device[block].copy())
        return [Found(self.stored[key][0], b"") for key in records.keys]

    def get_into(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> list[Found | Absence]:
        if self.fail_next is StorageError:
            self._maybe_fail()
        found: list[Found | Absence] = []
        for key, block in zip(keys, blocks, strict=True):
            if key not in self.stored:
                found.append(Absence.MISS)
                continue
            origin, self.device[block] = self.stored[key]
            found.append(Found(origin, b""))
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self.stored for key in keys]

    def flush(self) -> None: ...

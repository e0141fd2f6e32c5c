"""An engine's KV for tests: arrays that hold, per slot, the digest of the token prefix that was computed there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cache_manager.spec import AuxBlockDataSpec

NBYTES = 32


def prefix_digest(tokens: Sequence[int]) -> bytes:
    """What the KV of the last of ``tokens`` depends on."""
    return hashlib.sha256(repr(list(tokens)).encode()).digest()


class SlotKV:
    """``KVBlocks`` of arrays ``[blocks, block_tokens, nbytes]`` of prefix digests; a copy can be told to fail."""

    def __init__(self, device_blocks: int, host_blocks: int, block_tokens: int, nbytes: int = NBYTES) -> None:
        self.spec = AuxBlockDataSpec("kv", (nbytes,), "uint8", block_tokens)
        self.device = np.zeros((device_blocks, block_tokens, nbytes), np.uint8)
        self.host = np.zeros((host_blocks, block_tokens, nbytes), np.uint8)
        self.fail_next: type[Exception] | None = None
        self.fail_after: type[Exception] | None = None  # raised when the first half of the blocks has been copied

    def write(self, slots: Sequence[int], digests: Sequence[bytes]) -> None:
        """Writes the KV that a forward pass would write."""
        flat = self.device.reshape(-1, NBYTES)
        for slot, digest in zip(slots, digests, strict=True):
            flat[slot] = np.frombuffer(digest, np.uint8)

    def digest(self, tier: str, block: int, offset: int) -> bytes:
        return (self.device if tier == "device" else self.host)[block, offset].tobytes()

    def digests(self, tier: str, block: int) -> list[bytes]:
        return [self.digest(tier, block, offset) for offset in range(self.device.shape[1])]

    def copy(self, source: str, target: str, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error("the KV copy failed on purpose")
        read, written = (self.device if tier == "device" else self.host for tier in (source, target))
        half = len(sources) // 2 if self.fail_after else len(sources)
        written[targets[:half]] = read[sources[:half]]
        if self.fail_after is not None:
            error, self.fail_after = self.fail_after, None
            raise error("the KV copy failed half way on purpose")

    def take(self, blocks: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
        into[:] = self.device[blocks].reshape(len(blocks), self.spec.block_nbytes)

    def fill(self, blocks: NDArray[np.int64], given: NDArray[np.uint8]) -> None:
        self.device[blocks] = given.reshape(self.device[blocks].shape)

"""Two parts of the same blocks in shared memory: rows, whose words count, and KV."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cache_manager.keys import BlockKey, KeyChain, Namespace
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.transfer_manager import CacheTransferManager, SharedPart, TransferSettings

TOKENS, DEVICE_BLOCKS, HOST_BLOCKS = 16, 12, 8
NAMESPACE = Namespace("m", 1)
ROWS = RecordLayout((AuxBlockDataSpec("topk_ids", row_shape=(3, 2), dtype="uint8", block_tokens=TOKENS),))
KV = RecordLayout((AuxBlockDataSpec("kv", row_shape=(2, 4), dtype="float32", block_tokens=TOKENS),))


@dataclass
class Memory:
    """The regions of both parts, filled with bytes that name part, tier and block."""

    parts: list[SharedPart]

    def fill(self) -> None:
        for p, part in enumerate(self.parts):
            for region in (part.device, part.host):
                assert region is not None
                for block in range(region.blocks):
                    region.rows[block] = (17 * block + 101 * p + (7 if region is part.host else 0)) % 251
                    region.words[block] = (block + 1) << 16

    def generations(self, tier: str, blocks: list[int]) -> list[int]:
        region = getattr(self.parts[0], tier)
        return (region.words[blocks] >> np.uint64(16)).tolist()

    def rows(self, part: int, tier: str, block: int) -> bytes:
        return getattr(self.parts[part], tier).rows[block].tobytes()

    @property
    def valid(self) -> bytes:
        return ((1 << TOKENS) - 1).to_bytes(8, "little")

    def keys(self, count: int, first: int = 0) -> list[BlockKey]:
        chain = KeyChain(NAMESPACE, ROWS)
        return [chain.key(None, [first + i]) for i in range(count)]


def started(parts: list[SharedPart], settings: TransferSettings | None = None) -> CacheTransferManager:
    """A cache-transfer process for parts, the rows and the KV."""
    rows, kv = parts
    return CacheTransferManager(kv, store=rows.store, settings=settings).start(rows.device, rows.host)

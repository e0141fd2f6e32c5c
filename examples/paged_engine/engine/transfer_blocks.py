"""What an engine's block is on its way to another engine: a record of its rows and a record of its KV."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Final

import numpy as np

from cache_manager.blocks import AuxBlocks
from cache_manager.keys import BlockKey
from cache_manager.record import OfferedRecord, RecordHeader
from cache_manager.spec import RecordLayout
from paged_engine.engine.kv import prefix_valid
from paged_engine.engine.memory import EngineMemory
from transfer.actions import OfferedBlock
from transfer.messages import Part

ROWS: Final = 0
KV: Final = 1


class TransferBlocks:
    """Takes device blocks out of one engine's ``aux`` and ``memory``, and puts them into another's.

    Both engines must have equal :attr:`parts`; whoever carries the records checks that.
    """

    def __init__(self, aux: AuxBlocks, memory: EngineMemory) -> None:
        self._aux = aux
        self._memory = memory
        self._layout = RecordLayout((memory.kv.spec,))

    @property
    def parts(self) -> tuple[Part, Part]:
        """What a block consists of; ``ROWS`` and ``KV`` are places in it."""
        tokens, rows = self._aux.block_tokens, self._aux.layout
        return (
            Part("rows", rows.fingerprint, rows.nbytes, tokens),
            Part("kv", self._layout.fingerprint, self._layout.nbytes, tokens),
        )

    def take(self, blocks: Mapping[BlockKey, int], tokens: Many[int]) -> list[OfferedBlock]:
        """The first ``tokens`` tokens of each block: a copy of the rows, and of a full block's KV a view on a CPU.

        Whoever offers them keeps the blocks from being written or given away until nobody reads the KV any more.
        """
        ids = list(blocks.values())
        rows = self._aux.export(blocks, self._aux.generations(ids), tokens)
        each = zip(blocks.items(), tokens, rows, self._aux.origins(ids), strict=True)
        return [
            OfferedBlock(i, key, (record, self._kv_record(key, block, count, origin)))
            for i, ((key, block), count, record, origin) in enumerate(each)
        ]

    def put_rows(self, block: int, generation: int, tokens: int, header: RecordHeader, payload: memoryview) -> int:
        """Put a verified record of rows into ``block``; how many of its first ``tokens`` tokens' rows landed.

        None of a record that has rows of further tokens, nor where the block has another generation or KV of another
        origin. Raises ``BlockBusyError`` while the block is in motion.
        """
        words = np.frombuffer(header.valid, "<u8").reshape(len(self._aux.layout.specs), -1)
        if any(int.from_bytes(spec.tobytes(), "little") >> tokens for spec in words):
            return 0
        return self._aux.install(block, generation, header, payload)

    def put_kv(self, block: int, generation: int, tokens: int, header: RecordHeader, payload: memoryview) -> bool:
        """Copy a verified KV record into ``block``, which nothing else may write or read now.

        ``False``, and nothing is written, when it has not all of the ``tokens`` tokens, or the block has another
        generation.
        """
        if header.fingerprint != self._layout.fingerprint or payload.nbytes != self._layout.nbytes:
            raise AssertionError(f"a KV record of another layout: {header}")
        wanted = (1 << tokens) - 1
        if int.from_bytes(header.valid, "little") & wanted != wanted or not header.origin:
            return False
        if not self._aux.bind_origin(block, generation, header.origin, tokens):
            return False
        self._memory.kv.fill(np.array([block]), np.frombuffer(payload, np.uint8)[None])
        return True

    def _kv_record(self, key: BlockKey, block: int, tokens: int, origin: int) -> OfferedRecord:
        raw = self._memory.kv.bytes_of(block)
        if tokens < self._aux.block_tokens:  # a snapshot: what lies behind the tokens is somebody else's
            raw, used = np.zeros_like(raw), raw[: tokens * (len(raw) // self._aux.block_tokens)]
            raw[: len(used)] = used
        valid = prefix_valid(self._layout, tokens)
        return OfferedRecord(key, self._layout.fingerprint, 0, origin, valid, raw.data)


__all__ = ["KV", "ROWS", "TransferBlocks"]

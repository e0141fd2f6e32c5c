"""What an engine's block is on its way to another engine: a record of its rows and a record of its KV."""

from __future__ import annotations

import functools
import operator
from typing import Any, Final

import numpy as np
import torch

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.keys import BlockKey
from cache_manager.record import OfferedRecord, RecordHeader
from cache_manager.spec import RecordLayout
from kvroute.engine.memory import EngineMemory
from transfer.actions import OfferedBlock
from transfer.messages import Part

ROWS: Final = 0
KV: Final = 1


class CrossingBlocks:
    """Takes device blocks out of one engine's ``aux`` and ``memory``, and puts them into another's.

    Both engines must have equal :attr:`parts`; whoever carries the records checks that.
    """

    def __init__(self, aux: AuxBlocks, memory: EngineMemory) -> None:
        self._aux = aux
        self._memory = memory
        self._layout = RecordLayout((memory.kv.shape.spec(memory.kv.block_tokens),))

    @property
    def parts(self) -> tuple[Part, Part]:
        """What a block consists of; ``ROWS`` and ``KV`` are places in it."""
        tokens, rows = self._aux.block_tokens, self._aux.layout
        return (
            Part("rows", rows.fingerprint, rows.nbytes, tokens),
            Part("kv", self._layout.fingerprint, self._layout.nbytes, tokens),
        )

    def take(self, index: int, key: BlockKey, block: int, tokens: int) -> OfferedBlock:
        """The first ``tokens`` tokens of ``block``, which must be held and not written until the offer has ended."""
        (rows,) = self._aux.export({key: block}, [tokens])
        return OfferedBlock(index, key, (rows, self._kv_record(key, block, tokens)))

    def put_rows(
        self, block: int, generation: int, tokens: int, header: RecordHeader, payload: memoryview
    ) -> int | None:
        """Put a verified record of rows into ``block``; how many of its first ``tokens`` tokens came with all rows.

        ``None``, and nothing is written: the block has another generation, or the record has rows of further tokens.
        Raises ``BlockBusyError`` while the block is in motion.
        """
        words = np.frombuffer(header.valid, "<u8").reshape(len(self._aux.layout.specs), -1)
        bits = [int.from_bytes(spec.tobytes(), "little") for spec in words]
        if any(spec >> tokens for spec in bits) or not self._aux.install(block, generation, header, payload):
            return None
        return functools.reduce(operator.and_, bits).bit_count()

    def put_kv(self, block: int, tokens: int, header: RecordHeader, payload: memoryview) -> bool:
        """Copy a verified KV record into ``block``, which nothing else may write or read now.

        ``False``, and nothing is written, when it has not all of the ``tokens`` tokens.
        """
        if header.fingerprint != self._layout.fingerprint or payload.nbytes != self._layout.nbytes:
            raise AssertionError(f"a KV record of another layout: {header}")
        wanted = (1 << tokens) - 1
        if int.from_bytes(header.valid, "little") & wanted != wanted:
            return False
        target: Any = self._memory.kv.device[block].view(torch.uint8).numpy().reshape(-1)
        target[:] = np.frombuffer(payload, np.uint8)
        return True

    def _kv_record(self, key: BlockKey, block: int, tokens: int) -> OfferedRecord:
        raw: Any = self._memory.kv.device[block].view(torch.uint8).numpy().reshape(-1)
        if tokens < self._aux.block_tokens:  # a snapshot: what lies behind the tokens is somebody else's
            raw, used = np.zeros_like(raw), raw[: tokens * (len(raw) // self._aux.block_tokens)]
            raw[: len(used)] = used
        valid = ((1 << tokens) - 1).to_bytes(8 * self._layout.valid_words, "little")
        return OfferedRecord(key, self._layout.fingerprint, 0, valid, raw.data)


__all__ = ["KV", "ROWS", "CrossingBlocks"]

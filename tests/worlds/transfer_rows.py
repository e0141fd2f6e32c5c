"""Blocks for transfer tests: every row's bytes say whose they are, so that a wrong one is recognised where it lands."""

from __future__ import annotations

import functools
import hashlib

from cache_manager.keys import BlockKey, Namespace
from cache_manager.record import OfferedRecord, RecordHeader
from transfer.actions import OfferedBlock, WantedBlock
from transfer.identity import Identity
from transfer.messages import BootId, Part, Range

NAMESPACE = Namespace("m", 1)
BLOCK_TOKENS = 64
ROW_NBYTES = 464
PART = Part("rows", b"f" * 16, BLOCK_TOKENS * ROW_NBYTES, BLOCK_TOKENS)
VALID = b"\xff" * 8


def identity_of(run: int, namespace: Namespace = NAMESPACE) -> Identity:
    return Identity(BootId(run.to_bytes(16, "big")), namespace, (PART,))


def key_of(request: int, index: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"key %d %d" % (request, index)).digest())


def ranges(request: int, blocks: int, parts: int = 1) -> list[Range]:
    """The request of a pull for the first ``blocks`` blocks."""
    return [Range(0, parts, b"".join(key_of(request, i) for i in range(blocks)))]


@functools.lru_cache(4096)
def payload_of(request: int, index: int) -> bytes:
    """Rows that differ by request, block and position."""
    return hashlib.shake_128(b"rows %d %d" % (request, index)).digest(PART.nbytes)


def offered(request: int, blocks: int) -> list[OfferedBlock]:
    """Fresh memory for every block, as an engine's pool has."""
    return [
        OfferedBlock(
            i, key, (OfferedRecord(key, PART.fingerprint, 1, 1, VALID, memoryview(bytearray(payload_of(request, i)))),)
        )
        for i in range(blocks)
        for key in (key_of(request, i),)
    ]


def wanted(request: int, blocks: int, start: int = 0) -> list[WantedBlock]:
    return [WantedBlock(i, key_of(request, i), (0,)) for i in range(start, blocks)]


class CanarySink:
    """Landing blocks of one request. ``wrong`` counts rows of another request, ``twice`` records that came again."""

    def __init__(self, request: int) -> None:
        self.request = request
        self.there: set[int] = set()
        self.wrong = 0
        self.twice = 0

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        self.twice += index in self.there
        right = part == 0 and header.key == key_of(self.request, index) and payload == payload_of(self.request, index)
        self.wrong += not right
        self.there.add(index)
        return True

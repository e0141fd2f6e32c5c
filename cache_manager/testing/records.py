"""Records for tests of stores: what one holds is a function of its number and its origin.

So a foreign, stale or shifted record is recognised by its content, whatever the store's headers say.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, checksum
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage.records import RecordStore

LAYOUT = RecordLayout(
    (
        AuxBlockDataSpec("topk_ids", row_shape=(6, 8), dtype="uint8", block_tokens=80),
        AuxBlockDataSpec("weights_version", row_shape=(), dtype="uint32", block_tokens=80),
    )
)
"""4,160 bytes a record, and bitmaps of two words."""

ORIGIN = 1
"""The computation that a record is of unless a test says otherwise."""

FIRST, SECOND, BOTH = 1, 2, 3
"""Whose rows a record has: those of the layout's first spec, of its second, or of both."""


def key_of(number: int) -> BlockKey:
    return BlockKey(b"scope-of" + number.to_bytes(24, "big"))


@functools.cache
def payload_of(number: int, nbytes: int = LAYOUT.nbytes, origin: int = ORIGIN) -> bytes:
    return np.random.default_rng((number, origin)).bytes(nbytes)


@functools.cache
def valid_of(number: int, specs: int = BOTH) -> bytes:
    rows, words = LAYOUT.block_tokens, LAYOUT.valid_words
    bits = np.random.default_rng(number).bytes(8 * words * len(LAYOUT.specs))
    used = [((1 << rows) - 1) * (specs >> i & 1) for i in range(len(LAYOUT.specs))]
    mask = b"".join(word.to_bytes(8 * words, "little") for word in used)
    return bytes(bit & wanted for bit, wanted in zip(bits, mask, strict=True))


@functools.cache
def header_of(number: int, nbytes: int = LAYOUT.nbytes, origin: int = ORIGIN, specs: int = BOTH) -> RecordHeader:
    sum_ = checksum(payload_of(number, nbytes, origin))
    return RecordHeader(key_of(number), LAYOUT.fingerprint, number, origin, valid_of(number, specs), nbytes, sum_)


def put(store: RecordStore, wanted: Sequence[int], origin: int = ORIGIN, *, replace: bool = False) -> list[bool]:
    """Whether each key has a record then; a header of anything else than was put is an ``AssertionError``."""
    keys, payloads = [key_of(n) for n in wanted], [payload_of(n, origin=origin) for n in wanted]
    valid, origins = [valid_of(n) for n in wanted], [origin] * len(wanted)
    answers = store.put(keys, payloads, valid, wanted, origins, replace=replace)
    for n, header in zip(wanted, answers, strict=True):
        assert header is None or header == header_of(n, origin=header.origin)
    return [header is not None for header in answers]


def get(store: RecordStore, wanted: Sequence[int]) -> list[bytes | Absence]:
    """What the store answers; a header that is not the one that was put is an ``AssertionError``."""
    buffers = [memoryview(bytearray(b"\xee" * LAYOUT.nbytes)) for _ in wanted]
    answers: list[bytes | Absence] = []
    found = store.get_into([key_of(n) for n in wanted], buffers)
    for n, buffer, header in zip(wanted, buffers, found, strict=True):
        if isinstance(header, RecordHeader):
            assert header == header_of(n)
        answers.append(bytes(buffer) if isinstance(header, RecordHeader) else header)
    return answers

"""Records for tests of stores: a record's content is a function of its number and its origin.

So a foreign, stale or shifted record is recognised by its content, whatever the store's headers say. Origins and specs
decide what a key that is put again holds (:func:`after`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, StorageBackend
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
"""The default origin of a test's records."""

FIRST = 1
SECOND = 2
BOTH = 3
"""The specs whose rows a record has: the layout's first, its second, or both."""

NUMBERS = 6
"""How many keys :func:`race` uses."""


class Content(NamedTuple):
    """A record of the tests: its origin, and the specs whose rows it has."""

    origin: int
    specs: int


def key_of(number: int) -> BlockKey:
    return BlockKey(b"scope-of" + number.to_bytes(24, "big"))


@functools.cache
def payload_of(number: int, nbytes: int = LAYOUT.nbytes, origin: int = ORIGIN) -> bytes:
    return np.random.default_rng((number, origin)).bytes(nbytes)


@functools.cache
def valid_of(number: int, specs: int = BOTH) -> bytes:
    rows = LAYOUT.block_tokens
    words = LAYOUT.valid_words
    bits = np.random.default_rng(number).bytes(8 * words * len(LAYOUT.specs))
    used = [((1 << rows) - 1) * (specs >> i & 1) for i in range(len(LAYOUT.specs))]
    mask = b"".join(word.to_bytes(8 * words, "little") for word in used)
    return bytes(bit & wanted for bit, wanted in zip(bits, mask, strict=True))


@functools.cache
def header_of(number: int, nbytes: int = LAYOUT.nbytes, origin: int = ORIGIN, specs: int = BOTH) -> RecordHeader:
    sum_ = checksum(payload_of(number, nbytes, origin))
    return RecordHeader(key_of(number), LAYOUT.fingerprint, number, origin, valid_of(number, specs), nbytes, sum_)


def put(store: RecordStore, wanted: Sequence[int], origin: int = ORIGIN, *, replace: bool = False) -> list[bool]:
    """Whether each key then has a record; a header that was not put is an ``AssertionError``."""
    keys = [key_of(n) for n in wanted]
    payloads = [payload_of(n, origin=origin) for n in wanted]
    valid = [valid_of(n) for n in wanted]
    origins = [origin] * len(wanted)
    answers = store.put(keys, payloads, valid, wanted, origins, replace=replace)
    for n, header in zip(wanted, answers, strict=True):
        assert header is None or header == header_of(n, origin=header.origin)
    return [header is not None for header in answers]


def offer(backend: StorageBackend, batch: Sequence[tuple[int, Content]], *, replace: bool) -> list[Content | None]:
    """Put records of several origins; the answers, checked against their keys."""
    headers = [header_of(n, origin=content.origin, specs=content.specs) for n, content in batch]
    payloads = [payload_of(n, origin=content.origin) for n, content in batch]
    answers = backend.put(headers, payloads, replace=replace)
    return [None if answer is None else _content(n, answer) for (n, _), answer in zip(batch, answers, strict=True)]


def held(store: StorageBackend | RecordStore, wanted: Sequence[int]) -> list[Content | Absence]:
    """What each key holds; a header and a payload of different records are an ``AssertionError``."""
    buffers = [memoryview(bytearray(b"\xee" * LAYOUT.nbytes)) for _ in wanted]
    answers: list[Content | Absence] = []
    headers = store.get_into([key_of(n) for n in wanted], buffers)
    for n, buffer, found in zip(wanted, buffers, headers, strict=True):
        if isinstance(found, Absence):
            answers.append(found)
        else:
            assert buffer == payload_of(n, origin=found.origin), f"header of {found.origin}, payload of another record"
            answers.append(_content(n, found))
    return answers


def get(store: RecordStore, wanted: Sequence[int]) -> list[bytes | Absence]:
    """The payload of each key; every record found is whole and of :data:`ORIGIN`."""
    answers = list(zip(wanted, held(store, wanted), strict=True))
    assert all(isinstance(found, Absence) or found == (ORIGIN, BOTH) for _, found in answers)
    return [found if isinstance(found, Absence) else payload_of(n) for n, found in answers]


def _content(n: int, found: RecordHeader) -> Content:
    specs = next((each for each in (FIRST, SECOND, BOTH) if found.valid == valid_of(n, each)), 0)
    assert found == header_of(n, origin=found.origin, specs=specs), f"{found} was never offered"
    return Content(found.origin, specs)


def after(stored: Content | None, offered: Content, *, replace: bool) -> Content:
    """What a key holds after ``offered`` was put, if the store has room."""
    if stored is None:
        return offered
    if stored.origin != offered.origin:
        return offered if replace else stored
    return offered if stored.specs | offered.specs == offered.specs else stored


def together(works: Sequence[Callable[[], object]], wait_s: float = 120.0) -> None:
    """Run each in a thread, started together; raises the first of their errors."""
    start = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        start.wait(60)
        work()

    with ThreadPoolExecutor(len(works)) as pool:
        for running in [pool.submit(run, work) for work in works]:
            running.result(wait_s)


def race(backends: Sequence[StorageBackend], rounds: int, *, replace: bool) -> list[dict[int, list[Content | None]]]:
    """Every backend has a thread that puts records of its own origin under the same keys, and reads them; with
    ``replace`` it sometimes replaces, and rows differ. Returns the answers to each writer, by key."""
    specs = (FIRST, SECOND, BOTH) if replace else (BOTH,)
    answers: list[dict[int, list[Content | None]]] = [{n: [] for n in range(NUMBERS)} for _ in backends]

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(rounds):
            for pair in rng.permutation(NUMBERS).reshape(-1, 2).tolist():
                batch = [(n, Content(1 + number, int(rng.choice(specs)))) for n in pair]
                told = offer(backends[number], batch, replace=replace and bool(rng.integers(2)))
                for (n, _), answer in zip(batch, told, strict=True):
                    answers[number][n].append(answer)
                assert Absence.CORRUPT not in held(backends[number], range(NUMBERS))

    together([functools.partial(work, number) for number in range(len(backends))])
    return answers

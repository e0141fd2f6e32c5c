"""What becomes of a key that is put again: the oracle, worked out from origins and specs, and calls that check."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import RecordHeader
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import BOTH, FIRST, LAYOUT, SECOND, header_of, key_of, payload_of, valid_of

NUMBERS = 6


class Content(NamedTuple):
    """What a record of the tests is: of which computation, and of which specs it has the rows."""

    origin: int
    specs: int


contents = st.builds(Content, st.integers(1, 3), st.sampled_from((FIRST, SECOND, BOTH)))


def after(stored: Content | None, offered: Content, *, replace: bool) -> Content:
    """What a key holds when ``offered`` was put, if the store has room."""
    if stored is None:
        return offered
    if stored.origin != offered.origin:
        return offered if replace else stored
    return offered if stored.specs | offered.specs == offered.specs else stored


def header(n: int, content: Content) -> RecordHeader:
    return header_of(n, origin=content.origin, specs=content.specs)


def offer(backend: StorageBackend, batch: Sequence[tuple[int, Content]], *, replace: bool) -> list[Content | None]:
    """Put a batch; the answers, which have to be of their keys and sound."""
    headers = [header(n, content) for n, content in batch]
    payloads = [payload_of(n, origin=content.origin) for n, content in batch]
    answers = backend.put(headers, payloads, replace=replace)
    assert len(answers) == len(batch)
    return [None if answer is None else content_of(n, answer) for (n, _), answer in zip(batch, answers, strict=True)]


def content_of(n: int, found: RecordHeader) -> Content:
    specs = next((each for each in (FIRST, SECOND, BOTH) if found.valid == valid_of(n, each)), 0)
    content = Content(found.origin, specs)
    assert found == header(n, content), f"{found} was never offered"
    return content


def held(store: StorageBackend | RecordStore, wanted: Sequence[int]) -> list[Content | Absence]:
    """What each key holds, header and payload of one record."""
    buffers = [memoryview(bytearray(LAYOUT.nbytes)) for _ in wanted]
    answers: list[Content | Absence] = []
    for n, buffer, found in zip(wanted, buffers, store.get_into([key_of(n) for n in wanted], buffers), strict=True):
        if isinstance(found, Absence):
            answers.append(found)
        else:
            assert buffer == payload_of(n, origin=found.origin), f"header of {found.origin}, payload of another record"
            answers.append(content_of(n, found))
    return answers


def together(works: Sequence[Callable[[], object]], wait_s: float = 120.0) -> None:
    """Run each in a thread, from one moment on; raises what the first of them raised."""
    start = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        start.wait(60)
        work()

    with ThreadPoolExecutor(len(works)) as pool:
        for running in [pool.submit(run, work) for work in works]:
            running.result(wait_s)


def race(backends: Sequence[StorageBackend], rounds: int, *, replace: bool) -> list[dict[int, list[Content | None]]]:
    """Every backend has a thread that puts its own origin's records of the same keys, and reads what is there; with
    ``replace`` now and then, and other rows then. What each writer was told, by key."""
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

    together([lambda number=number: work(number) for number in range(len(backends))])  # type: ignore[misc]
    return answers

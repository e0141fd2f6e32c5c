"""What becomes of a key that is put again: the law of origins, as tests that every ``StorageBackend`` has to pass.

The oracle is :class:`Key`: the set of what a key may hold after each offer, worked out from origins and specs alone.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cache_manager.errors import StorageError
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import RecordHeader
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import (
    BOTH,
    FIRST,
    LAYOUT,
    ORIGIN,
    SECOND,
    get,
    header_of,
    key_of,
    payload_of,
    valid_of,
)

NUMBERS = 6
OTHER = ORIGIN + 1


class Content(NamedTuple):
    """What a record of the tests is: of which computation, and of which specs it has the rows."""

    origin: int
    specs: int


contents = st.builds(Content, st.integers(1, 3), st.sampled_from((FIRST, SECOND, BOTH)))
batches = st.lists(st.tuples(st.integers(0, NUMBERS - 1), contents), max_size=8)


def after(stored: Content | None, offered: Content, *, replace: bool) -> Content:
    """What a key holds when ``offered`` was put, if the store has room."""
    if stored is None:
        return offered
    if stored.origin != offered.origin:
        return offered if replace else stored
    more = stored.specs | offered.specs == offered.specs
    return offered if more else stored


def is_more(answer: Content | Absence, stored: Content | None) -> bool:
    """Whether a further place of a store has kept more rows of the same computation than the one that was evicted."""
    if stored is None or isinstance(answer, Absence):
        return False
    return answer.origin == stored.origin and answer.specs | stored.specs == answer.specs


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
    for specs in (FIRST, SECOND, BOTH):
        if found.valid == valid_of(n, specs):
            content = Content(found.origin, specs)
            assert found == header(n, content)
            return content
    raise AssertionError(f"nobody offered {found}")


def held(backend: StorageBackend, wanted: Sequence[int]) -> list[Content | Absence]:
    """What each key holds, header and payload of one record."""
    buffers = [memoryview(bytearray(LAYOUT.nbytes)) for _ in wanted]
    answers: list[Content | Absence] = []
    for n, buffer, found in zip(wanted, buffers, backend.get_into([key_of(n) for n in wanted], buffers), strict=True):
        if isinstance(found, Absence):
            answers.append(found)
        else:
            assert buffer == payload_of(n, origin=found.origin), f"header of {found.origin}, payload of another record"
            answers.append(content_of(n, found))
    return answers


class OriginMachine(RuleBasedStateMachine):
    """Puts of several computations' records in any order; ``roomy``: the store has room for all of them."""

    open_backend: Callable[[], StorageBackend]
    settle: Callable[[StorageBackend], None]
    roomy: bool

    def __init__(self) -> None:
        super().__init__()
        self.backend = type(self).open_backend()
        self.stored: dict[int, Content | None] = dict.fromkeys(range(NUMBERS))

    def teardown(self) -> None:
        self.backend.close()

    @rule(batch=batches, replace=st.booleans())
    def put(self, batch: list[tuple[int, Content]], replace: bool) -> None:
        may: dict[int, set[Content | None]] = {n: {stored} for n, stored in self.stored.items()}
        for n, offered in batch:
            before = may[n] if self.roomy else may[n] | {None}  # others of the batch may need the room
            may[n] = {after(stored, offered, replace=replace) for stored in before}
            if not self.roomy:
                may[n] |= before
        for (n, _), answer in zip(batch, offer(self.backend, batch, replace=replace), strict=True):
            assert answer in may[n]
            self.stored[n] = answer

    @rule(batch=st.lists(st.tuples(st.integers(NUMBERS, NUMBERS + 23), contents), max_size=8))
    def make_no_room(self, batch: list[tuple[int, Content]]) -> None:
        if not self.roomy:
            offer(self.backend, batch, replace=False)

    @rule(n=st.integers(0, NUMBERS - 1))
    def delete(self, n: int) -> None:
        with suppress(StorageError):  # gone from here in any case
            self.backend.delete([key_of(n)])
        self.stored[n] = None

    @rule()
    def settled(self) -> None:
        type(self).settle(self.backend)

    @rule(wanted=st.permutations(range(NUMBERS)))
    def a_key_holds_what_was_answered_or_nothing(self, wanted: list[int]) -> None:
        for n, answer in zip(wanted, held(self.backend, wanted), strict=True):
            stored = self.stored[n]
            if not self.roomy and (answer is Absence.MISS or is_more(answer, stored)):
                self.stored[n] = answer if isinstance(answer, Content) else None
            assert answer == (self.stored[n] or Absence.MISS)

    @invariant()
    def what_has_given_way_does_not_come_back(self) -> None:
        self.a_key_holds_what_was_answered_or_nothing(list(range(NUMBERS)))


class OriginLaw:
    """The part of ``StorageContract`` about origins; it brings ``make_backend``, ``settle`` and ``_store``."""

    origin_settings = settings(max_examples=15, stateful_step_count=15)
    race_rounds = 25
    race_pause_s = 0.001
    """How long the race's readers wait between two reads."""

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        raise NotImplementedError

    def settle(self, backend: StorageBackend) -> None: ...

    def _store(self) -> AbstractContextManager[tuple[StorageBackend, RecordStore]]:
        raise NotImplementedError

    @contextmanager
    def rival(self, backend: StorageBackend) -> Iterator[StorageBackend]:
        """Another writer's backend of the same records; the very same one where one object serves all threads."""
        yield backend

    def _run_origin_machine(self, capacity_nbytes: int, *, roomy: bool) -> None:
        with tempfile.TemporaryDirectory() as scratch:

            def open_backend() -> StorageBackend:
                return self.make_backend(Path(tempfile.mkdtemp(dir=scratch)), capacity_nbytes)

            class Machine(OriginMachine):
                pass

            Machine.open_backend = staticmethod(open_backend)
            Machine.settle = staticmethod(self.settle)
            Machine.roomy = roomy
            run_state_machine_as_test(Machine, settings=self.origin_settings)

    def test_any_sequence_of_offers_with_room_for_all(self) -> None:
        self._run_origin_machine(1 << 20, roomy=True)

    def test_any_sequence_of_offers_in_little_room(self) -> None:
        self._run_origin_machine(64 << 10, roomy=False)

    def test_the_answer_is_the_header_of_what_is_stored(self) -> None:
        """Goal: no answer names a record that is not there. Method: every kind of second offer for one key."""
        with self._store() as (backend, _):
            few, more, beside = Content(ORIGIN, FIRST), Content(ORIGIN, BOTH), Content(ORIGIN, SECOND)
            foreign = Content(OTHER, BOTH)
            for content, replace, stored in (
                (few, False, few),
                (few, True, few),
                (beside, False, few),  # other rows of the same pass, but not those that are there
                (beside, True, few),
                (foreign, False, few),
                (more, False, more),
                (few, False, more),
                (few, True, more),  # replace is about other origins
                (foreign, False, more),
                (foreign, True, foreign),
                (more, False, foreign),
                (few, True, few),
            ):
                assert offer(backend, [(1, content)], replace=replace) == [stored]
                assert held(backend, [1]) == [stored]
                self.settle(backend)
                assert held(backend, [1]) == [stored]

    def test_the_answer_is_the_very_header_where_the_call_stored_the_record(self) -> None:
        with self._store() as (backend, store):
            first = [header_of(n) for n in (1, 2)]
            again = [RecordHeader(*(getattr(h, name) for name in h.__struct_fields__)) for h in first]
            payloads = [payload_of(1), payload_of(2)]
            assert [a is h for a, h in zip(backend.put(first, payloads), first, strict=True)] == [True, True]
            assert [a is h for a, h in zip(backend.put(again, payloads), again, strict=True)] == [False, False]
            assert backend.put(again, payloads) == first
            origins = [ORIGIN, OTHER, OTHER]
            wanted = list(enumerate(origins, start=1))
            payloads = [payload_of(n, origin=origin) for n, origin in wanted]
            valid = [valid_of(n) for n, _ in wanted]
            answers = store.put([key_of(n) for n, _ in wanted], payloads, valid, [0] * 3, origins)
            assert [answer and answer.origin for answer in answers] == [ORIGIN, ORIGIN, OTHER]
            counters = store.counters
            assert (counters.stored, counters.kept, counters.conflicts, counters.refused) == (1, 1, 1, 0)

    def test_a_batch_with_one_key_twice_answers_what_is_stored_in_the_end(self) -> None:
        with self._store() as (backend, _):
            few, more, foreign = Content(ORIGIN, FIRST), Content(ORIGIN, BOTH), Content(OTHER, BOTH)
            batch = [(1, few), (2, few), (1, more), (1, foreign)]
            assert offer(backend, batch, replace=False) == [more, few, more, more]
            assert held(backend, [1, 2]) == [more, few]
            assert offer(backend, [(2, foreign), (2, few)], replace=True) == [few, few]
            assert held(backend, [2]) == [few]

    def test_a_replaced_record_does_not_come_back_when_the_newer_one_goes(self) -> None:
        with self._store() as (backend, store):
            offer(backend, [(1, Content(ORIGIN, BOTH)), (2, Content(ORIGIN, BOTH))], replace=False)
            offer(backend, [(1, Content(OTHER, BOTH))], replace=True)
            self.settle(backend)
            backend.delete([key_of(1)])
            assert store.contains([key_of(1), key_of(2)]) == [False, True]
            assert get(store, [1, 2]) == [Absence.MISS, payload_of(2)]

    def test_two_writers_of_the_same_keys_agree_who_was_first(self) -> None:
        """Goal: nobody is told that his record is stored when another's is. Method: two writers, no ``replace``."""
        with self._store() as (backend, _), self.rival(backend) as rival:
            answers = _race([backend, rival], 6, self.race_pause_s, (BOTH,), replace=False)
            self.settle(backend)
            final = held(backend, range(NUMBERS))
            for n, content in enumerate(final):
                assert {answer for told in answers for answer in told[n]} == {content}

    def test_two_writers_that_replace_each_other_leave_one_whole_record(self) -> None:
        """Goal: each key ends with exactly one whole offered record. Method: two writers, other rows and origins."""
        with self._store() as (backend, _), self.rival(backend) as rival:
            answers = _race([backend, rival], self.race_rounds, self.race_pause_s, (FIRST, SECOND, BOTH), replace=True)
            self.settle(backend)
            for n, content in enumerate(held(backend, range(NUMBERS))):
                last = {told[n][-1] for told in answers}
                assert content in last or (content is Absence.MISS and None in last)


def _race(
    backends: Sequence[StorageBackend], rounds: int, pause_s: float, specs: Sequence[int], *, replace: bool
) -> list[dict[int, list[Content | None]]]:
    """Every backend has a thread that puts its own origin's records of the same keys, and a reader beside it.

    What each writer was told, by key; nobody is told or reads what nobody offered, which ``held`` and ``offer`` check.
    """
    answers: list[dict[int, list[Content | None]]] = [{n: [] for n in range(NUMBERS)} for _ in backends]
    failures: list[BaseException] = []
    start = threading.Barrier(2 * len(backends))
    writing = threading.Event()
    writing.set()

    def write(number: int) -> None:
        rng = np.random.default_rng(number)
        start.wait(60)
        for _ in range(rounds):
            for pair in rng.permutation(NUMBERS).reshape(-1, 2).tolist():
                batch = [(n, Content(1 + number, int(rng.choice(specs)))) for n in pair]
                told = offer(backends[number], batch, replace=replace and bool(rng.integers(2)))
                for (n, _), answer in zip(batch, told, strict=True):
                    answers[number][n].append(answer)

    def read(number: int) -> None:
        start.wait(60)
        while writing.is_set():
            for content in held(backends[number], range(NUMBERS)):
                assert content is Absence.MISS or isinstance(content, Content)
            time.sleep(pause_s)

    def guarded(work: Callable[[int], None], number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - shown below, in the test's own thread
            failures.append(error)

    writers = [threading.Thread(target=guarded, args=(write, i)) for i in range(len(backends))]
    readers = [threading.Thread(target=guarded, args=(read, i)) for i in range(len(backends))]
    for thread in (*writers, *readers):
        thread.start()
    for thread in writers:
        thread.join(120)
    writing.clear()
    for thread in readers:
        thread.join(60)
    assert not any(thread.is_alive() for thread in (*writers, *readers))
    assert not failures, failures[0]
    return answers

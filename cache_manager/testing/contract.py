"""The contract of every ``StorageBackend``, as a test class: subclass it, say how to make one, and run pytest.

.. code-block:: python

    class TestMyStore(StorageContract):
        def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
            return MyStore(directory, capacity_nbytes)

A record's bytes are a function of its number and origin, and what a key may hold is computed from origins and specs
(:mod:`cache_manager.testing.records`). Needs ``pytest`` and ``hypothesis``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cache_manager.errors import RecordError, StoreClosedError
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import RecordHeader
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage.records import RecordStore
from cache_manager.testing.faults import FaultyStore
from cache_manager.testing.records import (
    BOTH,
    FIRST,
    LAYOUT,
    NUMBERS,
    ORIGIN,
    SECOND,
    Content,
    after,
    get,
    header_of,
    held,
    key_of,
    offer,
    payload_of,
    put,
    race,
    together,
    valid_of,
)

CAPACITY_NBYTES = 1 << 20
FEW_NBYTES = 128 << 10
KEYS = 24

numbers = st.lists(st.integers(0, KEYS - 1), max_size=8)
contents = st.builds(Content, st.integers(1, 3), st.sampled_from((FIRST, SECOND, BOTH)))
offers = st.lists(st.tuples(st.integers(0, 5) | st.integers(0, KEYS - 1), contents), max_size=8)


class StorageMachine(RuleBasedStateMachine):
    """Any sequence of calls, against what each key may hold. ``roomy``: no record may be missing for lack of room.
    ``contract.exact``: a key holds the record answered last; otherwise any that was put and not deleted."""

    contract: StorageContract
    open_backend: Callable[[], StorageBackend]
    roomy: bool

    def __init__(self) -> None:
        super().__init__()
        self.backend = FaultyStore(type(self).open_backend())
        self.store = RecordStore(self.backend, LAYOUT)
        self.may: dict[int, set[Content | None]] = {n: {None} for n in range(KEYS)}
        self.asked = self.flipped = 0

    def teardown(self) -> None:
        self.store.close()
        self.store.close()

    def answered(self, n: int, answer: Content | None) -> None:
        assert answer in self.may[n] or (answer is None and not self.roomy)
        if self.contract.exact or answer is None:
            self.may[n] = {answer} if self.contract.exact else self.may[n] | {None}
        elif self.roomy:
            self.may[n].discard(None)

    @rule(batch=offers, replace=st.booleans())
    def put(self, batch: list[tuple[int, Content]], replace: bool) -> None:
        for n, offered in batch:
            before = self.may[n] if self.roomy else self.may[n] | {None}  # others of the batch may need the room
            self.may[n] = {after(stored, offered, replace=replace) for stored in before}
            if not (self.roomy and self.contract.exact):
                self.may[n] |= before - {None} | {offered}
        for (n, _), answer in zip(batch, offer(self.backend, batch, replace=replace), strict=True):
            self.answered(n, answer)

    @rule(n=st.integers(0, KEYS - 1), bit=st.integers(0, LAYOUT.nbytes * 8 - 1))
    def a_flipped_bit_is_a_miss_and_is_counted(self, n: int, bit: int) -> None:
        there = self.store.contains([key_of(n)])[0]
        self.backend.flip_next = bit
        (answer,) = held(self.store, [n])
        self.backend.flip_next = None
        self.asked += 1
        self.flipped += there
        assert answer is (Absence.CORRUPT if there else Absence.MISS)
        assert self.store.contains([key_of(n)]) == [False]
        self.may[n] = {None}

    @rule(wanted=numbers)
    def delete(self, wanted: list[int]) -> None:
        self.backend.delete([key_of(n) for n in wanted])
        self.may.update({n: {None} for n in wanted})

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule(wanted=st.permutations(range(KEYS)) | numbers)
    def a_key_holds_what_was_put_and_not_deleted(self, wanted: list[int]) -> None:
        self.found(wanted)

    def found(self, wanted: Sequence[int]) -> list[bool]:
        answers = held(self.store, wanted)
        self.asked += len(wanted)
        for n, answer in zip(wanted, answers, strict=True):
            assert answer is not Absence.CORRUPT
            self.answered(n, answer if isinstance(answer, Content) else None)
        return [isinstance(answer, Content) for answer in answers]

    @invariant()
    def bytes_used_plus_free_equal_capacity(self) -> None:
        usage = self.store.usage()
        assert usage["used_nbytes"] + usage["free_nbytes"] == usage["capacity_nbytes"]
        assert usage["used_nbytes"] >= usage["records"] * LAYOUT.nbytes
        assert usage["free_nbytes"] >= 0

    @invariant()
    def an_index_entry_points_at_a_verified_record_of_the_same_key(self) -> None:
        there = self.store.contains([key_of(n) for n in range(KEYS)])
        assert sum(there) <= self.store.usage()["records"] <= self.contract.copies_max * sum(there)
        assert self.found(range(KEYS)) == there

    @invariant()
    def every_record_asked_for_is_a_hit_a_miss_or_corrupt(self) -> None:
        c = self.store.counters
        assert c.hits + c.misses + c.corrupt == self.asked
        assert c.corrupt == self.flipped


class StorageContract:
    """Subclass with :meth:`make_backend`; the class's name starts with ``Test``."""

    copies_max = 1  # how often ``usage`` may count one record: a backend may keep it in several places
    exact = True  # a key holds the record that was answered last; a store of several places may have an older one
    machine_settings = settings(max_examples=25, stateful_step_count=25)
    race_rounds = 25

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        """A new, empty backend of about that capacity; ``directory`` is empty and its own."""
        raise NotImplementedError

    @contextmanager
    def rival(self, backend: StorageBackend) -> Iterator[StorageBackend]:
        """Another writer's backend of the same records; the same object if one object serves all threads."""
        yield backend

    @contextmanager
    def _store(self, capacity_nbytes: int = CAPACITY_NBYTES) -> Iterator[tuple[StorageBackend, RecordStore]]:
        with tempfile.TemporaryDirectory() as scratch:
            backend = self.make_backend(Path(scratch), capacity_nbytes)
            try:
                yield backend, RecordStore(backend, LAYOUT)
            finally:
                backend.close()

    @pytest.mark.parametrize("roomy", [True, False])
    def test_any_sequence_of_calls(self, roomy: bool) -> None:
        with tempfile.TemporaryDirectory() as scratch:

            def open_backend() -> StorageBackend:
                directory = Path(tempfile.mkdtemp(dir=scratch))
                return self.make_backend(directory, CAPACITY_NBYTES if roomy else FEW_NBYTES // 2)

            its = {"contract": self, "open_backend": staticmethod(open_backend), "roomy": roomy}
            run_state_machine_as_test(type("Machine", (StorageMachine,), its), settings=self.machine_settings)

    def test_a_record_that_cannot_be_stored_harms_no_other(self) -> None:
        """A record larger than the store is refused; a payload of another length than in its header is an error."""
        with self._store() as (backend, store):
            large = 2 * backend.usage()["capacity_nbytes"]
            headers = [header_of(1), header_of(2, large), header_of(3)]
            payloads = [payload_of(1), payload_of(2, large), payload_of(3)]
            assert backend.put(headers, payloads) == [headers[0], None, headers[2]]
            with pytest.raises(RecordError, match="payload"):
                backend.put([header_of(2), header_of(4)], [payload_of(2)[:-64], payload_of(4)])
            assert get(store, [1, 2, 3]) == [payload_of(1), Absence.MISS, payload_of(3)]

    def test_a_full_store_makes_room_and_keeps_its_bound(self) -> None:
        with self._store(FEW_NBYTES) as (backend, store):
            for first in range(0, 200, 5):
                assert put(store, range(first, first + 5)) == [True] * 5
                assert get(store, [first + 4]) == [payload_of(first + 4)]
            usage = backend.usage()
            assert 0 < usage["records"] <= usage["capacity_nbytes"] // LAYOUT.nbytes
            assert all(answer in (payload_of(n), Absence.MISS) for n, answer in enumerate(get(store, range(200))))

    def test_a_payload_is_copied_by_put_and_a_buffer_of_another_size_gets_nothing(self) -> None:
        with self._store() as (backend, store):
            payload = bytearray(payload_of(1))
            assert store.put([key_of(1)], [payload], [valid_of(1)], [1], [ORIGIN]) == [header_of(1)]
            payload[:] = bytes(len(payload))
            put(store, [2])
            assert get(store, [1, 2, 9]) == [payload_of(1), payload_of(2), Absence.MISS]
            short = [memoryview(bytearray(LAYOUT.nbytes - 64)), memoryview(bytearray(LAYOUT.nbytes))]
            assert backend.get_into([key_of(1), key_of(2)], short) == [Absence.CORRUPT, header_of(2)]
            with pytest.raises(RecordError, match="buffer size"):
                store.get_into([key_of(1)], short[:1])

    def test_a_record_of_another_layout_is_corrupt_for_this_one(self) -> None:
        other = AuxBlockDataSpec("topk_ids", row_shape=(LAYOUT.nbytes // 64,), dtype="uint8", block_tokens=64)
        with self._store() as (backend, store):
            put(store, [1, 2])
            foreign = RecordStore(backend, RecordLayout((other,)))
            assert get(foreign, [1, 9]) == [Absence.CORRUPT, Absence.MISS]
            assert foreign.counters.corrupt == 1
            assert get(store, [1, 2]) == [Absence.MISS, payload_of(2)]

    def test_one_bad_key_fails_that_key_only(self) -> None:
        with self._store() as (backend, _):
            faulty = FaultyStore(backend)
            store = RecordStore(faulty, LAYOUT)
            put(store, range(8))
            faulty.flip_next = 12_345
            assert get(store, range(8)) == [Absence.CORRUPT, *(payload_of(n) for n in range(1, 8))]
            faulty.fail_delete = True
            assert get(store, [3, 4]) == [Absence.CORRUPT, payload_of(4)]
            assert store.counters.quarantine_failures == 1
            faulty.flip_next = None
            assert get(store, [0, 4]) == [Absence.MISS, payload_of(4)]

    def test_a_closed_store_says_so_and_closing_it_again_is_harmless(self) -> None:
        with self._store() as (backend, store):
            put(store, [1])
            backend.close()
            backend.close()
            calls = (lambda: put(store, [2]), lambda: get(store, [1]), lambda: backend.delete([key_of(1)]))
            for call in (*calls, lambda: store.contains([key_of(1)]), store.flush, backend.usage):
                with pytest.raises(StoreClosedError):
                    call()

    def test_threads_see_whole_records_only(self) -> None:
        """Writers, readers and a deleter at once, in a store that has to make room all the time."""
        with self._store(FEW_NBYTES) as (backend, store):

            def work(seed: int) -> None:
                rng = np.random.default_rng(seed)
                for _ in range(60):
                    wanted = [int(n) for n in rng.integers(0, 60, size=6)]
                    if seed % 2:
                        assert any(put(store, wanted))  # an older record may make room for a new one
                    for n, answer in zip(wanted, get(store, wanted), strict=True):
                        assert answer in (payload_of(n), Absence.MISS)
                    if seed == 0:
                        backend.delete([key_of(wanted[0])])
                        store.flush()

            together([lambda seed=seed: work(seed) for seed in range(4)])  # type: ignore[misc]
            assert store.counters.corrupt == 0

    def test_the_answer_is_the_very_header_where_the_call_stored_the_record(self) -> None:
        with self._store() as (backend, store):
            first = [header_of(n) for n in (1, 2)]
            again = [RecordHeader(*(getattr(h, name) for name in h.__struct_fields__)) for h in first]
            payloads = [payload_of(1), payload_of(2)]
            assert [a is h for a, h in zip(backend.put(first, payloads), first, strict=True)] == [True, True]
            assert [a is h for a, h in zip(backend.put(again, payloads), again, strict=True)] == [False, False]
            assert backend.put(again, payloads) == first
            assert put(store, [1]) == [True]
            assert put(store, [2, 3], ORIGIN + 1) == [True, True]
            assert [isinstance(each, Content) and each.origin for each in held(store, [1, 2, 3])] == [1, 1, 2]
            counters = store.counters
            assert (counters.stored, counters.kept, counters.conflicts, counters.refused) == (1, 1, 1, 0)

    @pytest.mark.parametrize("replace", [False, True])
    def test_two_writers_of_the_same_keys_leave_one_whole_record(self, replace: bool) -> None:
        """Each key ends with one whole record; without ``replace`` both writers are told the first writer's."""
        with self._store() as (backend, _), self.rival(backend) as rival:
            rounds = self.race_rounds if replace else 6
            answers = race([backend, rival], rounds, replace=replace)
            for n, found in enumerate(held(backend, range(NUMBERS))):
                content = found if isinstance(found, Content) else None
                told = [answer for of_one in answers for answer in of_one[n]]
                assert content in told  # if one of several places was away, either may have been told first
                if self.exact:
                    assert content in {of_one[n][-1] for of_one in answers} if replace else {*told} == {content}

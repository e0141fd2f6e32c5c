"""What every ``StorageBackend`` has to do, as a test class: subclass it, say how to make one, and run pytest.

.. code-block:: python

    class TestMyStore(StorageContract):
        def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
            return MyStore(directory, capacity_nbytes)

The oracle is a plain dict, and a record's bytes are a function of its number and origin
(:mod:`cache_manager.testing.records`). What becomes of a key that is put again is :mod:`cache_manager.testing.origins`.
Needs ``pytest`` and ``hypothesis``.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from cache_manager.errors import RecordError, StorageError, StoreClosedError
from cache_manager.ports import Absence, StorageBackend
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage.records import RecordStore
from cache_manager.testing.faults import FaultyStore
from cache_manager.testing.origins import OriginLaw
from cache_manager.testing.records import LAYOUT, ORIGIN, get, header_of, key_of, payload_of, put, valid_of

CAPACITY_NBYTES = 1 << 20
FEW_NBYTES = 128 << 10

numbers = st.lists(st.integers(0, 23), max_size=8)


class StorageMachine(RuleBasedStateMachine):
    """Any sequence of calls against a dict. ``roomy``: the store has room for all, so that nothing may be missing."""

    open_backend: Callable[[], StorageBackend]
    settle: Callable[[StorageBackend], None]
    copies_max: int
    roomy: bool

    def __init__(self) -> None:
        super().__init__()
        self.backend = FaultyStore(type(self).open_backend())
        self.store = RecordStore(self.backend, LAYOUT)
        self.stored: dict[int, bytes] = {}
        self.asked = 0
        self.flipped = 0

    def teardown(self) -> None:
        self.store.close()
        self.store.close()

    @rule(wanted=numbers)
    def put(self, wanted: list[int]) -> None:
        answers = put(self.store, wanted)
        assert len(answers) == len(wanted)
        assert all(answers) or not self.roomy
        self.stored |= {n: payload_of(n) for n, stored in zip(wanted, answers, strict=True) if stored}

    @rule(wanted=numbers)
    def get(self, wanted: list[int]) -> None:
        self.asked += len(wanted)
        for n, answer in zip(wanted, get(self.store, wanted), strict=True):
            if n in self.stored and (self.roomy or answer is not Absence.MISS):
                assert answer == self.stored[n]
            else:
                assert answer is Absence.MISS

    @rule(n=st.integers(0, 23), bit=st.integers(0, LAYOUT.nbytes * 8 - 1))
    def a_flipped_bit_is_a_miss_and_is_counted(self, n: int, bit: int) -> None:
        there = self.store.contains([key_of(n)])[0]
        self.backend.flip_next = bit
        answer = get(self.store, [n])[0]
        self.backend.flip_next = None
        self.asked += 1
        assert answer is (Absence.CORRUPT if there else Absence.MISS)
        self.flipped += there
        assert self.store.counters.corrupt == self.flipped
        assert self.store.contains([key_of(n)]) == [False]
        self.stored.pop(n, None)

    @rule(wanted=numbers)
    def delete(self, wanted: list[int]) -> None:
        self.backend.delete([key_of(n) for n in wanted])
        for n in wanted:
            self.stored.pop(n, None)

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @precondition(lambda self: self.stored)
    @rule(wanted=st.permutations(range(24)))
    def records_of_a_batch_go_to_their_own_buffers(self, wanted: list[int]) -> None:
        self.get(wanted)

    @invariant()
    def bytes_used_plus_free_equal_capacity(self) -> None:
        usage = self.store.usage()
        assert usage["used_nbytes"] + usage["free_nbytes"] == usage["capacity_nbytes"]
        assert usage["used_nbytes"] >= usage["records"] * LAYOUT.nbytes
        assert usage["free_nbytes"] >= 0

    @invariant()
    def an_index_entry_points_at_a_verified_record_of_the_same_key(self) -> None:
        everything = range(24)
        type(self).settle(self.backend.backend)
        there = self.store.contains([key_of(n) for n in everything])
        assert sum(there) <= self.store.usage()["records"] <= type(self).copies_max * sum(there)
        self.asked += len(everything)
        for n, is_there, answer in zip(everything, there, get(self.store, everything), strict=True):
            assert answer == payload_of(n) if is_there else answer is Absence.MISS
            assert n in self.stored or not is_there
            assert is_there or n not in self.stored or not self.roomy

    @invariant()
    def every_record_asked_for_is_a_hit_a_miss_or_corrupt(self) -> None:
        c = self.store.counters
        assert c.hits + c.misses + c.corrupt == self.asked
        assert c.corrupt == self.flipped


class StorageContract(OriginLaw):
    """Subclass with :meth:`make_backend`; the class's name starts with ``Test``."""

    copies_max = 1
    """How often ``usage`` may count one record: a backend may keep it in several places."""
    machine_settings = settings(max_examples=25, stateful_step_count=25)

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        """A new, empty backend of about that capacity; ``directory`` is empty and its own."""
        raise NotImplementedError

    def settle(self, backend: StorageBackend) -> None:
        """Wait for what the backend does behind its callers, if it does anything."""

    @contextmanager
    def _store(self, capacity_nbytes: int = CAPACITY_NBYTES) -> Iterator[tuple[StorageBackend, RecordStore]]:
        with tempfile.TemporaryDirectory() as scratch:
            backend = self.make_backend(Path(scratch), capacity_nbytes)
            try:
                yield backend, RecordStore(backend, LAYOUT)
            finally:
                backend.close()

    def _run_machine(self, capacity_nbytes: int, *, roomy: bool) -> None:
        with tempfile.TemporaryDirectory() as scratch:

            def open_backend() -> StorageBackend:
                return self.make_backend(Path(tempfile.mkdtemp(dir=scratch)), capacity_nbytes)

            class Machine(StorageMachine):
                pass

            Machine.open_backend = staticmethod(open_backend)
            Machine.settle = staticmethod(self.settle)
            Machine.copies_max = self.copies_max
            Machine.roomy = roomy
            run_state_machine_as_test(Machine, settings=self.machine_settings)

    def test_any_sequence_of_calls_with_room_for_all(self) -> None:
        self._run_machine(CAPACITY_NBYTES, roomy=True)

    def test_any_sequence_of_calls_in_little_room(self) -> None:
        self._run_machine(FEW_NBYTES // 2, roomy=False)

    def test_a_record_comes_back_as_it_was_put(self) -> None:
        with self._store() as (_, store):
            assert put(store, [3, 1, 2]) == [True] * 3
            assert get(store, [1, 9, 2, 3, 1]) == [
                payload_of(1),
                Absence.MISS,
                payload_of(2),
                payload_of(3),
                payload_of(1),
            ]
            assert store.contains([key_of(1), key_of(9)]) == [True, False]

    def test_nothing_asked_is_nothing_answered(self) -> None:
        with self._store() as (backend, store):
            assert put(store, []) == []
            assert get(store, []) == []
            assert store.contains([]) == []
            backend.delete([])
            store.flush()

    def test_writing_a_key_again_changes_nothing(self) -> None:
        with self._store() as (backend, store):
            assert put(store, [1, 1]) == [True, True]
            self.settle(backend)
            before = dict(backend.usage())
            assert put(store, [1]) == [True]
            self.settle(backend)
            assert dict(backend.usage()) == before
            assert 1 <= before["records"] <= self.copies_max

    def test_put_has_copied_the_payload_when_it_returns(self) -> None:
        with self._store() as (_, store):
            payload = bytearray(payload_of(1))
            assert store.put([key_of(1)], [payload], [valid_of(1)], [1], [ORIGIN]) == [header_of(1)]
            payload[:] = bytes(len(payload))
            assert get(store, [1]) == [payload_of(1)]

    def test_a_deleted_record_is_a_miss_and_can_be_stored_anew(self) -> None:
        with self._store() as (backend, store):
            put(store, [1, 2])
            backend.delete([key_of(1), key_of(7)])
            assert get(store, [1, 2]) == [Absence.MISS, payload_of(2)]
            assert put(store, [1]) == [True]
            assert get(store, [1, 2]) == [payload_of(1), payload_of(2)]

    def test_a_record_larger_than_the_store_is_refused_and_harms_no_other(self) -> None:
        with self._store() as (backend, store):
            large = 2 * backend.usage()["capacity_nbytes"]
            headers = [header_of(1), header_of(2, large), header_of(3)]
            payloads = [payload_of(1), payload_of(2, large), payload_of(3)]
            assert backend.put(headers, payloads) == [headers[0], None, headers[2]]
            assert get(store, [1, 2, 3]) == [payload_of(1), Absence.MISS, payload_of(3)]

    def test_a_payload_that_is_not_as_long_as_its_header_says_is_an_error_and_changes_nothing(self) -> None:
        with self._store() as (backend, store):
            put(store, [1])
            with pytest.raises(RecordError, match="payload"):
                backend.put([header_of(2), header_of(3)], [payload_of(2)[:-64], payload_of(3)])
            assert get(store, [1, 2]) == [payload_of(1), Absence.MISS]

    def test_a_full_store_makes_room_and_keeps_its_bound(self) -> None:
        with self._store(FEW_NBYTES) as (backend, store):
            for first in range(0, 200, 5):
                batch = range(first, first + 5)
                assert put(store, batch) == [True] * 5
                assert get(store, [first + 4]) == [payload_of(first + 4)]
                usage = backend.usage()
                assert usage["used_nbytes"] + usage["free_nbytes"] == usage["capacity_nbytes"]
                assert usage["free_nbytes"] >= 0
            usage = backend.usage()
            assert 0 < usage["records"] <= usage["capacity_nbytes"] // LAYOUT.nbytes
            answers = get(store, range(200))
            for n, answer in enumerate(answers):
                assert answer in (payload_of(n), Absence.MISS)

    def test_a_buffer_of_another_size_gets_nothing(self) -> None:
        with self._store() as (backend, store):
            put(store, [1, 2])
            short = [memoryview(bytearray(LAYOUT.nbytes - 64)), memoryview(bytearray(LAYOUT.nbytes))]
            found = backend.get_into([key_of(1), key_of(2)], short)
            assert found == [Absence.CORRUPT, header_of(2)]
            with pytest.raises(RecordError, match="buffer size"):
                store.get_into([key_of(1)], short[:1])

    def test_a_record_of_another_layout_is_corrupt_for_this_one(self) -> None:
        other = AuxBlockDataSpec("topk_ids", row_shape=(LAYOUT.nbytes // 64,), dtype="uint8", block_tokens=64)
        with self._store() as (backend, store):
            put(store, [1, 2])
            foreign = RecordStore(backend, RecordLayout((other,)))
            buffers = [memoryview(bytearray(LAYOUT.nbytes)) for _ in range(2)]
            assert foreign.get_into([key_of(1), key_of(9)], buffers) == [Absence.CORRUPT, Absence.MISS]
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

    def test_a_failure_is_a_storage_error_and_nothing_is_lost(self) -> None:
        with self._store() as (backend, _):
            faulty = FaultyStore(backend)
            store = RecordStore(faulty, LAYOUT)
            put(store, [1])
            faulty.fail_put = True
            with pytest.raises(StorageError):
                put(store, [2])
            faulty.fail_put = False
            assert get(store, [1, 2]) == [payload_of(1), Absence.MISS]
            assert put(store, [2]) == [True]

    def test_a_closed_store_says_so_and_closing_it_again_is_harmless(self) -> None:
        with self._store() as (backend, store):
            put(store, [1])
            backend.close()
            backend.close()
            for call in (
                lambda: put(store, [2]),
                lambda: get(store, [1]),
                lambda: store.contains([key_of(1)]),
                lambda: backend.delete([key_of(1)]),
                store.flush,
                backend.usage,
            ):
                with pytest.raises(StoreClosedError):
                    call()

    def test_threads_see_whole_records_only(self) -> None:
        """Writers, readers and a deleter at once, in a store that has to make room all the time."""
        with self._store(FEW_NBYTES) as (backend, store):
            failures: list[BaseException] = []

            def work(seed: int) -> None:
                rng = np.random.default_rng(seed)
                try:
                    for _ in range(60):
                        wanted = [int(n) for n in rng.integers(0, 60, size=6)]
                        if seed % 2:
                            assert any(put(store, wanted))  # one that was there may make room for another
                        for n, answer in zip(wanted, get(store, wanted), strict=True):
                            assert answer in (payload_of(n), Absence.MISS)
                        if seed == 0:
                            backend.delete([key_of(wanted[0])])
                            store.flush()
                except BaseException as error:  # noqa: BLE001 - shown below, in the test's own thread
                    failures.append(error)

            threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads)
            assert not failures, failures[0]
            assert store.counters.corrupt == 0

"""What every ``StorageBackend`` has to do, as a test class: subclass it, say how to make one, and run pytest.

.. code-block:: python

    class TestMyStore(StorageContract):
        def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
            return MyStore(directory, capacity_nbytes)

A record's bytes are a function of its number and origin (:mod:`cache_manager.testing.records`); what a key may hold is
worked out from origins and specs (:mod:`cache_manager.testing.origins`). Needs ``pytest`` and ``hypothesis``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cache_manager.errors import RecordError, StorageError, StoreClosedError
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import RecordHeader
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage.records import RecordStore
from cache_manager.testing.faults import FaultyStore
from cache_manager.testing.origins import NUMBERS, Content, after, contents, held, is_more, offer, race, together
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
    put,
    valid_of,
)

CAPACITY_NBYTES = 1 << 20
FEW_NBYTES = 128 << 10
KEYS = 24
OTHER = ORIGIN + 1

numbers = st.lists(st.integers(0, KEYS - 1), max_size=8)
offers = st.lists(st.tuples(st.integers(0, 5) | st.integers(0, KEYS - 1), contents), max_size=8)


class StorageMachine(RuleBasedStateMachine):
    """Any sequence of calls. ``roomy``: the store has room for all, so that nothing may be missing."""

    open_backend: Callable[[], StorageBackend]
    settle: Callable[[StorageBackend], None]
    copies_max: int
    roomy: bool

    def __init__(self) -> None:
        super().__init__()
        self.backend = FaultyStore(type(self).open_backend())
        self.store = RecordStore(self.backend, LAYOUT)
        self.stored: dict[int, Content | None] = dict.fromkeys(range(KEYS))
        self.asked = self.flipped = 0

    def teardown(self) -> None:
        self.store.close()
        self.store.close()

    @rule(batch=offers, replace=st.booleans())
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

    @rule(n=st.integers(0, KEYS - 1), bit=st.integers(0, LAYOUT.nbytes * 8 - 1))
    def a_flipped_bit_is_a_miss_and_is_counted(self, n: int, bit: int) -> None:
        there = self.store.contains([key_of(n)])[0]
        self.backend.flip_next = bit
        answer = held(self.store, [n])[0]
        self.backend.flip_next = None
        self.asked += 1
        assert answer is (Absence.CORRUPT if there else Absence.MISS)
        self.flipped += there
        assert self.store.contains([key_of(n)]) == [False]
        self.stored[n] = None

    @rule(wanted=numbers)
    def delete(self, wanted: list[int]) -> None:
        with suppress(StorageError):  # gone from here in any case
            self.backend.delete([key_of(n) for n in wanted])
        self.stored.update(dict.fromkeys(wanted))

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule()
    def settled(self) -> None:
        type(self).settle(self.backend.backend)

    @rule(wanted=st.permutations(range(KEYS)) | numbers)
    def a_key_holds_what_was_answered_or_nothing(self, wanted: list[int]) -> None:
        self.asked += len(wanted)
        for n, answer in zip(wanted, held(self.store, wanted), strict=True):
            if not self.roomy and (answer is Absence.MISS or is_more(answer, self.stored[n])):
                self.stored[n] = answer if isinstance(answer, Content) else None
            assert answer == (self.stored[n] or Absence.MISS)

    @invariant()
    def what_has_given_way_does_not_come_back(self) -> None:
        self.a_key_holds_what_was_answered_or_nothing(list(range(KEYS)))

    @invariant()
    def bytes_used_plus_free_equal_capacity(self) -> None:
        usage = self.store.usage()
        assert usage["used_nbytes"] + usage["free_nbytes"] == usage["capacity_nbytes"]
        assert usage["used_nbytes"] >= usage["records"] * LAYOUT.nbytes
        assert usage["free_nbytes"] >= 0

    @invariant()
    def an_index_entry_points_at_a_verified_record_of_the_same_key(self) -> None:
        everything = range(KEYS)
        type(self).settle(self.backend.backend)
        there = self.store.contains([key_of(n) for n in everything])
        assert sum(there) <= self.store.usage()["records"] <= type(self).copies_max * sum(there)
        self.asked += KEYS
        assert [answer is not Absence.MISS for answer in held(self.store, everything)] == there

    @invariant()
    def every_record_asked_for_is_a_hit_a_miss_or_corrupt(self) -> None:
        c = self.store.counters
        assert c.hits + c.misses + c.corrupt == self.asked
        assert c.corrupt == self.flipped


class StorageContract:
    """Subclass with :meth:`make_backend`; the class's name starts with ``Test``."""

    copies_max = 1
    """How often ``usage`` may count one record: a backend may keep it in several places."""
    machine_settings = settings(max_examples=25, stateful_step_count=25)
    race_rounds = 25
    race_pause_s = 0.001
    """How long the race's readers wait between two reads."""

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        """A new, empty backend of about that capacity; ``directory`` is empty and its own."""
        raise NotImplementedError

    def settle(self, backend: StorageBackend) -> None:
        """Wait for what the backend does behind its callers, if it does anything."""

    @contextmanager
    def rival(self, backend: StorageBackend) -> Iterator[StorageBackend]:
        """Another writer's backend of the same records; the very same one where one object serves all threads."""
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

            its = {name: staticmethod(call) for name, call in (("open_backend", open_backend), ("settle", self.settle))}
            machine = type("Machine", (StorageMachine,), {**its, "copies_max": self.copies_max, "roomy": roomy})
            run_state_machine_as_test(machine, settings=self.machine_settings)

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
            assert (put(store, []), get(store, []), store.contains([])) == ([], [], [])

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

            def work(seed: int) -> None:
                rng = np.random.default_rng(seed)
                for _ in range(60):
                    wanted = [int(n) for n in rng.integers(0, 60, size=6)]
                    if seed % 2:
                        assert any(put(store, wanted))  # one that was there may make room for another
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
            origins = [ORIGIN, OTHER, OTHER]
            wanted = list(enumerate(origins, start=1))
            payloads = [payload_of(n, origin=origin) for n, origin in wanted]
            valid = [valid_of(n) for n, _ in wanted]
            answers = store.put([key_of(n) for n, _ in wanted], payloads, valid, [0] * 3, origins)
            assert [answer and answer.origin for answer in answers] == [ORIGIN, ORIGIN, OTHER]
            counters = store.counters
            assert (counters.stored, counters.kept, counters.conflicts, counters.refused) == (1, 1, 1, 0)

    def test_two_writers_of_the_same_keys_agree_who_was_first(self) -> None:
        """Goal: nobody is told that his record is stored when another's is. Method: two writers, no ``replace``."""
        with self._store() as (backend, _), self.rival(backend) as rival:
            answers = race([backend, rival], 6, self.race_pause_s, (BOTH,), replace=False)
            self.settle(backend)
            final = held(backend, range(NUMBERS))
            for n, content in enumerate(final):
                assert {answer for told in answers for answer in told[n]} == {content}

    def test_two_writers_that_replace_each_other_leave_one_whole_record(self) -> None:
        """Goal: each key ends with exactly one whole offered record. Method: two writers, other rows and origins."""
        with self._store() as (backend, _), self.rival(backend) as rival:
            answers = race([backend, rival], self.race_rounds, self.race_pause_s, (FIRST, SECOND, BOTH), replace=True)
            self.settle(backend)
            for n, content in enumerate(held(backend, range(NUMBERS))):
                last = {told[n][-1] for told in answers}
                assert content in last or (content is Absence.MISS and None in last)

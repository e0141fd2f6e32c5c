"""The memory store keeps the storage contract, and what is its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cache_manager.errors import NoSpaceError, RecordError, StorageError
from cache_manager.ports import Absence, StorageBackend
from cache_manager.spec import align
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.contract import StorageContract
from cache_manager.testing.records import LAYOUT, get, header_of, key_of, payload_of, put, valid_of


class TestMemoryStore(StorageContract):
    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        return MemoryStore(capacity_nbytes)


def test_the_least_recently_used_record_makes_room() -> None:
    """Three slots; reading a record and putting it again both count as use."""
    backend = MemoryStore(3 * LAYOUT.nbytes)
    store = RecordStore(backend, LAYOUT)
    put(store, [1, 2, 3])
    get(store, [1])
    put(store, [4])
    assert store.contains([key_of(n) for n in (1, 2, 3, 4)]) == [True, False, True, True]
    put(store, [3, 5])
    assert store.contains([key_of(n) for n in (1, 3, 4, 5)]) == [False, True, True, True]
    assert backend.usage()["evicted_records"] == 2
    backend.close()


def test_the_slot_of_a_deleted_record_is_used_again() -> None:
    backend = MemoryStore(3 * LAYOUT.nbytes)
    store = RecordStore(backend, LAYOUT)
    put(store, [1, 2, 3])
    backend.delete([key_of(1), key_of(2)])
    put(store, [4, 5])
    assert store.contains([key_of(n) for n in (3, 4, 5)]) == [True] * 3
    assert backend.usage()["evicted_records"] == 0
    backend.close()


def test_a_record_of_another_size_is_an_error_that_changes_nothing() -> None:
    backend = MemoryStore(1 << 20)
    store = RecordStore(backend, LAYOUT)
    put(store, [1])
    with pytest.raises(RecordError, match=rf"payload size: wanted {LAYOUT.nbytes}, .* got 128"):
        backend.put([header_of(2), header_of(3, 128)], [payload_of(2), payload_of(3, 128)])
    assert get(store, [1, 2]) == [payload_of(1), Absence.MISS]
    backend.close()


def test_a_payload_that_is_not_bytes_leaves_no_slot_behind() -> None:
    """As many bytes as the record, but as 4-byte numbers: an error, and the slot is free again."""
    backend = MemoryStore(2 * LAYOUT.nbytes)
    store = RecordStore(backend, LAYOUT)
    put(store, [1])
    words = np.zeros(LAYOUT.nbytes // 4, dtype=np.uint32)
    with pytest.raises(RecordError, match="flat bytes"):
        backend.put([header_of(2)], [words.data])
    assert put(store, [3]) == [True]
    assert get(store, [1, 2, 3]) == [payload_of(1), Absence.MISS, payload_of(3)]
    backend.close()


def test_more_memory_than_there_can_be_is_a_typed_error() -> None:
    with pytest.raises(NoSpaceError, match=r"memory: wanted \d+ bytes"):
        MemoryStore(1 << 62)


def test_what_is_lent_keeps_its_bytes_while_others_come_and_go() -> None:
    """Goal: a view is one record's until it is given back. Method: evict, delete and replace while records are lent."""
    nbytes = align(LAYOUT.nbytes)
    with MemoryStore(8 * nbytes) as backend:
        store = RecordStore(backend, LAYOUT)
        assert all(put(store, range(8)))
        with backend.borrow([key_of(0), key_of(1), key_of(99), key_of(2)]) as found:
            assert found[2] is Absence.MISS
            backend.delete([key_of(1)])
            assert store.put([key_of(2)], [payload_of(7)], [valid_of(2)], [2], [5], replace=True) != [None]
            for n in range(100, 140):
                assert put(store, [n]) == [True]
            lent = [each for each in found if isinstance(each, tuple)]
            assert [bytes(view) for _, view in lent] == [payload_of(0), payload_of(1), payload_of(2)]
            assert all(view.readonly for _, view in lent)
            usage = backend.usage()
            assert usage["lent_nbytes"] == 3 * nbytes
            assert usage["used_nbytes"] + usage["free_nbytes"] == usage["capacity_nbytes"] == 8 * nbytes
            with (
                pytest.raises(NoSpaceError, match="borrow fewer"),
                backend.borrow([key_of(138), key_of(139)]),
            ):
                pass
        with pytest.raises(ValueError, match="released"):
            bytes(lent[0][1])
        for n in range(200, 240):
            assert put(store, [n]) == [True]
        assert backend.usage()["lent_nbytes"] == 0
        assert backend.usage()["records"] == 8
        assert get(store, [0, *range(232, 240)]) == [Absence.MISS, *(payload_of(n) for n in range(232, 240))]


def test_where_everything_is_lent_there_is_no_room_and_larger_reads_are_copied() -> None:
    nbytes = align(LAYOUT.nbytes)
    with MemoryStore(2 * nbytes) as backend:
        store = RecordStore(backend, LAYOUT)
        assert all(put(store, range(2)))
        with backend.borrow([key_of(0)]):
            assert get(store, [1, 0]) == [payload_of(1), payload_of(0)]
            assert put(store, [2]) == [True]
            assert get(store, [0, 1, 2]) == [payload_of(0), Absence.MISS, payload_of(2)]


def test_a_store_that_is_closed_leaves_what_it_has_lent() -> None:
    backend = MemoryStore(1 << 20)
    put(RecordStore(backend, LAYOUT), [1])
    with backend.borrow([key_of(1)]) as found:
        backend.close()
        assert isinstance(found[0], tuple)
        assert bytes(found[0][1]) == payload_of(1)
    backend.close()


class Lender(MemoryStore):
    """Counts what is borrowed; fails from the call numbered ``fails_at`` on."""

    def __init__(self, capacity_nbytes: int) -> None:
        super().__init__(capacity_nbytes)
        self.parts: list[int] = []
        self.fails_at = 0

    def borrow(self, keys):
        self.parts.append(len(keys))
        if 0 < self.fails_at <= len(self.parts):
            raise StorageError("on purpose")
        return super().borrow(keys)


def test_a_batch_larger_than_is_lent_at_once_is_borrowed_in_parts() -> None:
    """Goal: no record is summed twice, and a part that fails costs no other one. Method: a store that lends four
    records at once, asked for ten; then one that fails at the second part, and at the first.
    """
    backend = Lender(8 * LAYOUT.nbytes)
    store = RecordStore(backend, LAYOUT)
    put(store, range(8))
    wanted = [*(payload_of(n) for n in range(8)), Absence.MISS, Absence.MISS]
    assert get(store, range(10)) == wanted
    assert backend.parts == [4, 4, 2]
    backend.parts, backend.fails_at = [], 2
    assert get(store, range(10)) == wanted[:4] + [Absence.MISS] * 6
    backend.parts, backend.fails_at = [], 1
    with pytest.raises(StorageError, match="on purpose"):
        get(store, range(10))
    assert store.counters.hits + store.counters.misses == 20
    backend.close()


class Crowded(Lender):
    """Lends its first part alone, and cannot copy either."""

    def borrow(self, keys):
        if self.parts:
            raise NoSpaceError("memory store", len(keys), 0, "on purpose")
        return super().borrow(keys)

    def get_into(self, keys, buffers):
        raise StorageError("on purpose")


def test_a_part_that_can_be_neither_lent_nor_copied_costs_no_other_part() -> None:
    """A bug that was found: what failed in the copy after a refused loan took the parts before with it."""
    with Crowded(8 * LAYOUT.nbytes) as backend:
        store = RecordStore(backend, LAYOUT)
        put(store, range(8))
        assert get(store, range(8)) == [*(payload_of(n) for n in range(4)), *[Absence.MISS] * 4]
        assert backend.parts == [4]
        with pytest.raises(StorageError, match="on purpose"):
            get(store, range(8))
        assert (store.counters.hits, store.counters.misses) == (4, 4)


def test_a_bad_record_that_cannot_be_read_once_more_costs_no_other_one() -> None:
    """It is a miss, and stays: it was found bad only once. Alone in its batch, the failure is told."""
    backend = Lender(8 * LAYOUT.nbytes)
    store = RecordStore(backend, LAYOUT)
    put(store, range(2))
    backend.put([header_of(2)], [payload_of(3)])
    backend.fails_at = 2
    assert get(store, range(3)) == [payload_of(0), payload_of(1), Absence.MISS]
    backend.parts = []
    with pytest.raises(StorageError, match="on purpose"):
        get(store, [2])
    backend.fails_at = 0
    assert get(store, [2]) == [Absence.CORRUPT]
    assert (store.counters.hits, store.counters.misses, store.counters.corrupt) == (2, 1, 1)
    backend.close()


def test_more_buffers_than_keys_are_refused() -> None:
    """Also where the keys are whole parts, so that no part has buffers left over."""
    with MemoryStore(8 * LAYOUT.nbytes) as backend:
        store = RecordStore(backend, LAYOUT)
        put(store, range(8))
        for keys in (0, 4, 7):
            with pytest.raises(ValueError, match="longer"):
                store.get_into([key_of(n) for n in range(keys)], [memoryview(bytearray(LAYOUT.nbytes))] * 8)

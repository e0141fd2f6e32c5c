"""What a ``RecordStore`` sets aside: the record that was read and found bad twice, and no other."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cache_manager.errors import RecordError, StorageError
from cache_manager.ports import Absence
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import ORIGIN_MAX, RecordStore
from cache_manager.testing.faults import FaultyStore
from cache_manager.testing.records import LAYOUT, get, header_of, key_of, payload_of, put


def test_a_torn_read_does_not_delete_the_record_that_came_after() -> None:
    """Goal: a record that is put anew is kept. Method: a read is torn, and its record replaced before it is judged."""
    with FaultyStore(MemoryStore(1 << 20)) as backend:
        store = RecordStore(backend, LAYOUT)
        put(store, [1, 2])
        backend.flip_next = 77

        def replace() -> None:
            backend.flip_next = None
            backend.delete([key_of(1)])
            assert put(store, [1]) == [True]

        backend.during_get = replace
        assert get(store, [1, 2]) == [payload_of(1), payload_of(2)]
        backend.during_get = None
        assert get(store, [1, 2]) == [payload_of(1), payload_of(2)]
        assert store.counters.corrupt == 0


def test_a_record_that_says_more_rows_than_a_block_has_is_set_aside() -> None:
    """Goal: bits that stand for no row are never taken into a region's words. Method: a backend has a record whose sums
    are sound, with one such bit in the words of one spec; then a record in which every row is marked as present."""
    tokens, width = LAYOUT.block_tokens, 64 * LAYOUT.valid_words
    assert tokens < width, "there are bits that stand for no row"
    every = sum(((1 << tokens) - 1) << width * spec for spec in range(len(LAYOUT.specs)))
    with MemoryStore(1 << 20) as backend:
        store = RecordStore(backend, LAYOUT)
        for spec in range(len(LAYOUT.specs)):
            for bit in (tokens, width - 1):
                valid = every | 1 << width * spec + bit
                more = replace(header_of(1), valid=valid.to_bytes(len(header_of(1).valid), "little"))
                assert backend.put([more], [payload_of(1)]) == [more]
                assert get(store, [1]) == [Absence.CORRUPT]
                assert get(store, [1]) == [Absence.MISS]
        assert store.counters.corrupt == 2 * len(LAYOUT.specs)
        whole = replace(header_of(1), valid=every.to_bytes(len(header_of(1).valid), "little"))
        assert backend.put([whole], [payload_of(1)]) == [whole]
        assert store.get_into([key_of(1)], [memoryview(bytearray(LAYOUT.nbytes))]) == [whole]


def test_a_bad_record_that_cannot_be_read_once_more_costs_no_other_one() -> None:
    """The record is a miss, and is kept: it was found bad only once. Alone in its batch, the failure is reported."""
    with FaultyStore(MemoryStore(1 << 20)) as backend:
        store = RecordStore(backend, LAYOUT)
        put(store, range(2))
        backend.put([header_of(2)], [payload_of(3)])
        backend.during_get = lambda: setattr(backend, "fail_get", True)
        assert get(store, range(3)) == [payload_of(0), payload_of(1), Absence.MISS]
        backend.fail_get = False
        with pytest.raises(StorageError, match="on purpose"):
            get(store, [2])
        backend.fail_get, backend.during_get = False, None
        assert get(store, [2]) == [Absence.CORRUPT]
        assert (store.counters.hits, store.counters.misses, store.counters.corrupt) == (2, 1, 1)


@pytest.mark.parametrize(("keys", "buffers"), [(2, 1), (1, 2), (1, 0), (0, 1)])
def test_keys_without_their_buffers_are_refused(keys: int, buffers: int) -> None:
    """Goal: no record is read into the place of another, and none is left out silently. Method: more of one than of
    the other; the store is asked for nothing."""
    with MemoryStore(1 << 20) as backend:
        store = RecordStore(backend, LAYOUT)
        put(store, range(2))
        places = [memoryview(bytearray(LAYOUT.nbytes)) for _ in range(buffers)]
        with pytest.raises(ValueError, match=f"{keys} keys and {buffers} buffers"):
            store.get_into([key_of(n) for n in range(keys)], places)
        assert not any(map(any, places))
        assert store.counters.hits == store.counters.misses == 0


@pytest.mark.parametrize(("origin", "is_one"), [(-1, False), (0, True), (ORIGIN_MAX, True), (ORIGIN_MAX + 1, False)])
def test_an_origin_has_64_bits(origin: int, is_one: bool) -> None:
    """Goal: no origin is cut to another one in a header. Method: those at both ends, and beyond; nothing is stored
    then."""
    with MemoryStore(1 << 20) as backend:
        store = RecordStore(backend, LAYOUT)
        record = [key_of(1)], [payload_of(1)], [header_of(1).valid], [1], [origin]
        if is_one:
            (header,) = store.put(*record)
            assert store.get_into([key_of(1)], [memoryview(bytearray(LAYOUT.nbytes))]) == [header]
            assert header is not None
            assert header.origin == origin
        else:
            with pytest.raises(RecordError, match=f"origin: wanted 0 to {ORIGIN_MAX}, got {origin} to {origin}"):
                store.put(*record)
            assert store.contains([key_of(1)]) == [False]

"""The memory store keeps the storage contract, and what is its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from stopped import is_stopped

from cache_manager.errors import RecordError
from cache_manager.ports import Absence, StorageBackend
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.contract import StorageContract
from cache_manager.testing.records import LAYOUT, get, header_of, key_of, payload_of, put


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


def test_a_record_of_another_size_is_an_error_that_changes_nothing() -> None:
    backend = MemoryStore(1 << 20)
    store = RecordStore(backend, LAYOUT)
    put(store, [1])
    with pytest.raises(RecordError, match=rf"payload size: wanted {LAYOUT.nbytes}, .* got 128"):
        backend.put([header_of(2), header_of(3, 128)], [payload_of(2), payload_of(3, 128)])
    assert get(store, [1, 2]) == [payload_of(1), Absence.MISS]
    backend.close()


def test_a_put_that_is_interrupted_costs_no_room() -> None:
    """Goal: no slot is lost for good. Method: a put that evicts, and one that replaces, each interrupted at each
    possible place; then as many records as ever fit are put and found."""
    at, ended = 1, False
    while not ended:
        with MemoryStore(3 * LAYOUT.nbytes) as backend:
            store = RecordStore(backend, LAYOUT)
            put(store, [1, 2, 3])
            headers = [header_of(3, origin=2), header_of(4), header_of(5)]
            payloads = [payload_of(3, origin=2), payload_of(4), payload_of(5)]
            ended = not is_stopped(partial(backend.put, headers, payloads, replace=True), at)
            assert put(store, [6, 7, 8]) == [True] * 3
            assert get(store, [6, 7, 8]) == [payload_of(n) for n in (6, 7, 8)]
            assert backend.usage()["used_nbytes"] == 3 * LAYOUT.nbytes
        at += 1
    assert at > 10, "it was never interrupted"

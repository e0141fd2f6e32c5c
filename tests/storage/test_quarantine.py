"""Only the record that was read is set aside, not one that was put under the same key since."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from cache_manager.ports import Absence, StorageBackend
from cache_manager.storage.file import FileStore
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.faults import FaultyStore
from cache_manager.testing.records import LAYOUT, get, header_of, key_of, payload_of, put


def backend_of(kind: str, directory: Path) -> StorageBackend:
    return MemoryStore(1 << 20) if kind == "memory" else FileStore(directory, quota_nbytes=1 << 20)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_torn_read_does_not_delete_the_record_that_came_after(tmp_path: Path, kind: str) -> None:
    """Goal: a record that is put anew is kept. Method: a read is torn, and its record replaced before it is judged."""
    with FaultyStore(backend_of(kind, tmp_path)) as backend:
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


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_record_that_says_more_rows_than_a_block_has_is_set_aside(tmp_path: Path, kind: str) -> None:
    """Goal: bits that stand for no row are never taken into a region's words. Method: a backend has a record whose sums
    are sound, with one such bit in the words of one spec; then a record in which every row is marked as present."""
    tokens, width = LAYOUT.block_tokens, 64 * LAYOUT.valid_words
    assert tokens < width, "there are bits that stand for no row"
    every = sum(((1 << tokens) - 1) << width * spec for spec in range(len(LAYOUT.specs)))
    with backend_of(kind, tmp_path) as backend:
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

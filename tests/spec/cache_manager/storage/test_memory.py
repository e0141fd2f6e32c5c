"""The memory store keeps the storage contract, and what is its own."""

from __future__ import annotations

from pathlib import Path

from cache_manager.ports import StorageBackend
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


def test_records_of_several_sizes_share_the_capacity() -> None:
    """Goal: layouts make room for each other, and not a byte more is taken. A bug that was found: the first record
    fixed the size of all for ever, so that a second layout was an error at each put.

    Method: sizes that change with the number, the same key with a larger record, and deletions; the store's count is
    compared with that of the records that are there.
    """
    sizes = {n: 64 * (1 + n % 5) for n in range(40)}
    with MemoryStore(1000) as backend:
        for n, nbytes in sizes.items():
            assert backend.put([header_of(n, nbytes)], [payload_of(n, nbytes)]) == [header_of(n, nbytes)]
            there = [n for n in sizes if backend.contains([key_of(n)])[0]]
            assert there[-1] == n
            assert backend.usage()["used_nbytes"] == sum(sizes[n] for n in there) <= 1000
        evicted = backend.usage()["evicted_records"]
        larger = header_of(39, 960, origin=2)
        assert backend.put([larger], [payload_of(39, 960, origin=2)], replace=True) == [larger]
        usage = backend.usage()
        assert (usage["records"], usage["used_nbytes"]) == (1, 960)
        assert usage["evicted_records"] == evicted + len(there) - 1, "what is replaced is not evicted"
        buffer = memoryview(bytearray(960))
        assert backend.get_into([key_of(39)], [buffer]) == [larger]
        assert buffer == payload_of(39, 960, origin=2)
        backend.delete([key_of(39), key_of(1)])
        assert backend.usage()["used_nbytes"] == 0

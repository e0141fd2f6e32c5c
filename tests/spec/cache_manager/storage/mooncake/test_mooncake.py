"""The Mooncake store keeps the storage contract, against a real master and a segment in another process.

And what is its own while nothing fails: large batches, memory that it lends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from budget import examples
from mooncake_pool import Master, Owner, running_master
from mooncake_stores import CALM_MS, opened
from waiting import until

from cache_manager.errors import StorageError
from cache_manager.ports import Absence, StorageBackend
from cache_manager.storage import open_store
from cache_manager.storage.mooncake import MooncakeStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.contract import StorageContract
from cache_manager.testing.records import LAYOUT, get, key_of, payload_of, put

BUSY = {"full_ms": 3_000, "timeout_ms": 6_000, "connect_ms": 60_000}
"""Limits that a busy machine keeps."""


@pytest.mark.parametrize("master", [500], indirect=True)  # ms: a read that takes longer is a miss
class TestMooncakeStore(StorageContract):
    machine_settings = examples(4, stateful_step_count=12)
    race_rounds = 8  # in a small pool, where the memory of a record that was replaced is used again at once

    @pytest.fixture(autouse=True)
    def _pool(self, master: Master, owner: Owner) -> None:
        self.master, self.owner = master, owner

    @contextmanager
    def rival(self, backend: StorageBackend) -> Iterator[StorageBackend]:
        """Another client of the same pool, as another process has it."""
        with opened(self.master, **BUSY) as other:
            yield other

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        self.owner.segment(directory / "segment", capacity_nbytes)
        return opened(self.master, **BUSY)


def test_a_batch_of_thousands_is_split(calm: MooncakeStore) -> None:
    store = RecordStore(calm, LAYOUT)
    assert store.contains([key_of(n) for n in range(3000)]) == [False] * 3000
    assert get(store, range(3000)) == [Absence.MISS] * 3000


def test_memory_is_lent_by_a_process_of_its_own() -> None:
    """``segment=``: the pool has it as soon as the store is open, and loses it with the store."""
    with running_master(CALM_MS) as master, open_store(master.url(timeout_ms=CALM_MS)) as backend:  # no lease ends
        other = RecordStore(backend, LAYOUT)
        with open_store(master.url(timeout_ms=CALM_MS, segment="16MiB")) as lender:
            assert backend.usage()["capacity_nbytes"] == 16 << 20
            assert put(RecordStore(lender, LAYOUT), [1]) == [True]
            assert get(other, [1]) == [payload_of(1)]
        until(lambda: not backend.usage()["capacity_nbytes"], what="the segment stays")
        assert get(other, [1]) == [Absence.MISS]
        with pytest.raises(StorageError, match="no memory"):
            put(other, [1])

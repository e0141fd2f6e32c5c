"""The Mooncake store keeps the storage contract, against a real master and a segment in another process.

And what is its own while nothing fails: large batches, memory that it lends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from budget import examples
from mooncake_pool import Master, Owner, running_master, running_owner

from cache_manager.errors import StorageError
from cache_manager.ports import Absence, StorageBackend
from cache_manager.storage import open_store
from cache_manager.storage.records import RecordStore
from cache_manager.testing.contract import StorageContract
from cache_manager.testing.records import LAYOUT, get, key_of, payload_of, put

CALM_MS = 30_000
"""Nothing hangs here: a machine that stands still for a second fails no call."""


class TestMooncakeStore(StorageContract):
    machine_settings = examples(4, stateful_step_count=12)
    race_rounds = 8  # in a small pool, where the memory of a record that was replaced is used again at once
    master: Master
    owner: Owner

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _pool(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        file = tmp_path_factory.mktemp("pool") / "segment"
        with running_master() as master, running_owner(master, file, 1 << 20) as owner:
            cls.master, cls.owner = master, owner
            yield

    @contextmanager
    def rival(self, backend: StorageBackend) -> Iterator[StorageBackend]:
        """Another client of the same pool, as another process has it."""
        other = open_store(self.master.url(full_ms=3000, timeout_ms=6000))
        try:
            yield other
        finally:
            other.close()

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        self.owner.segment(directory / "segment", capacity_nbytes)
        return open_store(self.master.url(full_ms=3000, timeout_ms=6000))


def test_a_batch_of_thousands_is_split(tmp_path: Path) -> None:
    with (
        running_master() as master,
        running_owner(master, tmp_path / "segment", 1 << 20),
        open_store(master.url(timeout_ms=CALM_MS)) as backend,
    ):
        store = RecordStore(backend, LAYOUT)
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
        give_up_s = time.monotonic() + 60.0
        while backend.usage()["capacity_nbytes"]:
            assert time.monotonic() < give_up_s, "the segment stays"
            time.sleep(0.05)
        assert get(other, [1]) == [Absence.MISS]
        with pytest.raises(StorageError, match="no memory"):
            put(other, [1])

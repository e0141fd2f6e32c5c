"""The Mooncake store keeps the storage contract, against a real master and a segment in another process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from mooncake_pool import Master, Owner, running_master, running_owner

from cache_manager.ports import StorageBackend
from cache_manager.storage import open_store
from cache_manager.testing.contract import StorageContract


class TestMooncakeStore(StorageContract):
    machine_settings = settings(max_examples=4, stateful_step_count=12)
    origin_settings = settings(max_examples=4, stateful_step_count=10)
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

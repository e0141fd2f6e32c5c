"""The tiered store keeps the storage contract, whatever its tiers are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from budget import examples
from faulty_disk import FaultyDisk
from mooncake_pool import Master, Owner, running_master, running_owner

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import Buffer, RecordHeader
from cache_manager.storage import open_store
from cache_manager.storage.file import FileStore
from cache_manager.storage.tiered import TieredStore
from cache_manager.testing.contract import StorageContract
from cache_manager.testing.faults import FaultyStore


class TieredContract(StorageContract):
    """Of two tiers, with room for a record in each."""

    copies_max = 2
    exact = False
    machine_settings = examples(15, stateful_step_count=20)


class TestMemoryBeforeFile(TieredContract):
    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        return open_store(f"tiered:memory:?capacity={capacity_nbytes},file://{directory}?quota={capacity_nbytes}")


class TestFileBeforeFile(TieredContract):
    """The front has half of the room."""

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        front, back = f"file://{directory}/front", f"file://{directory}/back"
        return open_store(f"tiered:{front}?quota={capacity_nbytes // 2},{back}?quota={capacity_nbytes}")


class FlakyStore(FaultyStore):
    """Every third put, read and look-up fails."""

    def __init__(self, backend: StorageBackend) -> None:
        super().__init__(backend)
        self._turns = itertools.count(1)

    def _turn(self) -> None:
        if next(self._turns) % 3 == 0:
            raise StorageError("it is the third call")

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        self._turn()
        return super().put(headers, payloads, replace=replace)

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        self._turn()
        return super().get_into(keys, buffers)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._turn()
        return super().contains(keys)


class TestFlakyFileBeforeFile(TieredContract):
    """A front that fails all the time costs callers nothing, where the back has room for all."""

    machine_settings = examples(5, stateful_step_count=15)

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        disk = FaultyDisk()
        disk.call_nbytes_max = 1000
        front = FileStore(directory / "front", quota_nbytes=capacity_nbytes, disk=disk)
        back = FileStore(directory / "back", quota_nbytes=max(capacity_nbytes, 2 << 20))
        return TieredStore({"front": FlakyStore(front), "back": back})


class TestFileBeforeMooncake(TieredContract):
    machine_settings = examples(3, stateful_step_count=10)
    race_rounds = 2
    master: Master
    owner: Owner

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _pool(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        file = tmp_path_factory.mktemp("pool") / "segment"
        with running_master() as master, running_owner(master, file, 1 << 20) as owner:
            cls.master, cls.owner = master, owner
            yield

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        self.owner.segment(directory / "segment", capacity_nbytes)
        front = f"file://{directory}/front?quota={capacity_nbytes}"
        return open_store(f"tiered:{front},{self.master.url(full_ms=3000, timeout_ms=6000)}")

"""The tiered store keeps the storage contract, whatever its tiers are."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore
from cache_manager.storage.tiered import TieredStore
from cache_manager.testing.contract import StorageContract
from cache_manager.testing.faults import FaultyStore
from cache_manager.testing.records import LAYOUT, get, payload_of, put


def until(what: str, holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < give_up_s, f"not within 60 s: {what}"
        time.sleep(0.02)


class TieredContract(StorageContract):
    """Of two tiers, with room for a record in each."""

    copies_max = 2


class TestMemoryBeforeFile(TieredContract):
    machine_settings = examples(15, stateful_step_count=20)

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        file = FileStore(directory, quota_nbytes=capacity_nbytes, segment_nbytes=16 << 10)
        return TieredStore({"memory": MemoryStore(capacity_nbytes), "file": file})


class TestFileBeforeFile(TieredContract):
    """The front has half of the room."""

    machine_settings = examples(15, stateful_step_count=20)

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        front = FileStore(directory / "front", quota_nbytes=capacity_nbytes // 2, segment_nbytes=16 << 10)
        back = FileStore(directory / "back", quota_nbytes=capacity_nbytes, segment_nbytes=16 << 10)
        return TieredStore({"front": front, "back": back})


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
    """Goal: a front that fails all the time changes nothing for callers. It is left in peace after every failure.

    The back has room for all, because what only the front has is a miss while that fails.
    """

    machine_settings = examples(5, stateful_step_count=15)

    def settle(self, backend: StorageBackend) -> None:
        """What the front owes is hidden, but still there."""
        backend.flush()

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        disk = FaultyDisk()
        disk.call_nbytes_max = 1000
        front = FileStore(directory / "front", quota_nbytes=capacity_nbytes, segment_nbytes=16 << 10, disk=disk)
        back = FileStore(directory / "back", quota_nbytes=max(capacity_nbytes, 2 << 20), segment_nbytes=16 << 10)
        return TieredStore({"front": FlakyStore(front), "back": back}, pause_ms=1)


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
        file = f"file://{directory}/front?quota={capacity_nbytes}&segment=16KiB"
        pool = self.master.url(full_ms=3000, timeout_ms=6000)
        return open_store(f"tiered:{file},{pool}")


def test_a_master_is_killed_and_restarted_under_load_behind_a_file_front(tmp_path: Path) -> None:
    """Goal: hits of the front go on, nothing read is wrong, and the back is used again, without a restart.

    Method: a reader and a writer work all the time; no call of the store may fail, because the front is well.
    """
    with running_master() as master, running_owner(master, tmp_path / "segment", 4 << 20):
        pool = master.url(timeout_ms=1000, full_ms=300, pause_ms=200, pause_max_ms=1000)
        front = f"file://{tmp_path}/front?quota=4MiB&segment=64KiB"
        backend = open_store(f"tiered:?pause_ms=100,{front},{pool}")
        assert isinstance(backend, TieredStore)
        store = RecordStore(backend, LAYOUT)
        assert all(put(store, range(20)))
        stop, failures, written = threading.Event(), [], [20]

        def work(step: Callable[[], None]) -> None:
            try:
                while not stop.wait(0.005):
                    step()
            except BaseException as error:
                failures.append(error)
                raise

        def read() -> None:
            last = written[-1]
            assert get(store, range(20)) == [payload_of(n) for n in range(20)]
            assert get(store, [last - 1, 100_000]) == [payload_of(last - 1), Absence.MISS]

        def write() -> None:
            first = written[-1] if written[-1] < 300 else 20  # the front has room for these, and evicts none
            assert all(put(store, range(first, first + 2)))
            written.append(first + 2)

        threads = [threading.Thread(target=work, args=(step,), daemon=True) for step in (read, write)]
        try:
            for thread in threads:
                thread.start()
            master.kill()
            until("the back is bypassed", lambda: backend.counters[1].bypassed_reads > 0)
            hits, before = backend.counters[0].hits, backend.counters[1].written
            until("hits go on", lambda: backend.counters[0].hits > hits + 100)
            master.start()
            until("the back is written again", lambda: backend.counters[1].written > before)
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        assert not failures, failures[0]
        assert store.counters.hits == sum(tier.hits for tier in backend.counters)
        assert store.counters.corrupt == sum(tier.corrupt for tier in backend.counters) == 0
        backend.close()

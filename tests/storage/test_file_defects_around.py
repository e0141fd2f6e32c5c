"""What adversarial testing found around forks, locks, limits and permissions; each failed before it was mended."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk

from cache_manager.errors import ConfigError, StorageError, StoreClosedError, StoreFormatError, StoreLockedError
from cache_manager.ports import Absence, StorageBackend
from cache_manager.storage import open_store
from cache_manager.storage.disk import Space
from cache_manager.storage.file import FileReader, FileStore, Sync, fsck
from cache_manager.storage.file.segment import PAGE_NBYTES
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, get, key_of, payload_of, put
from tests.storage.file_stores import SEGMENT_NBYTES, flip, opened, segments

MISSING = Absence.MISS

# Forks.


def _stores(directory: Path) -> dict[str, tuple[StorageBackend, list[threading.Lock]]]:
    file = FileStore(directory, quota_nbytes=1 << 20)
    reader, memory = FileReader(directory), MemoryStore(1 << 20)
    return {
        "file": (file, [file._pool.append, file._flush, file._pool.index_lock]),
        "reader": (reader, [reader._refresh, reader._shelf.index_lock]),
        "memory": (memory, [memory._lock]),
    }


def _in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked child, which is killed when it takes ten seconds; its exit status."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("kind", ["file", "reader", "memory"])
def test_a_forked_child_is_told_so_whatever_locks_were_held(tmp_path: Path, kind: str) -> None:
    """Goal: no hang. Method: fork while every lock of the store is taken, and call every method in the child."""
    stores = _stores(tmp_path)
    backend, locks = stores[kind]
    try:
        for lock in locks:
            lock.acquire()

        def work() -> None:
            buffers = [memoryview(bytearray(8))]
            for call in (
                lambda: backend.put([], []),
                lambda: backend.get_into([key_of(1)], buffers),
                lambda: backend.contains([key_of(1)]),
                lambda: backend.delete([key_of(1)]),
                backend.flush,
                backend.usage,
            ):
                with pytest.raises(StoreClosedError, match="before fork"):
                    call()
            backend.close()

        assert _in_child(work) == 0
        for lock in locks:
            lock.release()
        assert backend.contains([key_of(1)]) == [False]
    finally:
        for store, _ in stores.values():
            store.close()


@contextmanager
def _idle_child() -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        signal.pause()
        os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_child_that_was_forked_does_not_keep_the_lock(tmp_path: Path) -> None:
    backend = FileStore(tmp_path)
    with _idle_child():
        backend.close()
        FileStore(tmp_path).close()


def test_a_store_that_was_dropped_without_being_closed_lets_the_next_one_in(tmp_path: Path) -> None:
    store = RecordStore(FileStore(tmp_path), LAYOUT)
    put(store, [1])
    del store
    with opened(tmp_path) as store:
        assert get(store, [1]) == [payload_of(1)]


def test_a_lock_that_outlives_its_writer_says_so(tmp_path: Path) -> None:
    """A child of the operating system's own making may hold it; the message must not send anybody after a dead pid."""
    with opened(tmp_path) as store:
        put(store, [1])
        gone = os.fork()
        if gone == 0:
            os._exit(0)
        os.waitpid(gone, 0)
        (tmp_path / "kvroute.lock").write_text(f"{gone}\n")
        with pytest.raises(StoreLockedError, match=f"process {gone} wrote this store and has ended"):
            FileStore(tmp_path)


# Smaller ones.


def test_a_deleted_record_does_not_return_by_a_repair_of_an_older_copy(tmp_path: Path) -> None:
    """The copy's header is damaged, so that nobody knows of it; the key is put anew, deleted, and fsck runs."""
    with opened(tmp_path) as store:
        put(store, range(8))
    flip(segments(tmp_path)[0], PAGE_NBYTES + 40)
    with opened(tmp_path) as store:
        assert get(store, [0]) == [Absence.CORRUPT]
        put(store, [0])
        store.backend.delete([key_of(0)])
    fsck(tmp_path, repair=True)
    with opened(tmp_path) as store:
        assert get(store, [0, 1]) == [MISSING, payload_of(1)]


def test_a_hostile_sparse_segment_does_not_keep_opening_busy(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, range(7))
    first, second = segments(tmp_path)
    raw = bytearray(first.read_bytes())
    os.truncate(second, 3 << 40)
    with opened(tmp_path) as store:  # reading 3 TiB would take longer than any test may
        assert get(store, range(6)) == [payload_of(n) for n in range(6)]
    assert first.read_bytes() == raw


def test_a_sequence_that_leaves_no_next_one_is_refused_by_name(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, [1])
    shutil.copy(segments(tmp_path)[0], tmp_path / "segment-ffffffffffffffff.kvr")
    with pytest.raises(StoreFormatError, match=r"segment-ffffffffffffffff.kvr: sequence"):
        FileStore(tmp_path)


def test_a_directory_with_the_name_of_a_leftover_is_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, [1])
    (tmp_path / "segment-0000000000000009.kvr.tmp").mkdir()
    with opened(tmp_path) as store:
        assert get(store, [1]) == [payload_of(1)]
    assert fsck(tmp_path, repair=True).sound


def test_limits_that_cannot_be_met_are_refused_at_open_with_a_remedy(tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.space_now = Space(1 << 30, 1 << 30)
    with pytest.raises(ConfigError, match=r"^min_free: .*lower min_free"):
        FileStore(tmp_path / "a", min_free_nbytes=999 << 40, disk=disk)
    with pytest.raises(ConfigError, match=r"^min_free: .*lower min_free"):
        open_store(f"file://{tmp_path}/b?min_free=999TiB")
    with pytest.raises(ConfigError, match=r"^quota: .*give segment="):
        open_store(f"file://{tmp_path}/c?quota=1GiB&segment=1MiB")
    with pytest.raises(ConfigError, match=r"^quota: .*give quota="):
        open_store(f"file://{tmp_path}/d?quota=16KiB")
    with (
        opened(tmp_path / "e", quota_nbytes=SEGMENT_NBYTES * 2, segment_nbytes=16 << 10) as store,
        pytest.raises(ConfigError, match="record"),
    ):
        RecordStore(store.backend, _large_layout())


def _large_layout() -> object:
    from cache_manager.spec import AuxBlockDataSpec, RecordLayout

    return RecordLayout((AuxBlockDataSpec("x", row_shape=(1 << 12,), dtype="uint8", block_tokens=64),))


def test_a_store_closes_at_the_end_of_a_with_block(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/s", f"file://{tmp_path}/s?mode=read", "memory:"):
        with open_store(url) as store:
            assert store.contains([key_of(1)]) == [False]
        with pytest.raises(StoreClosedError):
            store.usage()


@pytest.mark.parametrize(("text", "file_mode", "directory_mode"), [("", 0o600, 0o700), ("?files=0640", 0o640, 0o750)])
def test_files_are_for_their_owner_unless_told_otherwise(
    tmp_path: Path, text: str, file_mode: int, directory_mode: int
) -> None:
    before = os.umask(0o022)
    try:
        with open_store(f"file://{tmp_path}/s{text}") as store:
            put(RecordStore(store, LAYOUT), range(3))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == directory_mode
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "s").iterdir()} == {file_mode}
    with pytest.raises(ConfigError, match="files: wanted 0600, 0640 or 0644"):
        open_store(f"file://{tmp_path}/t?files=0777")


def test_a_full_disk_evicts_the_stores_own_oldest_records(tiny_disk: Path) -> None:
    """Goal: a cache on a full disk goes on. Method: a quota of 1 MiB on a file system of 256 KiB."""
    with opened(tiny_disk / "store") as store:
        for n in range(120):
            assert put(store, [n]) == [True]
            assert get(store, [n]) == [payload_of(n)]
        assert store.usage()["dropped_segments"] > 5
        assert store.usage()["records"] >= 24


def test_with_sync_batch_a_failed_put_does_not_shake_what_was_there(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk, sync=Sync.BATCH) as store:
        put(store, range(3))
        disk.sync_errno = errno.EIO
        with pytest.raises(StorageError):
            put(store, [3])
        disk.sync_errno = None
        assert get(store, range(4)) == [*(payload_of(n) for n in range(3)), MISSING]
        assert put(store, [3]) == [True]
        store.flush()

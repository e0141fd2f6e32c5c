"""The file store: the contract of stores, and what it promises beside that."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk
from stores import PER_EXTENT, SMALL_NBYTES, opened, reading, there

from cache_manager.errors import StoreReadOnlyError
from cache_manager.ports import Absence
from cache_manager.storage.file import FileStore
from cache_manager.testing.contract import StorageContract
from cache_manager.testing.records import get, key_of, put

PAGE_NBYTES = 4096


class TestOneExtent(StorageContract):
    def make_backend(self, directory: Path, capacity_nbytes: int) -> FileStore:
        return FileStore(directory, quota_nbytes=capacity_nbytes)


class TestManyExtents(StorageContract):
    def make_backend(self, directory: Path, capacity_nbytes: int) -> FileStore:
        return FileStore(directory, quota_nbytes=capacity_nbytes, extent_nbytes=32 << 10)


def test_a_reader_finds_what_was_put_before_the_call_without_a_look_in_between(tmp_path: Path) -> None:
    with opened(tmp_path) as store, reading(tmp_path) as reader:
        for n in range(30):
            assert not there(reader, [n])
            assert all(put(store, [n]))
            assert reader.contains([key_of(n)]) == [True]
            assert there(reader, [n]) == {n}
        (tmp_path / "kvroute.lock").unlink()  # no call reports any more whether anything has
        assert all(put(store, [99]))
        assert there(reader, [99]) == {99}
        with pytest.raises(StoreReadOnlyError):
            put(reader, [1])


def test_a_slot_that_was_used_again_while_it_was_read_is_a_miss(tmp_path: Path) -> None:
    """Method: between a reader's look-up and its read the writer gives the slot to another record."""
    armed, disk = list[range](), FaultyDisk()
    disk.on_read = lambda: armed and put(store, armed.pop())
    with opened(tmp_path, quota_nbytes=SMALL_NBYTES) as store, reading(tmp_path, disk=disk) as reader:
        assert all(put(store, range(PER_EXTENT)))
        assert there(reader, range(PER_EXTENT)) == set(range(PER_EXTENT))
        armed.append(range(50, 50 + PER_EXTENT))
        assert get(reader, [3]) == [Absence.MISS]
        assert reader.counters.corrupt == 0
        assert there(reader, [50]) == {50}


def test_a_record_that_the_disk_does_not_give_is_a_counted_miss_while_it_does_not(tmp_path: Path) -> None:
    """Goal: no wrong row, no silence and no bookkeeping. Method: reads fail for a time, in which it is put again."""
    disk = FaultyDisk()
    with opened(tmp_path, disk) as store:
        assert all(put(store, range(3)))
        disk.read_errno = errno.EIO
        assert get(store, [1]) == [Absence.MISS]
        assert store.usage()["failed_reads"] == 1
        assert all(put(store, [1]))
        disk.read_errno = None
        assert there(store, range(3)) == set(range(3))
        assert store.usage()["records"] == 3


def test_files_are_for_their_owner_unless_the_url_says_otherwise(tmp_path: Path) -> None:
    for mode, directory_mode in ((0o600, 0o700), (0o644, 0o755)):
        with opened(tmp_path / str(mode), file_mode=mode) as store:
            assert all(put(store, [1]))
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / str(mode)).iterdir()}
        assert set(modes.values()) == {mode & ~_umask()}
        assert (tmp_path / str(mode)).stat().st_mode & 0o777 == directory_mode & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

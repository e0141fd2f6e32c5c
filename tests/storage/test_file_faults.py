"""The file store when the disk fails, fills up, or is cut short: nothing is lost, later calls work again."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk

from cache_manager.errors import StorageError
from cache_manager.ports import Absence
from cache_manager.storage.file import Sync, fsck
from cache_manager.testing.records import get, payload_of, put
from tests.storage.file_stores import FILL, RECORD_NBYTES, child, opened, segments


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("written", [0, 1, 300, RECORD_NBYTES, 2 * RECORD_NBYTES + 400])
def test_a_write_that_fails_in_the_middle_of_a_batch_loses_nothing(tmp_path: Path, number: int, written: int) -> None:
    """No room is ``False``, any other failure an error; what was there stays, and later puts work again."""
    disk = FaultyDisk()
    with opened(tmp_path, disk) as store:
        put(store, [1])
        disk.write_budget_nbytes, disk.write_errno = written, number
        if number == errno.EIO:
            with pytest.raises(StorageError, match="cannot write"):
                put(store, [1, 2, 3, 4])
        else:
            assert put(store, [1, 2, 3, 4]) == [True, False, False, False]
        disk.write_budget_nbytes = None
        assert get(store, [1, 2, 3, 4]) == [payload_of(1), *[Absence.MISS] * 3]
        usage = store.usage()
        assert usage["used_nbytes"] == sum(path.stat().st_size for path in segments(tmp_path))
        assert put(store, [5]) == [True]
        shutil.copytree(tmp_path, crashed := tmp_path.with_name(tmp_path.name + "-crashed"))
        assert put(store, [3, 4]) == [True, True]
    with opened(tmp_path) as store:
        assert get(store, [1, 2, 3, 4]) == [payload_of(1), Absence.MISS, payload_of(3), payload_of(4)]
    with opened(crashed) as store:
        assert get(store, range(1, 6)) == [payload_of(1), *[Absence.MISS] * 3, payload_of(5)]
        assert store.usage()["damaged_segments"] == store.usage()["torn_records"] == 0


@pytest.mark.parametrize(
    ("field", "value"), [("allocate_errno", errno.ENOSPC), ("allocate_errno", errno.EIO), ("sync_errno", errno.EIO)]
)
def test_a_segment_that_cannot_be_started_loses_nothing(tmp_path: Path, field: str, value: int) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk, sync=Sync.BATCH) as store:
        put(store, range(6))  # the first segment is full
        setattr(disk, field, value)
        if value == errno.ENOSPC:
            assert put(store, [6, 7]) == [False, False]
        else:
            with pytest.raises(StorageError):
                put(store, [6, 7])
        setattr(disk, field, None)
        assert len(list(tmp_path.iterdir())) == 3  # marker, lock, one segment
        assert get(store, [0, 6]) == [payload_of(0), Absence.MISS]
        assert put(store, [6]) == [True]
        assert get(store, range(7)) == [payload_of(n) for n in range(7)]


def test_space_that_cannot_be_given_back_stays_counted(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk) as store:
        put(store, [1])
        disk.write_budget_nbytes, disk.truncate_errno = RECORD_NBYTES + 40, errno.EIO
        assert put(store, [2, 3]) == [False, False]
        disk.write_budget_nbytes = disk.truncate_errno = None
        assert store.usage()["used_nbytes"] == sum(path.stat().st_size for path in segments(tmp_path))
        assert put(store, [3]) == [True]
    with opened(tmp_path) as store:
        for n, answer in zip((1, 2, 3), get(store, [1, 2, 3]), strict=True):
            assert answer == payload_of(n) or (n == 2 and answer is not None)


def test_what_a_failed_write_left_is_cut_away_later(tmp_path: Path) -> None:
    """Goal: half a record is nobody's. Method: a write fails within the second record's payload, and so does the cut;
    then the disk is well again, and the next put cuts; or the process is killed before, and the next life does."""
    disk, directory, killed = FaultyDisk(), tmp_path / "store", tmp_path / "killed"
    with opened(directory, disk) as store:
        put(store, [1])
        disk.write_budget_nbytes, disk.truncate_errno = 2 * RECORD_NBYTES - 40, errno.EIO
        assert put(store, [2, 3]) == [False, False]
        disk.write_budget_nbytes = None
        assert put(store, [4]) == [True]  # in another segment: this one is not the newest any more
        shutil.copytree(directory, killed)
        disk.truncate_errno = None
        assert put(store, [5]) == [True]
        shutil.copytree(directory, tmp_path / "cut")
        assert fsck(tmp_path / "cut").total("corrupt") == 0
    with opened(killed) as store:
        assert get(store, [1, 2, 3]) == [payload_of(1), payload_of(2), Absence.MISS]
        assert put(store, [3]) == [True]
    assert fsck(killed).total("corrupt") == 0
    with opened(killed) as store:
        assert get(store, [1, 3]) == [payload_of(1), payload_of(3)]


def test_an_unreadable_record_is_missing_and_a_failing_disk_is_an_error(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk) as store:
        put(store, [1, 2])
        disk.read_errno = errno.ENXIO
        with pytest.raises(StorageError, match="cannot read"):
            get(store, [1, 2])
        disk.read_errno = errno.EIO
        assert get(store, [1]) == [Absence.MISS]
        disk.read_errno = None
        assert get(store, [1, 2]) == [payload_of(1), payload_of(2)]


def test_a_flush_that_fails_is_an_error_and_is_tried_again(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk) as store:
        put(store, [1])
        disk.sync_errno = errno.EIO
        for _ in range(2):
            with pytest.raises(StorageError, match="cannot flush"):
                store.flush()
        disk.sync_errno = None
        store.flush()
        done = disk.syncs
        store.flush()
        assert disk.syncs == done  # nothing was written meanwhile
        assert get(store, [1]) == [payload_of(1)]


def test_with_sync_batch_every_put_is_durable_when_it_returns(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk, sync=Sync.BATCH) as store:
        put(store, [1])
        assert disk.syncs >= 2  # the bytes, and the entry of the new segment
        before = disk.syncs
        put(store, [2])
        assert disk.syncs == before + 1


def test_a_file_size_limit_of_the_process_is_no_room(tmp_path: Path) -> None:
    """A real limit, set by setrlimit below the size of a segment."""
    code = FILL + (
        "import resource\n"
        "assert all(put(store, range(6)))\n"
        "limit = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))\n"
        "assert put(store, range(5, 8)) == [True, False, False]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, limit)\n"
        "assert put(store, range(5, 8)) == [True, True, True]\n"
        "assert get(store, range(8)) == [payload_of(n) for n in range(8)]\n"
        "store.close()\n"
    )
    done = child(code, str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_on_a_full_disk_the_stores_own_oldest_segment_makes_room(tiny_disk: Path) -> None:
    """A real file system that others have filled; without a segment that could go, what is stored stays readable."""
    directory = tiny_disk / "store"
    with opened(directory) as store:
        assert all(put(store, range(6)))
        hog = tiny_disk / "hog"
        with hog.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            file.writelines(bytes(4096) for _ in range(100))
        assert put(store, [6, 7]) == [True, True]
        assert store.usage()["dropped_segments"] == 1
        assert get(store, range(6)) == [Absence.MISS] * 6
        hog.unlink()
        assert put(store, range(6)) == [True] * 6
        assert put(store, [6, 7]) == [True, True]
        assert get(store, range(8)) == [payload_of(n) for n in range(8)]
    with opened(directory) as store:
        assert get(store, range(8)) == [payload_of(n) for n in range(8)]

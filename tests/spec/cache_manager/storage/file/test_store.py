"""What a writer says is stored is there after a crash, a full disk and a power cut; what it has deleted is not."""

from __future__ import annotations

import errno
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from faulty_disk import FaultyDisk, VolatileDisk
from stores import PER_EXTENT, SMALL_NBYTES, opened, there

from cache_manager.errors import StorageError
from cache_manager.storage.file import Sync
from cache_manager.testing.records import key_of, put

PAGE_NBYTES = 4096


@pytest.mark.parametrize("full", [False, True], ids=["fresh slots", "slots that are used again"])
def test_a_process_that_ends_at_any_byte_leaves_whole_records(tmp_path: Path, full: bool) -> None:
    """Goal: nothing is torn after a crash. Method: writes end after so many bytes; what is on the disk is opened."""
    first = range(PER_EXTENT if full else 2)
    for budget in (0, 60, 150, 400, 1000, 4160, 4608, 9000, 14_000, 18_432, 18_500, 18_700, 18_900, 19_300):
        directory, disk = tmp_path / str(budget), FaultyDisk()
        with opened(directory, disk, quota_nbytes=SMALL_NBYTES) as store:
            assert all(put(store, first))
            disk.write_budget_nbytes, disk.write_errno = budget, errno.EIO
            with suppress(StorageError):
                put(store, range(20, 24))
            shutil.copytree(directory, tmp_path / f"after-{budget}")
            disk.write_budget_nbytes = None
        with opened(tmp_path / f"after-{budget}", quota_nbytes=SMALL_NBYTES) as store:
            found = there(store, range(24))
            assert len(found & set(first)) >= len(first) - 4
            assert store.counters.corrupt == 0


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()])
def test_a_put_that_is_interrupted_takes_no_room_for_ever(tmp_path: Path, error: BaseException) -> None:
    """Goal: as many records fit after it as before. Method: an error that is no ``OSError`` while an extent is made for
    the second half of a batch, and then puts of everything."""

    def interrupted() -> None:
        raise error

    disk = FaultyDisk()
    with opened(tmp_path, quota_nbytes=4 * SMALL_NBYTES, disk=disk) as store:
        assert all(put(store, [0]))
        disk.on_allocate = interrupted
        with pytest.raises(type(error)):
            put(store, range(1, 2 * PER_EXTENT))
        disk.on_allocate = lambda: None
        assert all(put(store, range(4 * PER_EXTENT)))
        assert there(store, range(4 * PER_EXTENT)) == set(range(4 * PER_EXTENT))
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_a_flush_that_fails_says_so_and_the_next_one_syncs_again(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk) as store:
        assert all(put(store, [1]))
        store.flush()
        assert all(put(store, [2]))
        disk.sync_errno = errno.EIO
        with pytest.raises(StorageError, match="flush"):
            store.flush()
        disk.sync_errno, syncs = None, disk.syncs
        store.flush()
        assert disk.syncs == syncs + 1
        store.flush()
        assert disk.syncs == syncs + 1


def test_what_a_put_says_is_stored_survives_a_power_cut_though_the_disk_was_full(tmp_path: Path) -> None:
    """A bug that was found: with ``sync=batch`` a batch whose last part found no room was not synced, nor were stored
    records that were put again after a failed sync. Method: a batch for two extents."""
    disk, wanted = VolatileDisk(tmp_path / "s"), range(PER_EXTENT + 3)

    def check(stored: set[int]) -> None:
        for seed in range(8):
            disk.cut_power(tmp_path / f"{len(stored)}-{seed}", np.random.default_rng(seed))
            with opened(tmp_path / f"{len(stored)}-{seed}") as after:
                assert there(after, sorted(stored)) == stored

    with opened(tmp_path / "s", disk, sync=Sync.BATCH) as store:
        disk.write_budget_nbytes = 2 * PAGE_NBYTES + 4608 * PER_EXTENT + 112 * PER_EXTENT + 4608
        told = put(store, wanted)
        assert told == [True] * PER_EXTENT + [False] * 3
        check(set(range(PER_EXTENT)))
        disk.write_budget_nbytes, disk.sync_errno = None, errno.ENOSPC
        for _ in range(2):
            with pytest.raises(StorageError, match="No space"):
                put(store, [50])
        disk.sync_errno = None
        assert all(put(store, [50]))
        check({*range(PER_EXTENT), 50})


@pytest.mark.parametrize("sync", Sync)
def test_what_was_flushed_survives_a_power_cut(tmp_path: Path, sync: Sync) -> None:
    disk = VolatileDisk(tmp_path / "before")
    with opened(tmp_path / "before", disk, sync=sync) as store:
        for first in range(0, 20, 5):
            assert all(put(store, range(first, first + 5)))
        store.flush() if sync is Sync.NONE else None
        for seed in range(8):
            disk.cut_power(tmp_path / str(seed), np.random.default_rng(seed))
            with opened(tmp_path / str(seed)) as after:
                assert there(after, range(20)) == set(range(20))


def test_a_deleted_record_does_not_come_back_though_writes_have_failed(tmp_path: Path) -> None:
    """Goal: a deletion that has returned holds. Method: a put ends before it has written zeros over the head of the
    record that it evicted; that record is then deleted, and the store opened anew."""
    disk = FaultyDisk()
    with opened(tmp_path, disk, quota_nbytes=SMALL_NBYTES) as store:
        assert all(put(store, range(PER_EXTENT)))
        disk.write_budget_nbytes, disk.write_errno = 0, errno.EIO
        with pytest.raises(StorageError):
            put(store, [50])
        disk.write_budget_nbytes = None
        left = there(store, range(PER_EXTENT))
        assert len(left) == PER_EXTENT - 1
        store.backend.delete([key_of(n) for n in {*range(PER_EXTENT)} - left])
    with opened(tmp_path, quota_nbytes=SMALL_NBYTES) as store:
        assert there(store, range(51)) == left

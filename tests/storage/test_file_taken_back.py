"""A replacement that fails in the middle: every key keeps its older or its newer record, and the store goes on."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk

from cache_manager.errors import StorageError
from cache_manager.ports import Absence
from cache_manager.record import Buffer
from cache_manager.storage.disk import Room
from cache_manager.storage.file import Sync, fsck
from cache_manager.testing.origins import Content, held, offer
from cache_manager.testing.records import BOTH
from tests.storage.file_stores import SEGMENT_NBYTES, opened

OLD, NEW = Content(1, BOTH), Content(2, BOTH)


class LateDisk(FaultyDisk):
    """Does something before the next read, and fails one write, ``writes_left`` writes from now."""

    between: Callable[[], None] | None = None
    writes_left = -1

    def preadv(self, fd: int, buffers: Sequence[Room], offset: int) -> int:
        if (work := self.between) is not None:
            self.between = None
            work()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.writes_left -= 1
        if self.writes_left == -1:
            raise OSError(errno.EIO, "one write")
        return super().pwritev(fd, buffers, offset)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("write", range(2, 8))
def test_a_replacement_that_fails_in_the_middle_loses_no_record(tmp_path: Path, write: int, finished: bool) -> None:
    """Goal: a key has its older or its newer record. Method: one write of the marks fails, after some are made."""
    disk = LateDisk()
    with opened(tmp_path, disk) as store:
        offer(store.backend, [(n, OLD) for n in range(6 if finished else 3)], replace=False)
        offer(store.backend, [(10, OLD)], replace=False)
        disk.writes_left = write
        try:
            offer(store.backend, [(n, NEW) for n in range(3)], replace=True)
        except StorageError:
            after_it = held(store.backend, range(3))
        else:
            after_it = [NEW] * 3
        assert set(after_it) <= {OLD, NEW}
        assert held(store.backend, [10]) == [OLD]
    assert fsck(tmp_path).sound
    with opened(tmp_path) as store:
        assert held(store.backend, [0, 1, 2, 10]) == [*after_it, OLD]


def test_a_replacement_whose_marks_cannot_be_synced_keeps_the_newer_records(tmp_path: Path) -> None:
    """Goal: no key loses both. Method: the older copies are marked, then their segment's sync fails."""

    class Unsynced(FaultyDisk):
        syncs_left = 1 << 30

        def sync(self, fd: int) -> None:
            self.syncs_left -= 1
            if self.syncs_left < 0:
                raise OSError(errno.EIO, "a sync")
            super().sync(fd)

    disk = Unsynced()
    with opened(tmp_path, disk, sync=Sync.BATCH) as store:
        offer(store.backend, [(n, OLD) for n in range(6)], replace=False)
        offer(store.backend, [(10, OLD)], replace=False)
        disk.syncs_left = 1  # of the newer records
        with pytest.raises(StorageError, match="cannot replace"):
            offer(store.backend, [(1, NEW), (2, NEW)], replace=True)
        disk.syncs_left = 1 << 30
        assert held(store.backend, [0, 1, 2]) == [OLD, NEW, NEW]
        assert store.usage()["replaced_records"] == 2
    with opened(tmp_path) as store:
        assert held(store.backend, [0, 1, 2, 10]) == [OLD, NEW, NEW, OLD]


def test_a_read_of_a_record_that_is_taken_back_leaves_nothing_behind(tmp_path: Path) -> None:
    """Goal: its segment can make room later. Method: it is read before the mark of the older copy fails."""
    disk = LateDisk()
    with opened(tmp_path, disk, quota_nbytes=3 * SEGMENT_NBYTES) as store:
        backend = store.backend
        offer(backend, [(1, OLD), (2, OLD)], replace=False)
        read: list[Content | Absence] = []

        def read_and_fail() -> None:
            read.extend(held(backend, [1]))
            disk.writes_left = 0

        disk.between = lambda: setattr(disk, "between", read_and_fail)  # the first read is of what the key has
        with pytest.raises(StorageError, match="cannot replace"):
            offer(backend, [(1, NEW)], replace=True)
        assert read == [NEW]
        assert held(backend, [1, 2]) == [OLD, OLD]
        for n in range(100, 130):
            assert offer(backend, [(n, OLD)], replace=False) == [OLD]

"""What adversarial testing found in the stores, one test a defect; each failed before it was mended."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from faulty_disk import FaultyDisk

from cache_manager.errors import StorageError
from cache_manager.ports import Absence
from cache_manager.record import Buffer
from cache_manager.storage.disk import Room
from cache_manager.storage.file import Sync, fsck
from cache_manager.storage.file.segment import PAGE_NBYTES
from cache_manager.testing.records import get, key_of, payload_of, put
from tests.storage.file_stores import RECORD_NBYTES, SEGMENT_NBYTES, flip, opened, reading, segments
from tests.storage.test_file_crash import VolatileDisk

MISSING = Absence.MISS


class BadSectors(FaultyDisk):
    """A disk that cannot read some ranges of some files, named by their inode."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: list[tuple[int, range]] = []

    def preadv(self, fd: int, buffers: Sequence[Room], offset: int) -> int:
        stop = offset + sum(memoryview(buffer).nbytes for buffer in buffers)
        for inode, sectors in self.bad:
            if inode == os.fstat(fd).st_ino and offset < sectors.stop and sectors.start < stop:
                raise OSError(errno.EIO, "bad sector")
        return super().preadv(fd, buffers, offset)


# A directory that is moved.


def test_a_writer_whose_directory_was_moved_touches_nothing_at_its_old_path(tmp_path: Path) -> None:
    """Goal: a store belongs to its directory and not to a name. Method: move it, make another, then evict and flush."""
    first, moved = tmp_path / "s", tmp_path / "s.old"
    with opened(first, quota_nbytes=3 * SEGMENT_NBYTES) as store:
        assert all(put(store, range(12)))
        first.rename(moved)
        with opened(first) as other:
            assert all(put(other, range(100, 140)))
            other.flush()
            before = {path.name: path.read_bytes() for path in first.iterdir()}
            for n in range(12, 60):
                assert put(store, [n]) == [True]
            store.flush()
            assert store.usage()["moved"] == 1
            assert other.usage()["moved"] == 0
            assert {path.name: path.read_bytes() for path in first.iterdir()} == before
            assert get(other, range(100, 140)) == [payload_of(n) for n in range(100, 140)]
    with opened(moved) as store:
        assert get(store, [59]) == [payload_of(59)]


def test_a_reader_follows_a_store_that_is_made_anew_and_stays_with_one_that_was_moved(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    with opened(directory) as store:
        put(store, range(8))
    with reading(directory) as reader:
        directory.rename(tmp_path / "s.old")
        assert get(reader, [1, 9]) == [payload_of(1), MISSING]
        with opened(directory) as other:
            put(other, [9])
            assert get(reader, [9]) == [payload_of(9)]
            assert get(reader, [1]) == [MISSING]


# Damage at opening.


@pytest.mark.parametrize("which", [0, 3])
@pytest.mark.parametrize("first", ["fsck", "open"])
def test_a_bit_in_a_segments_first_header_costs_one_record_whoever_comes_first(
    tmp_path: Path, which: int, first: str
) -> None:
    """Goal: opening destroys nothing. Method: the oldest segment, with an index, and the newest, without one."""
    with opened(tmp_path) as store:
        assert all(put(store, range(24)))
    flip(segments(tmp_path)[which], PAGE_NBYTES + 40)
    if first == "fsck":
        fsck(tmp_path, repair=True)
    for _ in range(2):
        with opened(tmp_path) as store:
            answers = get(store, range(24))
            lost = [n for n, answer in enumerate(answers) if answer != payload_of(n)]
            assert lost == [6 * which]
    fsck(tmp_path, repair=True)
    with opened(tmp_path) as store:
        assert sum(store.contains([key_of(n) for n in range(24)])) == 23
        assert all(put(store, range(24)))
        assert get(store, range(24)) == [payload_of(n) for n in range(24)]


def test_what_cannot_be_read_as_records_is_set_aside_counted_and_dropped_last(tmp_path: Path) -> None:
    """A damaged header in a segment that has lost its journal, too: what is behind it is kept for who can read it."""
    with opened(tmp_path) as store:
        assert all(put(store, range(6)))
    (path,) = segments(tmp_path)
    flip(path, PAGE_NBYTES + 2 * RECORD_NBYTES + 40)
    path.with_suffix(".journal").unlink()
    before = path.read_bytes()
    quota_nbytes = 3 * SEGMENT_NBYTES
    for _ in range(2):
        with opened(tmp_path, quota_nbytes=quota_nbytes) as store:
            assert get(store, range(6)) == [payload_of(0), payload_of(1), *[MISSING] * 4]
            usage = store.usage()
            assert (usage["aside_segments"], usage["aside_nbytes"]) == (1, len(before))
            assert usage["used_nbytes"] == sum(each.stat().st_size for each in segments(tmp_path))
    aside = path.with_suffix(".aside")
    assert aside.read_bytes() == before
    report = fsck(tmp_path)
    assert report.sound
    assert report.segments[0].aside
    assert report.segments[0].lost_nbytes >= 3 * RECORD_NBYTES
    assert "1 segments are set aside" in report.to_text()
    with opened(tmp_path, quota_nbytes=quota_nbytes) as store:
        for n in range(100, 140):
            assert put(store, [n]) == [True]
        assert aside.read_bytes() == before
        assert get(store, [0, 139]) == [payload_of(0), payload_of(139)]
    with reading(tmp_path) as reader:
        assert get(reader, [0, 139]) == [payload_of(0), payload_of(139)]


@pytest.mark.parametrize("what", ["page", "header", "payload", "index"])
@pytest.mark.parametrize("which", [0, 2])
def test_a_bad_sector_costs_its_record_and_nothing_for_good(tmp_path: Path, what: str, which: int) -> None:
    """Goal: one sector does not close a store. Method: EIO at opening for writer, reader and fsck; then it is well."""
    with opened(tmp_path) as store:
        assert all(put(store, range(15)))
    path = segments(tmp_path)[which]
    starts = {
        "page": 0,
        "header": PAGE_NBYTES + RECORD_NBYTES,
        "payload": PAGE_NBYTES + RECORD_NBYTES + 2000,
        "index": path.stat().st_size - 64,
    }
    disk = BadSectors()
    disk.bad.append((path.stat().st_ino, range(starts[what], starts[what] + 60)))
    costs = {6 * which + 1} if what in ("header", "payload") else set[int]()
    assert fsck(tmp_path, disk=disk).total("records") >= 14
    for opener in (opened, reading):
        with opener(tmp_path, disk=disk) as store:  # type: ignore[operator]
            for _ in range(2):
                answers = get(store, range(15))
                assert {n for n, answer in enumerate(answers) if answer != payload_of(n)} <= costs
                assert all(answer in (payload_of(n), MISSING) for n, answer in enumerate(answers))
            assert store.counters.corrupt == 0
    disk.bad.clear()
    with opened(tmp_path, disk=disk) as store:
        assert get(store, range(15)) == [payload_of(n) for n in range(15)]
        assert store.usage()["aside_segments"] == 0
    assert fsck(tmp_path).sound


def test_a_record_under_a_bad_sector_gives_way_to_a_newer_one_in_its_index(tmp_path: Path) -> None:
    """Goal: who puts it anew has it stored, and the older copy stays away. Method: EIO where its header is."""
    disk = BadSectors()
    with opened(tmp_path, disk) as store:
        put(store, range(8))
        bad = (segments(tmp_path)[0].stat().st_ino, range(PAGE_NBYTES, PAGE_NBYTES + 60))
        disk.bad.append(bad)
        assert get(store, [0]) == [MISSING]
        assert put(store, [0]) == [True]
        assert get(store, range(8)) == [payload_of(n) for n in range(8)]
    with opened(tmp_path, disk) as store:
        assert get(store, range(8)) == [payload_of(n) for n in range(8)]
        store.backend.delete([key_of(0)])
    disk.bad.clear()
    with opened(tmp_path) as store:
        assert get(store, range(2)) == [MISSING, payload_of(1)]


def test_an_older_copy_under_a_bad_sector_does_not_keep_a_store_from_opening(tmp_path: Path) -> None:
    """Goal: one sector does not close a store. Method: the older copy's mark is lost, then its header is unreadable."""
    with opened(tmp_path) as store:
        put(store, range(7))
        first = segments(tmp_path)[0]
        before = first.read_bytes()
        store.backend.delete([key_of(0)])
        put(store, [0])
    first.write_bytes(before)  # as a power cut may leave it
    disk = BadSectors()
    disk.bad.append((first.stat().st_ino, range(PAGE_NBYTES, PAGE_NBYTES + 60)))
    for _ in range(2):
        with opened(tmp_path, disk) as store:
            assert get(store, range(7)) == [payload_of(n) for n in range(7)]


def test_a_transient_read_error_is_a_miss_and_the_record_comes_back(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk) as store:
        put(store, range(8))
        disk.read_errno = errno.EIO
        assert get(store, range(3)) == [MISSING] * 3
        assert store.usage()["failed_reads"] == 3
        disk.read_errno = None
        assert get(store, range(3)) == [payload_of(n) for n in range(3)]
        disk.read_errno = errno.EIO
        assert get(store, [5]) == [MISSING]
        disk.read_errno = None
        assert put(store, [5]) == [True]  # who puts it anew has it stored, whatever the first copy is worth
        assert store.counters.stored == 9
    with opened(tmp_path) as store:
        assert get(store, range(8)) == [payload_of(n) for n in range(8)]


# Durability.


class ForgetfulDisk(VolatileDisk):
    """As Linux: after a failed sync the pages count as written, and the next sync does nothing for them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.forgotten: dict[int, dict[int, bytes]] = {}  # inode: sector's offset and what is on the disk

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        inode = os.fstat(fd).st_ino
        forgotten = self.forgotten.get(inode, {})
        written = super().pwritev(fd, buffers, offset)
        for at in [at for at in forgotten if offset <= at and at + self.SECTOR_NBYTES <= offset + written]:
            self.undo.setdefault(inode, []).insert(0, (at, forgotten.pop(at)))
        return written

    def sync(self, fd: int) -> None:
        inode = os.fstat(fd).st_ino
        if self.sync_errno is not None and not stat.S_ISDIR(os.fstat(fd).st_mode):
            for offset, before in reversed(self.undo.pop(inode, [])):
                for at in range(offset, offset + len(before), self.SECTOR_NBYTES):
                    sector = at // self.SECTOR_NBYTES * self.SECTOR_NBYTES
                    known = self.forgotten.setdefault(inode, {})
                    known.setdefault(sector, os.pread(fd, self.SECTOR_NBYTES, sector))
                    whole = bytearray(known[sector])
                    piece = before[at - offset : at - offset + self.SECTOR_NBYTES]
                    whole[at - sector : at - sector + len(piece)] = piece[: self.SECTOR_NBYTES - (at - sector)]
                    known[sector] = bytes(whole)
        super().sync(fd)

    def cut_power(self, target: Path, rng: np.random.Generator) -> None:
        super().cut_power(target, rng)
        for path in self.directory.glob("segment-*.kvr"):
            copy = target / path.name
            if copy.exists():
                with copy.open("r+b") as file:
                    for sector, before in self.forgotten.get(path.stat().st_ino, {}).items():
                        file.seek(sector)
                        file.write(before)


@pytest.mark.parametrize("seed", range(12))
def test_a_flush_after_a_failed_one_leaves_everything_on_the_disk(tmp_path: Path, seed: int) -> None:
    """Goal: what flush says is so. Method: a sync fails as Linux's do, the next flush works, then the power is cut."""
    rng, directory = np.random.default_rng(seed), tmp_path / "before"
    directory.mkdir()
    disk = ForgetfulDisk(directory)
    with opened(directory, disk) as store:
        for first in range(0, 20, 4):
            put(store, range(first, first + 4))
            if rng.random() < 0.5:
                disk.sync_errno = errno.EIO
                with pytest.raises(StorageError, match="cannot flush"):
                    store.flush()
                disk.sync_errno = None
        store.flush()
        disk.cut_power(tmp_path / "after", rng)
    with opened(tmp_path / "after") as store:
        assert get(store, range(20)) == [payload_of(n) for n in range(20)]


@pytest.mark.parametrize("meanwhile", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_put_that_was_synced_does_not_hide_a_sync_that_failed(tmp_path: Path, seed: int, meanwhile: bool) -> None:
    """Goal: what was deleted and flushed stays so. Method: a flush fails, then a put works; or a put while it runs."""
    rng, directory = np.random.default_rng(seed), tmp_path / "before"
    directory.mkdir()

    class Busy(ForgetfulDisk):
        beside: Callable[[], None] | None = None

        def sync(self, fd: int) -> None:
            if not stat.S_ISDIR(os.fstat(fd).st_mode) and (work := self.beside):
                self.beside = None
                work()
            super().sync(fd)

    disk = Busy(directory)

    def fail(call: Callable[[], object]) -> None:
        disk.sync_errno = errno.EIO
        with pytest.raises(StorageError):
            call()
        disk.sync_errno = None

    with opened(directory, disk, sync=Sync.BATCH) as store:
        put(store, range(3))
        store.backend.delete([key_of(1)])
        if meanwhile:
            disk.beside = lambda: fail(lambda: put(store, [3]))
            with pytest.raises(StorageError, match="cannot flush"):
                store.flush()
        else:
            fail(store.flush)
            assert put(store, [3]) == [True]
        store.flush()
        disk.cut_power(tmp_path / "after", rng)
    with opened(tmp_path / "after") as store:
        assert get(store, range(3)) == [payload_of(0), MISSING, payload_of(2)]


def test_a_flush_without_a_free_descriptor_syncs_the_directory_all_the_same(tmp_path: Path) -> None:
    synced: list[bool] = []

    class Noting(FaultyDisk):
        def sync(self, fd: int) -> None:
            super().sync(fd)
            synced.append(stat.S_ISDIR(os.fstat(fd).st_mode))

    disk = Noting()
    with opened(tmp_path, disk) as store:
        put(store, range(8))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        hog: list[int] = []
        try:
            with suppress(OSError):
                while True:
                    hog.append(os.open("/dev/null", os.O_RDONLY))
            disk.sync_errno = errno.EIO
            with pytest.raises(StorageError):
                store.flush()
            assert not any(synced)
            disk.sync_errno = None
            store.flush()
        finally:
            for fd in hog:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert sorted(synced) == [False, False, True]


def test_no_put_syncs_anything_unless_it_was_asked_to(tmp_path: Path) -> None:
    """Goal: a new segment costs no wait for the disk. Method: count syncs over many segments, evictions included."""
    disk = FaultyDisk()
    with opened(tmp_path, disk, quota_nbytes=4 * SEGMENT_NBYTES) as store:
        for n in range(100):
            put(store, [n])
        assert store.usage()["dropped_segments"] > 8
        assert disk.syncs == 0
        store.flush()
        assert disk.syncs == 5  # four segments and the directory

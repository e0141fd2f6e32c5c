"""Faults R3, R5 to R8, R12 and R13: files that are cut, flipped, gone, junk, or left by a killed process."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_disk import FaultyDisk

from cache_manager.ports import Absence
from cache_manager.storage.file import fsck
from cache_manager.testing.records import get, key_of, payload_of, put
from tests.fault_matrix.blocks import (
    file_nbytes,
    persist,
    restore_into_a_used_block,
    stored,
)
from tests.storage.stores import SMALL_NBYTES, files, opened

PAGE = 4096


def test_r03_a_file_cut_short_shows_no_stale_byte(tmp_path: Path) -> None:
    """Fault: cut a file to half a record, with foreign bytes in the staging memory. kvroute: nothing is readable."""
    with stored(tmp_path) as (aux, store):
        assert persist(aux, [1, 2]) == [True, True]
        (path,) = files(tmp_path)
        os.truncate(path, PAGE + aux.layout.nbytes // 2)
        assert not restore_into_a_used_block(aux, 1)
        assert not restore_into_a_used_block(aux, 2)
        assert aux.store_counters is not None
        assert aux.store_counters.corrupt == 2
        assert aux.store_counters.hits == 0
    with stored(tmp_path) as (aux, store):
        assert not restore_into_a_used_block(aux, 1)
        assert store.usage()["used_nbytes"] == file_nbytes(tmp_path)


def test_r05_a_vanished_file_is_a_miss(tmp_path: Path) -> None:
    """Fault: remove the file, get. kvroute: rows or a miss, and the same memory and descriptors as before."""
    with stored(tmp_path) as (aux, _):
        assert persist(aux, [1]) == [True]
        descriptors = len(os.listdir("/proc/self/fd"))
        files(tmp_path)[0].unlink()
        for _ in range(5):
            assert restore_into_a_used_block(aux, 1)
        assert len(os.listdir("/proc/self/fd")) == descriptors
    with stored(tmp_path) as (aux, store):
        assert not restore_into_a_used_block(aux, 1)
        assert store.usage()["used_nbytes"] == file_nbytes(tmp_path) == 0
        assert persist(aux, [1]) == [True]
        assert restore_into_a_used_block(aux, 1)


@pytest.fixture(params=["wrapped", "mounted"])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, FaultyDisk, Any, Any]]:
    """A directory, its disk, and how to fill the disk and to empty it: by error number, or for real."""
    disk = FaultyDisk()
    if request.param == "wrapped":

        def fill() -> None:
            disk.write_budget_nbytes = 1000
            disk.allocate_errno = errno.ENOSPC

        def empty() -> None:
            disk.write_budget_nbytes = disk.allocate_errno = None

        yield tmp_path, disk, fill, empty
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    try:
        allowed = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this user may not mount a file system")
    hog = tmp_path / "hog"

    def fill_for_real() -> None:
        with hog.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            file.writelines(bytes(4096) for _ in range(100))

    yield tmp_path / "store", disk, fill_for_real, hog.unlink
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_r06_a_full_disk_leaves_nothing_stuck(full_disk: tuple[Path, FaultyDisk, Any, Any]) -> None:
    """Fault: ENOSPC, also in the middle of a record. kvroute: true answers, the books in order, success afterwards."""
    directory, disk, fill, empty = full_disk
    with opened(directory, disk) as store:
        assert all(put(store, range(4)))
        fill()
        for _ in range(3):
            answers = put(store, range(4, 9))
            for n, stored, found in zip(range(4, 9), answers, get(store, range(4, 9)), strict=True):
                assert found == (payload_of(n) if stored else Absence.MISS)
            usage = store.usage()
            assert usage["used_nbytes"] + usage["free_nbytes"] == usage["capacity_nbytes"]
        kept = get(store, range(4))
        assert kept == [payload_of(n) for n in range(4)] or store.usage()["evicted_records"] > 0
        empty()
        assert all(put(store, range(9)))
        assert get(store, range(9)) == [payload_of(n) for n in range(9)]
        assert store.usage()["used_nbytes"] == file_nbytes(directory)
    with opened(directory) as store:
        assert get(store, range(9)) == [payload_of(n) for n in range(9)]


def test_r07_a_restart_finds_and_counts_everything(tmp_path: Path) -> None:
    """Fault: a second backend on the directory. kvroute: same rows, same bytes, and the quota holds for old files."""
    for life in range(3):
        with stored(tmp_path) as (aux, store):
            for number in range(life):
                assert restore_into_a_used_block(aux, number)
            assert store.usage()["used_nbytes"] == file_nbytes(tmp_path)
            assert persist(aux, [life]) == [True]
    with opened(tmp_path, quota_nbytes=2 * SMALL_NBYTES) as small:
        assert all(put(small, range(n, n + 4)) == [True] * 4 for n in range(0, 40, 4))
        assert file_nbytes(tmp_path) <= 2 * SMALL_NBYTES


class ExhaustedDisk(FaultyDisk):
    """Memory runs out in the middle of a read."""

    exhausted = False

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        if self.exhausted:
            raise MemoryError("no staging")
        return super().preadv(fd, buffers, offset)


def test_r08_a_read_that_dies_leaves_no_lock(tmp_path: Path) -> None:
    """Fault: the read fails for want of memory. kvroute: every call of another thread ends."""
    disk = ExhaustedDisk()
    with opened(tmp_path, disk, quota_nbytes=SMALL_NBYTES) as store:
        assert all(put(store, range(4)))
        disk.exhausted = True
        for _ in range(3):
            with pytest.raises(MemoryError):
                get(store, range(4))
        disk.exhausted = False
        seen: list[object] = []

        def go_on() -> None:
            seen.append(get(store, range(4)))
            seen.append(
                all(put(store, range(n, n + 4)) == [True] * 4 for n in range(4, 40, 4))
            )  # uses the slots again that were being read
            store.backend.delete([key_of(39)])
            store.flush()
            seen.append(store.usage()["used_nbytes"] == file_nbytes(tmp_path))
            store.close()
            seen.append("closed")

        other = threading.Thread(target=go_on, daemon=True)
        other.start()
        other.join(60)
        assert seen == [[payload_of(n) for n in range(4)], True, True, "closed"]
        assert not [fd for fd in os.listdir("/proc/self/fd") if _points_into(fd, tmp_path)]


def _points_into(fd: str, directory: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(str(directory))
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("restarted", [False, True], ids=["open", "restarted"])
@pytest.mark.parametrize("tail", ["itself", "random", "zeros"])
def test_r12_a_file_twice_as_long_serves_what_was_put(tail: str, restarted: bool, tmp_path: Path) -> None:
    """Fault: append as many bytes again, its own among them. kvroute: the same records, and room for more."""
    with opened(tmp_path) as store:
        assert all(put(store, range(4)))
        if restarted:
            store.close()
        (path,) = files(tmp_path)
        size = path.stat().st_size
        more = {"itself": path.read_bytes(), "random": np.random.default_rng(1).bytes(size), "zeros": bytes(size)}[tail]
        with path.open("ab") as file:
            file.write(more)
        if not restarted:
            assert get(store, range(5)) == [payload_of(n) for n in range(4)] + [Absence.MISS]
            assert put(store, [4]) == [True]
    with opened(tmp_path) as store:
        assert store.usage()["used_nbytes"] == file_nbytes(tmp_path)
        assert all(put(store, range(4, 7)))
        assert get(store, range(7)) == [payload_of(n) for n in range(7)]
        assert store.counters.corrupt == 0


def test_r13_a_junk_file_neither_stops_a_store_nor_reaches_a_block(tmp_path: Path) -> None:
    """Fault: 7 bytes of junk at the next path, then a file cut to 100 bytes. kvroute: stored; a miss; no byte shows."""
    with stored(tmp_path) as (aux, _):
        in_the_way = tmp_path / "extent-00000001.kvr"
        in_the_way.write_bytes(b"garbage")
        assert persist(aux, [1, 2]) == [True, True]
        assert restore_into_a_used_block(aux, 1)
        os.truncate(files(tmp_path)[1], 100)
        assert not restore_into_a_used_block(aux, 1)
        assert not restore_into_a_used_block(aux, 2)
    assert in_the_way.read_bytes() == b"garbage"
    in_the_way.unlink()
    junk = tmp_path / "extent-000000ff.kvr"
    junk.write_bytes(b"garbage")
    with opened(tmp_path) as small:
        assert small.usage()["refused_files"] == 2  # and the one that was cut
        assert junk.name in fsck(tmp_path).to_text()
    assert junk.read_bytes() == b"garbage"
    junk.unlink()
    with stored(tmp_path) as (aux, _):
        assert persist(aux, [1, 2]) == [True, True]
        assert restore_into_a_used_block(aux, 1)

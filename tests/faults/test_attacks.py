"""A slice of each of the file store's trials; ``python -m tests.faults.attacks`` runs them all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from attacks import TRIALS
from disk_trials import faults
from faulty_disk import FaultyDisk
from process_trials import beside
from stores import files, flip, opened, reading

from cache_manager.ports import Absence
from cache_manager.storage.disk import Room
from cache_manager.storage.file import FileStore, fsck
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, get, payload_of, put


@pytest.mark.parametrize("name", ["faults", "cuts", "damage", "kills", "forks", "openings", "racing"])
def test_a_slice_of_each_trial(name: str) -> None:
    assert TRIALS[name](0.05)


def test_a_reader_beside_a_writer_reads_whole_records(tmp_path: Path) -> None:
    assert beside(tmp_path, 0, lasts_s=0.5) > 0


# Tests that the previous store failed.


class StaleDisk(FaultyDisk):
    """Every call for the file called ``stale`` answers ESTALE, as NFS does for one that another host removed."""

    stale = ""

    def _check(self, fd: int) -> None:
        if self.stale and os.readlink(f"/proc/self/fd/{fd}").endswith(self.stale):
            raise OSError(errno.ESTALE, "Stale file handle")

    def preadv(self, fd: int, buffers: Sequence[Room], offset: int) -> int:
        self._check(fd)
        return super().preadv(fd, buffers, offset)

    def size(self, fd: int) -> int:
        self._check(fd)
        return super().size(fd)


def everybody_serves(directory: Path, wanted: set[int]) -> None:
    """A reader, a check and a writer, which can put anew, too."""
    for opener in (reading, opened):
        with opener(directory) as store:  # type: ignore[operator]
            answers = get(store, range(60))
            assert {n for n in range(60) if answers[n] == payload_of(n)} >= wanted
            assert all(isinstance(each, Absence) or each == payload_of(n) for n, each in enumerate(answers))
        fsck(directory, payloads=True)
    with opened(directory) as store:
        assert all(put(store, [100, 101]))


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_no_file_is_a_single_point_of_failure(tmp_path: Path, harm: str) -> None:
    """Goal: damage outside of records costs the records of its extent, which is refused by name, and no other. Method:
    bits of the first page of each file, one after the other, and each file that holds no records cut or removed."""
    with opened(tmp_path / "s") as store:
        assert all(put(store, range(40)))
    raws = {path.name: path.read_bytes() for path in files(tmp_path / "s")}
    records = {name: {n for n in range(40) if payload_of(n) in raw} for name, raw in raws.items()}
    assert min(map(len, records.values())) > 0
    names = sorted({path.name for path in (tmp_path / "s").iterdir()} - (set(records) if harm != "flip" else set()))
    for name in names:
        for at in (0, 9, 30, 63, 4095) if harm == "flip" else (0,):
            copy = tmp_path / f"{name}-{at}"
            shutil.copytree(tmp_path / "s", copy)
            match harm:
                case "flip":
                    flip(copy / name, at % (copy / name).stat().st_size)
                case "cut":
                    os.truncate(copy / name, 0)
                case "remove":
                    (copy / name).unlink()
            everybody_serves(copy, set(range(40)) - records.get(name, set()))
            with reading(copy) as store:
                assert list(store.backend.refused) == [name] * (name in records)  # type: ignore[attr-defined]


def test_a_file_whose_handle_is_stale_costs_a_reader_what_is_in_it_and_nothing_else(tmp_path: Path) -> None:
    disk = StaleDisk()
    with opened(tmp_path) as store, reading(tmp_path, disk=disk) as reader:
        assert all(put(store, range(20)))
        assert get(reader, range(20)) == [payload_of(n) for n in range(20)]
        disk.stale = files(tmp_path)[0].name
        in_it = {n for n in range(20) if payload_of(n) in files(tmp_path)[0].read_bytes()}
        assert 0 < len(in_it) < 20
        assert all(put(store, range(20, 60)))
        answers = get(reader, range(60))
        assert answers == [Absence.MISS if n in in_it else payload_of(n) for n in range(60)]
        assert reader.usage()["failed_reads"] > 0
        disk.stale = ""
        assert get(reader, range(60)) == [payload_of(n) for n in range(60)]


def test_a_full_store_makes_no_file_and_drops_none(tmp_path: Path) -> None:
    """Goal: no cliff at the defaults. Method: count allocations while a store of a small quota is full."""
    allocations, disk = list[int](), FaultyDisk()
    disk.on_allocate = lambda: allocations.append(1)
    with FileStore(tmp_path, quota_nbytes=4 << 20, disk=disk) as backend:
        store = RecordStore(backend, LAYOUT)
        for first in range(0, 1200, 8):
            assert all(put(store, range(first, first + 8)))
        before, names = len(allocations), files(tmp_path)
        assert backend.usage()["records"] < 1200
        for first in range(1200, 2400, 8):
            assert all(put(store, range(first, first + 8)))
        assert (len(allocations), files(tmp_path)) == (before, names)


@pytest.mark.parametrize("own", [True, False])
def test_a_sparse_file_of_terabytes_takes_no_other_with_it(tmp_path: Path, own: bool) -> None:
    with opened(tmp_path) as store:
        assert all(put(store, range(40)))
        lost = {n for n in range(40) if payload_of(n) in files(tmp_path)[1].read_bytes()}
    hostile = files(tmp_path)[1] if own else tmp_path / "extent-0000ff00.kvr"
    hostile.touch()
    os.truncate(hostile, 3 << 40)
    everybody_serves(tmp_path, set(range(40)) - (lost if own else set()))


@pytest.mark.parametrize("seed", [11, 30, 42, 54])
def test_a_slot_that_holds_a_record_is_not_given_to_another(tmp_path: Path, seed: int) -> None:
    """A bug that was found: the disk failed during the removal of a replaced record, and the slot of the new one was
    treated as free, so that a later put reported a record as stored that was not."""
    faults(tmp_path, seed)

"""The file store keeps the storage contract, and what is its own: files, quota, other writers."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk

from cache_manager.errors import ConfigError, StorageError, StoreFormatError, StoreLockedError
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import header_nbytes
from cache_manager.spec import align
from cache_manager.storage.file import FileStore, Sync, default_segment_nbytes
from cache_manager.storage.file.segment import PAGE_NBYTES, pack_segment_page
from cache_manager.testing.contract import StorageContract
from cache_manager.testing.records import LAYOUT, get, header_of, key_of, payload_of, put
from tests.storage.file_stores import FILL, RECORD_NBYTES, SEGMENT_NBYTES, child, flip, opened, segments


class TestFileStore(StorageContract):
    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        return FileStore(directory, quota_nbytes=capacity_nbytes, segment_nbytes=16 << 10)


class TestFileStoreWithShortTransfers(StorageContract):
    """Every read and write is cut to 1000 bytes, every batch is synced."""

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        disk = FaultyDisk()
        disk.call_nbytes_max = 1000
        return FileStore(directory, quota_nbytes=capacity_nbytes, sync=Sync.BATCH, disk=disk)


class TestFileStoreWithLimits(StorageContract):
    """A time to live and a reserve that are never reached change nothing."""

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        return FileStore(
            directory,
            quota_nbytes=capacity_nbytes,
            segment_nbytes=16 << 10,
            ttl_s=3600,
            min_free_nbytes=1,
            min_free_percent=1,
            disk=FaultyDisk(),
        )


class TestFileStoreWhoseRecordsGrowOld(StorageContract):
    """Time passes with every look at the clock, but no record ever gets as old as the time to live."""

    def make_backend(self, directory: Path, capacity_nbytes: int) -> StorageBackend:
        ticks = itertools.count(1_700_000_000)
        return FileStore(
            directory, quota_nbytes=capacity_nbytes, segment_nbytes=16 << 10, ttl_s=1e6, clock=lambda: next(ticks)
        )


def test_records_survive_a_restart(tmp_path: Path) -> None:
    """In a directory whose name is not ASCII, over several segments."""
    directory = tmp_path / "Übung 日本" / "kv%20"
    with opened(directory) as store:
        assert put(store, range(20)) == [True] * 20
    with opened(directory) as store:
        assert get(store, range(21)) == [*(payload_of(n) for n in range(20)), Absence.MISS]
        assert len(segments(directory)) == store.usage()["segments"] == 4
        assert put(store, [20]) == [True]
    with opened(directory) as store:
        assert get(store, [0, 20]) == [payload_of(0), payload_of(20)]
        assert len(segments(directory)) == 4


def test_a_deleted_record_stays_deleted_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, range(8))
        segment = segments(tmp_path)[0]
        flip(segment, PAGE_NBYTES + RECORD_NBYTES + header_nbytes(LAYOUT) + 17)
        assert get(store, [0, 1, 2]) == [payload_of(0), Absence.CORRUPT, payload_of(2)]
        assert store.counters.corrupt == 1
    with opened(tmp_path) as store:
        assert get(store, [0, 1, 2]) == [payload_of(0), Absence.MISS, payload_of(2)]
        assert put(store, [1]) == [True]
    with opened(tmp_path) as store:
        assert get(store, range(8)) == [payload_of(n) for n in range(8)]


def test_a_damaged_header_is_found_by_a_read_and_costs_no_neighbour(tmp_path: Path) -> None:
    """Quarantine writes the header anew, so that the next opening gets past it."""
    with opened(tmp_path) as store:
        put(store, range(8))
        flip(segments(tmp_path)[0], PAGE_NBYTES + RECORD_NBYTES + 70)
        assert get(store, range(3)) == [payload_of(0), Absence.CORRUPT, payload_of(2)]
    with opened(tmp_path) as store:
        assert get(store, range(3)) == [payload_of(0), Absence.MISS, payload_of(2)]
        assert store.usage()["damaged_segments"] == 0


@pytest.mark.parametrize("indexed", [True, False])
def test_a_header_that_is_damaged_before_opening_costs_no_neighbour(tmp_path: Path, indexed: bool) -> None:
    """Index or journal say where the next record begins; without both the rest is not searched but set aside."""
    with opened(tmp_path) as store:
        put(store, range(8))
    path = segments(tmp_path)[0]
    flip(path, PAGE_NBYTES + 2 * RECORD_NBYTES + 70)
    if not indexed:
        os.truncate(path, PAGE_NBYTES + 6 * RECORD_NBYTES)
    rest = Absence.MISS if not indexed else None
    with opened(tmp_path) as store:
        lost = {2: Absence.CORRUPT if indexed else rest}
        lost |= {} if indexed else dict.fromkeys((3, 4, 5), rest)
        assert get(store, range(8)) == [lost.get(n, payload_of(n)) for n in range(8)]
        usage = store.usage()
        assert usage["aside_segments"] == usage["damaged_segments"] == (not indexed)
        assert usage["lost_nbytes"] >= (0 if indexed else 3 * RECORD_NBYTES)
        assert put(store, range(8)) == [True] * 8
        assert get(store, range(8)) == [payload_of(n) for n in range(8)]


def test_a_payload_cannot_carry_a_record_of_its_own(tmp_path: Path) -> None:
    """A payload whose bytes are a sound record is followed by damage; the record inside it is never found."""
    inner = tmp_path / "inner"
    with opened(inner) as store:
        put(store, [99])
    smuggled = segments(inner)[0].read_bytes()[PAGE_NBYTES:]
    small = LAYOUT.nbytes - 256
    assert len(smuggled) > small
    victim = tmp_path / "victim"
    with opened(victim) as store:
        put(store, [1, 2])
    path = segments(victim)[0]
    raw = bytearray(path.read_bytes())
    at = PAGE_NBYTES + RECORD_NBYTES
    raw[at] ^= 1  # the header before the payload
    body = at + header_nbytes(LAYOUT)
    raw += bytes(2 * RECORD_NBYTES)
    raw[body : body + RECORD_NBYTES] = smuggled[:RECORD_NBYTES]
    path.write_bytes(raw)
    with opened(victim) as store:
        assert get(store, [1, 2, 99]) == [payload_of(1), Absence.MISS, Absence.MISS]


def test_what_a_crash_left_in_the_newest_segment_is_cut_away(tmp_path: Path) -> None:
    """A copy of the directory is what a killed process leaves: a segment with all its space, and one torn record."""
    live, after = tmp_path / "live", tmp_path / "after"
    with opened(live) as store:
        put(store, range(4))
        shutil.copytree(live, after)
    flip(segments(after)[0], PAGE_NBYTES + 4 * RECORD_NBYTES - 9)
    with opened(after) as store:
        usage = store.usage()
        assert usage["torn_records"] == 1
        assert usage["used_nbytes"] == align(PAGE_NBYTES + 3 * RECORD_NBYTES, PAGE_NBYTES)
        assert segments(after)[0].stat().st_size == usage["used_nbytes"]
        assert get(store, range(4)) == [payload_of(0), payload_of(1), payload_of(2), Absence.MISS]


def test_a_torn_record_in_the_middle_stays_gone_when_its_segment_is_no_longer_the_newest(tmp_path: Path) -> None:
    """Payloads are read in the newest segment only, so that what was found there has to be marked."""
    with opened(tmp_path) as store:
        put(store, range(6))
    flip(segments(tmp_path)[0], PAGE_NBYTES + 2 * RECORD_NBYTES - 9)
    with opened(tmp_path) as store:
        assert store.contains([key_of(n) for n in range(3)]) == [True, False, True]
        put(store, range(10, 20))
    with opened(tmp_path) as store:
        assert store.usage()["torn_records"] == 0
        assert get(store, range(3)) == [payload_of(0), Absence.MISS, payload_of(2)]


def test_a_segment_cut_while_it_is_open_costs_only_the_records_that_are_gone(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, range(6))
        os.truncate(segments(tmp_path)[0], PAGE_NBYTES + 4 * RECORD_NBYTES - 9)
        buffers = [memoryview(bytearray(LAYOUT.nbytes)) for _ in range(6)]
        answers = store.backend.get_into([key_of(n) for n in range(6)], buffers)
        assert answers == [header_of(0), header_of(1), header_of(2), *[Absence.CORRUPT] * 3]
        assert get(store, range(6)) == [payload_of(0), payload_of(1), payload_of(2), *[Absence.CORRUPT] * 3]
        assert put(store, [3]) == [True]
        assert get(store, [3]) == [payload_of(3)]


def test_leftovers_of_a_crash_are_swept_and_other_files_are_not(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, [1])
    leftover = tmp_path / "segment-0000000000000007.kvr.tmp"
    leftover.write_bytes(b"x")
    notes = tmp_path / "notes.tmp"
    notes.write_bytes(b"mine")
    with opened(tmp_path):
        assert not leftover.exists()
        assert notes.read_bytes() == b"mine"


def test_the_quota_drops_the_segment_that_was_used_least_recently(tmp_path: Path) -> None:
    """Three segments of six records fit; the first is read, so that the second goes."""
    with opened(tmp_path, quota_nbytes=3 * SEGMENT_NBYTES) as store:
        put(store, range(18))
        get(store, [2])
        put(store, [18])
        there = store.contains([key_of(n) for n in range(19)])
        assert [n for n in range(19) if not there[n]] == list(range(6, 12))
        assert store.usage()["dropped_segments"] == 1
    with opened(tmp_path, quota_nbytes=2 * SEGMENT_NBYTES) as store:
        assert store.contains([key_of(n) for n in (2, 12, 18)]) == [False, True, True]
        assert store.usage()["used_nbytes"] <= 2 * SEGMENT_NBYTES


def test_a_record_larger_than_a_segment_gets_a_segment_of_its_own(tmp_path: Path) -> None:
    backend = FileStore(tmp_path, quota_nbytes=1 << 20, segment_nbytes=SEGMENT_NBYTES)
    large = 5 * SEGMENT_NBYTES + 3
    headers = [header_of(1), header_of(2, large)]
    assert backend.put(headers, [payload_of(1), payload_of(2, large)]) == headers
    backend.close()
    backend = FileStore(tmp_path, quota_nbytes=1 << 20, segment_nbytes=SEGMENT_NBYTES)
    buffers = [memoryview(bytearray(large)), memoryview(bytearray(LAYOUT.nbytes))]
    assert backend.get_into([key_of(2), key_of(1)], buffers) == [header_of(2, large), header_of(1)]
    assert bytes(buffers[0]) == payload_of(2, large)
    backend.close()


# Other writers, other formats.


def test_a_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, [1])
        done = child(FILL, str(tmp_path))
        assert done.returncode == 1
        assert f"StoreLockedError: {tmp_path}: process {os.getpid()} writes this store" in done.stderr
        with pytest.raises(StoreLockedError, match=str(os.getpid())):
            FileStore(tmp_path)
        assert get(store, [1]) == [payload_of(1)]
    done = child(FILL + "assert get(store, [1]) == [payload_of(1)]\nstore.close()\n", str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_directory_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreFormatError, match=r"directory: wanted a kvroute store .* got 1 other entries.*thesis.tex"):
        FileStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def rewrite(path: Path, change: Callable[[bytearray], None]) -> None:
    raw = bytearray(path.read_bytes())
    change(raw)
    path.write_bytes(raw)


def junk(raw: bytearray) -> None:
    raw[:] = b"junk" * 5000


def set_version(raw: bytearray) -> None:
    raw[8] = 9


def cut(raw: bytearray) -> None:
    del raw[20:]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("kvroute.store", cut, "size: wanted 64 bytes, got 20"),
        ("kvroute.store", set_version, "version: wanted 3 or 4, got 9"),
        ("segment-0000000000000001.kvr", junk, "magic: wanted b'KVRSEGMT', got b'junkjunk'"),
    ],
)
def test_a_foreign_file_is_named_and_left_alone(
    tmp_path: Path, name: str, change: Callable[[bytearray], None], message: str
) -> None:
    with opened(tmp_path) as store:
        put(store, range(8))
    rewrite(tmp_path / name, change)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "kvroute.lock"}
    with pytest.raises(StoreFormatError, match=message) as caught:
        FileStore(tmp_path)
    assert name in str(caught.value)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "kvroute.lock"}


def test_a_segment_of_another_store_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, [1])
    foreign = pack_segment_page(1, b"x" * 16, None)
    rewrite(segments(tmp_path)[0], lambda raw: raw.__setitem__(slice(0, PAGE_NBYTES), foreign))
    with pytest.raises(StoreFormatError, match="store id"):
        FileStore(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, PAGE_NBYTES - 1])
def test_a_segment_cut_into_its_header_page_is_gone_and_counted(tmp_path: Path, keep: int) -> None:
    with opened(tmp_path) as store:
        put(store, range(8))
    os.truncate(segments(tmp_path)[0], keep)
    with opened(tmp_path) as store:
        assert store.contains([key_of(0), key_of(6)]) == [False, True]
        assert store.usage()["damaged_segments"] == 1


@pytest.mark.parametrize("offset", [0, 2000])
def test_a_damaged_header_page_costs_no_record(tmp_path: Path, offset: int) -> None:
    with opened(tmp_path) as store:
        put(store, range(8))
    flip(segments(tmp_path)[0], offset)
    with opened(tmp_path) as store:
        assert get(store, range(8)) == [payload_of(n) for n in range(8)]
        assert store.usage()["damaged_segments"] == 1
    with opened(tmp_path) as store:  # the page was written anew, so that damage does not add up
        assert store.usage()["damaged_segments"] == 0


def test_a_path_that_is_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot open"):
        FileStore(tmp_path / "file")


@pytest.mark.parametrize(
    ("quota", "segment", "field"),
    [(1 << 20, 1 << 20, "quota"), (1 << 40, 1 << 20, "quota"), (1 << 20, 100, "segment"), (1 << 20, 20_000, "segment")],
)
def test_a_quota_that_does_not_fit_its_segments_is_a_config_error(
    tmp_path: Path, quota: int, segment: int, field: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: wanted"):
        FileStore(tmp_path, quota_nbytes=quota, segment_nbytes=segment)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("quota", [64 << 10, 1 << 20, 100 << 20, 4 << 30, 7 << 40])
def test_the_segment_size_that_goes_with_a_quota_is_one_the_store_takes(tmp_path: Path, quota: int) -> None:
    segment = default_segment_nbytes(quota)
    FileStore(tmp_path, quota_nbytes=quota, segment_nbytes=segment).close()

"""A check of a file store finds whatever is wrong, repairs it once, and never costs a sound record."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from budget import examples
from faulty_disk import FaultyDisk
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import StorageError, StoreLockedError
from cache_manager.ports import Absence
from cache_manager.record import pack_header
from cache_manager.storage.disk import SystemDisk
from cache_manager.storage.file import fsck
from cache_manager.storage.file.directory import StoreDirectory
from cache_manager.storage.file.segment import ENTRY_NBYTES, PAGE_NBYTES, pack_index, read_index
from cache_manager.testing.records import get, header_of, key_of, payload_of, put
from kvroute.cli import FAILED, USAGE, main
from tests.storage.file_stores import (
    HEADER_NBYTES,
    RECORD_NBYTES,
    RECORDS,
    at,
    filled,
    flip,
    opened,
    reading,
    segments,
)


def served(directory: Path) -> set[int]:
    """The numbers that a writer serves from a copy; their bytes are checked."""
    copy = directory.with_name(directory.name + "-copy")
    shutil.copytree(directory, copy)
    with opened(copy) as store:
        answers = get(store, range(RECORDS))
    shutil.rmtree(copy)
    found = {n for n, answer in enumerate(answers) if not isinstance(answer, Absence)}
    assert all(answers[n] == payload_of(n) for n in found)
    return found


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "kvroute.lock"}


def test_a_sound_store_is_sound_and_is_not_touched(tmp_path: Path) -> None:
    before = contents(filled(tmp_path))
    for repair in (False, True):
        report = fsck(tmp_path, repair=repair)
        assert report.sound
        assert report.total("records") == RECORDS - 2
        assert report.total("deleted") == 2
        assert report.total("nbytes") == sum(path.stat().st_size for path in segments(tmp_path))
        assert contents(tmp_path) == before


def payload_flip(directory: Path) -> None:
    flip(segments(directory)[0], at(2) + HEADER_NBYTES + 1000)


def header_flip(directory: Path) -> None:
    flip(segments(directory)[0], at(2) + 40)


def header_loss(directory: Path) -> None:
    for offset in (40, 50):
        flip(segments(directory)[0], at(2) + offset)


def newest_flip(directory: Path) -> None:
    """Of a segment without an index: its journal says where the next record begins."""
    flip(segments(directory)[2], at(0) + 40)


def torn_tail(directory: Path) -> None:
    os.truncate(segments(directory)[2], at(1) + HEADER_NBYTES + 100)


def torn_payload(directory: Path) -> None:
    flip(segments(directory)[2], at(1) + HEADER_NBYTES + 100)


def page_flip(directory: Path) -> None:
    flip(segments(directory)[1], 30)


def page_loss(directory: Path) -> None:
    os.truncate(segments(directory)[1], 100)


def unfinished(directory: Path) -> None:
    (directory / "segment-00000000000000aa.kvr.tmp").write_bytes(b"half")


@pytest.mark.parametrize(
    ("harm", "finding", "lost"),
    [
        (payload_flip, {"corrupt": 1}, {2}),
        (header_flip, {"corrupt": 1}, {2}),
        (header_loss, {"corrupt": 1}, {2}),
        (newest_flip, {"lost_nbytes": RECORD_NBYTES}, {12}),
        (torn_tail, {"torn": 1}, {13}),
        (torn_payload, {"torn": 1}, {13}),
        (page_flip, {"page_damaged": 1}, set()),
        (page_loss, {"page_missing": 1}, {6, 7, 8, 10, 11}),
        (unfinished, {}, set()),
    ],
)
def test_what_is_wrong_is_named_repaired_and_then_right(
    tmp_path: Path, harm: Callable[[Path], None], finding: dict[str, int], lost: set[int]
) -> None:
    """A report changes nothing; a repair costs the damaged record only, and a second one finds nothing to do."""
    harm(filled(tmp_path))
    before = contents(tmp_path)
    report = fsck(tmp_path)
    assert contents(tmp_path) == before
    assert not report.sound
    counts = ("corrupt", "lost_nbytes", "torn", "page_damaged", "page_missing")
    found = {count: report.total(count) for count in counts if report.total(count)}
    assert found.keys() == finding.keys()
    assert all(finding[count] - 8 < found[count] <= finding[count] for count in found)  # a payload may end in zeros
    assert report.leftovers == (("segment-00000000000000aa.kvr.tmp",) if harm is unfinished else ())
    repaired = fsck(tmp_path, repair=True)
    assert repaired.segments == report.segments
    assert served(tmp_path) == set(range(RECORDS)) - {3, 9} - lost
    after = contents(tmp_path)
    for repair in (False, True):
        assert fsck(tmp_path, repair=repair).sound
        assert contents(tmp_path) == after
    with opened(tmp_path) as store:
        assert all(put(store, range(RECORDS)))
        assert get(store, range(RECORDS)) == [payload_of(n) for n in range(RECORDS)]


def another_field(header: bytearray) -> None:
    header[72] ^= 1  # a bit of the generation; the sums stay


def another_header(header: bytearray) -> None:
    header[72] ^= 1
    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")


def another_version(header: bytearray) -> None:
    header[4] ^= 1
    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")


def unharmed(_: bytearray) -> None:
    pass


@pytest.mark.parametrize(
    ("harm", "named_key", "named_sum"),
    [
        (another_field, 2, False),
        (another_header, 2, False),
        (another_version, 2, True),
        (unharmed, 99, True),
    ],
)
def test_a_record_is_sound_only_with_the_very_header_that_its_index_names(
    tmp_path: Path, harm: Callable[[bytearray], None], named_key: int, named_sum: bool
) -> None:
    """Goal: each thing that is compared counts. Method: a header and its index that differ in that thing alone.

    The index names a key, and the sum that the header ended in when it was put or, with ``named_sum``, ends in now.
    """
    path = segments(filled(tmp_path))[0]
    raw, store_id = bytearray(path.read_bytes()), StoreDirectory.existing(tmp_path).store_id
    with path.open("rb") as file:
        found = read_index(SystemDisk(), file.fileno(), len(raw), 1, store_id)
    assert found is not None
    rows, states, end = found
    header = raw[at(2) : at(2) + HEADER_NBYTES]
    harm(header)
    raw[at(2) : at(2) + HEADER_NBYTES] = header
    rows[2 * ENTRY_NBYTES : 2 * ENTRY_NBYTES + 32] = key_of(named_key)
    if named_sum:
        rows[3 * ENTRY_NBYTES - 4 : 3 * ENTRY_NBYTES] = header[-4:]
    raw[end:] = pack_index(1, store_id, end, rows, states)
    path.write_bytes(raw)
    assert [segment.corrupt for segment in fsck(tmp_path).segments] == [1, 0, 0]
    fsck(tmp_path, repair=True)
    assert served(tmp_path) == set(range(RECORDS)) - {2, 3, 9}
    assert fsck(tmp_path).sound


@examples(150)
@given(
    harms=st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(["flip", "cut", "zero", "junk"]), st.floats(0, 1), st.integers(0, 7)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_repair_never_costs_a_sound_record_and_is_done_once(
    tmp_path_factory: pytest.TempPathFactory, harms: list[tuple[int, str, float, int]]
) -> None:
    """Any damage anywhere; what a store serves before the repair it serves after it, and the next report is clean."""
    directory = filled(tmp_path_factory.mktemp("fsck") / "store")
    paths = segments(directory)
    for which, kind, share, bit in harms:
        raw = bytearray(paths[which].read_bytes())
        if not raw:
            continue
        offset = min(int(share * len(raw)), len(raw) - 1)
        if kind == "flip":
            raw[offset] ^= 1 << bit
        elif kind == "cut":
            del raw[offset:]
        elif kind == "zero":
            raw[offset : offset + 64] = bytes(len(raw[offset : offset + 64]))
        else:
            raw[offset : offset + 64] = np.random.default_rng(bit).bytes(len(raw[offset : offset + 64]))
        paths[which].write_bytes(raw)
    before, report = contents(directory), fsck(directory)
    assert contents(directory) == before
    refused = any(segment.refused for segment in report.segments)
    if refused:  # the first bytes are no segment's: left alone, and no store opens
        fsck(directory, repair=True)
        assert [segment.refused for segment in fsck(directory).segments if segment.refused]
        return
    there = served(directory)
    fsck(directory, repair=True)
    assert there <= served(directory)
    again = fsck(directory, repair=True)
    assert again.sound
    assert again.total("records") == len(served(directory))


@examples(80)
@given(
    which=st.integers(0, 2),
    offset=st.integers(PAGE_NBYTES, PAGE_NBYTES + 6 * RECORD_NBYTES - 1),
    bit=st.integers(0, 7),
    repaired=st.booleans(),
)
def test_one_flipped_bit_costs_one_record_at_most(
    tmp_path_factory: pytest.TempPathFactory, which: int, offset: int, bit: int, repaired: bool
) -> None:
    """In any segment, with an index or without one, and whether a repair or an opening comes first."""
    directory = filled(tmp_path_factory.mktemp("bit") / "store")
    path = segments(directory)[which]
    raw = bytearray(path.read_bytes())
    raw[offset % len(raw)] ^= 1 << bit
    path.write_bytes(raw)
    if repaired:
        fsck(directory, repair=True)
    victim = 6 * which + (offset % len(raw) - PAGE_NBYTES) // RECORD_NBYTES
    assert served(directory) >= set(range(RECORDS)) - {3, 9, victim}
    assert fsck(directory).sound or not repaired


@pytest.mark.parametrize("bit", range(8))
def test_a_deleted_record_does_not_come_back_by_a_flipped_bit(tmp_path: Path, bit: int) -> None:
    """Alive and deleted are two bits apart, so that one more wrong bit may look like either; deleted it stays."""
    path = segments(filled(tmp_path))[0]
    raw = bytearray(path.read_bytes())
    raw[at(3) + 3] ^= 1 << bit
    path.write_bytes(raw)
    fsck(tmp_path, repair=True)
    assert served(tmp_path) == set(range(RECORDS)) - {3, 9}
    assert fsck(tmp_path).sound


def test_a_segment_of_another_store_is_named_and_left_alone(tmp_path: Path) -> None:
    filled(tmp_path / "one")
    filled(tmp_path / "two")
    target = tmp_path / "two" / segments(tmp_path / "one")[1].name
    shutil.copy(segments(tmp_path / "one")[1], target)
    before = target.read_bytes()
    (tmp_path / "two" / "notes.txt").write_text("mine")
    report = fsck(tmp_path / "two", repair=True)
    assert not report.sound
    assert "store id" in str(report.segments[1].refused)
    assert report.foreign == ("notes.txt",)
    assert target.read_bytes() == before
    assert "1 files are not this store's" in report.to_text()
    assert not fsck(tmp_path / "two").sound


def test_a_check_beside_a_writer_reads_and_a_repair_is_refused(tmp_path: Path) -> None:
    """What is half written at the end of the newest segment is the writer's business; all else is judged."""
    with opened(tmp_path) as store:
        put(store, range(8))
        raw = bytearray(segments(tmp_path)[1].read_bytes())
        raw[at(8) : at(8) + 200] = pack_header(header_of(8)) + payload_of(8)[: 200 - HEADER_NBYTES]
        segments(tmp_path)[1].write_bytes(raw)
        report = fsck(tmp_path)
        assert report.sound
        assert str(os.getpid()) in str(report.writer)
        flip(segments(tmp_path)[0], at(1) + HEADER_NBYTES)
        assert not fsck(tmp_path).sound
        with pytest.raises(StoreLockedError, match=f"process {os.getpid()} writes this store"):
            fsck(tmp_path, repair=True)
        assert main(["fsck", str(tmp_path), "--repair"]) == USAGE
        assert main(["fsck", str(tmp_path)]) == FAILED


def test_a_writer_that_opens_during_a_check_is_told_so(tmp_path: Path) -> None:
    filled(tmp_path)
    tried: list[str] = []

    class Meddling(FaultyDisk):
        def preadv(self, fd: int, buffers: object, offset: int) -> int:
            if not tried:
                with pytest.raises(StoreLockedError) as caught, opened(tmp_path):
                    raise AssertionError("opened")
                tried.append(str(caught.value))
                with reading(tmp_path) as reader:
                    assert get(reader, [0]) == [payload_of(0)]
            return super().preadv(fd, buffers, offset)  # type: ignore[arg-type]

    assert fsck(tmp_path, disk=Meddling()).sound
    assert "kvroute fsck" in tried[0]
    with opened(tmp_path):
        pass


def test_a_disk_that_fails_is_an_error(tmp_path: Path) -> None:
    filled(tmp_path)
    disk = FaultyDisk()
    disk.read_errno = errno.ENXIO
    with pytest.raises(StorageError, match="cannot check the store"):
        fsck(tmp_path, disk=disk)
    disk.read_errno = errno.EIO  # of every sector
    report = fsck(tmp_path, disk=disk)
    assert (report.sound, report.total("records"), len(report.segments)) == (False, 0, 3)

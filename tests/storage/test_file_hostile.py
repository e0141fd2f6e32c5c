"""Directories that somebody else has prepared: no call waits for them, reads without end, or writes elsewhere."""

from __future__ import annotations

import os
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cache_manager.errors import StorageError, StoreFormatError
from cache_manager.ports import Absence
from cache_manager.record import pack_header
from cache_manager.storage.disk import SystemDisk
from cache_manager.storage.file import FileReader, FileStore, fsck
from cache_manager.storage.file.recovery import read_on
from cache_manager.storage.file.segment import ENTRY_NBYTES, FRAME_NBYTES, PAGE_NBYTES, UNSOUND, pack_index
from cache_manager.testing.records import LAYOUT, get, header_of, key_of, payload_of, put
from tests.storage.file_stores import opened, segments

OPENERS: list[Callable[[Path], object]] = [
    FileStore,
    FileReader,
    fsck,
    lambda path: fsck(path, repair=True),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("opener", OPENERS, ids=["writer", "reader", "fsck", "repair"])
@pytest.mark.parametrize("name", ["kvroute.store", "kvroute.lock", "segment-00000000000000ff.kvr"])
def test_a_pipe_in_a_files_place_is_an_error_and_not_waited_for(
    tmp_path: Path, name: str, opener: Callable[[Path], object]
) -> None:
    """Goal: no open() that blocks. Method: a pipe that nobody writes, where a store has a file."""
    with opened(tmp_path) as store:
        put(store, range(3))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    if opener is FileReader and name == "kvroute.lock":
        FileReader(tmp_path).close()  # it takes no lock
        return
    with pytest.raises(StorageError, match="not a regular file"):
        opener(tmp_path)


@pytest.mark.parametrize("opener", OPENERS, ids=["writer", "reader", "fsck", "repair"])
def test_a_marker_larger_than_memory_is_no_marker(tmp_path: Path, opener: Callable[[Path], object]) -> None:
    with opened(tmp_path):
        pass
    os.truncate(tmp_path / "kvroute.store", 1 << 42)
    with pytest.raises(StoreFormatError, match="size: wanted 64 bytes"):
        opener(tmp_path)


def test_a_store_is_made_where_it_is_and_not_behind_a_link(tmp_path: Path) -> None:
    """Goal: opening a directory writes nothing outside of it. Method: a link where the marker is written first."""
    victim, directory = tmp_path / "victim", tmp_path / "store"
    victim.write_text("precious")
    directory.mkdir()
    (directory / "kvroute.store.tmp").symlink_to(victim)
    with opened(directory) as store:
        put(store, range(2))
    assert victim.read_text() == "precious"
    with opened(directory) as store:
        assert get(store, range(2)) == [payload_of(0), payload_of(1)]


def test_a_payload_is_checked_in_pieces(tmp_path: Path) -> None:
    """Goal: memory is bounded, whatever a header says. Method: scan 64 MiB of holes behind a header."""
    header = msgspec.structs.replace(header_of(0), payload_nbytes=64 << 20)
    path = tmp_path / "segment"
    path.write_bytes(bytes(PAGE_NBYTES) + pack_header(header))
    os.truncate(path, 65 << 20)
    fd = os.open(path, os.O_RDONLY)
    tracemalloc.start()
    try:
        found = read_on(SystemDisk(), fd, 65 << 20, PAGE_NBYTES, payloads=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        os.close(fd)
    assert [entry.offset for entry in found.entries(UNSOUND)] == [PAGE_NBYTES]
    assert peak < 4 << 20


@pytest.mark.timeout(60)
def test_a_check_does_not_read_holes(tmp_path: Path) -> None:
    """Goal: what is not there costs nothing. Method: 4 TiB with a few pages, and one far away."""
    with opened(tmp_path) as store:
        put(store, range(3))
    path = segments(tmp_path)[0]
    used, far = path.stat().st_size, 1 << 41
    os.truncate(path, 1 << 42)
    assert fsck(tmp_path).sound
    with path.open("r+b") as file:
        file.seek(far)
        file.write(b"x")
    (report,) = fsck(tmp_path, repair=True).segments
    assert far - used < report.lost_nbytes <= far
    (aside,) = segments(tmp_path)
    assert (aside.suffix, aside.stat().st_size) == (".aside", 1 << 42)  # nothing is erased
    assert fsck(tmp_path).sound


@pytest.mark.parametrize("opener", OPENERS, ids=["writer", "reader", "fsck", "repair"])
def test_an_index_that_names_headers_too_short_to_be_any_is_no_index(
    tmp_path: Path, opener: Callable[[Path], object]
) -> None:
    """Goal: no stranger's file ends a call. Method: 68 bytes with a key and their own sum, and an index that fits."""
    with opened(tmp_path) as store:
        assert all(put(store, range(8)))
    path = segments(tmp_path)[0]
    raw = bytearray(path.read_bytes())
    page, frame = raw[:PAGE_NBYTES], raw[-FRAME_NBYTES:]
    end = int.from_bytes(frame[24:32], "little")
    rows = raw[end + FRAME_NBYTES : end + FRAME_NBYTES + 6 * ENTRY_NBYTES]
    first = raw[PAGE_NBYTES : PAGE_NBYTES + 64]
    sum_ = zlib.crc32(first).to_bytes(4, "little")
    raw[PAGE_NBYTES + 64 : PAGE_NBYTES + 68] = sum_
    rows[56:64] = (68).to_bytes(4, "little") + sum_
    raw[end:] = pack_index(1, bytes(page[24:40]), end, rows, bytes(6))
    path.write_bytes(raw)
    found = opener(tmp_path)
    if isinstance(found, FileStore | FileReader):
        assert found.get_into([key_of(0)], [memoryview(bytearray(LAYOUT.nbytes))]) == [Absence.MISS]
        found.close()

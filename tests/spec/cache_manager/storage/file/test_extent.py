"""What stands in an extent is believed with its sum, its place and its tick alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk
from stores import PER_EXTENT, SMALL_NBYTES, files, flip, opened, reading, there

from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.testing.records import BOTH, LAYOUT, Content, held, key_of, offer, put

PAGE_NBYTES = 4096


def test_a_payload_is_written_before_its_head(tmp_path: Path) -> None:
    """Method: the order of writes of a put, by their sizes: the payload, the head; where a record gave its slot, zeros
    over that one's head before them, and where it was deleted, too."""
    sizes, disk = list[int](), FaultyDisk()
    disk.on_written = lambda raw: sizes.append(len(raw))
    with opened(tmp_path, disk, quota_nbytes=SMALL_NBYTES) as store:
        for n in range(PER_EXTENT):
            put(store, [n])
            sizes[:] = sizes if n else sizes[1:]  # of the extent's own page
        assert sizes == [4608, 112] * PER_EXTENT
        sizes.clear()
        put(store, [50])
        assert sizes == [112, 4608, 112]
        store.backend.delete([key_of(50)])
        put(store, [51])
        assert sizes[3:] == [112, 4608, 112]


def test_a_bit_of_a_head_costs_its_record_and_no_other(tmp_path: Path) -> None:
    """Goal: no field of a head is believed without its sum. Method: each byte of one head, and the store opened."""
    with opened(tmp_path / "s") as store:
        assert all(put(store, range(5)))
    (path,) = files(tmp_path / "s")
    start = path.read_bytes().index(key_of(2)) - 40
    for at in range(start, start + 112):
        flip(path, at)
        with opened(tmp_path / "s") as store:
            assert there(store, range(5)) == {0, 1, 3, 4}
        flip(path, at)
    with opened(tmp_path / "s") as store:
        assert there(store, range(5)) == set(range(5))


def test_a_head_of_another_extent_is_not_believed(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert all(put(store, range(PER_EXTENT + 1)))
    first, second = files(tmp_path)
    raw, other = bytearray(first.read_bytes()), second.read_bytes()
    at = raw.index(key_of(0)) - 40
    raw[at : at + 112] = other[at : at + 112]
    first.write_bytes(raw)
    second.unlink()
    with opened(tmp_path) as store:
        assert there(store, range(PER_EXTENT + 1)) == set(range(1, PER_EXTENT))


def _newer(raw: bytearray) -> None:
    page = memoryview(raw)[:PAGE_NBYTES]
    page[8:10] = (99).to_bytes(2, "little")
    page[-4:] = zlib.crc32(page[:-4]).to_bytes(4, "little")


def _foreign(raw: bytearray) -> None:
    raw[:] = b"junk" * 4096


def _empty(raw: bytearray) -> None:
    raw.clear()


@pytest.mark.parametrize(("harm", "why"), [(_newer, "version"), (_foreign, "magic"), (_empty, "page")])
def test_a_file_that_is_no_extent_is_refused_by_name_and_the_rest_serves(
    tmp_path: Path, harm: Callable[[bytearray], None], why: str
) -> None:
    with opened(tmp_path) as store:
        assert all(put(store, range(PER_EXTENT + 3)))
    path = files(tmp_path)[0]
    raw = bytearray(path.read_bytes())
    harm(raw)
    path.write_bytes(raw)
    for look in (reading, opened):
        with look(tmp_path) as store:  # type: ignore[operator]
            assert there(store, range(PER_EXTENT + 3)) == set(range(PER_EXTENT, PER_EXTENT + 3))
            assert store.usage()["refused_files"] == 1
            (refusal,) = store.backend.refused.values()  # type: ignore[attr-defined]
            assert why in refusal.why
            assert path.name in refusal.why
    assert path.read_bytes() == raw


def test_of_two_copies_of_a_record_the_newer_one_is_served(tmp_path: Path) -> None:
    """Goal: the newer tick decides. Method: the older head is put back into the file, as a power cut may leave it."""
    with opened(tmp_path) as store:
        for origin in (1, 2):
            assert offer(store.backend, [(0, Content(origin, BOTH))], replace=True) == [Content(origin, BOTH)]
        (path,) = files(tmp_path)
        older = path.read_bytes()
        assert offer(store.backend, [(0, Content(3, BOTH))], replace=True) == [Content(3, BOTH)]
    at = older.index(key_of(0)) - 40
    raw = bytearray(path.read_bytes())
    raw[at : at + 112] = older[at : at + 112]
    path.write_bytes(raw)
    for look in (reading, opened):
        with look(tmp_path) as store:  # type: ignore[operator]
            assert held(store, [0]) == [Content(3, BOTH)]
    with opened(tmp_path) as store:  # the older copy has gone for good
        store.backend.delete([key_of(0)])
    with opened(tmp_path) as store:
        assert held(store, [0]) == [Absence.MISS]


def test_a_key_of_zeros_is_not_in_a_free_slot(tmp_path: Path) -> None:
    """Goal: what was not stored is not there. Method: a key like the head of a free slot, after that of the record
    before the slot: asked for together, of the writer and of a reader."""
    keys, room = [key_of(0), BlockKey(bytes(32))], memoryview(bytearray(LAYOUT.nbytes))
    with opened(tmp_path) as store, reading(tmp_path) as reader:
        assert all(put(store, [0]))
        for backend in (store.backend, reader.backend):
            assert backend.contains(keys) == [True, False]
            assert backend.get_into(keys, [memoryview(bytearray(LAYOUT.nbytes)), room])[1] is Absence.MISS
        store.backend.delete(keys[1:])
        assert all(put(store, range(1, 4)))
        assert there(store, range(4)) == {0, 1, 2, 3}

"""The file store: the contract of stores, and what it promises beside that."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from faulty_disk import FaultyDisk, VolatileDisk
from stores import PER_EXTENT, SMALL_NBYTES, files, flip, opened, reading, there

from cache_manager.errors import StorageError, StoreReadOnlyError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.storage.file import FileStore, Sync
from cache_manager.testing.contract import StorageContract
from cache_manager.testing.records import BOTH, LAYOUT, Content, get, held, key_of, offer, put

PAGE_NBYTES = 4096


class TestOneExtent(StorageContract):
    def make_backend(self, directory: Path, capacity_nbytes: int) -> FileStore:
        return FileStore(directory, quota_nbytes=capacity_nbytes)


class TestManyExtents(StorageContract):
    def make_backend(self, directory: Path, capacity_nbytes: int) -> FileStore:
        return FileStore(directory, quota_nbytes=capacity_nbytes, extent_nbytes=32 << 10)


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


def test_a_reader_finds_what_was_put_before_the_call_without_a_look_in_between(tmp_path: Path) -> None:
    with opened(tmp_path) as store, reading(tmp_path) as reader:
        for n in range(30):
            assert not there(reader, [n])
            assert all(put(store, [n]))
            assert reader.contains([key_of(n)]) == [True]
            assert there(reader, [n]) == {n}
        (tmp_path / "kvroute.lock").unlink()  # no call reports any more whether anything has
        assert all(put(store, [99]))
        assert there(reader, [99]) == {99}
        with pytest.raises(StoreReadOnlyError):
            put(reader, [1])


def test_a_slot_that_was_used_again_while_it_was_read_is_a_miss(tmp_path: Path) -> None:
    """Method: between a reader's look-up and its read the writer gives the slot to another record."""
    armed, disk = list[range](), FaultyDisk()
    disk.on_read = lambda: armed and put(store, armed.pop())
    with opened(tmp_path, quota_nbytes=SMALL_NBYTES) as store, reading(tmp_path, disk=disk) as reader:
        assert all(put(store, range(PER_EXTENT)))
        assert there(reader, range(PER_EXTENT)) == set(range(PER_EXTENT))
        armed.append(range(50, 50 + PER_EXTENT))
        assert get(reader, [3]) == [Absence.MISS]
        assert reader.counters.corrupt == 0
        assert there(reader, [50]) == {50}


def test_a_record_that_the_disk_does_not_give_is_a_counted_miss_while_it_does_not(tmp_path: Path) -> None:
    """Goal: no wrong row, no silence and no bookkeeping. Method: reads fail for a time, in which it is put again."""
    disk = FaultyDisk()
    with opened(tmp_path, disk) as store:
        assert all(put(store, range(3)))
        disk.read_errno = errno.EIO
        assert get(store, [1]) == [Absence.MISS]
        assert store.usage()["failed_reads"] == 1
        assert all(put(store, [1]))
        disk.read_errno = None
        assert there(store, range(3)) == set(range(3))
        assert store.usage()["records"] == 3


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


def test_files_are_for_their_owner_unless_the_url_says_otherwise(tmp_path: Path) -> None:
    for mode, directory_mode in ((0o600, 0o700), (0o644, 0o755)):
        with opened(tmp_path / str(mode), file_mode=mode) as store:
            assert all(put(store, [1]))
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / str(mode)).iterdir()}
        assert set(modes.values()) == {mode & ~_umask()}
        assert (tmp_path / str(mode)).stat().st_mode & 0o777 == directory_mode & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""The file store beside its readers: a directory that moves, a store that is not there yet, a writer that failed."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk
from stores import PER_EXTENT, SMALL_NBYTES, files, opened, put_others, reading, there
from waiting import GIVE_UP_S

from cache_manager.errors import StorageError, StoreLockedError
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, checksum
from cache_manager.storage.file import FileReader, FileStore
from cache_manager.storage.file.directory import CHANGES_MAX
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import BOTH, LAYOUT, Content, held, key_of, offer, put


def test_a_moved_directory_keeps_its_writer_and_its_readers(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as store, reading(tmp_path / "a") as reader:
        assert all(put(store, [1]))
        (tmp_path / "a").rename(tmp_path / "b")
        assert all(put(store, range(2, 2 * PER_EXTENT)))
        assert there(store, range(1, 4)) == {1, 2, 3}
        assert there(reader, [1]) == {1}
        with pytest.raises(StoreLockedError, match=str(os.getpid())):
            FileStore(tmp_path / "b")
        with opened(tmp_path / "a") as another:  # made anew at the old path
            assert all(put(another, [40]))
            assert there(reader, [40]) == {40}
            assert not there(reader, [1])
    assert len(files(tmp_path / "b")) == 2


def test_a_reader_may_wait_for_its_store(tmp_path: Path) -> None:
    with FileReader(tmp_path / "s", waits=True) as backend:
        reader = RecordStore(backend, LAYOUT)
        assert not there(reader, [1])
        with opened(tmp_path / "s") as store:
            assert all(put(store, [1]))
            assert there(reader, [1]) == {1}
            backend.delete([key_of(1)])
            assert not there(reader, [1])
            assert there(store, [1]) == {1}


def test_a_reader_that_is_far_behind_finds_everything(tmp_path: Path) -> None:
    """Method: more changes between two looks than the lock file holds, of which the first ones are deletions."""
    with opened(tmp_path, quota_nbytes=8 << 20) as store, reading(tmp_path) as reader:
        assert all(put(store, range(5)))
        assert there(reader, range(5)) == set(range(5))
        store.backend.delete([key_of(0)])
        for n in range(5, CHANGES_MAX + 10):
            assert all(put(store, [n]))
        assert there(reader, range(CHANGES_MAX + 10)) == set(range(1, CHANGES_MAX + 10))


def test_a_reader_finds_what_its_writer_found_when_it_was_opened(tmp_path: Path) -> None:
    """Goal: a reader finds every record that a put reports as stored. Method: a writer ends behind a head, before
    readers are told; the next one keeps that record when it is put again."""

    def ends(raw: bytes) -> None:
        if any(raw) and len(raw) == 112:
            raise OSError(errno.EIO, "the end")

    disk = FaultyDisk()
    with opened(tmp_path, disk) as store, reading(tmp_path) as reader:
        assert all(put(store, [1]))
        assert there(reader, [1]) == {1}
        disk.on_written = ends
        with pytest.raises(StorageError):
            put(store, [2])
        disk.write_budget_nbytes, disk.write_errno = 0, errno.EIO  # nor can the head be erased
        with pytest.raises(StorageError, match="erase"):
            store.backend.close()
        with opened(tmp_path) as after:
            assert all(put(after, [2]))
            assert there(reader, [1, 2]) == {1, 2}


def test_a_reader_knows_an_extent_from_an_earlier_one_of_its_name(tmp_path: Path) -> None:
    """Method: a store of one extent, whose layouts take turns."""
    with opened(tmp_path, quota_nbytes=SMALL_NBYTES) as store, reading(tmp_path) as reader:
        for n in range(0, 9, 3):
            assert all(put(store, [n]))
            assert there(reader, [n]) == {n}
            assert put_others(store, [n, n + 1]) == 2


def test_a_reader_sees_what_takes_the_place_of_a_deleted_record_after_a_restart(tmp_path: Path) -> None:
    """Method: the newest record is deleted, and the next writer puts another one into its slot."""
    with reading(tmp_path, waits=True) as reader:
        with opened(tmp_path) as store:
            assert all(put(store, [1]))
            assert there(reader, [1]) == {1}
            store.backend.delete([key_of(1)])
        with opened(tmp_path) as store:
            assert all(put(store, [2]))
            assert there(reader, [1, 2]) == {2}
            assert reader.contains([key_of(1), key_of(2)]) == [False, True]


def test_a_reader_finds_what_was_put_again_after_a_restart(tmp_path: Path) -> None:
    """Goal: a deleted record does not hide the next one of its key from a reader, whatever their ticks. Method:
    two keys change their slots with each opening; ticks begin at a random number."""
    with opened(tmp_path) as store:
        assert all(put(store, [0]) + put(store, [9]))
        store.backend.delete([key_of(0)])
    with reading(tmp_path) as reader:
        for n in range(16):
            with opened(tmp_path) as store:
                assert all(put(store, [n % 2]) + put(store, [1 - n % 2]))
                assert there(reader, [0, 1]) == {0, 1}
                store.backend.delete([key_of(0), key_of(1)])


def test_a_reader_finds_a_key_that_has_a_record_of_another_size_now(tmp_path: Path) -> None:
    """Goal: what a put has stored before a call, the call finds. Method: a reader that knows a record of one layout is
    asked for that of another, which was put under its key when the first was deleted."""
    with FileStore(tmp_path, quota_nbytes=1 << 20) as store, FileReader(tmp_path) as reader:
        for nbytes in (100, 200, 100):
            payload = bytes([nbytes]) * nbytes
            header = RecordHeader(key_of(1), bytes(15) + bytes([nbytes]), 1, 1, b"\1" * 8, nbytes, checksum(payload))
            assert store.put([header], [payload]) == [header]
            assert reader.get_into([key_of(1)], [memoryview(bytearray(nbytes))]) == [header]
            store.delete([key_of(1)])


def test_a_thread_that_misses_while_another_one_looks_asks_again(tmp_path: Path) -> None:
    """Goal: a call finds records that were put before it. Method: a look is held up in its middle; a second thread
    asks."""
    looks, goes_on = threading.Event(), threading.Event()
    found = list[set[int]]()

    def held_up() -> None:
        if armed and threading.current_thread().name == "looks":
            armed.pop()
            looks.set()
            assert goes_on.wait(GIVE_UP_S)

    armed, disk = list[int](), FaultyDisk()
    disk.on_read = held_up
    with opened(tmp_path) as store, reading(tmp_path, disk=disk) as reader:
        assert all(put(store, [1]))
        assert there(reader, [1]) == {1}
        assert all(put(store, [2]))
        armed.append(1)
        first = threading.Thread(target=lambda: there(reader, [3]), name="looks")
        second = threading.Thread(target=lambda: found.append(there(reader, [2])))
        first.start()
        assert looks.wait(GIVE_UP_S)
        second.start()
        second.join(0.2)  # it waits for the look, or has wrongly missed the record
        goes_on.set()
        first.join(GIVE_UP_S)
        second.join(GIVE_UP_S)
    assert found == [{2}]


@pytest.mark.parametrize("when", ["at opening", "later"])
def test_an_extent_that_cannot_be_read_is_refused_by_name_and_the_rest_serves(tmp_path: Path, when: str) -> None:
    """Goal: a reader misses the records of one extent, only as long as the disk does not give its heads, and opens it
    again once a second. Method: reads of its heads fail when it is opened, or when the writer has changed one."""
    disk, now = FaultyDisk(), [1e9]
    wanted = set(range(2 * PER_EXTENT))
    with opened(tmp_path) as store:
        assert all(put(store, sorted(wanted)))
        disk.bad_file = files(tmp_path)[0].name
        disk.bad = range(4096, 4097) if when == "at opening" else range(0)
        with reading(tmp_path, disk=disk, clock=lambda: now[0]) as reader:
            if when == "later":
                assert there(reader, sorted(wanted)) == wanted
                disk.bad = range(4096, 4097)
                store.backend.delete([key_of(0)])
                wanted -= {0}
                assert not reader.contains([key_of(0)])[0]
            assert there(reader, sorted(wanted)) == set(range(PER_EXTENT, 2 * PER_EXTENT))
            assert reader.usage()["refused_files"] == 1
            assert all(put(store, [50, 51]))  # one of them may get the slot of the deleted one
            assert 51 in there(reader, [50, 51])
            disk.reads = 0
            assert not there(reader, [1])
            assert not disk.reads
            ((name, refusal),) = reader.backend.refused.items()  # type: ignore[attr-defined]
            assert name == disk.bad_file
            assert "Input/output error" in refusal.why
            disk.bad = range(0)
            now[0] += 1
            assert there(reader, [*sorted(wanted), 50, 51]) == {*wanted, 50, 51}
            assert reader.usage()["refused_files"] == 0


def test_a_record_that_may_come_back_is_not_said_to_be_deleted(tmp_path: Path) -> None:
    """A bug that was found: a writer whose disk did not give heads deleted a record that was in them, and the next
    writer served it. Method: reads fail of the heads of the first extent, while a store is opened."""
    disk, wanted = FaultyDisk(), range(2 * PER_EXTENT)
    with opened(tmp_path) as store:
        assert all(put(store, wanted))
    disk.bad, disk.bad_file = range(4096, 4097), files(tmp_path)[0].name
    with opened(tmp_path, disk) as store:
        assert store.usage()["refused_files"] == 1
        assert there(store, wanted) == set(wanted[PER_EXTENT:])
        store.backend.delete([key_of(PER_EXTENT), key_of(PER_EXTENT + 1)])
        for deleted in ([1], [PER_EXTENT + 2, 1]):
            with pytest.raises(StorageError, match=disk.bad_file):
                store.backend.delete([key_of(n) for n in deleted])
        assert there(store, wanted) == set(wanted[PER_EXTENT + 3 :])
        assert all(put(store, [50]))
    with opened(tmp_path) as store:
        gone = {PER_EXTENT, PER_EXTENT + 1, PER_EXTENT + 2}
        assert there(store, [*wanted, 50]) == {*wanted, 50} - gone


def test_a_disk_that_gives_nothing_is_asked_a_few_times(tmp_path: Path) -> None:
    """Goal: with a dead disk a miss makes a few reads. Method: 5,000 records are new to a
    reader that has only seen the first; then the disk is back."""
    disk, now = FaultyDisk(), [1e9]
    with (
        opened(tmp_path, quota_nbytes=256 << 20, extent_nbytes=128 << 20) as store,
        reading(tmp_path, disk=disk, clock=lambda: now[0]) as reader,
    ):
        assert all(put(store, [0]))
        assert there(reader, [0])
        for first in range(1, 5_001, 1000):
            assert all(put(store, range(first, first + 1000)))
        disk.bad, disk.reads = range(4096, 1 << 40), 0
        assert not there(reader, [5_000])
        assert disk.reads < 30
        disk.bad = range(0)
        now[0] += 1
        assert there(reader, range(5_001)) == set(range(5_001))


def test_a_reader_serves_nothing_of_an_extent_that_was_dropped(tmp_path: Path) -> None:
    """A bug that was found: a reader went on with the records of an extent that the writer had dropped, also those
    that were deleted, or put anew under another origin, until another key was missing. Method: another layout takes the
    room of the only extent."""
    with opened(tmp_path, quota_nbytes=SMALL_NBYTES) as store, reading(tmp_path) as reader:
        assert offer(store.backend, [(1, Content(1, BOTH))], replace=False) == [Content(1, BOTH)]
        assert held(reader, [1]) == [Content(1, BOTH)]
        assert put_others(store, [1]) == 1
        store.backend.delete([key_of(1)])
        assert held(reader, [1]) == [Absence.MISS]
        assert offer(store.backend, [(1, Content(2, BOTH))], replace=False) == [Content(2, BOTH)]
        assert held(reader, [1]) == [Content(2, BOTH)]


@pytest.mark.parametrize("how", ["deleted", "dropped", "moved"])
def test_a_reader_knows_at_once_that_a_record_is_gone(tmp_path: Path, how: str) -> None:
    """Goal: ``contains`` of a reader is what the writer has, without a read in between. Method: the record is deleted,
    its extent is dropped for another layout, or another store is made in the directory's place."""
    home = tmp_path / "s"
    with opened(home, quota_nbytes=SMALL_NBYTES) as store, reading(home) as reader:
        assert all(put(store, [1]))
        assert reader.contains([key_of(1)]) == [True]
        if how == "deleted":
            store.backend.delete([key_of(1)])
        elif how == "dropped":
            assert put_others(store, [1]) == 1
        else:
            home.rename(tmp_path / "moved")
            with opened(home):
                assert reader.contains([key_of(1)]) == [False]
        assert how == "moved" or store.contains([key_of(1)]) == [False]
        assert reader.contains([key_of(1)]) == [False]


def test_a_look_that_failed_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: one error of the disk hides no record. Method: the directory cannot be listed when the reader looks for the
    writer's new extent; nothing changes after that."""
    with opened(tmp_path) as store, reading(tmp_path) as reader:
        assert not there(reader, [1])
        assert all(put(store, [1]))
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", _raises)
            assert not there(reader, [1])
        assert there(reader, [1]) == {1}


def _raises(*_: object) -> list[str]:
    raise OSError(errno.EIO, "on purpose")

"""The file store beside its readers: a directory that moves, a store that is not there yet, a writer that failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk

from cache_manager.errors import StorageError, StoreLockedError
from cache_manager.record import Buffer
from cache_manager.storage.file import FileReader, FileStore
from cache_manager.storage.file.directory import CHANGES_MAX
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, key_of, put
from tests.storage.stores import files, opened, reading
from tests.storage.test_file import PER_EXTENT, there


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
    """Goal: what a put says is stored, a reader finds. Method: a writer ends behind a head, before readers are told;
    the next one keeps that record when it is put again."""
    armed = False

    class Disk(FaultyDisk):
        def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
            written = super().pwritev(fd, buffers, offset)
            if armed and any(b"".join(buffers)) and written == 112:
                raise OSError(errno.EIO, "the end")
            return written

    with opened(tmp_path, Disk()) as store, reading(tmp_path) as reader:
        assert all(put(store, [1]))
        assert there(reader, [1]) == {1}
        armed = True
        with pytest.raises(StorageError):
            put(store, [2])
        store.backend.close()
        with opened(tmp_path) as after:
            assert all(put(after, [2]))
            assert there(reader, [1, 2]) == {1, 2}

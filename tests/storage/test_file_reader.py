"""Readers of a file store beside its writer: right or missing, whatever the writer does, and never a byte written."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from cache_manager.errors import (
    ConfigError,
    StorageError,
    StoreClosedError,
    StoreFormatError,
    StoreMissingError,
    StoreReadOnlyError,
)
from cache_manager.ports import Absence
from cache_manager.record import RecordHeader, checksum, header_nbytes, pack_header
from cache_manager.storage import open_store
from cache_manager.storage.file import FileReader, FileStore
from cache_manager.storage.file.segment import PAGE_NBYTES
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, get, header_of, key_of, payload_of, put, valid_of
from tests.storage.file_stores import RECORD_NBYTES, SEGMENT_NBYTES, Clock, child, flip, opened, reading, segments
from tests.storage.kills import begin_lives

MISSING = Absence.MISS
NEVER = 1e9


def snapshot(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()}


def test_what_the_writer_drops_stays_readable_until_the_reader_looks(tmp_path: Path) -> None:
    """The files are gone from the directory; the reader's descriptors keep the bytes, and then let them go."""
    with opened(tmp_path, quota_nbytes=2 * SEGMENT_NBYTES) as store:
        put(store, range(6))
        with reading(tmp_path, refresh_s=NEVER) as reader:
            put(store, range(6, 24))
            assert not any(store.contains([key_of(n) for n in range(6)]))
            assert get(reader, range(6)) == [payload_of(n) for n in range(6)]
            before = len(os.listdir("/proc/self/fd"))
            reader.backend.refresh()  # type: ignore[attr-defined]
            assert get(reader, range(6)) == [MISSING] * 6
            assert get(reader, [18, 23]) == [payload_of(18), payload_of(23)]
            assert reader.usage()["used_nbytes"] == store.usage()["used_nbytes"]
            assert len(os.listdir("/proc/self/fd")) <= before + 1  # one gone, two come
            assert reader.counters.corrupt == 0


def test_a_reader_in_use_lets_dropped_segments_go_after_a_while(tmp_path: Path) -> None:
    """It has no miss that would make it look."""
    ticks = Clock(0.0)
    with opened(tmp_path, quota_nbytes=2 * SEGMENT_NBYTES) as store:
        put(store, range(7))
        with reading(tmp_path, ticks=ticks) as reader:
            put(store, range(7, 18))
            assert get(reader, [1, 6]) == [payload_of(1), payload_of(6)]
            ticks.now_s = 60.0
            assert get(reader, [1, 6]) == [payload_of(1), payload_of(6)]
            assert get(reader, [1, 6]) == [MISSING, payload_of(6)]


def test_a_record_that_the_writer_deletes_is_a_miss_for_readers_at_once(tmp_path: Path) -> None:
    """And is there again when it was stored anew, which it is in another place."""
    with opened(tmp_path) as store:
        put(store, range(8))
        with reading(tmp_path, refresh_s=NEVER) as reader:
            store.backend.delete([key_of(1), key_of(7)])
            assert get(reader, [0, 1, 2, 7]) == [payload_of(0), MISSING, payload_of(2), MISSING]
            assert reader.contains([key_of(1)]) == [False]
            assert reader.counters.corrupt == 0
            put(store, [1])
            reader.backend.refresh()  # type: ignore[attr-defined]
            assert get(reader, [0, 1, 7]) == [payload_of(0), payload_of(1), MISSING]


def test_a_reader_writes_nothing(tmp_path: Path) -> None:
    """Put is refused by name; a quarantine hides the record here, from this reader, and changes no byte."""
    with opened(tmp_path) as store:
        put(store, range(8))
    flip(segments(tmp_path)[0], PAGE_NBYTES + RECORD_NBYTES + header_nbytes(LAYOUT) + 9)
    before = snapshot(tmp_path)
    with reading(tmp_path) as reader, reading(tmp_path) as other:
        with pytest.raises(StoreReadOnlyError, match=f"{tmp_path}: opened with mode=read"):
            put(reader, [9])
        assert put(reader, []) == []
        assert get(reader, [0, 1, 2]) == [payload_of(0), Absence.CORRUPT, payload_of(2)]
        for _ in range(2):
            assert get(reader, [0, 1, 2]) == [payload_of(0), MISSING, payload_of(2)]
        assert reader.counters.corrupt == 1
        assert reader.counters.quarantine_failures == 0
        assert get(other, [1]) == [Absence.CORRUPT]
        reader.flush()
        usage = reader.usage()
        assert usage["used_nbytes"] + usage["free_nbytes"] == usage["capacity_nbytes"]
    assert snapshot(tmp_path) == before


def test_a_reader_of_a_store_that_it_may_not_write() -> None:
    """Another user's directory, read only; root gives up its rights first.

    It does all of it once before, because modules that are loaded on first use may lie where nobody else may read.
    """
    code = (
        "import os, sys\n"
        "from cache_manager.storage.file import FileReader\n"
        "from cache_manager.storage.file import fsck\n"
        "from cache_manager.storage.records import RecordStore\n"
        "from cache_manager.testing.records import LAYOUT, get, payload_of\n"
        "from pathlib import Path\n"
        "directory = Path(sys.argv[1])\n"
        "def read():\n"
        "    store = RecordStore(FileReader(directory), LAYOUT)\n"
        "    assert get(store, [1]) == [payload_of(1)]\n"
        "    assert fsck(directory).sound\n"
        "read()\n"
        "loaded = set(sys.modules)\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "assert not os.access(directory, os.W_OK)\n"
        "read()\n"
        "assert set(sys.modules) == loaded\n"
    )
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "store"
        with opened(directory) as store:
            put(store, [1])
        Path(scratch).chmod(0o755)
        for path in directory.iterdir():
            path.chmod(0o444)
        directory.chmod(0o555)
        done = child(code, str(directory))
        directory.chmod(0o755)
    assert done.returncode == 0, done.stderr


def test_where_there_is_no_store_there_is_no_reader(tmp_path: Path) -> None:
    for missing in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StoreMissingError, match=f"{missing}: there is no store"):
            FileReader(missing)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreFormatError, match=r"directory: wanted a kvroute store .*thesis.tex"):
        FileReader(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        FileReader(tmp_path / "file")


def test_a_reader_that_waits_finds_what_a_writer_stores_later(tmp_path: Path) -> None:
    """Goal: readers and writers start in any order. Method: one is opened where there is nothing, and one where there
    is an empty directory; both are asked for a minute of their clock, then a writer comes.
    """
    ticks = Clock(0.0)
    (tmp_path / "empty").mkdir()
    for where in (tmp_path / "nowhere", tmp_path / "empty"):
        with reading(where, waits=True, refresh_s=NEVER, ticks=ticks) as reader:
            for _ in range(60):
                ticks.now_s += 1.0
                assert get(reader, [1]) == [MISSING]
                assert reader.contains([key_of(1)]) == [False]
            assert reader.usage()["records"] == reader.usage()["segments"] == 0
            assert reader.usage()["refresh_failures"] == 0
            reader.flush()
            with opened(where) as store:
                put(store, [1])
                assert reader.contains([key_of(1)]) == [True]
                assert get(reader, [1]) == [payload_of(1)]
        with pytest.raises(StoreClosedError):
            get(reader, [1])
    with RecordStore(open_store(f"file://{tmp_path}/none?mode=read&absent=wait"), LAYOUT).backend as backend:
        assert backend.contains([key_of(1)]) == [False]
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match="absent: wanted one of error, wait"):
        open_store(f"file://{tmp_path}/none?mode=read&absent=later")


def test_a_reader_opened_by_url_reads_a_store_that_is_being_written(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, [1])
        reader = RecordStore(open_store(f"file://{tmp_path}?mode=read&ttl=1h"), LAYOUT)
        assert get(reader, [1]) == [payload_of(1)]
        assert put(store, [2]) == [True]
        reader.close()
    reader.close()
    for call in (lambda: get(reader, [1]), lambda: reader.contains([key_of(1)]), reader.flush, reader.usage):
        with pytest.raises(StoreClosedError):
            call()
    with pytest.raises(StoreClosedError):
        put(reader, [])


def test_a_look_that_fails_is_an_error_when_asked_for_and_a_counted_miss_when_not(tmp_path: Path) -> None:
    with opened(tmp_path) as store, reading(tmp_path) as reader:
        put(store, [1])
        assert get(reader, [1]) == [payload_of(1)]
        foreign = tmp_path / "segment-00000000000000ff.kvr"
        foreign.write_bytes(b"junk" * 5000)
        assert get(reader, [1, 2]) == [payload_of(1), MISSING]
        assert reader.usage()["refresh_failures"] == 1
        with pytest.raises(StoreFormatError, match=r"segment-00000000000000ff.kvr: magic"):
            reader.backend.refresh()  # type: ignore[attr-defined]
        foreign.unlink()
        put(store, [2])
        assert get(reader, [1, 2]) == [payload_of(1), payload_of(2)]


def test_a_record_in_the_middle_of_its_write_is_missing_and_then_there(tmp_path: Path) -> None:
    """A header and half a payload are what a reader may find while a batch is written."""
    with opened(tmp_path) as store:
        put(store, range(3))
        where = segments(tmp_path)[0]
        with where.open("r+b", buffering=0) as file, reading(tmp_path) as reader:
            file.seek(PAGE_NBYTES + 3 * RECORD_NBYTES)
            for part in (header_of_bytes(3)[:50], header_of_bytes(3)[50:], payload_of(3)[:2000]):
                file.write(part)
                assert get(reader, range(4)) == [*(payload_of(n) for n in range(3)), MISSING]
            file.write(payload_of(3)[2000:])
            assert get(reader, range(4)) == [payload_of(n) for n in range(4)]
            assert reader.counters.corrupt == 0


def header_of_bytes(n: int) -> bytes:
    return pack_header(header_of(n))


def test_a_segment_that_was_cut_and_written_anew_is_read_anew(tmp_path: Path) -> None:
    """The reader stands behind a record that a failed write took back; there, a payload carries a record of its own.

    What the reader takes for the start of a record is now the middle of that payload. It must find what was put, and
    not the record within.
    """
    smuggled = pack_header(header_of(99)) + payload_of(99)
    large = len(smuggled) + RECORD_NBYTES - header_nbytes(LAYOUT)
    payload = bytes(RECORD_NBYTES - header_nbytes(LAYOUT)) + smuggled
    carrier = RecordHeader(key_of(50), LAYOUT.fingerprint, 50, 1, valid_of(50), large, checksum(payload))
    with opened(tmp_path) as store:
        put(store, [1, 2])
    live = segments(tmp_path)[0]
    with reading(tmp_path, refresh_s=NEVER) as reader:
        assert get(reader, [1, 2]) == [payload_of(1), payload_of(2)]
        with live.open("r+b") as file:  # what a writer that failed after record 2 and started again leaves
            file.truncate(PAGE_NBYTES + RECORD_NBYTES)
            file.seek(PAGE_NBYTES + RECORD_NBYTES)
            file.write(pack_header(carrier) + payload)
            file.truncate(SEGMENT_NBYTES)
        reader.backend.refresh()  # type: ignore[attr-defined]
        assert get(reader, [1, 2, 99]) == [payload_of(1), MISSING, MISSING]
        assert reader.contains([key_of(50)]) == [True]


def test_a_sequence_that_is_used_again_is_another_segment(tmp_path: Path) -> None:
    """All segments expire, the writer starts again and counts from one; the reader has the old file of that name."""
    clock = Clock()
    with opened(tmp_path, ttl_s=10, clock=clock) as store:
        put(store, range(3))
    with reading(tmp_path) as reader:
        assert get(reader, [1]) == [payload_of(1)]
        clock.now_s += 10
        opened(tmp_path, ttl_s=10, clock=clock).__enter__().close()
        with opened(tmp_path, ttl_s=10, clock=clock) as store:
            put(store, [7, 8])
            assert [path.name for path in segments(tmp_path)] == ["segment-0000000000000001.kvr"]
            assert get(reader, [1, 7, 8]) == [payload_of(1), payload_of(7), payload_of(8)]
            assert get(reader, [1, 7, 9]) == [MISSING, payload_of(7), MISSING]


def test_a_reader_has_a_time_to_live_of_its_own(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as store:
        put(store, range(8))
        with reading(tmp_path, ttl_s=60, clock=clock) as reader:
            assert get(reader, [1]) == [payload_of(1)]
            clock.now_s += 60
            assert get(reader, [1, 7]) == [MISSING, MISSING]
            assert reader.usage()["expired_records"] == 8
            assert get(store, [1]) == [payload_of(1)]


def test_readers_beside_a_writer_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """Fifteen writers die in one directory, in a small quota, while two threads read: right or missing, never torn."""
    delays_s = np.random.default_rng(11).uniform(0.03, 0.12, 15).tolist()
    with opened(tmp_path):
        pass
    stop, failures, hits = threading.Event(), [], [0, 0]

    def write() -> None:
        backend = FileStore(tmp_path, quota_nbytes=4 * SEGMENT_NBYTES, segment_nbytes=SEGMENT_NBYTES)
        store = RecordStore(backend, LAYOUT)
        while True:
            for first in range(0, 120, 5):
                assert all(put(store, range(first, first + 5)))
                backend.delete([key_of(first + 2)])

    def read(which: int) -> None:
        try:
            with reading(tmp_path, refresh_s=0.001 * which) as reader:
                while not stop.is_set():
                    for n, answer in enumerate(get(reader, range(120))):
                        assert answer in (payload_of(n), MISSING)
                        hits[which] += answer is not MISSING
                assert reader.counters.corrupt == 0
        except BaseException as error:  # noqa: BLE001 - shown below, in the test's own thread
            failures.append(error)

    lives = begin_lives(write, delays_s)
    threads = [threading.Thread(target=read, args=(which,), daemon=True) for which in range(2)]
    for thread in threads:
        thread.start()
    _, status = os.waitpid(lives, 0)
    while not all(hits) and not failures:  # bounded by the test's own timeout
        stop.wait(0.01)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert status == 0
    assert not any(thread.is_alive() for thread in threads)


def test_a_reader_sees_what_is_written_under_a_sequence_that_went_and_came_again(tmp_path: Path) -> None:
    """Goal: no record is overlooked for good.

    Method: between two looks of a reader the second of two segments goes, and a writer that opens then makes a second
    one again, and a third.
    """
    clock = Clock()
    with opened(tmp_path, ttl_s=800, clock=clock) as store:
        put(store, [0])
        clock.now_s += 101  # an eighth of the time to live: the first segment takes no more
        put(store, [1])
    with reading(tmp_path, refresh_s=NEVER) as reader:
        with opened(tmp_path) as store:
            store.backend.delete([key_of(1)])
        with opened(tmp_path):  # nothing is in the second segment any more
            pass
        with opened(tmp_path) as store:
            put(store, range(2, 10))
        assert len(segments(tmp_path)) == 3
        reader.backend.refresh()  # type: ignore[attr-defined]
        assert get(reader, range(2, 10)) == [payload_of(n) for n in range(2, 10)]

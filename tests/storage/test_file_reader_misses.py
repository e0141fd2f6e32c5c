"""What a reader of a file store misses: nothing that was stored before it was asked, at a price that is bounded."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from cache_manager.ports import Absence
from cache_manager.record import pack_header
from cache_manager.storage.file.reader import UNREAD_S
from cache_manager.storage.file.segment import PAGE_NBYTES
from cache_manager.testing.records import get, header_of, key_of, payload_of, put
from tests.storage.file_stores import FILL, RECORD_NBYTES, Clock, opened, reading, segments

MISSING = Absence.MISS
NEVER = 1e9
TOLD = "for line in sys.stdin:\n    put(store, [int(line)])\n    print(line, end='', flush=True)\n"


def test_what_one_reader_has_found_no_other_misses(tmp_path: Path) -> None:
    """Goal: of two readers none misses what the other has found, however short ago they looked.

    Method: a writer in a process of its own; here a scheduler's reader, which is asked whether a record is there, and a
    worker's, which is to read it then, without a pause and after a miss of its own.
    """
    with opened(tmp_path):
        pass
    writer = subprocess.Popen(
        [sys.executable, "-c", FILL + TOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with writer, reading(tmp_path, refresh_s=0.05) as scheduler, reading(tmp_path, refresh_s=0.05) as worker:
        assert writer.stdin is not None
        assert writer.stdout is not None
        there = came = 0
        for n in range(50):
            assert get(worker, [1000 + n]) == [MISSING]
            print(n, file=writer.stdin, flush=True)
            assert writer.stdout.readline() == f"{n}\n"
            there += scheduler.contains([key_of(n)]) == [True]
            came += get(worker, [n]) == [payload_of(n)]
        writer.stdin.close()
    assert (there, came) == (50, 50)


@pytest.mark.parametrize("asks", ["get", "contains"])
def test_what_was_stored_before_a_call_is_found(tmp_path: Path, asks: str) -> None:
    """Goal: as above, wherever the writer puts it. Method: a reader that no clock makes look, opened on an empty store;
    each record alone, through a dozen segments of which the first are evicted, and through restarts of the writer.
    """
    with opened(tmp_path):
        pass
    with reading(tmp_path, refresh_s=NEVER) as reader:
        for life in range(4):
            with opened(tmp_path, quota_nbytes=256 << 10) as store:
                for n in range(20 * life, 20 * life + 20):
                    assert put(store, [n]) == [True]
                    found = get(reader, [n]) == [payload_of(n)] if asks == "get" else reader.contains([key_of(n)])[0]
                    assert found, n
    assert len(segments(tmp_path)) < 80 // 6


def test_what_is_stored_where_a_failed_write_was_taken_back_is_found(tmp_path: Path) -> None:
    """Goal: as above, behind a record that a reader has seen and that is there no more. Method: the writer's file is
    cut by that record, and another writer puts others there: a shorter end, and then the same.
    """
    with opened(tmp_path) as store:
        put(store, range(3))
    with reading(tmp_path, refresh_s=NEVER) as reader:
        assert get(reader, [2]) == [payload_of(2)]
        os.truncate(segments(tmp_path)[0], PAGE_NBYTES + RECORD_NBYTES)
        with opened(tmp_path) as store:
            assert put(store, [10]) == [True]
            assert get(reader, [10]) == [payload_of(10)]
            assert put(store, [11]) == [True]
            assert get(reader, [11, 0]) == [payload_of(11), payload_of(0)]


def test_a_store_that_is_made_anew_is_found_at_once(tmp_path: Path) -> None:
    """Method: the directory is moved away, and another store is made at its path."""
    path = tmp_path / "store"
    with opened(path) as store:
        put(store, [1])
    with reading(path, refresh_s=NEVER) as reader:
        path.rename(tmp_path / "gone")
        assert get(reader, [1, 2]) == [payload_of(1), MISSING]
        with opened(path) as store:
            put(store, [2])
            assert get(reader, [2]) == [payload_of(2)]


def test_misses_of_what_was_never_stored_read_nothing(tmp_path: Path) -> None:
    """Goal: a stream of misses costs a few system calls each. Method: the looks are counted, beside a writer that has
    stored something, and when it has closed; when time has come, one.
    """
    ticks = Clock(0.0)
    with opened(tmp_path):
        pass
    with reading(tmp_path, refresh_s=2.0, ticks=ticks) as reader:
        for closed in (False, True):
            with opened(tmp_path) as store:
                put(store, range(8))
                looks = [reader.usage()["refreshes"] for n in range(1000, 1050) if get(reader, [n]) == [MISSING]]
            looks += [reader.usage()["refreshes"] for n in range(1000, 1050) if not reader.contains([key_of(n)])[0]]
            assert len(looks) == 100
            assert looks[-1] - looks[0] <= closed + 1
        ticks.now_s = 2.0
        before = reader.usage()["refreshes"]
        assert get(reader, [1000]) == get(reader, [1001]) == [MISSING]
        assert reader.usage()["refreshes"] == before + 1


def test_what_a_killed_writer_left_torn_is_looked_at_for_a_limited_time(tmp_path: Path) -> None:
    """Goal: bytes that are no record for good are not read for each miss. Method: half a record behind the last one;
    what a writer then puts there is found at once.
    """
    ticks = Clock(0.0)
    with opened(tmp_path) as store:
        put(store, range(3))
    with segments(tmp_path)[0].open("r+b") as file:
        file.seek(PAGE_NBYTES + 3 * RECORD_NBYTES)
        file.write(pack_header(header_of(3)) + payload_of(3)[:2000])
    with reading(tmp_path, refresh_s=NEVER, ticks=ticks) as reader:
        assert get(reader, [3]) == get(reader, [3]) == [MISSING]
        ticks.now_s = UNREAD_S
        before = reader.usage()["refreshes"]
        for _ in range(50):
            assert get(reader, [3]) == [MISSING]
        assert reader.usage()["refreshes"] == before
        with opened(tmp_path) as store:
            assert put(store, [4]) == [True]
            assert get(reader, [4]) == [payload_of(4)]


def test_threads_of_one_reader_miss_nothing_that_another_is_reading(tmp_path: Path) -> None:
    """Goal: who finds another thread looking waits for what that finds. Method: four threads ask at once for what has
    just been put, of a reader that no clock makes look.
    """
    rounds, threads = 100, 4
    met = Barrier(threads, timeout=60)
    with opened(tmp_path) as store, reading(tmp_path, refresh_s=NEVER) as reader:

        def ask(which: int) -> int:
            missed = 0
            for n in range(rounds):
                if which == 0:
                    put(store, [n])
                met.wait()
                missed += get(reader, [n]) != [payload_of(n)]
                met.wait()
            return missed

        with ThreadPoolExecutor(threads) as pool:
            assert sum(pool.map(ask, range(threads))) == 0

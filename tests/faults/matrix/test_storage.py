"""Faults of files: cut, gone, twice as long, flipped, junk, of another layout, or left by a killed process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_disk import FaultyDisk
from matrix.blocks import SPEC, TOKENS, file_nbytes, key, make_aux, persist, restored, stored
from stores import SMALL_NBYTES, files, flip, opened, payload_in
from waiting import GIVE_UP_S

from cache_manager.errors import StoreLockedError
from cache_manager.keys import Namespace
from cache_manager.ports import Absence
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage.file import FileStore, fsck
from cache_manager.testing.records import get, key_of, payload_of, put


def flipped(path: Path) -> None:
    with make_aux() as aux:
        flip(*payload_in(path.parent, key(aux, 1), 1000))


def doubled(path: Path) -> None:
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(whole)


DAMAGE: dict[str, tuple[Callable[[Path], object], list[int], list[int]]] = {  # what comes back while open, and reopened
    "cut to half a record": (lambda path: os.truncate(path, 4096 + SPEC.block_nbytes // 2), [], []),
    "gone": (Path.unlink, [1, 2], []),
    "twice as long": (doubled, [1, 2], [1, 2]),
    "one byte flipped": (flipped, [2], [2]),
}


@pytest.mark.parametrize("is_open", [True, False], ids=["while open", "at rest"])
@pytest.mark.parametrize(("damage", "while_open", "reopened"), DAMAGE.values(), ids=DAMAGE)
def test_r03_r05_r12_r21_a_damaged_file_shows_no_stale_byte(
    damage: Callable[[Path], object], while_open: list[int], reopened: list[int], is_open: bool, tmp_path: Path
) -> None:
    """Fault: harm a file beneath its store, or between two runs. kvroute: rows or a counted miss, true books, and the
    same records are stored again."""
    with stored(tmp_path) as (aux, _):
        assert persist(aux, [1, 2])
        descriptors = len(os.listdir("/proc/self/fd"))
        if is_open:
            damage(*files(tmp_path))
            assert restored(aux, 1, 2) == while_open
            assert aux.store is not None
            assert (aux.store.counters.hits, aux.store.counters.corrupt) == (len(while_open), 2 - len(while_open))
            assert len(os.listdir("/proc/self/fd")) == descriptors
    if not is_open:
        damage(*files(tmp_path))
    for expected in (reopened, [1, 2]):
        with stored(tmp_path) as (aux, store):
            assert restored(aux, 1, 2) == expected
            assert store.usage()["used_nbytes"] == file_nbytes(tmp_path)
            assert persist(aux, [1, 2])
            assert restored(aux, 1, 2) == [1, 2]


def test_r13_a_junk_file_neither_stops_a_store_nor_reaches_a_block(tmp_path: Path) -> None:
    """Fault: 7 bytes of junk at the next path. kvroute: stores beside it, names it and leaves it alone."""
    junk = tmp_path / "extent-00000001.kvr"
    with stored(tmp_path) as (aux, _):
        junk.write_bytes(b"garbage")
        assert persist(aux, [1, 2])
        assert restored(aux, 1, 2) == [1, 2]
    with stored(tmp_path) as (aux, store):
        assert restored(aux, 1, 2) == [1, 2]
        assert store.usage()["refused_files"] == 1
        assert junk.name in fsck(tmp_path).to_text()
    assert junk.read_bytes() == b"garbage"


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "deleted and put anew"])
def test_a_record_deleted_under_a_reader_is_a_miss_and_not_damage(again: bool, tmp_path: Path) -> None:
    """Goal: ``corrupt`` counts damage only, and what was put anew stays. Method: delete between look-up and read."""
    disk = FaultyDisk()
    with opened(tmp_path, disk) as store:
        assert all(put(store, [1, 2]))

        def delete() -> None:
            disk.on_read = lambda: None
            store.backend.delete([key_of(1)])
            assert not again or all(put(store, [1]))

        disk.on_read = delete
        for _ in range(2):
            assert get(store, [1, 2]) == [payload_of(1) if again else Absence.MISS, payload_of(2)]
        assert store.counters.corrupt == 0


def test_a_removed_lock_file_lets_no_second_writer_in(tmp_path: Path) -> None:
    """Goal: an operator who removes the lock file by mistake loses nothing. Method: remove it, open again."""
    with opened(tmp_path) as store:
        (tmp_path / "kvroute.lock").unlink()
        for _ in range(2):
            with pytest.raises(StoreLockedError, match="one writer"):
                FileStore(tmp_path, quota_nbytes=1 << 20)
        assert all(put(store, [1, 2]))
    with opened(tmp_path) as store:
        assert get(store, [1, 2]) == [payload_of(1), payload_of(2)]


def test_r08_a_read_that_dies_leaves_no_lock(tmp_path: Path) -> None:
    """Fault: the read fails for want of memory. kvroute: every call of another thread ends."""
    disk, seen = FaultyDisk(), list[object]()
    with opened(tmp_path, disk, quota_nbytes=SMALL_NBYTES) as store:
        assert all(put(store, range(4)))

        def exhausted() -> None:
            raise MemoryError("no staging")

        disk.on_read = exhausted
        for _ in range(3):
            with pytest.raises(MemoryError):
                get(store, range(4))
        disk.on_read = lambda: None

        def go_on() -> None:
            seen.append(get(store, range(4)))
            seen.append(all(all(put(store, range(n, n + 4))) for n in range(4, 40, 4)))  # the slots that were read
            store.flush()
            store.close()

        other = threading.Thread(target=go_on, daemon=True)
        other.start()
        other.join(GIVE_UP_S)
        assert not other.is_alive()
        assert seen == [[payload_of(n) for n in range(4)], True]


KILLED_BEFORE_A_BYTE = """
import os, signal, sys
from pathlib import Path
from tests.worlds.stores import opened
from cache_manager.testing.records import put
with opened(Path(sys.argv[1])) as store:
    put(store, range(6))
    os.posix_fallocate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    put(store, range(6, 60))
"""


def test_r07_r14_r22_what_a_killed_process_left_is_found_swept_and_counted(tmp_path: Path) -> None:
    """Fault: a child killed when a new file has no byte yet, then a start with a limit. kvroute: every record, no
    leftover, and used bytes are the bytes of the files, within the limit."""
    command = [sys.executable, "-c", KILLED_BEFORE_A_BYTE, str(tmp_path)]
    assert subprocess.run(command, timeout=GIVE_UP_S, check=False).returncode == -signal.SIGKILL
    (leftover,) = tmp_path.glob("*.tmp")
    assert leftover.stat().st_size == 0
    quota = 2 * SMALL_NBYTES
    with opened(tmp_path, quota_nbytes=quota) as store:
        assert not list(tmp_path.glob("*.tmp"))
        assert get(store, range(12)) == [payload_of(n) for n in range(6)] + [Absence.MISS] * 6
        assert store.usage()["used_nbytes"] == file_nbytes(tmp_path) <= quota
        for first in range(0, 60, 6):
            assert all(put(store, range(first, first + 6)))
            assert store.usage()["used_nbytes"] == file_nbytes(tmp_path) <= quota


OTHER: dict[str, dict[str, Any]] = {
    "dtype": {"spec": AuxBlockDataSpec("routing", (4, 8), "float16", TOKENS, {"num_experts": 300})},
    "shape": {"spec": AuxBlockDataSpec("routing", (8, 4), "uint16", TOKENS, {"num_experts": 300})},
    "attributes": {"spec": AuxBlockDataSpec("routing", (4, 8), "uint16", TOKENS, {"num_experts": 301})},
    "weights": {"namespace": Namespace("m", 2)},
    "tenant": {"namespace": Namespace("m", 1, salt="t")},
    "rank": {"namespace": Namespace("m", 1, rank=1, world=2)},
}


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_r19_rows_are_never_reinterpreted(change: dict[str, Any], tmp_path: Path) -> None:
    """Fault: a restart with another dtype, other layers or top-k, weights, tenant or rank. kvroute: a miss."""
    own = {"spec": AuxBlockDataSpec("routing", (4, 8), "uint16", TOKENS, {"num_experts": 300})}
    with stored(tmp_path, **own) as (aux, _):
        assert persist(aux, [1])
    with stored(tmp_path, **{**own, **change}) as (aux, _):
        assert restored(aux, 1) == []
        assert aux.store is not None
        assert (aux.store.counters.misses, aux.store.counters.corrupt) == (1, 0)
        assert persist(aux, [1])
    for options in (own, {**own, **change}):
        with stored(tmp_path, **options) as (aux, _):
            assert restored(aux, 1) == [1]

"""What a disk and a kill do to rollouts in a directory: nothing that was not whole is ever read."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk

from cache_manager.errors import StorageError
from cache_manager.ports import Absence
from kvroute.rollout.contract import of_layers, routes_of
from kvroute.rollout.local import LocalRollouts
from kvroute.rollout.settings import CutSettings
from kvroute.rollout.shard import fetch_routes
from kvroute.routes import Routes

CUT = CutSettings(part_nbytes=64)
PUT_NBYTES = 3_400
"""About what one put of the tests writes."""


def store_at(directory: Path, disk: FaultyDisk | None = None, *, sync: bool = False) -> LocalRollouts:
    return LocalRollouts(directory, CUT, sync=sync, disk=disk)


def names_below(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if ".locks" not in path.parts)


@pytest.mark.parametrize("budget_nbytes", range(0, PUT_NBYTES, 300))
def test_a_writer_killed_anywhere_leaves_the_put_before(tmp_path: Path, budget_nbytes: int) -> None:
    """Goal: a kill costs the put and nothing else. Method: SIGKILL after so many bytes of a second put; what another
    process finds then, and that its next put leaves no trace of the killed one."""
    with_one = store_at(tmp_path)
    with_one.put("task:1:0:0", routes_of(1))
    before = names_below(tmp_path)
    pid = os.fork()
    if pid == 0:
        disk = FaultyDisk()
        disk.write_budget_nbytes = budget_nbytes
        disk.at_limit = lambda: os.kill(os.getpid(), signal.SIGKILL)
        store_at(tmp_path, disk).put("task:1:0:0", routes_of(2))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the budget was not used up"
    store = store_at(tmp_path)
    handle = store.find("task:1:0:0")
    assert handle is not None
    assert fetch_routes(store, handle) == routes_of(1)
    assert store.reap() == 1
    assert names_below(tmp_path) == before
    third = store.put("task:1:0:0", routes_of(3))
    assert store.find("task:1:0:0") == third
    assert fetch_routes(store, third) == routes_of(3)


@pytest.mark.parametrize("step", ["rename", "replace"])
def test_a_writer_killed_between_two_names_leaves_the_put_before(tmp_path: Path, step: str) -> None:
    """Goal: names change in one step. Method: SIGKILL right after the directory, or ``current``, has its name."""
    store_at(tmp_path).put("task:1:0:0", routes_of(1))
    pid = os.fork()
    if pid == 0:
        original = getattr(Path, step)

        def then_die(self: Path, target: Path) -> None:
            original(self, target)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(Path, step, then_die)
        store_at(tmp_path).put("task:1:0:0", routes_of(2))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    store = store_at(tmp_path)
    handle = store.find("task:1:0:0")
    assert handle is not None
    assert fetch_routes(store, handle) == routes_of(1 if step == "rename" else 2)
    assert store.reap() == 1
    assert fetch_routes(store, handle) == routes_of(1 if step == "rename" else 2)
    assert len(list((tmp_path / "task:1:0:0").iterdir())) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_put_that_fails_changes_nothing(tmp_path: Path, number: int) -> None:
    """Goal: a failure is reported and leaves nothing. Method: the disk is full in the middle of a put."""
    disk = FaultyDisk()
    store = store_at(tmp_path, disk)
    handle = store.put("task:1:0:0", routes_of(1))
    before = names_below(tmp_path)
    disk.write_budget_nbytes, disk.write_errno = 2_000, number
    with pytest.raises(StorageError, match=os.strerror(number)):
        store.put("task:1:0:0", routes_of(2))
    assert names_below(tmp_path) == before
    disk.write_budget_nbytes = None
    assert store.find("task:1:0:0") == handle
    assert (store.counters.puts, store.counters.put_failures) == (1, 1)


def test_a_sync_that_fails_is_reported_and_tried_again(tmp_path: Path) -> None:
    """Goal: durability is never claimed. Method: the disk refuses to sync, with and without ``sync=put``."""
    disk = FaultyDisk()
    store = store_at(tmp_path, disk)
    store.put("task:1:0:0", routes_of(1))
    disk.sync_errno = errno.EIO
    with pytest.raises(StorageError):
        store.flush()
    with pytest.raises(StorageError):
        store_at(tmp_path, disk, sync=True).put("task:1:0:1", routes_of(2))
    disk.sync_errno, before = None, disk.syncs
    store.flush()
    assert disk.syncs > before + 6  # the files of six layers, and their directories
    store.close()


def test_short_transfers_are_finished(tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.call_nbytes_max = 7
    store = store_at(tmp_path, disk)
    assert fetch_routes(store, store.put("x", routes_of(1))) == routes_of(1)


def test_a_read_error_is_a_failure_and_no_absence(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = store_at(tmp_path, disk)
    handle = store.put("x", routes_of(1))
    disk.read_errno = errno.EIO
    with pytest.raises(StorageError):
        store.get(handle)
    assert store.counters.corrupt == 0


@pytest.mark.parametrize("at", [0, 9, 13, 20, 40, 300, -3])
def test_every_byte_of_a_file_counts(tmp_path: Path, at: int) -> None:
    """Goal: no byte is believed unsummed. Method: a bit is flipped in each part of a file's layout."""
    store = store_at(tmp_path)
    handle = store.put("x", routes_of(1))
    file = tmp_path / "x" / handle.put_id / "layer_00003.routes"
    content = bytearray(file.read_bytes())
    content[at] ^= 0x10
    file.write_bytes(content)
    assert store.get(handle, [3]) is Absence.CORRUPT
    assert store.get(handle, [1]) == [of_layers(routes_of(1), {1})]


@pytest.mark.parametrize("nbytes", [0, 10, 31, 100, -1])
def test_a_file_cut_short_is_damage(tmp_path: Path, nbytes: int) -> None:
    store = store_at(tmp_path)
    handle = store.put("x", routes_of(1))
    file = tmp_path / "x" / handle.put_id / "layer_00003.routes"
    os.truncate(file, nbytes if nbytes >= 0 else file.stat().st_size + nbytes)
    assert store.get(handle, [3]) is Absence.CORRUPT


def test_a_file_of_another_rollout_is_damage(tmp_path: Path) -> None:
    """Goal: foreign rows are never taken. Method: a whole file, sound in itself, in the place of another."""
    store = store_at(tmp_path)
    handle, other = store.put("x", routes_of(1)), store.put("y", routes_of(2))
    for name in ("layer_00003.routes", "layer_00005.routes"):
        shutil.copy(tmp_path / "y" / other.put_id / name, tmp_path / "x" / handle.put_id / "layer_00003.routes")
        assert store.get(handle, [3]) is Absence.CORRUPT
    shutil.copy(
        tmp_path / "x" / handle.put_id / "layer_00005.routes", tmp_path / "x" / handle.put_id / "layer_00001.routes"
    )
    assert store.get(handle, [1]) is Absence.CORRUPT


def test_a_damaged_current_is_found_by_nobody_and_replaced(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    handle = store.put("x", routes_of(1))
    for content in (b"", b"0" * 16 + b" {}", b"\xff" * 100, (tmp_path / "x" / "current").read_bytes()[:-9]):
        (tmp_path / "x" / "current").write_bytes(content)
        assert store.find("x") is None
    assert store.counters.corrupt == 4
    assert store.reap() == 0  # nobody knows what is current, and a handle still works
    assert fetch_routes(store, handle) == routes_of(1)
    last = store.put("x", routes_of(2))
    assert store.find("x") == last


WRITER = """
import sys
from pathlib import Path
from kvroute.rollout.contract import routes_of
from kvroute.rollout.local import LocalRollouts

store = LocalRollouts(Path(sys.argv[1]))
for seed in range(int(sys.argv[2]), int(sys.argv[2]) + 25):
    store.put(f"task:{seed % 2}:0:0", routes_of(seed, 10 + seed))
"""


def test_writers_in_other_processes_do_not_meet(tmp_path: Path) -> None:
    """Goal: what is found is whole, whoever writes. Method: two processes put the same two ids again and again, and are
    read meanwhile; in the end there are two puts and nothing else."""
    store = LocalRollouts(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(first)], env=environment) for first in (0, 100)]
    whole = 0
    while any(writer.poll() is None for writer in writers):
        for name in ("task:0:0:0", "task:1:0:0"):
            handle = store.find(name)
            found = None if handle is None else fetch_routes(store, handle)
            if isinstance(found, Routes):
                whole += 1
                assert found == routes_of(found.weights_versions[0][2], len(found))
            assert found is not Absence.CORRUPT
    assert [writer.returncode for writer in writers] == [0, 0]
    assert whole
    assert store.counters.corrupt == 0
    for name in ("task:0:0:0", "task:1:0:0"):
        handle = store.find(name)
        assert handle is not None
        assert sorted(os.listdir(tmp_path / name)) == sorted([handle.put_id, "current"])


def test_a_link_in_the_directory_is_not_followed(tmp_path: Path) -> None:
    """Goal: a directory that others write to leads nowhere. Method: a file of a rollout is a link to another's."""
    store = store_at(tmp_path / "store")
    handle = store.put("x", routes_of(1))
    file = tmp_path / "store" / "x" / handle.put_id / "layer_00003.routes"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        store.get(handle, [3])


def test_what_was_deleted_leaves_no_directory(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    handle = store.put("x", routes_of(1))
    store.delete(handle)
    assert names_below(tmp_path) == []

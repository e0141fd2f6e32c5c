"""Rollouts in a directory under disk errors and kills: an incomplete rollout is never read."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from faulty_disk import FaultyDisk
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import StorageError
from cache_manager.ports import Absence
from kvroute.rollout import local
from kvroute.rollout.local import LocalRollouts
from kvroute.testing.rollouts import fetch_routes, routes_of, routes_of_layers, support_of

PUT_NBYTES = 900
"""About what one put of the tests writes."""


def store_at(directory: Path, disk: FaultyDisk | None = None, *, sync: bool = False) -> LocalRollouts:
    return LocalRollouts(directory, sync=sync, disk=disk)


def killed_in_a_put(directory: Path, set_up: Callable[[FaultyDisk, Callable[..., None]], None]) -> None:
    """A child puts a second rollout of the id, and kills itself at the point that ``set_up(disk, die)`` chooses."""
    pid = os.fork()
    if pid == 0:
        disk = FaultyDisk()
        set_up(disk, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        store_at(directory, disk).put("task:1:0:0", routes_of(2))
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "the put came to its end"


@pytest.mark.parametrize("budget_nbytes", range(0, PUT_NBYTES, 75))
def test_a_writer_killed_anywhere_leaves_the_put_before(tmp_path: Path, budget_nbytes: int) -> None:
    """Goal: a kill costs the put and nothing else. Method: SIGKILL after a number of bytes of a second put; check what
    another process finds then, and that its next put leaves no trace of the killed one."""
    store = store_at(tmp_path)
    store.put("task:1:0:0", routes_of(1))

    def after_bytes(disk: FaultyDisk, die: Callable[..., None]) -> None:
        disk.write_budget_nbytes, disk.at_limit = budget_nbytes, die

    killed_in_a_put(tmp_path, after_bytes)
    handle = store.find("task:1:0:0")
    assert handle is not None
    assert fetch_routes(store, handle) == routes_of(1)
    assert sorted(os.listdir(tmp_path)) == [".task:1:0:0.partial", "task:1:0:0.routes"]
    third = store.put("task:1:0:0", routes_of(3, 8))
    assert store.find("task:1:0:0") == third
    assert fetch_routes(store, third) == routes_of(3, 8)
    assert os.listdir(tmp_path) == ["task:1:0:0.routes"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_writer_killed_beside_the_rename_leaves_one_put(tmp_path: Path, when: str) -> None:
    """Goal: a name changes in one step. Method: SIGKILL right before and right after the file has its name."""
    store = store_at(tmp_path)
    store.put("task:1:0:0", routes_of(1))

    def at_the_rename(_: FaultyDisk, die: Callable[..., None]) -> None:
        original = os.replace
        setattr(os, "replace", die if when == "before" else lambda *names: die(original(*names)))  # noqa: B010

    killed_in_a_put(tmp_path, at_the_rename)
    handle = store.find("task:1:0:0")
    assert handle is not None
    assert fetch_routes(store, handle) == routes_of(1 if when == "before" else 2)
    store.delete(handle)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_put_that_fails_changes_nothing(tmp_path: Path, number: int) -> None:
    """Goal: a failure is reported and leaves nothing. Method: the disk is full in the middle of a put."""
    disk = FaultyDisk()
    store = store_at(tmp_path, disk)
    handle = store.put("task:1:0:0", routes_of(1))
    disk.write_budget_nbytes, disk.write_errno = 500, number
    with pytest.raises(StorageError, match=os.strerror(number)):
        store.put("task:1:0:0", routes_of(2))
    assert os.listdir(tmp_path) == ["task:1:0:0.routes"]
    disk.write_budget_nbytes = None
    assert store.find("task:1:0:0") == handle
    assert (store.counters.puts, store.counters.put_failures) == (1, 1)


@pytest.mark.parametrize("which", ["the file", "the directory"])
def test_a_put_that_cannot_be_synced_is_a_failure(tmp_path: Path, which: str) -> None:
    """Goal: durability is never claimed. Method: with ``sync=put`` the disk refuses to sync the file, or its name."""

    class Refusing(FaultyDisk):
        def sync(self, fd: int) -> None:
            if self.syncs == (which == "the directory"):
                self.sync_errno = errno.EIO
            super().sync(fd)

    disk = Refusing()
    with closing(store_at(tmp_path, disk, sync=True)) as store:
        with pytest.raises(StorageError, match=os.strerror(errno.EIO)):
            store.put("task:1:0:0", routes_of(1))
        assert os.listdir(tmp_path) == []
        assert store.counters.put_failures == 1


def test_a_read_error_is_a_failure_and_no_absence(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = store_at(tmp_path, disk)
    handle = store.put("x", routes_of(1))
    disk.read_errno = errno.EIO
    with pytest.raises(StorageError):
        store.get(handle)
    assert store.counters.corrupt == 0


@given(st.data())
def test_every_byte_of_a_file_counts(data: st.DataObject) -> None:
    """Goal: no byte is trusted without its checksum. Method: one bit of a file is flipped, or the file is cut short.
    Damage in a part costs only that part's layer; a search by name finds the same rollout or none, but never
    another."""
    with TemporaryDirectory() as name, closing(store_at(Path(name))) as store:
        handle = store.put("x", routes_of(1))
        file = Path(name) / "x.routes"
        content = bytearray(file.read_bytes())
        parts_at, cut = handle.header_nbytes, data.draw(st.booleans())
        at = data.draw(st.integers(0, len(content) - 1) | st.integers(0, 40))
        if cut:
            content = content[:at]
        else:
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content)
        assert store.find("x") == (handle if at >= parts_at else None)
        for i, layer in enumerate(handle.layout.layer_ids):
            layer_at = parts_at + 80 * i  # 40 rows of 2 ids of a byte
            sound = at >= layer_at + 80 or (layer_at > at >= parts_at and not cut)
            found = store.get(handle, [layer])
            assert found == ([routes_of_layers(routes_of(1), {layer})] if sound else Absence.CORRUPT)


@given(st.data())
def test_every_byte_of_a_support_counts(data: st.DataObject) -> None:
    """Goal: no support is trusted without its checksum, and its damage costs no rows. Method: one bit of it is flipped,
    or the file is cut short in it."""
    with TemporaryDirectory() as name, closing(store_at(Path(name))) as store:
        routes = routes_of(1)
        handle = store.put("x", routes, support_of(1, routes))
        file = Path(name) / "x.routes"
        content = bytearray(file.read_bytes())
        behind = len(content) - handle.support_nbytes
        assert behind == handle.header_nbytes + handle.nbytes
        place = data.draw(st.integers(behind, len(content) - 1))
        if data.draw(st.booleans()):
            content = content[:place]
        else:
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content)
        assert store.support(handle) is Absence.CORRUPT
        assert fetch_routes(store, handle) == routes
        assert store.counters.corrupt == 1


def test_a_file_of_another_rollout_is_damage(tmp_path: Path) -> None:
    """Goal: rows of another rollout are never read. Method: a whole, valid file takes the place of another; in the
    place of another put of the same rollout it is a miss, and then found."""
    store = store_at(tmp_path)
    handle, other = store.put("x", routes_of(1)), store.put("y", routes_of(2))
    shutil.copy(tmp_path / "y.routes", tmp_path / "x.routes")
    assert store.get(handle) is Absence.CORRUPT
    assert store.find("x") is None
    store.delete(handle)
    assert fetch_routes(store, other) == routes_of(2)
    assert fetch_routes(store, store.put("x", routes_of(3))) == routes_of(3)
    assert store.get(handle) is Absence.MISS
    assert store.counters.corrupt == 2


def test_a_writer_that_never_ends_costs_the_put_and_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no wait without a limit. Method: a stopped writer holds the file of a rollout; a put and a delete report
    that, and the stored rollout can be read; then the writer ends."""
    monkeypatch.setattr(local, "LOCK_S", 0.05)
    store = store_at(tmp_path)
    handle = store.put("x", routes_of(1))
    with open(tmp_path / ".x.partial", "wb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        for call in (lambda: store.put("x", routes_of(2)), lambda: store.delete(handle)):
            with pytest.raises(StorageError, match=r"x.routes: another writer has had it for 0.05 s"):
                call()
        assert fetch_routes(store, handle) == routes_of(1)
    store.delete(handle)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["x.routes", ".x.partial"])
def test_a_link_in_the_directory_is_not_followed(tmp_path: Path, name: str) -> None:
    """Goal: a link in a directory that others write to is not followed. Method: a file of a rollout is a link to
    another's."""
    store = store_at(tmp_path / "store")
    handle = store.put("x", routes_of(1))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes((tmp_path / "store" / "x.routes").read_bytes())
    (tmp_path / "store" / name).unlink(missing_ok=True)
    (tmp_path / "store" / name).symlink_to(elsewhere)
    with pytest.raises(StorageError):
        store.get(handle) if name == "x.routes" else store.put("x", routes_of(2))
    assert elsewhere.stat().st_size > handle.header_nbytes


def test_nothing_of_a_longer_put_that_was_killed_is_left(tmp_path: Path) -> None:
    """Method: the partial file of a killed writer is longer than the next put of its id."""
    put_nbytes = []
    for directory, left in ((tmp_path / "without", b""), (tmp_path / "with", b"\xff" * 100_000)):
        store = store_at(directory)
        (directory / ".task:1:0:0.partial").write_bytes(left)
        handle = store.put("task:1:0:0", routes_of(1))
        assert fetch_routes(store, handle) == routes_of(1)
        put_nbytes.append((directory / "task:1:0:0.routes").stat().st_size)
    assert put_nbytes[0] == put_nbytes[1]

"""What an adversary found: each is a way to a wrong row, a lost record or a stuck block, and the call that now prevents
it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_disk import FaultyDisk

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockStateError, StoreLockedError
from cache_manager.keys import KeyChain, Namespace
from cache_manager.ports import Absence
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage.file import FileStore
from cache_manager.testing.records import get, key_of, payload_of, put
from tests.storage.stores import opened

SPEC = AuxBlockDataSpec("routing", (3, 2), "uint8", 4)


@pytest.fixture(params=["heap", "shared"])
def aux(request: pytest.FixtureRequest) -> Iterator[AuxBlocks]:
    with AuxBlocks([SPEC], blocks=6, host_blocks=3, namespace=Namespace("m", 1), memory=request.param) as blocks:
        yield blocks


def rows_of(value: int, tokens: int) -> np.ndarray[Any, Any]:
    return np.full((tokens, *SPEC.row_shape), value, dtype=np.uint8)


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside other threads, from Python 3.12 on
        return os.fork()


def in_a_forked_child(call: Callable[[], object]) -> bytes:
    """What ``call`` did in a forked child: the name of the error, or ``none``."""
    reading, writing = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            call()
            os.write(writing, b"none")
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(writing, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read()


def test_a_slot_buffer_that_is_used_again_changes_no_step_in_flight(aux: AuxBlocks) -> None:
    """Goal: engines keep one slot array for all steps. Method: refill it between begin and a commit with rejections.

    Rows used to become readable at the slots of the *next* step, which were unwritten.
    """
    aux.renew([0, 1, 2])
    slots = np.arange(8)
    step = aux.begin_step(slots)
    step.write("routing", rows_of(7, 8))
    slots[:] = np.arange(4, 12)
    later = aux.begin_step(slots[4:])
    keep = np.array([False] + [True] * 7)
    assert step.commit(keep) == 7
    later.abort()
    found = aux.read("routing", [0, 1, 2])
    assert found.valid.tolist() == [False] + [True] * 7 + [False] * 4
    assert (found.values[found.valid] == 7).all()


@pytest.mark.parametrize("integer", [np.int32, np.int64, np.uint16])
def test_numpy_scalars_are_integers(integer: Any) -> None:
    """Goal: sizes and positions often come out of arrays. Method: the same spec and the same read with them."""
    plain, scalar = AuxBlockDataSpec("r", (3,), "uint8", 4), AuxBlockDataSpec("r", (integer(3),), "uint8", integer(4))
    assert scalar == plain
    assert scalar.to_json() == plain.to_json()
    assert type(scalar.block_tokens) is int
    with AuxBlocks([SPEC], blocks=2, namespace=Namespace("m", 1)) as aux:
        aux.renew([integer(1)])
        with aux.begin_step([integer(5)]) as step:
            step.write("routing", rows_of(3, 1))
        assert aux.read("routing", [1], integer(1), integer(2)).valid.tolist() == [True]


def test_a_chain_goes_on_from_its_own_keys_only() -> None:
    """Goal: no key that mixes two namespaces. Method: a parent key from before a reset, and an invalid parent."""
    layout = RecordLayout((SPEC,))
    before, after = KeyChain(Namespace("m", 1), layout), KeyChain(Namespace("m", 2), layout)
    for parent in (before.keys([1, 2, 3, 4])[0], b""):
        with pytest.raises(ValueError, match="parent: wanted a key of this chain"):
            after.key(parent, [5, 6, 7, 8])  # type: ignore[arg-type]


@pytest.mark.parametrize("begun", ["in the child", "before the fork"])
def test_a_forked_child_cannot_write_the_parents_rows(begun: str) -> None:
    """Goal: a child shares the memory of a shared region and not the states. Method: a child that steps, or ends one.

    Its rows used to be read by the parent as its own.
    """
    with AuxBlocks([SPEC], blocks=2, namespace=Namespace("m", 1), memory="shared") as aux:
        aux.renew([0])
        with aux.begin_step([0]) as step:
            step.write("routing", rows_of(1, 1))
        step = aux.begin_step([1])
        step.write("routing", rows_of(99, 1))

        def write() -> None:
            if begun == "before the fork":
                step.commit()
            with aux.begin_step([0, 1]) as own:
                own.write("routing", rows_of(99, 2))

        assert in_a_forked_child(write) == b"BlockStateError"
        assert in_a_forked_child(lambda: aux.read("routing", [0])) == b"BlockStateError"
        found = aux.read("routing", [0])
        assert found.valid.tolist() == [True, False, False, False]
        assert (found.values[0] == 1).all()
        step.abort()
    with pytest.raises(BlockStateError, match="closed"):
        aux.read("routing", [0])


def test_a_forked_child_of_a_file_store_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """Goal: two writers behind one lock. Method: a child that puts, and one that closes."""
    with opened(tmp_path) as store:
        assert all(put(store, [1]))
        assert in_a_forked_child(lambda: put(store, [2])) == b"StoreClosedError"
        assert in_a_forked_child(lambda: get(store, [1])) == b"StoreClosedError"
        held, release = os.pipe()
        pid = fork()
        if pid == 0:
            os.read(held, 1)
            store.close()
            os._exit(0)
        assert all(put(store, [3]))
        os.write(release, b"!")
        assert os.waitpid(pid, 0)[1] == 0
        for end in (held, release):
            os.close(end)
        assert get(store, [1, 2, 3]) == [payload_of(1), Absence.MISS, payload_of(3)]
    with opened(tmp_path) as store:
        assert get(store, [1, 2, 3]) == [payload_of(1), Absence.MISS, payload_of(3)]


def test_a_removed_lock_file_lets_no_second_writer_in(tmp_path: Path) -> None:
    """Goal: an operator who removes the lock file by mistake loses nothing. Method: remove it, open again.

    The lock is the directory's own.
    """
    with opened(tmp_path) as store:
        assert all(put(store, [1]))
        (tmp_path / "kvroute.lock").unlink()
        for _ in range(2):
            with pytest.raises(StoreLockedError, match="one writer"):
                FileStore(tmp_path, quota_nbytes=1 << 20)
        assert all(put(store, [2]))
    with opened(tmp_path) as store:
        assert get(store, [1, 2]) == [payload_of(1), payload_of(2)]


class HookedDisk(FaultyDisk):
    """Calls ``before_read`` once, between the look-up and the read."""

    before_read: Callable[[], object] | None = None

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        if self.before_read is not None:
            hook, self.before_read = self.before_read, None
            hook()
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "deleted and put anew"])
def test_a_record_deleted_under_a_reader_is_a_miss_and_not_damage(again: bool, tmp_path: Path) -> None:
    """Goal: ``corrupt`` counts damage only. Method: delete between look-up and read.

    The reader used to count the mark of deletion as damage, and to delete what had been put anew meanwhile. Now it
    looks again where the key has moved to.
    """
    disk = HookedDisk()
    with opened(tmp_path, disk) as store:
        assert all(put(store, [1, 2]))

        def delete() -> None:
            store.backend.delete([key_of(1)])
            if again:
                put(store, [1])

        disk.before_read = delete
        assert get(store, [1, 2]) == [payload_of(1) if again else Absence.MISS, payload_of(2)]
        assert store.counters.corrupt == 0
        assert get(store, [1]) == [payload_of(1) if again else Absence.MISS]

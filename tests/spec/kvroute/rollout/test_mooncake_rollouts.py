"""Rollouts in a real Mooncake pool: keys travel, ranks read their share, and faults of the pool."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from mooncake_pool import Master, Owner, running_master, running_owner
from msgspec.structs import replace
from waiting import GIVE_UP_S

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence
from cache_manager.record import Buffer, RecordHeader
from cache_manager.storage import open_store
from cache_manager.testing.faults import FaultyStore
from kvroute.rollout import RolloutStore, open_rollouts
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.mooncake import POINTER_PLACES, MooncakeRollouts, keys_of, pointers_of
from kvroute.testing.rollouts import fetch_routes, routes_of

SEGMENT_NBYTES = 16 << 20

WRITER = """
import os, signal, sys
from cache_manager.storage import open_store
from cache_manager.testing.faults import FaultyStore
from kvroute.testing.rollouts import fetch_routes, routes_of
from kvroute.rollout import mooncake
from kvroute.rollout.mooncake import MooncakeRollouts

mooncake.BATCH_NBYTES = 300  # 480 bytes of parts, then the header, then the pointer
url, puts = sys.argv[1], int(sys.argv[2])
backend = FaultyStore(open_store(url))
store = MooncakeRollouts(backend, layers=1)
before = [puts]

def die():
    before[0] -= 1
    if before[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)

backend.during_put = die
store.put("task:1:0:0", routes_of(2))
"""


LEASE_MS = 5_000
"""Mooncake's default. A read that takes longer is a miss, which one of 60 ms makes of a core that is busy."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Master, Owner, Path]]:
    segment = tmp_path_factory.mktemp("pool") / "segment"
    with running_master(LEASE_MS) as master, running_owner(master, segment, SEGMENT_NBYTES) as owner:
        yield master, owner, segment


@pytest.fixture
def url(pool: tuple[Master, Owner, Path], request: pytest.FixtureRequest) -> str:
    """A prefix of its own for each test."""
    return pool[0].url(f"t-{abs(hash(request.node.name))}", arena="4MiB", timeout_ms=6000)


Opened = Callable[[RolloutStore], RolloutStore]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Closes the stores that it is given when the test is over."""
    with ExitStack() as stack:
        yield lambda store: stack.enter_context(closing(store))


@pytest.mark.parametrize("puts", range(4))
def test_a_killed_writer_leaves_the_put_before(url: str, opened: Opened, puts: int) -> None:
    """Goal: an incomplete rollout is never read. Method: SIGKILL before the parts, the header or the pointer."""
    store = opened(open_rollouts(url))
    first = store.put("task:1:0:0", routes_of(1))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", WRITER, url, str(puts)], env=environment, check=False, timeout=GIVE_UP_S
    )
    assert done.returncode == -9
    assert store.find("task:1:0:0") == first
    assert fetch_routes(store, first) == routes_of(1)
    third = store.put("task:1:0:0", routes_of(3))
    assert store.find("task:1:0:0") == third
    assert fetch_routes(store, third) == routes_of(3)


def test_a_put_that_does_not_fit_is_a_failure_and_leaves_nothing(url: str, opened: Opened) -> None:
    """Goal: no half rollout. Method: rows of more bytes than the pool has; then one that fits."""
    store = opened(open_rollouts(url.replace("&host", "&full_ms=50&host")))
    with pytest.raises(StorageError, match="no room for"):
        store.put("large", routes_of(1, 2_000_000))
    assert store.find("large") is None
    assert store.counters.put_failures == 1
    handle = store.put("small", routes_of(2))
    assert fetch_routes(store, handle) == routes_of(2)


def test_a_store_that_fails_is_no_absence(url: str, opened: Opened) -> None:
    """Goal: a failure is told apart from a miss. Method: a backend that fails to put and to get."""
    backend = FaultyStore(open_store(url))
    store = opened(MooncakeRollouts(backend, layers=1))
    handle = store.put("x", routes_of(1))
    backend.fail_get = True
    with pytest.raises(StorageError, match="on purpose"):
        store.get(handle)
    backend.fail_get, backend.fail_put = False, True
    with pytest.raises(StorageError, match="on purpose"):
        store.put("x", routes_of(2))
    backend.fail_put = False
    assert store.find("x") == handle
    backend.flip_next = 3
    assert store.get(handle) is Absence.CORRUPT
    backend.flip_next = None
    assert fetch_routes(store, handle) == routes_of(1)
    counters = store.counters
    assert (counters.hits, counters.corrupt, counters.put_failures) == (1, 1, 1)


def test_a_handle_that_nobody_was_given_costs_no_more_than_a_small_one(url: str, opened: Opened) -> None:
    """A bug that was found: delete made a key for every part that a handle claims. Method: forged ones, of a put that
    is there and of none; the real one is deleted whole."""
    asked = list[BlockKey]()

    class Counting(FaultyStore):
        def delete(self, keys: Sequence[BlockKey]) -> None:
            asked.extend(keys)
            super().delete(keys)

    store = opened(MooncakeRollouts(Counting(open_store(url)), layers=1))
    handle = store.put("x", routes_of(1))
    asked.clear()
    for put_id in (handle.put_id, "0" * 32):
        store.delete(replace(handle, rows=1 << 14, part_tokens=1, put_id=put_id, rollout_id="y"))
        store.delete(replace(handle, rows=1 << 14, part_tokens=1, put_id="0" * 32))
    assert len(asked) <= 8
    again = store.put("x", routes_of(1))
    store.delete(again)
    assert not any(store.backend.contains([*keys_of(again), *pointers_of("x")]))


def test_an_id_can_be_put_any_number_of_times(url: str, opened: Opened) -> None:
    """Goal: removed pointers do not count against the limit. Method: one id is put more often than there are places for
    pointers, and the last put is found each time; then, with a pointer left in each place, a put is refused until the
    rollout is deleted."""
    backend = FaultyStore(open_store(url))
    store = opened(MooncakeRollouts(backend, layers=1))
    for seed in range(POINTER_PLACES + 6):
        last = store.put("x", routes_of(seed, 4))
        assert store.find("x") == last
    assert sum(backend.contains(pointers_of("x"))) == 1
    assert fetch_routes(store, last) == routes_of(POINTER_PLACES + 5, 4)
    backend.fail_delete = True
    for seed in range(POINTER_PLACES - 1):
        last = store.put("x", routes_of(seed, 4))
    with pytest.raises(StorageError, match=f"rollout x has {POINTER_PLACES} pointers; delete it first"):
        store.put("x", routes_of(99, 4))
    assert store.find("x") == last
    assert fetch_routes(store, last) == routes_of(POINTER_PLACES - 2, 4)
    backend.fail_delete = False
    store.delete(last)
    assert store.find("x") is None
    assert fetch_routes(store, store.put("x", routes_of(7, 4))) == routes_of(7, 4)


class Meanwhile(FaultyStore):
    """What ``then`` says happens once, right before the first ``call`` about pointers of ``rollout_id``."""

    def __init__(self, url: str, call: str) -> None:
        super().__init__(open_store(url))
        self.call, self.rollout_id, self.then = call, "", list[Callable[[], object]]()

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        self._meanwhile("put", [header.key for header in headers])
        return super().put(headers, payloads, replace=replace)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._meanwhile("delete", keys)
        super().delete(keys)

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        self._meanwhile("get", keys)
        return super().get_into(keys, buffers)

    def _meanwhile(self, call: str, keys: Sequence[BlockKey]) -> None:
        if self.then and call == self.call and set(keys) & set(pointers_of(self.rollout_id)):
            self.then.pop()()


def test_a_put_while_an_earlier_one_is_deleted_is_found(url: str, opened: Opened) -> None:
    """Goal: a name leads to the last put. Method: another process puts the id between the look at its pointers and
    their removal."""
    backend, put = Meanwhile(url, "delete"), list[RolloutHandle]()
    store, other = opened(MooncakeRollouts(backend)), opened(open_rollouts(url))
    first = store.put("x", routes_of(1))
    backend.rollout_id, backend.then = "x", [lambda: put.append(other.put("x", routes_of(2)))]
    store.delete(first)
    assert store.find("x") == other.find("x") == put[0]
    assert fetch_routes(store, put[0]) == routes_of(2)


def test_a_late_removal_of_pointers_spares_the_next_life_of_a_name(url: str, opened: Opened) -> None:
    """Goal: a delete costs its own put. Method: a process that is about to remove a pointer stops; others delete the
    rollout and put it again; then it goes on. First numbers are random, and there are 64 places: of eight names some
    are in another place than before, unless numbering begins where it did."""
    backend, put = Meanwhile(url, "delete"), list[RolloutHandle]()
    store, other = opened(MooncakeRollouts(backend)), opened(open_rollouts(url))

    def again(first: RolloutHandle) -> None:
        other.delete(first)
        put.append(other.put(first.rollout_id, routes_of(2, 4)))

    for i in range(8):
        first = store.put(f"x{i}", routes_of(1, 4))
        backend.rollout_id, backend.then = first.rollout_id, [lambda first=first: again(first)]
        store.delete(first)
        assert not backend.then
        assert fetch_routes(store, put[-1]) == routes_of(2, 4)
    assert [store.find(each.rollout_id) for each in put].count(None) < 6


def test_a_pointer_that_moves_during_a_search_is_found(url: str, opened: Opened) -> None:
    """Goal: a rollout that is there at every moment is found. Method: between the look at which pointers there are and
    their reading another process puts the id again, or deletes it and puts it again."""
    backend, put = Meanwhile(url, "get"), list[RolloutHandle]()
    store, other = opened(MooncakeRollouts(backend)), opened(open_rollouts(url))
    for deletes in (False, True, False):

        def again(deletes: bool = deletes) -> None:
            if deletes:
                other.delete(put[-1])
            put.append(other.put("x", routes_of(len(put), 4)))

        again(deletes=False)
        backend.rollout_id, backend.then = "x", [again]
        assert store.find("x") == put[-1]
        assert not backend.then
        assert fetch_routes(store, put[-1]) == routes_of(len(put) - 1, 4)


def test_writers_that_met_leave_nothing_behind_the_next(url: str, opened: Opened) -> None:
    """Goal: no rows without a name. Method: two writers of a new name meet, so that both have a pointer; after the next
    put only its own pointer and rows are there."""
    backend, put = Meanwhile(url, "put"), list[RolloutHandle]()
    store, other = opened(MooncakeRollouts(backend)), opened(open_rollouts(url))
    backend.rollout_id, backend.then = "x", [lambda: put.append(other.put("x", routes_of(1, 4)))]
    put.append(store.put("x", routes_of(2, 4)))
    assert sum(backend.contains(pointers_of("x"))) == 2
    assert store.find("x") == other.find("x")
    assert store.find("x") in put
    last = other.put("x", routes_of(3, 4))
    assert sum(backend.contains(pointers_of("x"))) == 1
    assert store.find("x") == last
    assert [store.get(each) for each in put] == [Absence.MISS, Absence.MISS]

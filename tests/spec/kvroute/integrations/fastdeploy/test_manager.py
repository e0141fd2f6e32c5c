"""The routing replay manager: no submitted rollout is lost without a report."""

from __future__ import annotations

import subprocess
import sys
import threading
from asyncio import CancelledError
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from waiting import GIVE_UP_S

from cache_manager.errors import ConfigError, InvalidInputError, StorageError, StoreClosedError
from kvroute.integrations.fastdeploy.config import RoutingReplayConfig
from kvroute.integrations.fastdeploy.manager import ReplayCounters, RoutingReplayManager
from kvroute.rollout import RolloutHandle
from kvroute.rollout.local import LocalRollouts
from kvroute.routes import Routes
from kvroute.routing import routing_spec
from kvroute.testing.rollouts import fetch_routes, routes_of

SPEC = routing_spec(num_experts=8, top_k=2, layer_ids=range(1, 12, 2), num_layers=12, block_tokens=8)
"""Of the routes that ``routes_of`` makes."""


class FaultyRollouts(LocalRollouts):
    """A rollout store that fails, or waits, when told to."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fail_put: BaseException | None = None
        self.fail_delete: BaseException | None = None
        self.fail_close = False
        self.gate = threading.Event()
        self.gate.set()
        self.log: list[str] = []

    def put(self, rollout_id: str, routes: Routes) -> RolloutHandle:
        assert self.gate.wait(GIVE_UP_S)
        if self.fail_put is not None:
            raise self.fail_put
        self.log.append(f"put {rollout_id}")
        return super().put(rollout_id, routes)

    def delete(self, handle: RolloutHandle) -> None:
        if self.fail_delete is not None:
            raise self.fail_delete
        self.log.append(f"delete {handle.rollout_id}")
        super().delete(handle)

    def _close(self) -> None:
        if self.fail_close:
            raise StorageError("close failed on purpose")
        self.log.append("close")


def managed(directory: Path, **keys: Any) -> tuple[RoutingReplayManager, FaultyRollouts]:
    store = FaultyRollouts(directory / "store")
    config = RoutingReplayConfig(enable_routing_replay=True, **keys)
    return RoutingReplayManager(config, SPEC, store=store), store


def test_what_is_submitted_is_stored_on_close(tmp_path: Path) -> None:
    """Goal: close loses nothing. Method: submit many, close at once; another store finds all of them."""
    manager, store = managed(tmp_path)
    store.gate.clear()
    futures = [manager.submit(f"task:{i}:0:0", routes_of(i)) for i in range(20)]
    assert not futures[-1].cancel()  # the thread has to report the result of each
    store.gate.set()
    manager.close()
    assert store.log == [*(f"put task:{i}:0:0" for i in range(20)), "close"]
    other = LocalRollouts(tmp_path / "store")
    for i, future in enumerate(futures):
        assert fetch_routes(other, future.result(0)) == routes_of(i)
        assert other.find(f"task:{i}:0:0") == future.result(0)
    assert manager.counters == ReplayCounters(submitted=20, stored=20)
    manager.close()


class UntoldError(Exception):
    def __str__(self) -> str:
        raise ValueError("an error that cannot be told")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StorageError("no room"), "no room"),
        (ValueError("a bug in a store"), "a bug in a store"),
        (CancelledError(), "CancelledError"),
        (UntoldError(), "UntoldError"),
    ],
)
def test_a_failed_put_is_reported_by_its_future_by_counters_and_by_close(
    tmp_path: Path, error: BaseException, said: str
) -> None:
    """Goal: failures are never swallowed. Method: puts fail; ticket, counters and close report it, with reasons."""
    manager, store = managed(tmp_path)
    manager.submit("good", routes_of(1)).result()
    store.fail_put = error
    store.fail_close = True
    futures = [manager.submit(f"r{i}", routes_of(2)) for i in range(10)]
    with pytest.raises(StorageError, match=f"rollout r0 was not stored: .*{said}"):
        futures[0].result(GIVE_UP_S)
    with pytest.raises(StorageError, match=rf"^rollouts were lost: close failed .*{said}.*; and 2 more$"):
        manager.close()
    assert all(future.done() for future in futures)
    assert manager.counters == ReplayCounters(submitted=11, stored=1, failed=10)


def test_only_the_last_turn_stays(tmp_path: Path) -> None:
    """Goal: FastDeploy's ``only_last_turn``. Method: turns of two generations; each delete comes after its put, and
    neither another segment nor another generation is touched; without the key every turn stays."""
    every, kept = managed(tmp_path / "every")
    manager, store = managed(tmp_path, only_last_turn=True)
    names = ["t:0:0:0", "t:0:0:1", "t:0:1:0", "t:1:0:0", "t:0:2:0"]
    for i, name in enumerate(names):
        manager.submit(name, routes_of(i)).result()
        every.submit(name, routes_of(i)).result()
    assert all(kept.find(name) for name in names)
    every.close()
    assert [name for name in names if store.find(name)] == ["t:0:0:1", "t:1:0:0", "t:0:2:0"]
    assert store.log[2:4] == ["put t:0:1:0", "delete t:0:0:0"]
    assert manager.counters.turns_deleted == 2
    for turn, error in enumerate([StorageError("no"), ValueError("a bug"), CancelledError()], 3):
        store.fail_delete = error
        assert manager.submit(f"t:0:{turn}:0", routes_of(9)).result(GIVE_UP_S).rollout_id == f"t:0:{turn}:0"
    assert (manager.counters.stored, manager.counters.turn_failures) == (8, 3)
    manager.close()


@pytest.mark.parametrize(("name", "limit"), [("WAITING_MAX", 2), ("WAITING_NBYTES_MAX", 1_600)])
def test_too_many_are_refused_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    """Goal: a slow store costs bounded memory and blocks no caller. Method: the store waits; submissions over the limit
    are refused."""
    monkeypatch.setattr(f"kvroute.integrations.fastdeploy.manager.{name}", limit)
    manager, store = managed(tmp_path)
    store.gate.clear()
    futures = [manager.submit(f"r{i}", routes_of(i)) for i in range(8)]
    refused = [future for future in futures if future.done()]
    assert len(refused) >= 4
    for future in refused:
        with pytest.raises(StorageError, match=r"was refused: .* would wait for the store"):
            future.result(0)
    assert manager.counters.refused == len(refused)
    assert manager.counters.waiting == 8 - len(refused)
    assert not futures[0].done()
    store.gate.set()
    with pytest.raises(StorageError, match=r"rollouts were lost: rollout .* was refused"):
        manager.close()
    counters = manager.counters
    assert (counters.stored, counters.waiting, counters.waiting_nbytes) == (8 - len(refused), 0, 0)


def test_what_is_not_stored_in_time_is_named_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: close ends, and reports what it left undone. Method: a store that hangs longer than close may wait."""
    monkeypatch.setattr("kvroute.integrations.fastdeploy.manager.CLOSE_S", 0.2)
    manager, store = managed(tmp_path)
    store.gate.clear()
    futures = [manager.submit(f"r{i}", routes_of(i)) for i in range(3)]
    with pytest.raises(
        StorageError, match=r"rollouts were lost: 3 rollouts are not stored after 0.2 s; .*rollout r2: closed"
    ):
        manager.close()
    for i, future in enumerate(futures[1:], 1):
        with pytest.raises(StorageError, match=f"rollout r{i}: closed before it was stored"):
            future.result(0)
    assert (manager.counters.failed, manager.counters.waiting) == (2, 1)
    store.gate.set()
    with pytest.raises(StorageError):  # the one that the store had: it is closed
        futures[0].result(GIVE_UP_S)
    assert (manager.counters.failed, manager.counters.waiting) == (3, 0)


def test_a_callback_that_fails_or_closes_delays_no_other_put(tmp_path: Path) -> None:
    """Goal: callbacks of a future end neither the thread nor close. Method: callbacks that raise errors which no future
    catches, and callbacks that close the manager in its own thread; submitted rollouts are stored all the same."""
    manager, store = managed(tmp_path)
    store.gate.clear()
    futures = [manager.submit(f"r{i}", routes_of(i)) for i in range(3)]
    ended = threading.Event()

    def fail(_: Future[RolloutHandle]) -> None:
        raise CancelledError

    def close(_: Future[RolloutHandle]) -> None:
        manager.close()
        ended.set()

    futures[0].add_done_callback(fail)
    futures[1].add_done_callback(close)
    store.gate.set()
    assert ended.wait(GIVE_UP_S)
    assert all(future.result(0) for future in futures)
    assert store.log == ["put r0", "put r1", "put r2", "close"]


HANGS = """
import sys, threading
from pathlib import Path
from kvroute import routing_spec
from kvroute.integrations.fastdeploy import RoutingReplayConfig, RoutingReplayManager
from kvroute.rollout.local import LocalRollouts
from kvroute.testing.rollouts import fetch_routes, routes_of

class Hangs(LocalRollouts):
    def put(self, rollout_id, routes):
        begun.set()
        threading.Event().wait()

begun = threading.Event()
spec = routing_spec(num_experts=8, top_k=2, layer_ids=range(1, 12, 2), num_layers=12, block_tokens=8)
manager = RoutingReplayManager(RoutingReplayConfig(enable_routing_replay=True), spec, store=Hangs(Path(sys.argv[1])))
manager.submit("x", routes_of(1))
begun.wait()
"""


def test_a_store_that_hangs_keeps_no_process_from_ending(tmp_path: Path) -> None:
    """Goal: an engine can end at any time. Method: a process that ends while a put never returns."""
    done = subprocess.run([sys.executable, "-c", HANGS, tmp_path], capture_output=True, text=True, timeout=GIVE_UP_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_manager_refuses_and_raises_nothing_into_an_engine(tmp_path: Path) -> None:
    """Goal: an engine that has given a sample's blocks back does not fail for want of a store. Method: a rollout is
    submitted to a closed manager: the ticket and the counters report it."""
    manager, store = managed(tmp_path)
    manager.close()
    future = manager.submit("x", routes_of(1))
    assert future.done()
    with pytest.raises(StoreClosedError, match="rollout x was refused: the routing replay manager is closed"):
        future.result(0)
    assert manager.counters == ReplayCounters(submitted=1, refused=1)
    assert store.log == ["close"]


# ---------------------------------------------------------------- what does not fit


def test_a_configuration_that_is_off_or_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="enable_routing_replay: wanted true"):
        RoutingReplayManager(RoutingReplayConfig(), SPEC)
    for keys in ({"num_moe_layers": 7}, {"moe_top_k": 3}):
        with pytest.raises(ConfigError, match=next(iter(keys))):
            managed(tmp_path, **keys)


def test_routes_of_another_model_are_refused(tmp_path: Path) -> None:
    manager, _ = managed(tmp_path)
    for other in (routes_of(1, layers=5), routes_of(1, experts=9), routes_of(1, top_k=3)):
        with pytest.raises(InvalidInputError, match="routes "):
            manager.submit("x", other)
    assert manager.counters.submitted == 0
    manager.close()

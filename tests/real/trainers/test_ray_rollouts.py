"""Rollouts as Ray objects, in a real cluster of one node, under the shipped contract."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np
import pytest
import ray
from hypothesis import settings

from cache_manager.errors import InvalidInputError, StorageError
from cache_manager.ports import Absence
from kvroute.replay.nemo_rl_references import References
from kvroute.rollout import RolloutHandle, RolloutStore, fetch_shard, open_rollouts
from kvroute.rollout.ray import RAY_NAMESPACE
from kvroute.routes import Split, shard_packed
from kvroute.testing.rollouts import RolloutContract, fetch_routes, routes_of

numbers = count()


class TestRayRollouts(RolloutContract):
    """Each store has an owner of its own."""

    settings = settings(max_examples=6, stateful_step_count=10, deadline=None)
    owners: ClassVar[dict[RolloutStore, str]] = {}

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: None) -> Iterator[None]:
        yield
        for name in ray.util.list_named_actors(all_namespaces=True):
            ray.kill(ray.get_actor(name["name"], namespace=name["namespace"]))

    def make_store(self, directory: Path) -> RolloutStore:
        name = f"test-{next(numbers)}"
        store = open_rollouts(f"ray:{name}")
        self.owners[store] = name
        return store

    def damage(self, directory: Path, store: RolloutStore, handle: RolloutHandle) -> RolloutHandle:
        """A part of another put is in the place of one of this."""
        other = store.put("another", routes_of(7))
        owner = ray.get_actor(self.owners[store], namespace=RAY_NAMESPACE)
        records = []
        for each in (handle, other):
            whole = [(0, each.header_nbytes + each.nbytes)]
            records.append(ray.get(owner.read.remote(each.rollout_id, each.to_json(), whole))[0].copy())
        part, (first, second) = handle.nbytes_of((0, 1)), (handle.header_nbytes, other.header_nbytes)
        records[0][first : first + part] = records[1][second : second + part]
        ray.get(owner.put.remote(handle.rollout_id, handle.to_json(), records[0]))
        return handle


@pytest.mark.usefixtures("cluster")
def test_rollouts_outlive_the_process_that_put_them_and_end_with_their_owner() -> None:
    """Goal: the owner is the lease. Method: a task of another process puts and is killed; a rank here reads its share;
    the owner is killed, and the rollout is a miss, until it is put again."""
    routes, name = routes_of(1, 4096), f"lease-{next(numbers)}"

    @ray.remote(num_cpus=0)
    class Engine:
        def put(self) -> str:
            return open_rollouts(f"ray:{name}").put("task:1:0:0", routes_of(1, 4096)).to_json()

        def die(self) -> None:
            os._exit(1)

    engine = Engine.remote()
    handle = RolloutHandle.from_json(ray.get(engine.put.remote()))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(engine.die.remote())
    store = open_rollouts(f"ray:{name}")
    split = Split(pp=3, pp_rank=1, cp=2, cp_rank=1)
    assert np.array_equal(fetch_shard(store, [handle], [4097], split), shard_packed([routes], [4097], split))
    assert store.counters.get_nbytes <= routes.ids.nbytes // 6 + handle.header_nbytes + 8 * handle.part_nbytes
    assert store.find("task:1:0:0") == handle
    ray.kill(ray.get_actor(name, namespace=RAY_NAMESPACE))
    assert store.get(handle) is Absence.MISS
    assert store.find("task:1:0:0") is None
    assert fetch_routes(store, store.put("task:1:0:0", routes)) == routes


@pytest.mark.usefixtures("cluster")
def test_nemo_rl_takes_references() -> None:
    """Goal: ``nemo_rl.routed_experts_ref.v1``. Method: a registry as NeMo-RL names it, and the calls that its workers
    make of a reference, of slices of it, of a second attempt, and of a retired version; missing rows say -1."""

    @ray.remote(num_cpus=0)
    class Registry:
        stores: ClassVar[dict[str, object]] = {}

        def register_store(self, instance: str, store: object) -> None:
            self.stores[instance] = store

        def retire_through(self, version: int) -> list[dict[str, int]]:
            return ray.get([store.retire_through.remote(version) for store in self.stores.values()])

    registry = Registry.options(name="nrl_routed_experts_registry_run", namespace="nemo_rl_routed_experts").remote()
    ray.get(registry.__ray_ready__.remote())
    routes = routes_of(1, 20, missing=0.3)
    names = {"request_id": "r", "task": 1, "rollout": 2, "weights_version": 5}
    references = References("run")
    ref = json.loads(json.dumps(references.put(routes, 21, **names)))
    wanted = routes.materialize(21, "moe", "int16", missing="minus1")
    assert (wanted == -1).any()
    assert (ref["schema"], ref["dtype"], ref["shape"]) == ("nemo_rl.routed_experts_ref.v1", "int16", [21, 6, 2])
    source = ray.get_actor(ref["store"], namespace="nemo_rl_routed_experts")
    whole = ray.get(source.get_ref.remote(ref))
    assert np.array_equal(ray.get(whole["object_ref"]), wanted)
    assert (whole["shape"], whole["dtype"], whole["nbytes"]) == ([21, 6, 2], "int16", wanted.nbytes)
    ranges = ray.get(source.get_ranges.remote([ref | {"offset": 15, "length": 6}, ref | {"offset": 0, "length": 3}]))
    assert np.array_equal(ranges["values"], np.concatenate([wanted[15:], wanted[:3]]))
    for wrong in ({"offset": 15, "length": 7}, {"offset": -3, "length": 3}):  # a slice would say nothing
        with pytest.raises(ValueError, match="a range of its 21 rows"):
            ray.get(source.get_ranges.remote([ref | wrong]))
    with pytest.raises(InvalidInputError, match="a new one"):
        references.put(routes, 21, **names)
    again = references.put(routes.slice(0, 10), 21, attempt=1, **names)
    for each, rows in ((again, 10), (ref, 20)):
        found = ray.get(ray.get(source.get_ref.remote(each))["object_ref"])
        assert np.array_equal(found, routes.slice(0, rows).materialize(21, "moe", "int16", missing="minus1"))
    assert ray.get(registry.retire_through.remote(5)) == [
        {"retired_through": 5, "retired_objects": 2, "retired_bytes": 2 * wanted.nbytes, "remaining_objects": 0}
    ]
    for other in (ref, ref | {"store_instance_id": "x"}):
        with pytest.raises(ValueError, match="one of rows that are here"):
            ray.get(source.get_ref.remote(other))


def test_a_store_goes_on_in_the_next_cluster() -> None:
    """Goal: a driver that restarts Ray keeps its open store: an error of ours, then misses, then rollouts. Method: the
    cluster ends and another begins, once for each call that may be the first to see it."""
    routes = routes_of(1, 20)
    first: list[Callable[[], object]] = [
        lambda: store.get(handle),
        lambda: store.find("a"),
        lambda: store.put("a", routes),
        lambda: store.delete(handle),
    ]
    with TemporaryDirectory(prefix="ray") as directory:

        def restart() -> None:
            ray.shutdown()
            ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=directory)

        try:
            restart()
            store = open_rollouts("ray:again")
            for call in first:
                handle = store.put("a", routes)
                restart()
                with pytest.raises(StorageError, match="the rollout store ray:again: "):
                    call()
                assert store.get(handle) is Absence.MISS
                assert store.find("a") is None
                assert fetch_routes(store, store.put("a", routes)) == routes
        finally:
            ray.shutdown()


def test_where_there_is_no_cluster_the_store_says_so() -> None:
    """Goal: a failure has a readable error. Method: a store is opened on a machine without a cluster."""
    ray.shutdown()
    with pytest.raises(StorageError, match="the rollout store ray:x: ConnectionError: Could not find"):
        open_rollouts("ray:x")

"""The contract of a rollout store, as tests that an implementation subclasses.

from kvroute.testing.rollouts import RolloutContract

class TestMyRollouts(RolloutContract):
    def make_store(self, directory):
        return MyRollouts(directory / "rollouts")
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from cache_manager.errors import InvalidInputError, StoreClosedError
from cache_manager.ports import Absence
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.port import RolloutStore
from kvroute.rollout.shard import fetch_routes, fetch_shard
from kvroute.routes import Routes, Split, shard_packed


def routes_of(
    seed: int,
    rows: int = 40,
    *,
    layers: int = 6,
    top_k: int = 2,
    experts: int = 8,
    start: int = 0,
    missing: float = 0.0,
    unknown: float = 0.0,
    lost: int = 0,
) -> Routes:
    """Routes that differ with ``seed``: every other layer of ``2 * layers``, a share ``missing`` of rows not there.

    Of the others a share ``unknown`` of cells; and of the last ``lost`` layers nothing at all.
    """
    random = np.random.default_rng(seed)
    first = random.integers(0, experts, (rows, layers, 1))
    ids = (first + np.arange(top_k)) % experts
    valid = random.random(rows) >= missing
    if unknown:
        valid = valid[:, None] & (random.random((rows, layers - lost)) >= unknown)
    versions = ((start, start + rows // 2, seed), (start + rows // 2, start + rows, seed + 1)) if rows > 1 else ()
    layer_ids = tuple(range(1, 2 * layers, 2))
    kept, gone = layer_ids[: layers - lost], layer_ids[layers - lost :]
    fields = kept, experts, 2 * layers, start, versions
    return Routes(ids[:, : len(kept)], valid, *fields, missing_layers=gone).bind(np.arange(start + rows + 1))


def of_layers(routes: Routes, layers: set[int]) -> Routes:
    """``routes`` of some layer ids only, taken apart by hand; of the others it is known that they route."""
    kept = [i for i, layer in enumerate(routes.layer_ids) if layer in layers]
    return Routes(
        routes.ids[:, kept],
        routes.known[:, kept],
        tuple(routes.layer_ids[i] for i in kept),
        routes.num_experts,
        routes.num_layers,
        routes.start,
        routes.weights_versions,
        routes.token_hashes,
        (*routes.missing_layers, *(layer for layer in routes.layer_ids if layer not in layers)),
    )


class RolloutContract(ABC):
    """Subclass it, name the class ``Test...``, and implement :meth:`make_store`."""

    finds: bool = True
    """Whether a rollout can be found by its id."""
    forgets: bool = True
    """Whether what was deleted is not there any more."""
    reads_parts: bool = True
    """Whether a get reads little beside what is wanted, and not the whole rollout."""
    settings: ClassVar[settings | None] = None
    """Of Hypothesis, where a store is slow."""

    @abstractmethod
    def make_store(self, directory: Path) -> RolloutStore:
        """An empty store; ``directory`` is empty too, and goes away after the test."""

    def damage(self, directory: Path, store: RolloutStore, handle: RolloutHandle) -> RolloutHandle:
        """Change a byte of what is stored; the handle to ask with. Skipped unless overridden."""
        pytest.skip(f"{type(self).__name__} does not say how to damage {handle.rollout_id} in {store} in {directory}")

    @contextmanager
    def _opened(self) -> Iterator[tuple[RolloutStore, Path]]:
        with TemporaryDirectory() as name:
            directory = Path(name) / "store"
            directory.mkdir()
            store = self.make_store(directory)
            try:
                yield store, directory
            finally:
                store.close()

    # ---------------------------------------------------------------- what is put comes back

    def test_what_was_put_comes_back_whole_and_in_part(self) -> None:
        """Goal: never wrong. Method: routes of any shape; all of them, and any layers and ranges, as sliced by hand."""
        comes_back = given(data=st.data())(self._comes_back)
        (self.settings(comes_back) if self.settings else comes_back)()

    def _comes_back(self, data: st.DataObject) -> None:
        rows, start = data.draw(st.integers(0, 90)), data.draw(st.sampled_from([0, 7]))
        width = data.draw(st.integers(1, 6))
        routes = routes_of(
            data.draw(st.integers(0, 99)),
            rows,
            layers=width,
            top_k=data.draw(st.integers(1, 4)),
            experts=data.draw(st.sampled_from([8, 256, 300])),
            start=start,
            missing=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
            unknown=data.draw(st.sampled_from([0.0, 0.2])),
            lost=data.draw(st.integers(0, min(2, width - 1))),
        )
        layers = data.draw(st.sets(st.integers(0, routes.num_layers - 1)))
        layers.add(data.draw(st.sampled_from(routes.layer_ids)))
        position = st.integers(start, start + rows)
        pairs = data.draw(st.lists(st.tuples(position, position), max_size=3))
        spans = [(min(pair), max(pair)) for pair in pairs]
        with self._opened() as (store, _):
            handle = RolloutHandle.from_json(store.put("task:1:0:0", routes).to_json())
            assert fetch_routes(store, handle) == routes
            found = store.get(handle, sorted(layers), spans)
            assert found == [of_layers(routes.slice(a, b), layers) for a, b in spans]

    def test_any_order_of_calls(self) -> None:
        """Goal: a handle is its own put or a miss. Method: a state machine beside a dictionary of what was put."""
        machine = _machine(self)
        run_state_machine_as_test(
            machine, settings=self.settings or settings(max_examples=20, stateful_step_count=15, deadline=None)
        )

    def test_a_rank_gets_its_shard(self) -> None:
        """Goal: the store cuts as trainers do. Method: ranks of TP x CP x PP, beside shards of the whole routes."""
        with self._opened() as (store, _):
            whole, tokens = [routes_of(1, 64), routes_of(2, 33)], [65, 34]
            handles = [store.put(f"task:{i}:0:0", routes) for i, routes in enumerate(whole)]
            for split in (
                Split(tp=2, tp_rank=1, cp=2, cp_rank=1, sp=True, pp=3, pp_rank=2),
                Split(cp=2, cp_rank=0, pp=2, pp_rank=0, layout="contiguous"),
                Split(),
            ):
                mine = fetch_shard(store, handles, tokens, split)
                assert np.array_equal(mine, shard_packed(whole, tokens, split))

    def test_a_rank_reads_little_beside_its_shard(self) -> None:
        """Goal: no rank reads what all need together. Method: bytes read for one layer of six and a quarter of rows."""
        with self._opened() as (store, _):
            routes = routes_of(3, 20_000, layers=6, top_k=8, experts=64)
            handle = store.put("task:1:0:0", routes)
            before = store.counters.get_nbytes
            store.get(handle, [routes.layer_ids[2]], [(0, 5_000)])
            read = store.counters.get_nbytes - before - handle.header_nbytes
            wanted = routes.ids.nbytes // 24
            assert wanted <= read <= (wanted + 2 * handle.grid.part_nbytes if self.reads_parts else routes.ids.nbytes)
            assert handle.grid.part_nbytes < wanted // 10 or not self.reads_parts

    # ---------------------------------------------------------------- names

    def test_the_last_put_of_an_id_is_found_until_it_is_deleted(self) -> None:
        """Goal: names. Method: puts of one id beside another id's; earlier ones are deleted, then the last, twice."""
        with self._opened() as (store, _):
            assert store.find("task:1:0:0") is None
            handles = []
            for seed in (1, 2, 3):
                handles.append(store.put("task:1:0:0", routes_of(seed)))
                assert fetch_routes(store, handles[-1]) == routes_of(seed)
                assert store.find("task:1:0:0") == (handles[-1] if self.finds else None)
            other = store.put("task:1:0:1", routes_of(4))
            for handle in handles[:2]:
                store.delete(handle)
            assert fetch_routes(store, handles[2]) == routes_of(3)
            if self.finds:
                assert store.find("task:1:0:0") == handles[2]
            for _ in range(2):
                store.delete(handles[2])
            if self.forgets:
                assert store.get(handles[2]) is Absence.MISS
                assert store.counters.misses == 1
            assert store.find("task:1:0:0") is None
            assert fetch_routes(store, other) == routes_of(4)
            assert (store.counters.puts, store.counters.deletes, store.counters.hits) == (4, 4, 5)
            assert store.counters.put_nbytes == 4 * routes_of(1).ids.nbytes

    def test_ids_that_clients_choose_are_names_and_nothing_else(self) -> None:
        """Goal: an id leads nowhere else. Method: ids that are paths, and what is beside the store afterwards; what can
        be no id is refused."""
        with self._opened() as (store, directory):
            ids = ["../x", "a/b", "..", ".", "a b", "ä:ö", "%2E", "x" * 200, "CON", "-rf"]
            handles = [store.put(rollout_id, routes_of(i)) for i, rollout_id in enumerate(ids)]
            for i, (rollout_id, handle) in enumerate(zip(ids, handles, strict=True)):
                assert fetch_routes(store, handle) == routes_of(i)
                assert store.find(rollout_id) == (handle if self.finds else None)
            assert os.listdir(directory.parent) == ["store"]
            for wrong in ("", "x" * 201, "\udc80", 7, None):
                with pytest.raises(InvalidInputError, match="rollout id: wanted"):
                    store.put(wrong, routes_of(1))  # type: ignore[arg-type]
                with pytest.raises(InvalidInputError, match="rollout id: wanted"):
                    store.find(wrong)  # type: ignore[arg-type]

    def test_what_a_rollout_does_not_have_is_refused(self) -> None:
        with self._opened() as (store, _):
            handle = store.put("task:1:0:0", routes_of(1, 10, start=5))
            for spans in ([(4, 8)], [(5, 16)], [(9, 8)], [(5, 6, 7)]):
                with pytest.raises(InvalidInputError, match="spans: wanted ranges of positions inside"):
                    store.get(handle, None, spans)  # type: ignore[arg-type]
            with pytest.raises(InvalidInputError, match="layers: wanted one or more of"):
                store.get(handle, [0, 2])

    # ---------------------------------------------------------------- absence

    def test_a_handle_of_another_store_is_a_miss(self) -> None:
        with self._opened() as (store, _), self._opened() as (other, _):
            handle = store.put("task:1:0:0", routes_of(1))
            if not handle.inline:
                assert other.get(handle) is Absence.MISS

    def test_damage_is_a_counted_absence(self) -> None:
        """Goal: never wrong. Method: one byte of the stored rollout is changed; other rollouts are not concerned."""
        with self._opened() as (store, directory):
            handle, other = store.put("task:1:0:0", routes_of(1)), store.put("task:1:0:1", routes_of(2))
            damaged = self.damage(directory, store, handle)
            assert store.get(damaged) is Absence.CORRUPT
            assert store.counters.corrupt == 1
            assert fetch_routes(store, other) == routes_of(2)
            again = store.put("task:1:0:0", routes_of(3))
            assert fetch_routes(store, again) == routes_of(3)

    # ---------------------------------------------------------------- side by side

    def test_writers_and_readers_do_not_meet(self) -> None:
        """Goal: what is found is whole. Method: threads that put few ids again and again, and threads that read."""
        ids = [f"task:{i}:0:0" for i in range(3)]
        with self._opened() as (store, _), ThreadPoolExecutor(5) as threads:

            def write(seed: int) -> None:
                for i in range(8):
                    store.put(ids[i % 3], routes_of(seed + i, 30 + i))

            def read() -> None:
                while not all(writer.done() for writer in writers):
                    for rollout_id in ids:
                        handle = store.find(rollout_id)
                        found = Absence.MISS if handle is None else fetch_routes(store, handle)
                        assert found is not Absence.CORRUPT
                        if not isinstance(found, Absence):
                            assert found == routes_of(found.weights_versions[0][2], len(found))

            writers = [threads.submit(write, seed) for seed in (0, 100, 200)]
            for each in [*writers, threads.submit(read), threads.submit(read)]:
                each.result(60)
            if self.finds:
                assert all(store.find(rollout_id) is not None for rollout_id in ids)
            assert (store.counters.puts, store.counters.put_failures, store.counters.corrupt) == (24, 0, 0)

    # ---------------------------------------------------------------- the end

    def test_a_closed_store_says_so(self) -> None:
        with self._opened() as (store, _):
            handle = store.put("task:1:0:0", routes_of(1))
            store.flush()
            store.close()
            store.close()
            calls: list[tuple[Any, ...]] = [
                (store.put, "task:1:0:0", routes_of(1)),
                (store.find, "task:1:0:0"),
                (store.flush,),
            ]
            for call, *given_ in [*calls, (store.get, handle), (store.delete, handle)]:
                with pytest.raises(StoreClosedError):
                    call(*given_)


def _machine(contract: RolloutContract) -> type[RuleBasedStateMachine]:
    """Puts, deletes and reads in any order, for few ids."""
    ids = st.sampled_from(["a:0:0:0", "a:0:1:0", "b/.."])

    class Rollouts(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self._stack = ExitStack()
            self.store, _ = self._stack.enter_context(contract._opened())
            self.put_as: list[tuple[RolloutHandle, int]] = []
            self.last: dict[str, RolloutHandle] = {}

        def teardown(self) -> None:
            self._stack.close()

        @rule(rollout_id=ids, seed=st.integers(0, 9))
        def put(self, rollout_id: str, seed: int) -> None:
            handle = self.store.put(rollout_id, routes_of(seed, 3 + seed))
            assert handle not in [other for other, _ in self.put_as]
            self.put_as.append((handle, seed))
            self.last[rollout_id] = handle

        @precondition(lambda self: self.put_as)
        @rule(data=st.data())
        def delete(self, data: st.DataObject) -> None:
            handle, _ = data.draw(st.sampled_from(self.put_as))
            self.store.delete(handle)
            if self.last.get(handle.rollout_id) == handle:
                del self.last[handle.rollout_id]

        @precondition(lambda self: self.put_as)
        @rule(data=st.data())
        def get(self, data: st.DataObject) -> None:
            handle, seed = data.draw(st.sampled_from(self.put_as))
            found = fetch_routes(self.store, handle)
            if handle in self.last.values() or handle.inline:
                assert found == routes_of(seed, 3 + seed)
            elif contract.forgets:
                assert found is Absence.MISS

        @rule(rollout_id=ids)
        def find(self, rollout_id: str) -> None:
            assert self.store.find(rollout_id) == (self.last.get(rollout_id) if contract.finds else None)

        @invariant()
        def counters_add_up(self) -> None:
            counters = self.store.counters
            assert (counters.puts, counters.put_failures, counters.corrupt) == (len(self.put_as), 0, 0)

    return Rollouts

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
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cache_manager.errors import InvalidInputError, RowError, StoreClosedError
from cache_manager.ports import Absence
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.port import RolloutCounters, RolloutStore
from kvroute.rollout.shard import fetch_shard
from kvroute.routes import Routes, SamplingSupport, Split, shard_packed


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
    """Routes that differ with ``seed``: every other layer of ``2 * layers``, with a share ``missing`` of missing rows.

    In the other rows a share ``unknown`` of cells is missing, as are all of the last ``lost`` layers.
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


def support_of(seed: int, routes: Routes) -> SamplingSupport:
    """What the last half of the tokens of :func:`routes_of` was drawn from, which differs with ``seed``."""
    tokens = np.arange(routes.stop + 1)
    start = (routes.start + routes.stop) // 2
    return SamplingSupport.of([range(token, token + 1 + (token + seed) % 4) for token in tokens[start:]], tokens, start)


def fetch_routes(store: RolloutStore, handle: RolloutHandle) -> Routes | Absence:
    """All routes of a rollout."""
    fetched = store.get(handle)
    return fetched if isinstance(fetched, Absence) else fetched[0]


def routes_of_layers(routes: Routes, layers: set[int]) -> Routes:
    """``routes`` with some layer ids only, made without the code under test; the others become ``missing_layers``."""
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

    reads_parts: bool = True
    """Whether a get reads little more than the wanted rows, not the whole rollout."""
    settings: ClassVar[settings | None] = None
    """Settings of Hypothesis, for a slow store."""

    @abstractmethod
    def make_store(self, directory: Path) -> RolloutStore:
        """An empty store; ``directory`` is empty too, and goes away after the test."""

    def damage(
        self,
        directory: Path,
        store: RolloutStore,
        handle: RolloutHandle,
    ) -> RolloutHandle:
        """Change a byte of a stored rollout; returns the handle to ask with. Skipped unless overridden."""
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
            parts = store.get(handle, sorted(layers), spans)
            assert parts == [routes_of_layers(routes.slice(a, b), layers) for a, b in spans]

    def test_any_order_of_calls(self) -> None:
        """Goal: a handle is its own put or a miss. Method: a state machine beside a dictionary of what was put."""
        machine = _machine(self)
        run_state_machine_as_test(
            machine, settings=self.settings or settings(max_examples=20, stateful_step_count=15, deadline=None)
        )

    def test_a_rank_gets_its_shard_and_reads_little_beside_it(self) -> None:
        """Goal: the store cuts as trainers do, and no rank reads the rows of all ranks. Method: ranks of TP x CP x PP,
        beside shards of the whole routes; bytes read for one layer of six and a quarter of the rows."""
        with self._opened() as (store, _):
            whole, tokens = [routes_of(1, 64), routes_of(2, 33)], [65, 34]
            handles = [store.put(f"task:{i}:0:0", routes) for i, routes in enumerate(whole)]
            for split in (
                Split(tp=2, tp_rank=1, cp=2, cp_rank=1, sp=True, pp=3, pp_rank=2),
                Split(cp=2, cp_rank=0, pp=2, pp_rank=0, layout="contiguous"),
                Split(),
            ):
                shard = fetch_shard(store, handles, tokens, split)
                assert np.array_equal(shard, shard_packed(whole, tokens, split))
            routes = routes_of(3, 20_000, layers=6, top_k=8, experts=64)
            handle = store.put("task:1:0:0", routes)
            before = store.counters.get_nbytes
            store.get(handle, [routes.layer_ids[2]], [(0, 5_000)])
            read = store.counters.get_nbytes - before - handle.header_nbytes
            wanted = routes.ids.nbytes // 24
            assert wanted <= read <= (wanted + 2 * handle.part_nbytes if self.reads_parts else routes.ids.nbytes)
            assert handle.part_nbytes < wanted // 10 or not self.reads_parts

    def test_what_tokens_were_drawn_from_lies_beside_their_routes(self) -> None:
        """Goal: a sampling support is that of its own put, and costs no rank that reads rows. Method: puts with one
        and without one under the same ids, and with one of no position; their handles through JSON; one of other
        tokens."""
        with self._opened() as (store, _):
            plain = store.put("task:1:0:0", routes_of(1))
            assert store.support(plain) is None
            tokens = np.arange(routes_of(1).stop + 1)
            empty = store.put("task:1:0:2", routes_of(1), SamplingSupport.of([], tokens, len(tokens)))
            assert (store.support(empty), empty.header_nbytes) == (None, plain.header_nbytes)  # as if there were none
            routes, other = routes_of(2), routes_of(3, 70)
            handle = RolloutHandle.from_json(store.put("task:1:0:0", routes, support_of(2, routes)).to_json())
            beside = store.put("task:1:0:1", other, support_of(3, other))
            assert store.find("task:1:0:0") == handle
            before = store.counters.get_nbytes
            assert store.support(handle) == support_of(2, routes)
            assert store.support(beside) == support_of(3, other)
            assert store.counters.get_nbytes - before < 4 * handle.header_nbytes
            assert fetch_routes(store, handle) == routes
            before = store.counters.get_nbytes
            assert fetch_routes(store, beside) == other
            assert store.counters.get_nbytes - before == beside.header_nbytes + beside.nbytes
            with pytest.raises(RowError, match="token"):
                store.put("task:1:0:0", routes, support_of(2, routes_of(2, 60)))
            assert store.support(handle) == support_of(2, routes)
            again = store.put("task:1:0:0", routes)
            assert (store.support(handle), store.support(again)) == (Absence.MISS, None)
            store.delete(beside)
            assert store.support(beside) is Absence.MISS

    # ---------------------------------------------------------------- names

    def test_ids_that_clients_choose_are_names_and_nothing_else(self) -> None:
        """Goal: an id does not lead out of the store. Method: ids that are paths, and the files beside the store
        afterwards; invalid ids are refused."""
        with self._opened() as (store, directory):
            ids = ["../x", "a/b", "..", ".", "a b", "ä:ö", "%2E", "x" * 200, "CON", "-rf"]
            handles = [store.put(rollout_id, routes_of(i)) for i, rollout_id in enumerate(ids)]
            for i, (rollout_id, handle) in enumerate(zip(ids, handles, strict=True)):
                assert fetch_routes(store, handle) == routes_of(i)
                assert store.find(rollout_id) == handle
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
        with self._opened() as (store, _), self._opened() as (second, _):
            handle = store.put("task:1:0:0", routes_of(1))
            assert second.get(handle) is Absence.MISS

    def test_damage_is_a_counted_absence(self) -> None:
        """Goal: never wrong. Method: one byte of the stored rollout is changed; other rollouts stay sound."""
        with self._opened() as (store, directory):
            handle, sound = store.put("task:1:0:0", routes_of(1)), store.put("task:1:0:1", routes_of(2))
            damaged = self.damage(directory, store, handle)
            assert store.get(damaged) is Absence.CORRUPT
            assert store.counters.corrupt == 1
            assert fetch_routes(store, sound) == routes_of(2)
            again = store.put("task:1:0:0", routes_of(3))
            assert fetch_routes(store, again) == routes_of(3)

    # ---------------------------------------------------------------- side by side

    def test_writers_and_readers_do_not_meet(self) -> None:
        """Goal: a found rollout is whole. Method: threads that put few ids again and again, and threads that read."""
        ids = [f"task:{i}:0:0" for i in range(3)]
        with self._opened() as (store, _), ThreadPoolExecutor(5) as threads:

            def write(seed: int) -> None:
                for i in range(8):
                    store.put(ids[i % 3], routes_of(seed + i, 30 + i))

            def read() -> None:
                while not all(writer.done() for writer in writers):
                    for rollout_id in ids:
                        handle = store.find(rollout_id)
                        fetched = Absence.MISS if handle is None else fetch_routes(store, handle)
                        assert fetched is not Absence.CORRUPT
                        if not isinstance(fetched, Absence):
                            assert fetched == routes_of(fetched.weights_versions[0][2], len(fetched))

            writers = [threads.submit(write, seed) for seed in (0, 100, 200)]
            for future in [*writers, threads.submit(read), threads.submit(read)]:
                future.result(60)
            assert all(store.find(rollout_id) is not None for rollout_id in ids)
            assert (store.counters.puts, store.counters.put_failures, store.counters.corrupt) == (24, 0, 0)

    # ---------------------------------------------------------------- the end

    def test_a_closed_store_says_so(self) -> None:
        with self._opened() as (store, _):
            handle = store.put("task:1:0:0", routes_of(1))
            store.close()
            store.close()
            calls: list[tuple[Any, ...]] = [
                (store.put, "task:1:0:0", routes_of(1)),
                (store.find, "task:1:0:0"),
            ]
            for call, *given_ in [*calls, (store.get, handle), (store.support, handle), (store.delete, handle)]:
                with pytest.raises(StoreClosedError):
                    call(*given_)


def _machine(contract: RolloutContract) -> type[RuleBasedStateMachine]:
    """Puts, deletes and reads in any order, for few ids."""
    ids = st.sampled_from(["a:0:0:0", "a:0:1:0", "b/.."])

    class Rollouts(RuleBasedStateMachine):
        made = Bundle("made")  # handles, and the seeds of their routes

        def __init__(self) -> None:
            super().__init__()
            self._stack = ExitStack()
            self.store, _ = self._stack.enter_context(contract._opened())
            self.last: dict[str, RolloutHandle] = {}
            self.counted = RolloutCounters()

        def teardown(self) -> None:
            self._stack.close()

        def count(self, **by: int) -> None:
            self.counted = replace(self.counted, **{k: getattr(self.counted, k) + n for k, n in by.items()})

        @rule(target=made, rollout_id=ids, seed=st.integers(0, 9))
        def put(self, rollout_id: str, seed: int) -> tuple[RolloutHandle, int]:
            routes = routes_of(seed, 3 + seed)
            support = support_of(seed, routes) if seed % 2 else None
            self.last[rollout_id] = handle = self.store.put(rollout_id, routes, support)
            self.count(puts=1, put_nbytes=routes.ids.nbytes)
            return handle, seed

        @rule(one=made)
        def delete(self, one: tuple[RolloutHandle, int]) -> None:
            self.store.delete(one[0])
            self.count(deletes=1)
            if self.last.get(one[0].rollout_id) == one[0]:
                del self.last[one[0].rollout_id]

        @rule(one=made)
        def get(self, one: tuple[RolloutHandle, int]) -> None:
            found, last = fetch_routes(self.store, one[0]), one[0] in self.last.values()
            there = not isinstance(found, Absence)
            self.count(hits=there, misses=not there)
            assert found == routes_of(one[1], 3 + one[1]) if there else found is Absence.MISS
            assert there == last
            support = self.store.support(one[0])
            if one[1] % 2:
                self.count(hits=there, misses=not there)
                assert support == support_of(one[1], routes_of(one[1], 3 + one[1])) if there else not last
            else:
                assert support is None

        @rule(rollout_id=ids)
        def find(self, rollout_id: str) -> None:
            assert self.store.find(rollout_id) == self.last.get(rollout_id)

        @invariant()
        def counters_add_up(self) -> None:
            assert replace(self.store.counters, get_nbytes=0) == self.counted

    return Rollouts

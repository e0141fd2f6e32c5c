"""Ranks with parts of the heads load the same pages, of computations that chose the same experts, or none at all.

Each rank is real: rows, blocks and a store of its own, whose puts and gets fail, lose and flip at random. The ranks ask
each other as SGLang's do, in threads that wait for the least. A page's KV says of which computation it is, and the
model knows which experts that computation chose.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from waiting import GIVE_UP_S

from cache_manager.keys import Namespace
from cache_manager.publish import Rows
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.testing.faults import FaultyStore
from kvroute import open_store, routing_spec
from kvroute.connector.settings import Common
from kvroute.integrations.sglang.ranks import ABSENT, Ranks, agreed, digests_of
from kvroute.integrations.sglang.rows import RoutedRows

PAGE, PAGES = 4, 9
KEYS = ["a" * 16, "b" * 16, "c" * 16]  # of the pages of one prefix
SPEC = routing_spec(num_experts=250, top_k=2, layer_ids=[0, 1], num_layers=2, block_tokens=PAGE)
FATES = ("comes", "fails", "is lost", "is flipped")


@dataclass
class Part:
    """A rank's part of the KV: of each page, the computation that made it, and the rank."""

    memory: torch.Tensor = field(default_factory=lambda: torch.zeros(PAGES, 2, dtype=torch.int64))
    spec: ClassVar = AuxBlockDataSpec("kv", (4,), "uint8", PAGE)

    def take(self, blocks: Any, into: Any) -> None:
        into[:] = self.memory.numpy()[blocks].view(np.uint8)

    def fill(self, blocks: Any, given: Any) -> None:
        self.memory[blocks] = torch.from_numpy(np.ascontiguousarray(given).view(np.int64))


class Rank:
    """One rank, as SGLang drives it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, engine: Engine) -> None:
        self.number, self.part = number, Part()
        self.store = FaultyStore(open_store("memory:"))
        monkeypatch.setattr("kvroute.integrations.sglang.rows.open_store", lambda _: self.store)
        namespace = Namespace("m", 1, rank=number, world=engine.count)
        self.rows = RoutedRows(SPEC, PAGES, namespace, Common(strict=True, store="memory:"))
        self.rows.attach(kv=self.part, ranks=Ranks(engine.least))

    def compute(self, page: int, computation: int, expert: int) -> None:
        slots = torch.arange(page * PAGE, (page + 1) * PAGE)
        ids = torch.tensor([expert, expert + 100], dtype=torch.int32).expand(PAGE, 2, 2)
        self.part.memory[page] = torch.tensor([computation, self.number])
        self.rows.launch(slots, ids).finalize()

    def offload(self, key: str, page: int, fate: str) -> None:
        self.store.fail_put = fate == "fails"
        (job,) = self.rows.keep([key], np.array([page])) or ()
        assert job.wait(GIVE_UP_S)
        self.store.fail_put = False
        if fate == "is lost":
            self.store.delete([self.rows.aux.keys.adopt(key.encode())])

    def load(self, keys: list[str], pages: list[int], fate: str, place: int) -> bool:
        if fate == "is lost":
            self.store.delete([self.rows.aux.keys.adopt(keys[place % len(keys)].encode())])
        self.store.fail_get, self.store.flip_next = fate == "fails", place if fate == "is flipped" else None
        try:
            return self.rows.fill(keys, np.array(pages))
        finally:
            self.store.fail_get, self.store.flip_next = False, None

    def experts(self, page: int) -> list[int]:
        """Of each token; -1: missing."""
        slots = np.arange(page * PAGE, (page + 1) * PAGE)
        routes = self.rows.read(slots, 0).routes()[0]
        return [int(ids[0, 0]) if known.all() else -1 for ids, known in zip(routes.ids, routes.known, strict=True)]


class Engine:
    """All ranks of an engine; a call on all of them is made at once, as their schedulers make it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=GIVE_UP_S)
        self._lock, self._told = threading.Lock(), list[Any]()
        self.pool = ThreadPoolExecutor(count)
        self.ranks = [Rank(monkeypatch, number, self) for number in range(count)]

    def least(self, values: Any) -> Any:
        with self._lock:
            self._told.append(values)
        self._barrier.wait()
        least = np.minimum.reduce(self._told)
        if self._barrier.wait() == 0:
            self._told.clear()
        self._barrier.wait()
        return least

    def load(self, keys: list[str], pages: list[int], fates: list[str], place: int) -> list[bool]:
        calls = [
            self.pool.submit(rank.load, keys, pages, fate, place) for rank, fate in zip(self.ranks, fates, strict=True)
        ]
        return [call.result(GIVE_UP_S) for call in calls]

    def close(self) -> None:
        for rank in self.ranks:
            rank.rows.close()
        self.pool.shutdown()


@given(count=st.integers(2, 3), drawn=st.data())
def test_no_rank_goes_on_with_other_pages_than_another(count: int, drawn: st.DataObject) -> None:
    """Goal: a load has the same end on each rank; where it has come, the rows on every rank are those of each rank's
    KV; and where all ranks have stored the same and nothing fails, it comes. Method: pages of a prefix are computed
    again and again, with the same experts or others, and stored, loaded, and failed on some ranks."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = Engine(monkeypatch, count)
        chosen = {0: -1}  # experts, by computation
        kept: list[dict[str, int]] = [{} for _ in range(count)]  # the computation in each rank's store
        gone = set[str]()
        fates = st.lists(st.sampled_from(("comes", *FATES)), min_size=count, max_size=count)
        try:
            for _ in range(drawn.draw(st.integers(2, 12))):
                if drawn.draw(st.booleans()):
                    key, fate = drawn.draw(st.sampled_from(KEYS)), drawn.draw(fates)
                    computation = len(chosen)
                    chosen[computation] = KEYS.index(key) * 10 + drawn.draw(st.integers(0, 1))
                    for rank, store, each in zip(engine.ranks, kept, fate, strict=True):
                        rank.compute(1, computation, chosen[computation])
                        rank.offload(key, 1, each)
                        if each == "is lost":
                            store.pop(key, None)
                        elif each != "fails":
                            store.setdefault(key, computation)
                    continue
                keys, fate, place = KEYS[: drawn.draw(st.integers(1, 3))], drawn.draw(fates), drawn.draw(st.integers(0))
                pages = list(range(2, 2 + len(keys)))
                for store, each in zip(kept, fate, strict=True):
                    if each == "is lost":
                        store.pop(keys[place % len(keys)], None)
                    elif each == "is flipped":  # the first record, which is deleted then
                        store.pop(keys[0], None)
                answers = engine.load(keys, pages, fate, place)
                assert len(set(answers)) == 1
                experts = [{chosen[store.get(key, 0)] for store in kept} for key in keys]
                if "fails" not in fate:
                    assert answers[0] == all(len(each) == 1 and -1 not in each for each in experts)
                    gone |= {key for key, each in zip(keys, experts, strict=True) if len(each) > 1 and -1 not in each}
                    for rank in engine.ranks:
                        assert not any(rank.rows.stored([key]) for key in gone)
                if answers[0]:
                    for page in pages:
                        rows = {tuple(rank.experts(page)) for rank in engine.ranks}
                        made = {chosen[int(rank.part.memory[page, 0])] for rank in engine.ranks}
                        assert rows == {(expert,) * PAGE for expert in made}
                        assert [int(rank.part.memory[page, 1]) for rank in engine.ranks] == list(range(count))
        finally:
            engine.close()


def test_a_rank_that_raises_holds_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the others hear that its pages are not there, and none waits. Method: a rank whose load raises."""
    engine = Engine(monkeypatch, 2)

    def broken(*_: Any) -> Any:
        raise RuntimeError("on purpose")

    try:
        for rank in engine.ranks:
            rank.compute(1, 1, 7)
            rank.offload(KEYS[0], 1, "comes")
        assert engine.load(KEYS[:1], [2], ["comes"] * 2, 0) == [True, True]
        monkeypatch.setattr(engine.ranks[1].rows.aux.jobs, "run", broken)
        calls = [engine.pool.submit(rank.load, KEYS[:1], [3], "comes", 0) for rank in engine.ranks]
        assert calls[0].result(GIVE_UP_S) is False
        with pytest.raises(RuntimeError, match="on purpose"):
            calls[1].result(GIVE_UP_S)
        assert engine.ranks[0].rows.counters["ranks"]().pages_short == 1
    finally:
        engine.close()


@given(
    st.lists(st.lists(st.integers(ABSENT, 2) | st.just((1 << 63) - 1), min_size=4, max_size=4), min_size=1, max_size=4)
)
def test_the_verdict_of_all_ranks(told: list[list[int]]) -> None:
    digests = [np.array(each, np.int64) for each in told]
    least = np.minimum.reduce([np.concatenate([each, -each]) for each in digests])
    for each in digests:
        there, same = agreed(each, lambda _: least)
        for page in range(4):
            of_page = {int(other[page]) for other in digests}
            assert there[page] == (ABSENT not in of_page)
            assert same[page] == (ABSENT not in of_page and len(of_page) == 1)


def test_digests_are_of_valid_rows_alone() -> None:
    """Goal: what is in a row that is missing tells no page from another, and every valid value does."""
    values = np.arange(2 * PAGE * 6, dtype=np.uint8).reshape(2 * PAGE, 3, 2)
    valid = np.ones(2 * PAGE, np.bool_)
    valid[5] = False
    plain = digests_of([Rows(values, valid)], PAGE)
    assert (plain >= 0).all()
    assert plain[0] != plain[1]
    for position in range(2 * PAGE):
        changed = values.copy()
        changed[position, 2, 1] += 1
        same = digests_of([Rows(changed, valid)], PAGE) == plain
        assert same.tolist() == [position // PAGE != page or not valid[position] for page in (0, 1)]
    all_valid = digests_of([Rows(values * valid[:, None, None], np.ones(2 * PAGE, np.bool_))], PAGE)
    assert (all_valid == plain).tolist() == [True, False]

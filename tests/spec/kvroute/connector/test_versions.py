"""A row has the version of the weights that made it, or none; stores keep versions apart accordingly."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st
from toy_engine import Toy, admitted, computed, judge
from toy_requests import TOKENS as BLOCK_TOKENS
from toy_requests import row_of, seeded
from toy_seen import seen

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from kvroute.connector import Settings, routes
from kvroute.connector.versions import AS_LOADED, Versions, version_of
from kvroute.routes import Routes

Start = Callable[..., Toy]
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def updated(toy: Toy, weights: int, *told: int) -> None:
    """The engine gets other weights and is notified; it is given their version too, if ``told``."""
    toy.weights = weights
    toy.scheduler.weights.changed(*told)


def after(toy: Toy, steps: int, call: Callable[[], object]) -> None:
    """Do this once, behind so many steps of the next request."""
    left = iter(range(1, 100))
    toy.between = lambda: call() if next(left) == steps else None


def weights_of_kv(toy: Toy, tokens: list[int]) -> list[int]:
    """The weights that made the KV of each of ``tokens``, the last request's, as far as the KV in its blocks says."""
    kv, weights = toy.kv["layers.0"], list[int]()
    for i in range(len(tokens)):
        there = kv[toy.table[i // BLOCK_TOKENS], :, i % BLOCK_TOKENS].numpy()
        made = (seeded([*tokens[: i + 1], 0], w).normal(size=there.shape).astype(there.dtype) for w in range(256))
        weights.append(next(w for w, each in enumerate(made) if (each == there).all()))
    return weights


def check(toy: Toy, found: Routes, tokens: list[int]) -> None:
    """Every row is of the weights that made the KV beside it, and so is its version, where it has one."""
    made = weights_of_kv(toy, tokens)
    for i, weights in enumerate(made):
        if found.valid[i]:
            assert (found.ids[i] == row_of(tokens[: i + 1], weights)[list(found.layer_ids)]).all()
    for start, stop, version in found.weights_versions:
        assert set(made[start:stop]) == {version}


@pytest.mark.parametrize("late", [False, True])
def test_an_answer_of_two_weights_has_two_versions(start: Start, late: bool) -> None:
    """Goal: no row has the version of other weights. Method: an update behind the fifth token, with KV kept; the next
    answer hits the older rows, which keep their version, in a block that has rows of both.
    """
    toy = start(late=late, weights_version=3)
    toy.weights = 3
    after(toy, 2, lambda: updated(toy, 4, 4))
    found = routes(toy.ask("a", TOKENS, [3, 2]))
    assert found.weights_versions == ((0, 5, 3), (5, 11, 4))
    assert found.complete
    check(toy, found, TOKENS)
    found = routes(toy.ask("b", TOKENS))
    assert found.weights_versions == ((0, 5, 3), (5, 11, 4))
    check(toy, found, TOKENS)


def test_rows_of_mixed_weights_are_not_stored(start: Start, tmp_path: Path) -> None:
    """Goal: no engine finds rows that stand on KV of other weights. Method: an update with KV kept. An engine of the
    first weights hits what was stored before the update, and nothing stored after it; one of the second weights hits
    nothing until all KV was forgotten, and then what is computed from there on."""
    kept, store, other = dict[bytes, Any](), f"file://{tmp_path}", [1, *TOKENS]

    def hits(tokens: list[int], **said: Any) -> int:
        engine = start(kept=kept, store=store + "?mode=read", witness="flagged", **said)
        engine.weights = said.get("weights_version", 0)
        check(engine, routes(engine.ask("r", tokens)), tokens)
        return engine.loaded

    toy = start(kept=kept, store=store)
    toy.ask("a", TOKENS)
    updated(toy, 1, 1)
    toy.ask("b", other)
    toy.settle()
    assert (hits(TOKENS), hits(other)) == (8, 0)
    assert (hits(TOKENS, weights_version=1), hits(other, weights_version=1)) == (0, 0)
    toy.cached.clear()
    toy.scheduler.reset()
    updated(toy, 1, 1)
    toy.ask("c", other)
    toy.settle()
    assert (hits(TOKENS, weights_version=1), hits(other, weights_version=1)) == (0, 8)


def test_mixed_weights_take_no_hit(start: Start, outside: Any) -> None:
    """Goal: rows of a store go with KV of their own weights alone. Method: the weights may have changed and KV was
    kept; KV and rows of the first weights are outside."""
    kept, store = outside(TOKENS)
    toy = start(kept=kept, store=store, witness="flagged")
    toy.ask("a", [7])
    toy.scheduler.weights.changed()
    check(toy, routes(toy.ask("b", TOKENS)), TOKENS)
    assert toy.loaded == 0


def test_weights_that_change_after_a_load_are_not_those_of_its_kv(start: Start, outside: Any) -> None:
    """Goal: KV that was loaded counts as computed. Method: a step only loads, and then the weights change."""
    kept, store = outside(TOKENS)
    toy = start(kept=kept, store=store, witness="flagged", later=True)
    admitted(toy, TOKENS, [5, 2, 3], external=8, later=True)
    toy.scheduler.step({})
    toy.scheduler.weights.changed(1)
    assert toy.scheduler.weights.mixed


@pytest.mark.parametrize(("name", "hits"), [("", 0), ("run-7", 8)])
def test_a_version_is_shared_by_engines_whose_weights_have_a_name(tmp_path: Path, name: str, hits: int) -> None:
    """Goal: name and version together identify the weights. Method: two engines with the same version over one store,
    with and without a name of the weights."""
    kept, said = dict[bytes, Any](), {"store": f"file://{tmp_path}", "weights": name, "witness": "flagged"}
    for loaded in (0, hits):
        toy = Toy(kept=kept, **said)
        updated(toy, 5, 5)
        found = routes(toy.ask("a", TOKENS))
        assert (toy.loaded, found.weights_versions) == (loaded, ((0, 11, 5),))
        check(toy, found, TOKENS)
        toy.settle()
        toy.close()


def test_blocks_that_are_computed_again_are_stored_again(start: Start, outside: Any) -> None:
    """Goal: rows of KV that did not come are found by the next engine. Method: a hit's records are lost after it was
    admitted, its KV fails to load, and it is computed; a third engine hits all of it.
    """
    kept, store = outside(TOKENS)
    store = store.removesuffix("?mode=read")
    toy = start(kept=kept, store=store, witness="flagged")
    request = admitted(toy, TOKENS, [5, 2, 3], external=8)
    assert toy.worker.store is not None
    toy.worker.store.delete(toy.scheduler.keys.adopt(each) for each in request.block_hashes)
    toy.worker.begin(toy.scheduler.step({"r": 3}))
    toy.worker.fail({5, 2})
    toy.worker.end()
    assert toy.worker.failures() == {5, 2}
    request.num_computed_tokens = 0
    computed(toy, request, 11)
    for block, each in zip(toy.table, request.block_hashes, strict=False):
        for name, page in kept[each].items():
            toy.kv[name][block] = page
    toy.worker.end()
    toy.settle()
    assert judge(seen(toy, 11), TOKENS)["wrong"] == 0
    other = start(kept=kept, store=store + "?mode=read", witness="flagged")
    assert judge(routes(other.ask("c", TOKENS)), TOKENS) == {"right": 11}
    assert other.loaded == 8


UPDATES = ["told", "untold", "paused", "paused and told", "told in a pause", "nothing"]
FORGETS = ["reset", "told, reset", "reset, told", "restart", "restart with a version", *UPDATES]
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
asks = st.tuples(prompts, st.lists(st.integers(1, 5), max_size=4), st.sampled_from(UPDATES), st.integers(1, 3))


@examples(60)
@given(st.lists(st.tuples(st.sampled_from(FORGETS), asks), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_no_version_is_false_whatever_happens(tmp_path_factory: Any, what: Any, named: bool, late: bool) -> None:
    """Goal: every row is of the weights of the KV beside it, and a version that it has is theirs. Method: any order of
    updates, announced or not, between and inside of requests, pauses, resets and restarts over one store and one place
    for KV, which forgets nothing; the KV says which weights made it. A caller that gives a version keeps the one
    required promise: no unannounced change before the next step, except in a pause."""
    kept, numbers, steps, told = dict[bytes, Any](), count(1), 0, -1
    said = {"store": f"file://{tmp_path_factory.mktemp('rows')}", "weights": "m" if named else "", "witness": "flagged"}
    toy = Toy(kept=kept, late=late, **said)

    def happens(event: str) -> None:
        nonlocal toy, told
        versions = toy.scheduler.weights
        before, new = toy.weights, next(numbers)
        if event.startswith("restart"):
            toy.settle()
            toy.close()
            toy = Toy(kept=kept, late=late, **said, **({"weights_version": 0} if "version" in event else {}))
            told = steps
            return
        if event == "nothing":
            return
        if event == "reset" and told == steps:
            new = before
        if "told" in event:
            told = steps
        if "paused" in event:
            versions.paused()
        if event == "told in a pause":
            versions.changed(before)
            versions.paused()
        toy.weights = new
        if event == "untold":
            versions.changed()
        if event.startswith("told, ") or event in ("told", "paused and told"):
            versions.changed(new)
        if "reset" in event:
            toy.cached.clear()
            toy.scheduler.reset()
        if event == "reset, told":
            versions.changed(new)
        if "pause" in event:
            versions.resumed()

    def between() -> None:
        nonlocal steps
        steps += 1
        if steps == last:
            happens(then)

    for i, (event, (tokens, chunks, inside, at)) in enumerate(what):
        happens(event)
        toy.between, last, then = between, steps + at, inside
        check(toy, routes(toy.ask(str(i), tokens, chunks)), tokens)
    toy.settle()
    toy.close()


def test_a_version_stands_until_something_may_have_changed_the_weights() -> None:
    """Goal: a right row still has its version. Method: each call alone, behind a step or behind the version itself."""
    cases: list[tuple[Callable[[Versions], object], bool, bool]] = [
        (lambda _: None, True, True),  # (what happens, the version stands before a step, and after one)
        (lambda v: v.forgotten(), True, False),
        (lambda v: v.resumed(), True, False),
        (lambda v: (v.paused(), v.resumed()), False, False),
        (lambda v: (v.paused(), v.forgotten()), False, False),
        (lambda v: (v.paused(), v.changed(5), v.forgotten(), v.resumed()), True, True),
        (lambda v: v.changed(), False, False),
    ]
    for happens, *stands in cases:
        for computes, known in zip((False, True), stands, strict=True):
            versions = Versions(Namespace("m", AS_LOADED), None, lambda _: None, named=True)
            versions.changed(5)
            if computes:
                versions.computes()
            happens(versions)
            assert versions.version == (5 if known else None)


def test_names_of_versions() -> None:
    """Goal: an engine's name of a version is read as a number, or as no version. Method: numbers, texts that are no
    numbers, numbers that a row cannot hold; and the settings of an operator."""
    assert [version_of(name) for name in ("0", "17", "4294967294")] == [0, 17, AS_LOADED - 1]
    assert [version_of(name) for name in ("default", "", "-1", "1.5", "²", "4294967295")] == [None] * 6
    assert Settings.of({"weights_version": 3}).weights_version == 3
    for bad in (-1, AS_LOADED, "3"):
        with pytest.raises(ConfigError, match="weights_version"):
            Settings.of({"weights_version": bad})

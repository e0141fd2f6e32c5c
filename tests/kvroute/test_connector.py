"""The two ends of a connector, driven by a small engine of our own: rows are those of the tokens, or missing."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_manager.keys import Namespace
from cache_manager.spec import RecordLayout
from kvroute.connector import Engine, SchedulerRows, Settings, routes, unseen
from kvroute.connector.pages import page_name, token_nbytes
from kvroute.connector.witness import KvFolder, OtherRank, witnessing
from kvroute.connector.worker import WorkerRows
from kvroute.routes import Routes
from kvroute.routing import routing_spec

TOKENS, EXPERTS, TOP_K = 4, 8, 2


def _seed(tokens: Sequence[int]) -> np.random.Generator:
    return np.random.default_rng(list(hashlib.blake2b(bytes(tokens), digest_size=8).digest()))


def row_of(tokens: Sequence[int]) -> NDArray[np.int64]:
    """What the routers choose for the last of ``tokens``: ``[layers, top_k]``."""
    return np.stack([_seed(tokens).permutation(EXPERTS)[:TOP_K], _seed([*tokens, 1]).permutation(EXPERTS)[:TOP_K]])


class Asked:
    """A request, under the names that the connector asks for."""

    def __init__(self, name: str, tokens: Sequence[int]) -> None:
        self.request_id, self.tokens, self.num_computed_tokens = name, tokens, 0
        ends = range(TOKENS, len(tokens) + 1, TOKENS)
        self.block_hashes = [hashlib.sha256(bytes(tokens[:end])).digest() for end in ends]


class Sum:
    """Of what two ranks have, each in a thread of its own."""

    def __init__(self) -> None:
        self._parts = [torch.zeros(0, dtype=torch.int64)] * 2
        self._met = threading.Barrier(2, timeout=60)

    def add(self, rank: int, part: torch.Tensor) -> None:
        self._parts[rank] = part.clone()
        self._met.wait()
        part.copy_(self._parts[0] + self._parts[1])
        self._met.wait()


class Toy:
    """A paged engine for one request at a time: a prefix cache over ``blocks`` blocks, and KV that others may have.

    It loads in a step or, if ``later``, beside one. Of several ``ranks`` each has one head; the first has the rows.
    """

    def __init__(
        self,
        kept: dict[bytes, Any] | None = None,
        pages: bool = False,
        layers: int = 2,
        blocks: int = 9,
        later: bool = False,
        ranks: int = 1,
        **said: Any,
    ) -> None:
        self.kept, self.later = kept, later  # KV outside, by hash of its block, in all layers
        spec = routing_spec(EXPERTS, TOP_K, range(layers), num_layers=layers, block_tokens=TOKENS)
        self.layers = range(layers)
        self.kv = {f"layers.{i}": torch.zeros(blocks, ranks, TOKENS, 8) for i in self.layers}
        mine, others = ({name: kv[:, i : i + 1] for name, kv in self.kv.items()} for i in (0, 1))
        if pages:
            self.kv[page_name(spec)] = torch.zeros(blocks, 1, TOKENS, token_nbytes(spec), dtype=torch.uint8)
            mine[page_name(spec)] = self.kv[page_name(spec)]
        settings = Settings.of({"strict": True, "weights": "m", **said})
        engine = Engine(
            settings,
            RecordLayout((spec,)),
            Namespace("m", 1),
            blocks=blocks,
            max_tokens=64,
            gate=not pages,
            pages=pages,
            witness=settings.witness if settings.store else "off",
        )
        added = Sum()
        self.worker = WorkerRows(engine, mine, partial(added.add, 0) if ranks > 1 else None)
        self.other_rank: OtherRank | None = None
        if ranks > 1:
            self.other_rank = OtherRank(KvFolder(witnessing(others, self.layers), 1, partial(added.add, 1)))
        self.threads = ThreadPoolExecutor(1)
        self.scheduler = SchedulerRows(engine)
        self.scheduler.attach(self.worker.region)
        self.scheduler.blocks_of = lambda _name, first, last: self.table[first:last]
        self.hooks = [self.worker.ids.hook(layer) for layer in self.layers]
        self.free, self.cached = list(range(blocks)), dict[bytes, int]()
        self.table: list[int] = []
        self.fails: set[int] = set()  # places in the request of blocks whose load fails
        self.loses: set[int] = set()  # positions at which the router's ids are not ones
        self.loaded = 0

    def ask(self, name: str, tokens: Sequence[int], chunks: Sequence[int] = (64,)) -> dict[str, Any]:
        """Compute ``tokens`` in steps of so many tokens; what goes to the client."""
        request, hashes = Asked(name, tokens), Asked(name, tokens).block_hashes
        most = (len(tokens) - 1) // TOKENS  # the last token is always computed
        local = next((i for i, each in enumerate(hashes[:most]) if each not in self.cached), most)
        kept = self.kept if self.kept is not None else {}
        there = next((i for i, each in enumerate(hashes[local:most]) if each not in kept), most - local)
        taken = self.scheduler.matched(request, local * TOKENS, there * TOKENS, later=self.later)
        self.table = [self.cached[each] for each in hashes[:local]]
        for block in self.table:
            self.free.remove(block)
        given = [self.free.pop(0) for _ in range(-(-len(tokens) // TOKENS) - local)]
        self.cached = {each: block for each, block in self.cached.items() if block not in given}
        self.table += given
        self.scheduler.given(given)
        self.scheduler.admitted(request, self.table, taken)
        request.num_computed_tokens, self.loaded = local * TOKENS + taken, taken
        loading, sizes = range(local, local + taken // TOKENS), [*chunks]
        if self.later and taken:
            failed = self._step(request, 0, loading)
            self.scheduler.loaded(name)
            self.scheduler.admitted(request, self.table, 0)
            request.num_computed_tokens, loading = (
                (local * TOKENS + taken if failed is None else failed * TOKENS),
                range(0),
            )
        while request.num_computed_tokens < len(tokens):
            n = min(sizes.pop(0) if sizes else len(tokens), len(tokens) - request.num_computed_tokens)
            failed = self._step(request, n, loading)
            request.num_computed_tokens = failed * TOKENS if failed is not None else request.num_computed_tokens + n
            loading = range(0)
        self.scheduler.forget(name)
        told = self.scheduler.finished(name, self.table, len(tokens))
        self.free += self.table
        self.cached |= dict(zip(hashes, self.table, strict=False))
        return {"kv_transfer_params": told}

    def _step(self, request: Asked, n: int, loading: range) -> int | None:
        """Load, compute and write; the place of the first block that could not be loaded."""
        self._on_each_rank("begin", self.scheduler.step({request.request_id: n} if n else {}))
        for place in loading:
            for name, page in (self.kept or {})[request.block_hashes[place]].items():
                self.kv[name][self.table[place]] = page if place not in self.fails else 7
        failed = {self.table[place] for place in loading if place in self.fails}
        start = request.num_computed_tokens
        prefixes = [request.tokens[: i + 1] for i in range(start, start + n)]
        at = [(self.table[i // TOKENS], i % TOKENS) for i in range(start, start + n)]
        for i, (block, offset) in enumerate(at):
            for layer in self.layers:
                kv = self.kv[f"layers.{layer}"]
                kv[block, :, offset] = torch.from_numpy(_seed([*prefixes[i], layer]).normal(size=(kv.shape[1], 8)))
        if n:
            chosen = np.stack([row_of(prefix) for prefix in prefixes])
            chosen[[i for i in range(n) if start + i in self.loses]] = -1
            for layer, hook in enumerate(self.hooks):
                hook(torch.from_numpy(chosen[:, layer].copy()))
            self.worker.slots = torch.tensor([block * TOKENS + offset for block, offset in at])
        self.worker.fail(failed)
        self._on_each_rank("end")
        assert self.worker.failures() == failed
        for place in range((start + n) // TOKENS) if self.kept is not None and not failed else ():
            pages = {name: kv[self.table[place]].clone() for name, kv in self.kv.items()}
            self.kept.setdefault(request.block_hashes[place], pages)
        first = min((place for place in loading if place in self.fails), default=None)
        self.fails -= set(loading)
        return first

    def _on_each_rank(self, call: str, *given: Any) -> None:
        other = self.threads.submit(getattr(self.other_rank, call), *given) if self.other_rank else None
        getattr(self.worker, call)(*given)
        if other is not None:
            other.result(60)

    def settle(self) -> None:
        """Until the store has everything."""
        while self.worker.blocks.jobs:
            assert self.worker.blocks.wait(30)
            self.worker.blocks.poll()

    def close(self) -> None:
        self.threads.shutdown()
        self.scheduler.close()
        self.worker.close()


def judge(found: Routes, tokens: Sequence[int]) -> Counter[str]:
    """How many rows of ``found`` are right, wrong and missing, in the layers that it has."""
    count: Counter[str] = Counter()
    for i in range(len(tokens)):
        same = (found.ids[i] == row_of(tokens[: i + 1])[list(found.layer_ids)]).all()
        count["missing" if not found.valid[i] else "right" if same else "wrong"] += 1
    return count


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)
asked = st.lists(st.tuples(prompts, st.lists(st.integers(1, 9), max_size=5)), min_size=1, max_size=6)


@settings(max_examples=40)
@given(asked, st.booleans())
def test_every_row_is_that_of_its_tokens(what: list[tuple[list[int], list[int]]], pages: bool) -> None:
    """Goal: hits, chunks and blocks given out again lose and mix nothing. Method: prompts over two tokens, so that many
    share a beginning, through a pool of nine blocks.
    """
    toy = Toy(pages=pages)
    for i, (tokens, chunks) in enumerate(what):
        assert judge(routes(toy.ask(str(i), tokens, chunks)), tokens) == {"right": len(tokens)}
    toy.worker.blocks.assert_consistent()
    assert not toy.worker.missing
    toy.close()


@settings(max_examples=20)
@given(st.integers(0, 19), st.integers(1, 20))
def test_ids_that_no_expert_has_cost_their_own_row_only(lost: int, n: int) -> None:
    """Goal: what was not captured is missing, what was is there. Method: one token's ids are -1, which the rows' dtype
    does not have; the other rows of the step were refused with it before.
    """
    toy = Toy()
    toy.loses, tokens = {lost}, [i % 5 for i in range(n)]
    found = routes(toy.ask("r", tokens))
    assert judge(found, tokens) == Counter({"right": n - (lost < n), "missing": int(lost < n)})
    assert toy.worker.missing.total() == int(lost < n)
    toy.close()


def test_another_engine_gets_the_rows_of_the_kv_that_it_loads(tmp_path: Path) -> None:
    """Goal: rows of loaded KV, without the last layer or with a word about it. Method: a second engine with the first
    one's KV and store of rows; then KV of which a bit has changed.
    """
    tokens, kept = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], dict[bytes, Any]()
    first = Toy(kept=kept, store=f"file://{tmp_path}")
    first.ask("a", tokens[:8])
    first.ask("b", tokens)
    first.settle()
    for witness, layers in (("missing", (0,)), ("flagged", (0, 1)), ("off", (0, 1))):
        other = Toy(kept=kept, store=f"file://{tmp_path}?mode=read", witness=witness)
        answer = other.ask("c", tokens)
        assert other.loaded == 8
        assert routes(answer).layer_ids == layers
        assert judge(routes(answer), tokens) == {"right": len(tokens)}
        assert unseen(answer) == (((0, 8),) if witness == "flagged" else ())
        other.close()
    hashes = Asked("", tokens).block_hashes
    kept[hashes[1]]["layers.1"].view(torch.int32)[0, 2, 3] ^= 1
    other = Toy(kept=kept, store=f"file://{tmp_path}?mode=read")
    assert judge(routes(other.ask("d", tokens)), tokens) == {"right": 7, "missing": 4}
    assert other.worker.missing == {"rows of other KV than was loaded": 4}
    other.close()
    first.close()


@settings(max_examples=20)
@given(st.sets(st.integers(0, 3), max_size=2), st.booleans(), st.lists(st.integers(1, 9), max_size=3), st.booleans())
def test_what_was_computed_from_kv_that_did_not_come_is_computed_again(
    tmp_path_factory: Any, fails: set[int], pages: bool, chunks: list[int], later: bool
) -> None:
    """Goal: no row of a wrong computation, and nothing lost for those who come later. Method: loads of some blocks
    fail; every row is right in the end, and so it is for who is served from the same blocks.
    """
    tokens, kept = [i * i % 7 for i in range(18)], dict[bytes, Any]()
    said = {} if pages else {"store": f"file://{tmp_path_factory.mktemp('rows')}", "witness": "flagged"}
    first = Toy(kept=kept, pages=pages, **said)
    first.ask("a", tokens)
    first.settle()
    said |= {"store": said["store"] + "?mode=read"} if said else {}
    other = Toy(kept=kept, pages=pages, later=later, **said)
    other.fails = set(fails)
    assert judge(routes(other.ask("b", tokens, chunks)), tokens) == {"right": len(tokens)}
    assert judge(routes(other.ask("c", tokens)), tokens) == {"right": len(tokens)}
    assert other.loaded == 0, "hit locally"
    for each in (other, first):
        each.close()


@pytest.mark.parametrize("later", [False, True])
def test_kv_that_is_wrong_in_one_rank_alone_has_no_rows(tmp_path: Path, later: bool) -> None:
    """Goal: the witness is of all ranks' heads. Method: two engines of two ranks; a bit of the second rank's KV."""
    tokens, kept, store = list(range(11)), dict[bytes, Any](), f"file://{tmp_path}"
    first = Toy(kept=kept, ranks=2, store=store, witness="flagged")
    first.ask("a", tokens)
    first.settle()
    for damaged, verdict in (
        ({}, {"right": 11}),
        ({1: 0}, {"right": 7, "missing": 4}),
        ({0: 1}, {"right": 3, "missing": 8}),
    ):
        for block, head in damaged.items():
            kept[Asked("", tokens).block_hashes[block]]["layers.1"].view(torch.int32)[head, 2, 3] ^= 1
        other = Toy(kept=kept, ranks=2, later=later, store=store + "?mode=read", witness="flagged")
        assert judge(routes(other.ask("b", tokens)), tokens) == verdict
        assert other.loaded == 8
        other.close()
    first.close()


def test_a_row_that_was_not_captured_is_missing_in_other_engines_pages() -> None:
    """Goal: a page says that a row is not there. Method: two tokens are lost; a second engine loads the KV."""
    tokens, kept = list(range(11)), dict[bytes, Any]()
    first, other = Toy(kept=kept, pages=True), Toy(kept=kept, pages=True)
    first.loses = {1, 6}
    first.ask("a", tokens)
    assert judge(routes(other.ask("b", tokens)), tokens) == {"right": 9, "missing": 2}
    assert other.loaded == 8
    first.close()
    other.close()


def test_of_one_router_nothing_is_known_beside_loaded_kv(tmp_path: Path) -> None:
    """Goal: a model whose only router is behind the last KV claims nothing. Method: a second engine loads two blocks of
    three; their rows are missing, or flagged.
    """
    tokens, kept = list(range(11)), dict[bytes, Any]()
    first = Toy(kept=kept, layers=1, store=f"file://{tmp_path}")
    first.ask("a", tokens)
    first.settle()
    for witness, verdict in (("missing", {"right": 3, "missing": 8}), ("flagged", {"right": 11})):
        other = Toy(kept=kept, layers=1, store=f"file://{tmp_path}?mode=read", witness=witness)
        assert judge(routes(other.ask("b", tokens)), tokens) == verdict
        other.close()
    first.close()


def test_after_new_weights_nothing_is_readable(tmp_path: Path) -> None:
    """Goal: keys and memory of earlier weights are gone. Method: a reset of both ends; the store has nothing either."""
    tokens, kept = list(range(9)), dict[bytes, Any]()
    toy = Toy(kept=kept, store=f"file://{tmp_path}")
    toy.ask("a", tokens)
    toy.settle()
    toy.scheduler.reset()
    toy.cached.clear()
    assert routes(toy.ask("b", tokens)).weights_versions == ((0, 9, 2),)
    assert (toy.loaded, toy.scheduler.hits_cut) == (0, 1)
    toy.close()

"""The rows of SGLang's slots: changes of pages while passes run are applied to their rows when these passes are over.

An engine of a few pages with late passes and lost ones, requests that end while a pass still writes for them, pages
that go to the host and back, and pages that a store of ours, a linker or a storage that knows no rows keeps. Every pass
has a salt, and so has the KV of each token: a row is right beside KV of its salt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from waiting import GIVE_UP_S, until

from cache_manager.errors import KVRouteError
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.testing.faults import FaultyStore
from kvroute import open_store, routing_spec
from kvroute.connector.answers import routes
from kvroute.connector.fields import FIELD
from kvroute.connector.job_counts import NOT_RESTORED
from kvroute.connector.left import Tokens
from kvroute.connector.meter import SECONDS
from kvroute.connector.settings import Common
from kvroute.connector.witness import KvFolder
from kvroute.integrations.sglang import hooks
from kvroute.integrations.sglang.passes import Launched
from kvroute.integrations.sglang.rows import WHY, RoutedRows

PAGE, PAGES, HOST = 4, 7, 5
KEYS = ["one" * 8, "other" * 8]  # of pages that another storage keeps
SPEC = routing_spec(num_experts=250, top_k=2, layer_ids=[1, 2], num_layers=3, block_tokens=PAGE)


@dataclass
class Salts:
    """The KV of blocks where kvroute stores it, too."""

    memory: torch.Tensor
    spec: ClassVar = AuxBlockDataSpec("kv", (8,), "uint8", PAGE)

    def take(self, blocks: Any, into: Any) -> None:
        into[:] = self.memory.numpy()[blocks].view(np.uint8)

    def fill(self, blocks: Any, given: Any) -> None:
        self.memory[blocks] = torch.from_numpy(np.ascontiguousarray(given).view(np.int64))


def ids_of(salts: list[int]) -> torch.Tensor:
    """What routers chose int32 ``[T, 3, 2]``; layer 0 has none."""
    one = torch.tensor(salts, dtype=torch.int32)[:, None, None]
    return torch.cat([one * 0, one.expand(-1, 2, 1)], dim=1).expand(-1, 3, 1).repeat(1, 1, 2) + torch.tensor([0, 100])


def weights_of(salts: list[int]) -> torch.Tensor:
    """What experts were given float32 ``[T, 2, 2]``, of the layers with routers."""
    return torch.tensor(salts, dtype=torch.float32)[:, None, None] / torch.tensor([[1, 2], [4, 8]])


class Request(list[int]):
    """A request's slots, and the last pass that it needs: SGLang asks for its rows after that pass."""

    last = 0


@dataclass
class Engine:
    """Pages, KV and passes as SGLang has them; the KV of a slot, in ``memory`` or ``host_memory``, is its salt."""

    tier: str = "host"
    weighted: bool = False  # rows have routing weights
    settings: dict[str, Any] = field(default_factory=dict)
    memory: torch.Tensor = field(default_factory=lambda: torch.zeros(PAGES + 1, PAGE, dtype=torch.int64))
    host_memory: torch.Tensor = field(default_factory=lambda: torch.zeros(HOST, PAGE, dtype=torch.int64))
    others: dict[str, torch.Tensor] = field(default_factory=dict)  # the KV of pages that another storage keeps, by key
    coming: list[tuple[str, int]] = field(default_factory=list)  # keys and pages, until the next pass is launched
    free: list[int] = field(default_factory=lambda: list(range(1, PAGES + 1)))
    free_host: list[int] = field(default_factory=lambda: list(range(HOST)))
    host: list[int] = field(default_factory=list)  # pages with KV
    running: list[Request] = field(default_factory=list)
    passes: list[Launched] = field(default_factory=list)
    kept: list[tuple[Any, int]] = field(default_factory=list)  # jobs, and pages that are held until they have begun
    salt: int = 0

    def __post_init__(self) -> None:
        store = "memory:" if self.tier not in ("none", "host") else ""
        settings = Common(strict=True, store=store, **self.settings)
        self.rows = RoutedRows(SPEC, PAGES + 1, Namespace("m", 1), settings, weights=self.weighted)
        folder = {"linker": KvFolder([self.memory]), "storage": KvFolder([self.host_memory])}.get(self.tier)
        kv, host_pages = Salts(self.memory) if self.tier == "ours" else None, len(self.host_memory)
        self.rows.attach(kv=kv, folder=folder, host_pages=host_pages * (self.tier in ("host", "storage")))

    def request(self, pages: list[int] | None = None) -> Request:
        """A new one, whose first pages came from elsewhere."""
        self.running.append(made := Request(all_slots(pages or []).tolist()))
        made.last = self.rows.passes.launched + 1
        return made

    def pages(self, pages: list[int], *, host: bool = False) -> Any:
        return self.rows.pages_of(all_slots(pages), host=host)

    def allocate(self, slots: list[int], n: int) -> list[int] | None:
        """``n`` further slots of a request, as ``alloc_extend`` gives them out."""
        found = list[int]()
        for _ in range(n):
            last = found[-1] if found else slots[-1] if slots else -1
            if (last + 1) % PAGE:
                found.append(last + 1)
            elif self.free:
                found.append(self.free.pop(0) * PAGE)
            else:
                self.free += sorted({slot // PAGE for slot in found if slot % PAGE == 0})
                return None
        return found

    def launch(self, *wanted: tuple[Request, int]) -> None:
        self.salt = self.salt % 99 + 1
        slots = list[int]()
        for request, n in wanted:
            if (more := self.allocate(request, n)) is not None:
                request.extend(more)
                request.last = self.rows.passes.launched + 1
                slots += more
        for key, page in self.coming:
            self.memory[page] = self.others[key]
        self.coming.clear()
        self.memory.view(-1)[slots] = self.salt
        self.rows.weights.version = self.salt
        slots += [0] * (self.salt % 3)  # padding
        salts = [self.salt] * len(slots)
        ids = ids_of(salts)
        given: torch.Tensor | None = None
        if self.weighted:
            given = torch.cat([ids[:, 1:].int(), weights_of(salts).view(torch.int32)], 1)
        self.passes.append(self.rows.launch(torch.tensor(slots, dtype=torch.int64), ids, given=given))

    def end(self) -> None:
        if self.passes:
            self.passes.pop(0).finalize()

    def offload(self, request: Request, key: str) -> None:
        """A linker keeps the first page, and overwrites what it has under a key of other KV; our own store keeps it."""
        page = request[0] // PAGE
        if len(request) >= PAGE and page not in {page for _, page in self.coming}:
            self.others[key] = self.memory[page].clone()
            self.kept.append((self.rows.keep([key], np.array([page])), page))

    def load(self, key: str) -> None:
        """A linker fills a page before the next pass is launched, and ours does so now."""
        if self.free and self.tier == "ours":
            page = self.free.pop(0)
            if self.rows.fill([key], self.pages([page])):
                self.request([page])
            else:
                self.free.append(page)
        elif self.free and key in self.others:
            page = self.free.pop(0)
            self.rows.loaded([key], self.pages([page]))
            self.coming.append((key, page))
            self.request([page])

    def store(self, key: str) -> None:
        """A storage keeps a page of the host."""
        if self.host:
            self.others[key] = self.host_memory[self.host[0]].clone()
            self.rows.keep([key], self.pages(self.host[:1], host=True))

    def prefetch(self, key: str) -> None:
        """A storage fills a page of the host."""
        if self.free_host and key in self.others:
            self.host.append(page := self.free_host.pop(0))
            self.host_memory[page] = self.others[key]
            self.rows.loaded([key], self.pages([page], host=True))

    def run(self, *wanted: tuple[Request, int]) -> None:
        """Launch a pass, and end all passes."""
        self.launch(*wanted)
        while self.passes:
            self.end()

    def computed(self) -> Request:
        """A request of a page, whose pass is over."""
        self.run((made := self.request(), PAGE))
        return made

    def persisted(self) -> None:
        assert all(job.wait(GIVE_UP_S) for job in self.rows.aux.jobs)

    def finish(self, request: Request, *, soon: bool = False) -> None:
        """A request's pages are given up, to be given out ``soon``; a pass may still write. Some pages may be held."""
        self.kept = [(begun, page) for begun, page in self.kept if not begun]
        pages = {slot // PAGE for slot in request}
        if not pages & {page for _, page in self.kept}:
            self.running = [each for each in self.running if each is not request]
            self.free = [*sorted(pages), *self.free] if soon else [*self.free, *sorted(pages)]

    def back_up(self, request: Request) -> None:
        whole = [slot // PAGE for slot in request[PAGE - 1 :: PAGE]][: len(self.free_host)]
        if whole:
            host = [self.free_host.pop(0) for _ in whole]
            self.host += host
            self.host_memory[host] = self.memory[whole]
            self.rows.copied(self.pages(whole), self.pages(host, host=True))

    def bring_back(self, wanted: int) -> None:
        host = self.host[:wanted]
        if host and len(self.free) >= len(host):
            pages = [self.free.pop(0) for _ in host]
            self.rows.copied(self.pages(host, host=True), self.pages(pages))
            self.memory[pages] = self.host_memory[host]
            self.request(pages)

    def evict_host(self) -> None:
        if self.host:
            self.free_host.append(self.host.pop(0))

    def check(self, *, complete: bool) -> int:
        """How many rows are right, of requests that may have ended; none is wrong, with ``complete`` none missing."""
        right = 0
        for request in self.running:
            if request.last > self.rows.passes.ended:
                continue
            read = self.rows.read(np.array(request, np.int64), 0)
            found = read.routes()[0]
            salts, there = self.memory.view(-1)[request].numpy(), found.valid
            assert (found.ids[there][:, :, 0] == salts[there][:, None]).all(), "a row of other KV"
            weights = read.weights_of(found)
            assert (weights is not None) == self.weighted
            if weights is not None:
                assert weights.weights[there].tobytes() == weights_of(salts[there].tolist()).numpy().tobytes()
                assert np.isnan(weights.weights[~there]).all()
            versions = {at: version for start, stop, version in found.weights_versions for at in range(start, stop)}
            assert all(versions[at] == salts[at] for at in np.flatnonzero(there)), "a label of other weights"
            assert there.all() or not complete
            right += int(there.sum())
        return right


def all_slots(pages: list[int]) -> torch.Tensor:
    return torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)], dtype=torch.int64)


TIERS = {
    "none": [],
    "host": ["back_up", "bring_back", "evict_host"],
    "storage": ["back_up", "bring_back", "evict_host", "store", "prefetch"],
    "linker": ["offload", "load"] * 2,
    "ours": ["offload", "load"] * 2,
}


@given(seed=st.integers(0, 1 << 32), tier=st.sampled_from(sorted(TIERS)), loses=st.booleans(), weighted=st.booleans())
def test_a_row_is_of_the_pass_that_made_the_kv_or_missing(seed: int, tier: str, loses: bool, weighted: bool) -> None:
    """Method: KV comes back under few keys, so that a key has rows of one computation and KV of another; with routing
    weights, too, which are of the very pass of their ids."""
    source = random.Random(seed)
    engine = Engine(tier, weighted, {"witness": "flagged"})
    kinds = ["launch", "launch", "end", "finish", "check", *TIERS[tier], *(["lose"] * loses)]
    for _ in range(60):
        kind = source.choice(kinds)
        running = engine.running
        if kind == "launch":
            old = source.sample(running, len(running) // 2)
            new = [engine.request()] if source.random() < 0.5 else []
            engine.launch(*((request, source.randint(1, 6)) for request in [*old, *new]))
            engine.running = [request for request in engine.running if request]
        elif kind in ("end", "evict_host"):
            getattr(engine, kind)()
        elif kind == "lose" and engine.passes:
            engine.passes.pop(0)
        elif kind in ("finish", "back_up") and running:
            getattr(engine, kind)(source.choice(running))
        elif kind == "bring_back":
            engine.bring_back(source.randint(1, 3))
        elif kind == "offload" and running:
            engine.offload(source.choice(running), source.choice(KEYS))
        elif kind in ("load", "store", "prefetch"):
            getattr(engine, kind)(source.choice(KEYS))
        if not engine.coming:
            engine.check(complete=tier in ("none", "host", "ours") and not loses)
        if len(engine.passes) > 2:
            engine.end()
    engine.run()
    engine.check(complete=tier in ("none", "host", "ours") and not loses)
    engine.rows.aux.assert_consistent()


@pytest.mark.parametrize("odd", ["", "other KV", "the store fails"])
@pytest.mark.parametrize("tier", ["storage", "linker"])
def test_rows_go_by_kv_that_others_keep(tier: str, odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: they land beside KV of their own computation, are missing beside other KV and without their store, and the
    answer says why."""
    store = FaultyStore(open_store("memory:"))
    monkeypatch.setattr("kvroute.integrations.sglang.rows.open_store", lambda _: store)
    engine = Engine(tier)
    engine.launch((request := engine.request(), PAGE))
    if tier == "storage":
        engine.back_up(request)
        engine.store(KEYS[0])
        engine.evict_host()
    else:
        engine.offload(request, KEYS[0])
    engine.end()
    engine.persisted()
    engine.finish(request)
    if odd == "other KV":
        engine.others[KEYS[0]][2] += 1
    elif odd:
        store.fail_get = True
    if tier == "storage":
        engine.prefetch(KEYS[0])
        engine.bring_back(1)
    else:
        engine.load(KEYS[0])
    (loaded,) = engine.running
    engine.run((engine.request(), 1))
    found, unseen, gaps = engine.rows.read(np.array(loaded), 0).routes()
    assert (found.known.tolist(), unseen) == ([[not odd, False]] * PAGE, [])  # the last router is behind all KV
    assert gaps == ([(0, PAGE, WHY)] if odd else [])
    causes = {"other KV": "absent_blocks_not_restored", "the store fails": "failed_blocks_not_restored"}
    assert engine.rows.meter.missing == ({NOT_RESTORED[causes[odd]]: PAGE} if odd else {})
    assert engine.rows.stored([KEYS[0]]) == (odd != "other KV")  # which is not loaded a second time


@pytest.mark.parametrize("tier", ["ours", "linker", "storage"])
def test_kv_that_was_loaded_before_the_first_pass_is_not_of_new_weights(tier: str) -> None:
    """Goal: what is computed with new weights on KV of old ones is stored under neither name. Method: weights are new
    when KV has come to an engine that was emptied and has computed nothing since; SGLang keeps that KV."""
    engine = Engine(tier, {"weights": "m"})
    request = engine.computed()
    if tier == "storage":
        engine.back_up(request)
        engine.store(KEYS[0])
    else:
        engine.offload(request, KEYS[0])
    engine.persisted()
    engine.finish(request)
    engine.rows.weights.forgotten()
    engine.rows.weights.changed(1)  # the first weights, under whose name the page was stored
    (engine.prefetch if tier == "storage" else engine.load)(KEYS[0])
    engine.rows.weights.changed(2)
    assert engine.rows.weights.mixed
    assert engine.rows.keep(KEYS[1:], engine.pages([1])) is None


def test_what_is_computed_in_the_place_of_a_page_that_did_not_come_is_not_missing() -> None:
    engine = Engine("ours")
    assert not engine.rows.fill([KEYS[0]], engine.pages([1]))
    assert engine.rows.meter.missing == {}
    taken = engine.rows.meter.take()
    assert taken is not None
    assert list(taken[SECONDS]) == ["restore"]


def test_a_page_that_is_filled_while_a_pass_still_writes_for_a_dead_request_keeps_what_came() -> None:
    engine = Engine("ours")
    engine.offload(engine.computed(), KEYS[0])
    engine.persisted()
    engine.launch((dead := engine.request(), PAGE))
    engine.finish(dead, soon=True)
    engine.load(KEYS[0])
    assert engine.running[-1] == dead
    engine.run()
    assert engine.check(complete=True) == 2 * PAGE


@pytest.mark.parametrize("again", ["the page", "the host's page"])
def test_what_goes_to_the_host_while_its_pass_runs_has_its_rows_when_that_is_over(again: str) -> None:
    """Method: meanwhile the page, or its page of the host, is given to another request."""
    engine = Engine("host")
    old, new = engine.computed(), engine.request()
    if again == "the page":
        engine.back_up(old)
    engine.launch((new, PAGE))
    engine.back_up(new)
    if again == "the page":
        engine.finish(new, soon=True)
        engine.bring_back(1)  # the old one's rows, into the new one's page
    else:
        engine.evict_host()
        engine.free_host = engine.free_host[::-1]
        engine.back_up(old)
        engine.finish(old, soon=True)
        engine.launch((engine.request(), PAGE))
    engine.run()
    while engine.host:
        engine.bring_back(1)
        engine.run()
        engine.check(complete=True)
        engine.evict_host()
    assert engine.check(complete=True) >= 2 * PAGE


def test_kv_of_a_storage_that_is_attached_later_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: KV that such a storage brings to pages of the host has not the rows of these pages' earlier requests, and
    the answer says why. Method: SGLang's report of a prefetch, in an engine that has started without a storage."""
    engine = Engine("host")
    engine.back_up(request := engine.computed())
    (host,) = engine.host
    monkeypatch.setattr(hooks, "capturer", lambda: engine)
    prefetch = SimpleNamespace(host_indices=all_slots([host]))
    tree = SimpleNamespace(page_size=PAGE, ongoing_prefetch={"request": prefetch})
    operation = SimpleNamespace(handle="request", completed_tokens=PAGE, hash_value=KEYS[:1])
    hooks.HOOKS["prefetched"](lambda *_: None, tree, operation)
    engine.host_memory[host] = 99
    engine.finish(request)
    engine.bring_back(1)
    engine.run()
    assert engine.check(complete=False) == 0
    _, _, gaps = engine.rows.read(np.array(engine.running[0], np.int64), 0).routes()
    assert gaps == [(0, PAGE, WHY)]


def test_what_happens_behind_a_pass_that_never_ends_happens_before_the_next() -> None:
    """Method: a page goes to the host behind such a pass, and is given to another request with the next."""
    engine = Engine("host")
    old, new = engine.computed(), engine.request()
    engine.launch((engine.request(), 1))
    engine.passes.clear()
    engine.back_up(old)
    engine.finish(old, soon=True)
    engine.run((new, PAGE))
    engine.bring_back(1)
    engine.run()
    assert engine.check(complete=False) == 2 * PAGE


def test_a_call_that_raises_costs_no_other() -> None:
    """Goal: a page that waits for a copy does not keep its old rows. Method: two copies wait for a pass; the first
    one's memory is gone."""
    engine = Engine("host")
    old, new = engine.computed(), engine.computed()
    engine.launch((engine.request(), 1))
    engine.rows.copied(np.array([PAGES + HOST + 9]), np.array([PAGES]))
    engine.back_up(new)
    engine.finish(old, soon=True)
    engine.finish(new, soon=True)
    with pytest.raises((KVRouteError, IndexError)):
        engine.end()
    engine.bring_back(1)
    engine.run()
    assert engine.check(complete=True) >= PAGE


@pytest.mark.parametrize("comes", [False, True])
def test_a_request_whose_pass_never_ended_has_no_rows_of_before(comes: bool) -> None:
    """Method: its page is begun by such a pass, or comes from the host behind one; SGLang asks all the same."""
    engine = Engine("host")
    old = engine.computed()
    engine.back_up(old)
    engine.finish(old, soon=True)
    engine.launch((engine.request(), PAGE))
    engine.passes.clear()
    if comes:
        engine.finish(engine.running[-1], soon=True)
        engine.bring_back(1)
    assert engine.running[-1] == old
    assert not engine.rows.read(np.array(old), 0).routes()[0].known.any()


def test_an_answer_has_both_fields() -> None:
    """Goal: SGLang's field in its layout, with -1 for what is missing, and routes that say the same."""
    engine = Engine("none")
    request = engine.request()
    engine.run((request, 6))
    request += engine.allocate(request, 1) or []  # a token that no pass has computed
    tokens = list(range(8))
    made = engine.rows.answer("id", np.array(request), 2, Tokens(tokens, 5))
    until(lambda: made.ready, what="the answer is not ready")
    assert made.field.dtype == torch.int32
    assert made.field.tolist() == [[[0, 0], [1, 101], [1, 101]]] * 4 + [[[0, 0], [-1, -1], [-1, -1]]]
    answer: dict[str, Any] = {
        "meta_info": {"id": "id", FIELD: [made.data]},
        "prompt_token_ids": tokens[:5],
        "output_ids": tokens[5:],
    }
    found = routes(answer)
    assert (found.start, found.valid.tolist()) == (2, [True] * 4 + [False])
    found.validate(tokens)

"""The rows of SGLang's slots: no pass writes into a page that was given out after it was launched.

An engine of a few pages with late passes, requests that end while a pass still writes for them, pages that go to the
host and back, and pages that a linker or a storage of somebody else keeps. Every pass has a salt, and so has the KV of
each token: a row is right beside KV of its salt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.keys import Namespace
from cache_manager.testing.faults import FaultyStore
from kvroute import open_store, routing_spec
from kvroute.connector.answers import FIELD, routes
from kvroute.connector.left import Tokens
from kvroute.connector.witness import KvFolder
from kvroute.integrations.sglang.rows import WHY, Launched, RoutedRows
from kvroute.integrations.sglang.settings import Settings, settings_of

PAGE, PAGES, HOST = 4, 7, 5
KEYS = ["one" * 8, "other" * 8]  # of pages that somebody else keeps
SPEC = routing_spec(num_experts=250, top_k=2, layer_ids=[1, 2], num_layers=3, block_tokens=PAGE)


def made(kept: torch.Tensor | None = None, **settings: Any) -> RoutedRows:
    """With ``kept`` int64 ``[PAGES + 1, PAGE]``, the KV of slots, it is bound to rows of a store."""
    rows = RoutedRows(SPEC, PAGES + 1, Namespace("m", 1), Settings(strict=True, store="memory:", **settings))
    rows.attach(host_pages=HOST, folder=None if kept is None else KvFolder([kept]))
    return rows


def ids_of(salts: list[int]) -> torch.Tensor:
    """What routers chose int32 ``[T, 3, 2]``; layer 0 has none."""
    one = torch.tensor(salts, dtype=torch.int32)[:, None, None]
    return torch.cat([one * 0, one.expand(-1, 2, 1)], dim=1).expand(-1, 3, 1).repeat(1, 1, 2) + torch.tensor([0, 100])


@dataclass
class Engine:
    """Pages, KV and passes as SGLang has them; ``kv`` and ``host`` are the salts of slots."""

    rows: RoutedRows
    memory: torch.Tensor = field(default_factory=lambda: torch.zeros(PAGES + 1, PAGE, dtype=torch.int64))
    others: dict[str, list[int]] = field(default_factory=dict)  # the KV of pages that somebody else keeps, by key
    coming: list[tuple[str, int]] = field(default_factory=list)  # keys and pages, until the next pass is launched
    free: list[int] = field(default_factory=lambda: list(range(1, PAGES + 1)))
    free_host: list[int] = field(default_factory=lambda: list(range(1, HOST)))
    kv: dict[int, int] = field(default_factory=dict)
    host: dict[int, list[int | None]] = field(default_factory=dict)
    running: list[list[int]] = field(default_factory=list)  # the slots of each request
    passes: list[Launched] = field(default_factory=list)
    salt: int = 0

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
        self.rows.given(torch.tensor(found))
        return found

    def launch(self, wanted: list[tuple[list[int], int]]) -> None:
        self.salt = self.salt % 99 + 1
        slots = list[int]()
        for request, n in wanted:
            if (more := self.allocate(request, n)) is not None:
                request += more
                slots += more
        for key, page in self.coming:
            self.fill({page * PAGE + i: salt for i, salt in enumerate(self.others[key])})
        self.coming.clear()
        self.fill(dict.fromkeys(slots, self.salt))
        self.rows.launched += 1
        ids = ids_of([self.salt] * len(slots))
        self.passes.append(
            Launched(self.rows.launched, self.salt, torch.tensor(slots, dtype=torch.int64), ids, self.rows)
        )

    def fill(self, kv: dict[int, int]) -> None:
        self.kv |= kv
        for slot, salt in kv.items():
            self.memory[slot // PAGE, slot % PAGE] = salt

    def end(self) -> None:
        self.passes.pop(0).finalize()

    def offload(self, request: list[int], key: str) -> None:
        """A linker keeps the first page, and what it has under the key of other KV is overwritten."""
        if len(request) >= PAGE and not any(request[0] // PAGE == page for _, page in self.coming):
            self.others[key] = [self.kv[request[0] + i] for i in range(PAGE)]
            self.rows.settle()
            self.rows.keep([key], np.array([request[0] // PAGE]))

    def load(self, key: str) -> None:
        """A linker fills a page before the next pass is launched."""
        if self.free and key in self.others:
            page = self.free.pop(0)
            self.rows.given(all_slots([page]))
            self.rows.loaded([key], self.rows.pages_of(all_slots([page])))
            self.coming.append((key, page))
            self.running.append(all_slots([page]).tolist())

    def store(self, key: str) -> None:
        """A storage keeps a page of the host."""
        if self.host:
            page = next(iter(self.host))
            self.others[key] = [salt or 0 for salt in self.host[page]]
            self.rows.keep([key], self.rows.pages_of(all_slots([page]), host=True))

    def prefetch(self, key: str) -> None:
        """It fills one."""
        if self.free_host and key in self.others:
            page = self.free_host.pop(0)
            self.host[page] = list(self.others[key])
            self.rows.prefetched([key], all_slots([page]))

    def finish(self, request: list[int]) -> None:
        """Its pages are given up; a pass that was launched may still write for it."""
        self.running.remove(request)
        self.free += sorted({slot // PAGE for slot in request})

    def back_up(self, request: list[int]) -> None:
        whole = [slot // PAGE for slot in request[PAGE - 1 :: PAGE]][: len(self.free_host)]
        if whole:
            host = [self.free_host.pop(0) for _ in whole]
            for page, there in zip(whole, host, strict=True):
                self.host[there] = [self.kv[page * PAGE + i] for i in range(PAGE)]
            self.rows.backed_up(all_slots(whole), all_slots(host))

    def bring_back(self, wanted: int) -> None:
        host = list(self.host)[:wanted]
        if host and len(self.free) >= len(host):
            pages = [self.free.pop(0) for _ in host]
            slots = all_slots(pages)
            self.rows.given(slots)
            self.rows.brought_back(all_slots(host), slots)
            self.fill({p * PAGE + i: s for p, h in zip(pages, host, strict=True) for i, s in enumerate(self.host[h])})
            self.running.append(slots.tolist())

    def evict_host(self) -> None:
        if self.host:
            page = next(iter(self.host))
            del self.host[page]
            self.free_host.append(page)

    def check(self, *, complete: bool) -> int:
        """Rows that are right, of all requests; with ``complete`` none that a pass has written may be missing."""
        right = 0
        for request in self.running:
            found = self.rows.routes(np.array(request, np.int64), 0)[0]
            coming = {page for _, page in self.coming}
            salts = np.array([-1 if slot // PAGE in coming else self.kv[slot] for slot in request])
            there = found.valid
            assert (found.ids[there][:, :, 0] == salts[there][:, None]).all(), "a row of other KV"
            versions = {at: version for start, stop, version in found.weights_versions for at in range(start, stop)}
            assert all(versions[at] == salts[at] for at in np.flatnonzero(there)), "a label of other weights"
            assert there.all() or not complete
            right += int(there.sum())
        return right


def all_slots(pages: list[int]) -> torch.Tensor:
    return torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)])


@given(seed=st.integers(0, 1 << 32), tier=st.sampled_from(["none", "host", "storage", "linker"]), rows=st.booleans())
def test_a_row_is_of_the_pass_that_made_the_kv_or_missing(seed: int, tier: str, rows: bool) -> None:
    """Method: KV comes back under few keys, so that a key has rows of one computation and KV of another."""
    source, kept = random.Random(seed), torch.zeros(PAGES + 1, PAGE, dtype=torch.int64)
    foreign = tier in ("storage", "linker")
    engine = Engine(made(kept if foreign else None, rows=rows, witness="flagged"), kept)
    kinds = ["launch", "launch", "end", "finish", "check"]
    kinds += {"none": [], "linker": ["offload", "load"] * 2}.get(tier, ["out", "in", "evict"])
    kinds += ["store", "prefetch"] if tier == "storage" else []
    for _ in range(60):
        kind = source.choice(kinds)
        running = engine.running
        if kind == "launch":
            new = [[]] if source.random() < 0.5 else []
            wanted = [(r, source.randint(1, 6)) for r in [*source.sample(running, len(running) // 2), *new]]
            engine.running += new
            engine.launch(wanted)
            engine.running = [request for request in engine.running if request]
        elif kind == "end" and engine.passes:
            engine.end()
        elif kind == "finish" and running:
            engine.finish(source.choice(running))
        elif kind == "out" and running:
            engine.back_up(source.choice(running))
        elif kind == "in":
            engine.bring_back(source.randint(1, 3))
        elif kind == "evict":
            engine.evict_host()
        elif kind == "offload" and running:
            engine.offload(source.choice(running), source.choice(KEYS))
        elif kind in ("load", "store", "prefetch"):
            getattr(engine, kind)(source.choice(KEYS))
        engine.check(complete=False)
        if len(engine.passes) > 2:
            engine.end()
    while engine.passes:
        engine.end()
    engine.check(complete=tier == "none")
    engine.rows.aux.assert_consistent()


@pytest.mark.parametrize("odd", ["", "other KV", "the store fails"])
@pytest.mark.parametrize("tier", ["storage", "linker"])
def test_rows_go_by_kv_that_others_keep(tier: str, odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: they land beside KV of their own computation, are missing beside other KV and without their store, and the
    answer says why."""
    store = FaultyStore(open_store("memory:"))
    monkeypatch.setattr("kvroute.integrations.sglang.rows.open_store", lambda _: store)
    kept = torch.zeros(PAGES + 1, PAGE, dtype=torch.int64)
    engine = Engine(made(kept), kept)
    engine.running.append(request := [])
    engine.launch([(request, PAGE)])
    engine.end()
    if tier == "storage":
        engine.back_up(request)
        engine.store(KEYS[0])
        engine.evict_host()
    else:
        engine.offload(request, KEYS[0])
    for job in engine.rows.aux.jobs:
        assert job.wait(10)
    engine.finish(request)
    if odd == "other KV":
        engine.others[KEYS[0]][2] += 1
    elif odd:
        store.fail_get = True
    if tier == "storage":
        engine.prefetch(KEYS[0])
        engine.bring_back(1)
        engine.back_up(engine.running[0])  # what is not compared yet is not named after what has come
    else:
        engine.load(KEYS[0])
    (loaded,) = engine.running
    before, _, gaps = engine.rows.routes(np.array(loaded), 0)
    assert not before.known.any(), "nobody has compared yet"
    engine.running.append(more := [])
    engine.launch([(more, 1)])
    engine.end()
    found, unseen, gaps = engine.rows.routes(np.array(loaded), 0)
    assert (found.known.tolist(), unseen) == ([[not odd, False]] * PAGE, [])  # the last router is behind all KV
    assert gaps == ([(0, PAGE, WHY)] if odd else [])
    assert engine.rows.stored([KEYS[0]]) == (odd != "other KV")  # which nobody loads a second time


def test_pages_that_went_to_the_host_before_their_pass_was_over_have_its_rows_when_it_is() -> None:
    engine = Engine(made())
    engine.running.append(request := [])
    engine.launch([(request, 2 * PAGE)])
    engine.back_up(request)
    engine.end()
    engine.finish(request)
    engine.bring_back(2)
    assert engine.check(complete=True) == 2 * PAGE


@pytest.mark.parametrize("again", ["the page", "the host's page"])
def test_what_follows_to_the_host_goes_where_pages_are_still_what_they_were(again: str) -> None:
    """Method: a page is on its way while its pass runs; it, or its page of the host, is another's when that is over."""
    engine = Engine(made())
    old: list[int] = []
    new: list[int] = []
    engine.running += [old, new]
    engine.launch([(old, PAGE)])
    engine.end()
    if again == "the page":
        engine.back_up(old)
    engine.launch([(new, PAGE)])
    engine.back_up(new)
    if again == "the page":
        engine.finish(new)
        engine.free = [new[0] // PAGE, *(page for page in engine.free if page != new[0] // PAGE)]
        engine.bring_back(1)  # the old one's rows, into the new one's page
    else:
        engine.evict_host()
        engine.free_host = engine.free_host[::-1]
        engine.back_up(old)
        engine.finish(old)
        engine.free = engine.free[::-1]
        third: list[int] = []
        engine.running.append(third)
        engine.launch([(third, PAGE)])
    while engine.passes:
        engine.end()
    while engine.host:
        engine.bring_back(1)
        engine.check(complete=False)
        engine.evict_host()
    assert engine.check(complete=False) >= PAGE


def test_an_answer_has_both_fields() -> None:
    """Goal: SGLang's field in its layout, with -1 for what is missing, and routes that say the same."""
    engine = Engine(made())
    engine.running.append(request := [])
    engine.launch([(request, 6)])
    engine.end()
    request += engine.allocate(request, 1) or []  # a token that no pass has computed
    tokens = list(range(8))
    field, told = engine.rows.answer("id", np.array(request), 2, Tokens(tokens, 5))
    assert field.dtype == torch.int32
    assert field.tolist() == [[[0, 0], [1, 101], [1, 101]]] * 4 + [[[0, 0], [-1, -1], [-1, -1]]]
    answer: dict[str, Any] = {
        "meta_info": {"id": "id", FIELD: [None, None, told]},
        "prompt_token_ids": tokens[:5],
        "output_ids": tokens[5:],
    }
    found = routes(answer)
    assert (found.start, found.valid.tolist()) == (2, [True] * 4 + [False])
    found.validate(tokens)


def test_settings_that_are_none_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvroute import ConfigError

    with pytest.raises(ConfigError, match=r"wanted those of docs/settings\.md, got .*unknown field `stor`"):
        settings_of({"linker": "KvrouteLinker", "linker_extra_config": {"stor": "x"}})
    monkeypatch.setenv("KVROUTE_SGLANG", '{"weights": 3}')
    with pytest.raises(ConfigError, match=r"KVROUTE_SGLANG: wanted .*`\$\.weights`"):
        settings_of(None)
    monkeypatch.setenv("KVROUTE_SGLANG", '{"weights": "w"}')
    assert settings_of({"linker": "another"}) == Settings(weights="w")

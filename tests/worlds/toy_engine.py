"""A small paged engine with both ends of a connector, whose rows are a function of the tokens."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from toy_requests import EXPERTS, TOKENS, TOP_K, Asked, row_of, seeded, weights_of
from waiting import GIVE_UP_S

from cache_manager.keys import Namespace
from kvroute.capture.step_weights import NoStepWeights
from kvroute.connector import Engine, Key, Limits, SchedulerRows, Settings, Tokens, worker
from kvroute.connector.behind import Behind
from kvroute.connector.carriers import ByKey, ByTransfer, Carrier, NoCarrier
from kvroute.connector.carriers.by_transfer import ByTransferWorker, TransferStep
from kvroute.connector.messages import StepMeta
from kvroute.connector.tickets import UNNAMED
from kvroute.connector.versions import AS_LOADED
from kvroute.connector.witness import KvFolder, OtherRank, witnessing
from kvroute.connector.worker import WorkerRows
from kvroute.routes import Routes
from kvroute.routing import routing_spec


class Sum:
    """The sum over two ranks, each in a thread of its own."""

    def __init__(self) -> None:
        self._parts = [torch.zeros(0, dtype=torch.int64)] * 2
        self._met = threading.Barrier(2, timeout=GIVE_UP_S)

    def add(self, rank: int, part: torch.Tensor) -> None:
        self._parts[rank] = part.clone()
        self._met.wait()
        part.copy_(self._parts[0] + self._parts[1])
        self._met.wait()


def _carrier(settings: Settings) -> Carrier:
    if settings.carrier == "transfer":
        return ByTransfer()
    if settings.store:
        return ByKey("flagged" if settings.witness == "flagged" else "missing")
    return NoCarrier()


class Toy:
    """A paged engine for one request at a time: a prefix cache over ``blocks`` blocks, and KV that others may have.

    It loads in a step or, if ``later``, beside one. Of several ``ranks`` each has one head; the first has the rows. If
    ``late``, what steps leave to the host is done behind them, as beside a device. Rows and KV are a function of its
    ``weights``, too, which may be changed at any time, ``between`` the steps of a request for one.
    """

    def __init__(
        self,
        kept: dict[bytes, Any] | None = None,
        layers: int = 2,
        blocks: int = 9,
        later: bool = False,
        ranks: int = 1,
        late: bool = False,
        drafts: bool = True,
        limits: Mapping[str, Any] = MappingProxyType({}),
        **said: Any,
    ) -> None:
        self.kept, self.later = kept, later  # KV outside, by hash of its block, in all layers
        spec = routing_spec(EXPERTS, TOP_K, range(layers), num_layers=layers, block_tokens=TOKENS)
        self.layers = range(layers)
        self.kv = {f"layers.{i}": torch.zeros(blocks, ranks, TOKENS, 8) for i in self.layers}
        mine, others = ({name: kv[:, i : i + 1] for name, kv in self.kv.items()} for i in (0, 1))
        settings = Settings.of({"strict": True, "weights": "m", **said})
        engine = Engine(
            settings,
            spec,
            Namespace(settings.weights, AS_LOADED if settings.weights_version is None else settings.weights_version),
            blocks=blocks,
            max_tokens=64,
            carrier=_carrier(settings),
            drafts=drafts,
            # a loaded machine may need more than a second for a store's answer, and then computes hits again, or for a
            # fetch, whose rows are then missing
            limits=Limits(**{"question_s": GIVE_UP_S, "fetch_s": GIVE_UP_S, **limits}),
        )
        added = Sum()
        joined = partial(added.add, 0) if ranks > 1 else None
        with patch.object(worker, "Behind", self._behind):
            self.worker = WorkerRows(engine, mine, joined, late=late)
        self.other_rank: OtherRank | None = None
        if ranks > 1:
            self.other_rank = OtherRank(KvFolder(witnessing(others, self.layers), 1, partial(added.add, 1)))
        self.threads = ThreadPoolExecutor(1)
        self.scheduler = SchedulerRows(engine)
        self.scheduler.attach(self.worker.handshake())
        self.scheduler.blocks_of = lambda _name, first, last: self.table[first:last]
        self.hooks = [self.worker.ids.hook(layer) for layer in self.layers]
        self.quiet = False  # routers tell no weights
        self.free, self.cached = list(range(blocks)), dict[bytes, int]()
        self.table: list[int] = []
        self.request: Asked | None = None  # the last one
        self.fails: set[int] = set()  # places in the request of blocks whose load fails
        self.unbrought: set[int] = set()  # and of those whose KV another engine was to bring
        self.waits = True  # until its rows have come, before that failure shows
        self.loses: set[int] = set()  # positions at which the router's ids are not ones
        self.loaded, self.weights = 0, 0
        self.between: Callable[[], object] = lambda: None
        self.waiting: Callable[[], object] = lambda: None  # done while a request waits for rows
        self.held: list[threading.Event] = []  # what the worker's host waits for
        self.lent = b""  # the transfer of the last blocks that were lent
        self.fetches: set[bytes] = set()  # transfers from which this engine fetches
        if isinstance(self.worker.carrier, ByTransferWorker):
            self._crossing = self.worker.carrier.crossing
            self._crossing.poll = self._polled(self._crossing.poll)  # type: ignore[method-assign]

    def _behind(self, *arguments: Any) -> Behind:
        self.behind = Behind(*arguments)
        """What does the host's part of a step, of an engine that is ``late``."""
        return self.behind

    def _polled(self, poll: Callable[[], Any]) -> Callable[[], Any]:
        def ended() -> Any:
            found = poll()
            self.fetches -= {each.transfer for each in found}
            return found

        return ended

    def ask(
        self,
        name: str,
        tokens: Sequence[int],
        chunks: Sequence[int] = (64,),
        *,
        lends: bool = False,
        brought: int | None = None,
        ticket: Any = None,
        more: Sequence[int] = (),
        kv: Mapping[str, str] = UNNAMED,
    ) -> dict[str, Any]:
        """Compute ``tokens`` in steps of so many tokens; what goes to the client.

        ``lends``: another engine goes on from here, and the answer is for that. Here that brings KV of the first tokens
        that are not cached, up to ``brought``, and a ``ticket`` for their rows; ``more`` is said behind the prompt. The
        KV that goes over is called ``kv``.
        """
        self.request = request = Asked(name, tokens)
        hashes = request.block_hashes
        most = (len(tokens) - 1) // TOKENS  # the last token is always computed
        local = next((i for i, each in enumerate(hashes[:most]) if each not in self.cached), most)
        kept = self.kept if self.kept is not None else {}
        there = next((i for i, each in enumerate(hashes[local:most]) if each not in kept), most - local)
        found = there * TOKENS if brought is None else max(0, brought - local * TOKENS)
        taken = self.scheduler.matched(request, local * TOKENS, found, later=self.later or brought is not None)
        self.table = [self.cached[each] for each in hashes[:local]]
        for block in self.table:
            self.free.remove(block)
        given = [self.free.pop(0) for _ in range(-(-len(tokens) // TOKENS) - local)]
        self.cached = {each: block for each, block in self.cached.items() if block not in given}
        self.table += given
        self.scheduler.given(given)
        self.scheduler.admitted(request, self.table, taken, lends=lends, ticket=ticket, kv=kv)
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
        if brought is not None:
            self._land(request, min(local * TOKENS + taken, len(tokens) - 1))
            tokens, loading = [*tokens, *more], range(0)
            request.all_token_ids = request.tokens = tokens
            new = -(-len(tokens) // TOKENS) - len(self.table)
            self.scheduler.given(given := [self.free.pop(0) for _ in range(new)])
            self.table += given
        while request.num_computed_tokens < len(tokens):
            n = min(sizes.pop(0) if sizes else len(tokens), len(tokens) - request.num_computed_tokens)
            failed = self._step(request, n, loading)
            request.num_computed_tokens = failed * TOKENS if failed is not None else request.num_computed_tokens + n
            loading = range(0)
            self.between()
        left = self.scheduler.ticket(request, kv) if lends else None
        ended = self.scheduler.forget(name)
        key = Key(name, of_client=True)
        told = self.scheduler.finished(key, self.table, len(tokens), Tokens(tokens, len(tokens)), ended=ended)
        self.free += self.table
        self.cached |= dict(zip(hashes, self.table, strict=False))
        return {"kv_transfer_params": {"kvroute": left} if lends else told and told.result(GIVE_UP_S)}

    def _land(self, request: Asked, computed: int) -> None:
        """The KV has come; rows are waited for as long as the worker says."""
        came = {request.request_id}
        self._step(request, 0, range(0))
        if self.unbrought:
            self.worker.settle()
            while self.waits and self.fetches:
                self.worker.arrived(set())
                time.sleep(0.001)
            self.worker.begin(self.scheduler.step({}))
            self.worker.fail({self.table[place] for place in self.unbrought if place < len(self.table)})
            self.worker.end()
            self.worker.failures()
            computed = min(computed, min(self.unbrought) * TOKENS)
        while not (go := self.worker.arrived(came, came if self.unbrought else frozenset())):
            came = set()
            self.waiting()
            self._step(request, 0, range(0))
            time.sleep(0.001)
        assert go == {request.request_id}
        self.hear()
        self.scheduler.loaded(request.request_id)
        self.scheduler.admitted(request, self.table, 0)
        request.num_computed_tokens, self.unbrought = computed, set()

    def hear(self) -> None:
        """The worker's report after a step."""
        if (told := self.worker.told()) is not None:
            self.scheduler.told(told.carrier)

    def _step(self, request: Asked, n: int, loading: range) -> int | None:
        """Load, compute and write; the place of the first block that could not be loaded."""
        meta = self.scheduler.step({request.request_id: n} if n else {})
        if isinstance(meta.carrier, TransferStep):
            self.lent = next((lend.transfer for lend in meta.carrier.lends), self.lent)
            self.fetches |= {fetch.transfer for fetch in meta.carrier.fetches}
        self._on_each_rank("begin", meta)
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
                random = seeded([*prefixes[i], layer], self.weights)
                kv[block, :, offset] = torch.from_numpy(random.normal(size=(kv.shape[1], 8)))
        if n:
            chosen = np.stack([row_of(prefix, self.weights) for prefix in prefixes])
            chosen[[i for i in range(n) if start + i in self.loses]] = -1
            for layer, hook in enumerate(self.hooks):
                hook(torch.from_numpy(chosen[:, layer].copy()))
            self.weigh(prefixes)
            self.worker.slots = torch.tensor([block * TOKENS + offset for block, offset in at])
        self.worker.fail(failed)
        self._on_each_rank("end")
        assert self.worker.failures() == failed
        if failed and n:  # computed from KV that had not come
            self.worker.settle()
            assert not self.worker.blocks.read("routing", self.table, start, start + n).valid.any()
        for place in range((start + n) // TOKENS) if self.kept is not None and not failed else ():
            pages = {name: kv[self.table[place]].clone() for name, kv in self.kv.items()}
            self.kept.setdefault(request.block_hashes[place], pages)
        first = min((place for place in loading if place in self.fails), default=None)
        self.fails -= set(loading)
        return first

    def weigh(self, prefixes: Sequence[Sequence[int]]) -> None:
        """The routers say by what they count the experts of the last token of each prefix, where that is wanted."""
        if isinstance(self.worker.weights, NoStepWeights) or self.quiet:
            return
        weights = np.stack([weights_of(prefix, self.weights) for prefix in prefixes])
        for layer in self.layers:
            self.worker.weights.hook(layer)(torch.from_numpy(weights[:, layer].copy()))

    def _on_each_rank(self, call: str, *given: Any) -> None:
        other = self.threads.submit(getattr(self.other_rank, call), *given) if self.other_rank else None
        getattr(self.worker, call)(*given)
        if other is not None:
            other.result(GIVE_UP_S)

    def settle(self) -> None:
        """Until the store has everything."""
        self.worker.settle()
        while self.worker.blocks.jobs:
            assert self.worker.blocks.jobs.wait(GIVE_UP_S)
            self.worker.blocks.jobs.poll()

    def close(self) -> None:
        for go in self.held:  # a test that has failed leaves nothing to wait for
            go.set()
        self.threads.shutdown()
        self.worker.settle()
        self.scheduler.close()
        self.worker.close()


def computed(toy: Toy, request: Asked, n: int, meta: StepMeta | None = None) -> None:
    """The worker computes the next ``n`` tokens of the one request of ``toy``; what the scheduler says of it."""
    start = request.num_computed_tokens
    toy.worker.begin(meta or toy.scheduler.step({request.request_id: n}))
    prefixes = [request.tokens[: i + 1] for i in range(start, start + n)]
    toy.weigh(prefixes)
    chosen = np.stack([row_of(prefix, toy.weights) for prefix in prefixes])
    for layer, hook in enumerate(toy.hooks):
        hook(torch.from_numpy(chosen[:, layer].copy()))
    at = [toy.table[i // TOKENS] * TOKENS + i % TOKENS for i in range(start, start + n)]
    toy.worker.slots = torch.tensor(at)


def stepped(toy: Toy, request: Asked, n: int, meta: StepMeta | None = None) -> None:
    """The worker has computed the next ``n`` tokens, and the scheduler knows."""
    computed(toy, request, n, meta)
    toy.worker.end()
    request.num_computed_tokens += n


def admitted(toy: Toy, tokens: list[int], blocks: list[int], external: int = 0, later: bool = False) -> Asked:
    """A request that has these blocks."""
    request = Asked("r", tokens)
    toy.table = blocks
    assert toy.scheduler.matched(request, 0, external, later=later) == external
    toy.scheduler.given(blocks)
    toy.scheduler.admitted(request, blocks, external)
    request.num_computed_tokens = external
    return request


def held(toy: Toy) -> threading.Event:
    """The worker's host is behind its device, until the event is set."""
    go = threading.Event()
    toy.held.append(go)
    toy.behind.put(lambda: go.wait(GIVE_UP_S) and None)
    return go


def judge(found: Routes, tokens: Sequence[int], weights: Sequence[int] | None = None) -> Counter[str]:
    """How many rows of ``found`` are right, wrong, missing, or right in those layers that are known: "partly".

    ``weights [tokens]`` computed them; by default weights 0 all.
    """
    count: Counter[str] = Counter()
    for i in range(len(tokens)):
        known, same = (
            found.known[i],
            (found.ids[i] == row_of(tokens[: i + 1], weights[i] if weights else 0)[list(found.layer_ids)]).all(1),
        )
        part = "missing" if not known.any() else "right" if known.all() else "partly"
        count["wrong" if (known & ~same).any() else part] += 1
    return count

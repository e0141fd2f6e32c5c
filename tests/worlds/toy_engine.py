"""A small paged engine with both ends of a connector, whose rows are a function of the tokens."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
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
from kvroute.connector.messages import StepMeta
from kvroute.connector.versions import AS_LOADED
from kvroute.connector.worker import WorkerRows
from kvroute.routes import Routes
from kvroute.routing import routing_spec


def _carrier(settings: Settings) -> Carrier:
    if settings.carrier == "transfer":
        return ByTransfer()
    if settings.store:
        return ByKey("flagged" if settings.witness == "flagged" else "missing")
    return NoCarrier()


class Toy:
    """A paged engine for one request at a time: a prefix cache over ``blocks`` blocks, and KV that others may have.

    It loads in a step or, if ``later``, beside one. If ``late``, what steps leave to the host is done behind them, as
    beside a device. Rows and KV are a function of its ``weights``, too, which may be changed at any time, ``between``
    the steps of a request for one. ``toy_ranks`` has one of several ranks, ``toy_crossing`` one that hands requests
    over.
    """

    heads = 1
    """Of its KV; the first one is of the rank with the rows."""

    def __init__(
        self,
        kept: dict[bytes, Any] | None = None,
        layers: int = 2,
        blocks: int = 9,
        later: bool = False,
        late: bool = False,
        drafts: bool = True,
        limits: Mapping[str, Any] = MappingProxyType({}),
        **said: Any,
    ) -> None:
        self.kept, self.later = kept, later  # KV outside, by hash of its block, in all layers
        spec = routing_spec(EXPERTS, TOP_K, range(layers), num_layers=layers, block_tokens=TOKENS)
        self.layers = range(layers)
        self.kv = {f"layers.{i}": torch.zeros(blocks, self.heads, TOKENS, 8) for i in self.layers}
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
        with patch.object(worker, "Behind", self._behind):
            self.worker = WorkerRows(engine, self.part(0), self._joined(), late=late)
        self.scheduler = SchedulerRows(engine)
        self.scheduler.attach(self.worker.handshake())
        self.scheduler.blocks_of = lambda _name, first, last: self.table[first:last]
        self.hooks = [self.worker.ids.hook(layer) for layer in self.layers]
        self.quiet = False  # routers tell no weights
        self.free, self.cached = list(range(blocks)), dict[bytes, int]()
        self.table: list[int] = []
        self.request: Asked | None = None  # the last one
        self.fails: set[int] = set()  # places in the request of blocks whose load fails
        self.loses: set[int] = set()  # positions at which the router's ids are not ones
        self.loaded, self.weights = 0, 0
        self.between: Callable[[], object] = lambda: None
        self.held: list[threading.Event] = []  # what the worker's host waits for

    def part(self, rank: int) -> dict[str, torch.Tensor]:
        """By layer, the KV of a rank's head."""
        return {name: kv[:, rank : rank + 1] for name, kv in self.kv.items()}

    def _joined(self) -> Callable[[torch.Tensor], None] | None:
        """What adds up the folds of all ranks, in place."""
        return None

    def _behind(self, *arguments: Any) -> Behind:
        self.behind = Behind(*arguments)
        """What does the host's part of a step, of an engine that is ``late``."""
        return self.behind

    def ask(self, name: str, tokens: Sequence[int], chunks: Sequence[int] = (64,)) -> dict[str, Any]:
        """Compute ``tokens`` in steps of so many tokens; what goes to the client."""
        self.request = request = Asked(name, tokens)
        local = self._local(request)
        taken = self.scheduler.matched(request, local * TOKENS, self._outside(request, local), later=self.later)
        self._admit(request, local, taken)
        loading = range(local, local + taken // TOKENS)
        if self.later and taken:
            failed = self._step(request, 0, loading)
            self.scheduler.loaded(name)
            self.scheduler.admitted(request, self.table, 0)
            request.num_computed_tokens = local * TOKENS + taken if failed is None else failed * TOKENS
            loading = range(0)
        self._compute(request, chunks, loading)
        told = self._leave(request)
        return {"kv_transfer_params": told and told.result(GIVE_UP_S)}

    def _local(self, request: Asked) -> int:
        """How many of the request's blocks are cached; its last token is always computed."""
        most = max(0, len(request.tokens) - 1) // TOKENS
        return next((i for i, each in enumerate(request.block_hashes[:most]) if each not in self.cached), most)

    def _outside(self, request: Asked, local: int) -> int:
        """Of how many tokens behind the cached blocks others have the KV."""
        behind = request.block_hashes[local : max(0, len(request.tokens) - 1) // TOKENS]
        kept = self.kept if self.kept is not None else {}
        return TOKENS * next((i for i, each in enumerate(behind) if each not in kept), len(behind))

    def _admit(self, request: Asked, local: int, taken: int, **handed: Any) -> None:
        """It gets its cached blocks and new ones; ``taken`` tokens come from outside."""
        self.table = [self.cached[each] for each in request.block_hashes[:local]]
        for block in self.table:
            self.free.remove(block)
        given = self._give(len(request.tokens))
        self.cached = {each: block for each, block in self.cached.items() if block not in given}
        self.scheduler.given(given)
        self.scheduler.admitted(request, self.table, taken, **handed)
        request.num_computed_tokens = local * TOKENS + taken
        self.loaded = taken

    def _give(self, tokens: int) -> list[int]:
        """The further blocks of a request of so many tokens."""
        given = [self.free.pop(0) for _ in range(-(-tokens // TOKENS) - len(self.table))]
        self.table += given
        return given

    def _compute(self, request: Asked, chunks: Sequence[int], loading: range) -> None:
        """The steps of a request; the first one loads."""
        sizes = [*chunks]
        stop = len(request.tokens)
        while request.num_computed_tokens < stop:
            n = min(sizes.pop(0) if sizes else stop, stop - request.num_computed_tokens)
            failed = self._step(request, n, loading)
            request.num_computed_tokens = failed * TOKENS if failed is not None else request.num_computed_tokens + n
            loading = range(0)
            self.between()

    def _leave(self, request: Asked) -> Future[dict[str, Any]] | None:
        """It ends; what its client will be told."""
        tokens = request.tokens
        ended = self.scheduler.forget(request.request_id)
        key = Key(request.request_id, of_client=True)
        told = self.scheduler.finished(key, self.table, len(tokens), Tokens(tokens, len(tokens)), ended=ended)
        self.free += self.table
        self.cached |= dict(zip(request.block_hashes, self.table, strict=False))
        return told

    def _scheduled(self, request: Asked, n: int) -> StepMeta:
        """What the scheduler says of a step of so many tokens."""
        return self.scheduler.step({request.request_id: n} if n else {})

    def _step(self, request: Asked, n: int, loading: range) -> int | None:
        """Load, compute and write; the place of the first block that could not be loaded."""
        self._tell("begin", self._scheduled(request, n))
        for place in loading:
            for name, page in (self.kept or {})[request.block_hashes[place]].items():
                self.kv[name][self.table[place]] = page if place not in self.fails else 7
        failed = {self.table[place] for place in loading if place in self.fails}
        start = request.num_computed_tokens
        for i in range(start, start + n):
            for layer in self.layers:
                kv = self.kv[f"layers.{layer}"]
                random = seeded([*request.tokens[: i + 1], layer], self.weights)
                kv[self.table[i // TOKENS], :, i % TOKENS] = torch.from_numpy(random.normal(size=(self.heads, 8)))
        if n:
            self.route(request, n)
        self.worker.fail(failed)
        self._tell("end")
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

    def route(self, request: Asked, n: int) -> None:
        """The routers choose for the next ``n`` tokens, and the worker knows their slots."""
        places = range(request.num_computed_tokens, request.num_computed_tokens + n)
        prefixes = [request.tokens[: i + 1] for i in places]
        chosen = np.stack([row_of(prefix, self.weights) for prefix in prefixes])
        chosen[[i in self.loses for i in places]] = -1
        for layer, hook in enumerate(self.hooks):
            hook(torch.from_numpy(chosen[:, layer].copy()))
        self.weigh(prefixes)
        self.worker.slots = torch.tensor([self.table[i // TOKENS] * TOKENS + i % TOKENS for i in places])

    def weigh(self, prefixes: Sequence[Sequence[int]]) -> None:
        """The routers say by what they count the experts of the last token of each prefix, where that is wanted."""
        if isinstance(self.worker.weights, NoStepWeights) or self.quiet:
            return
        weights = np.stack([weights_of(prefix, self.weights) for prefix in prefixes])
        for layer in self.layers:
            self.worker.weights.hook(layer)(torch.from_numpy(weights[:, layer].copy()))

    def _tell(self, call: str, *given: Any) -> None:
        """The worker begins or ends a step."""
        getattr(self.worker, call)(*given)

    def settle(self) -> None:
        """Until the store has everything."""
        self.worker.settle()
        while self.worker.blocks.jobs:
            assert self.worker.blocks.jobs.wait(GIVE_UP_S)
            self.worker.blocks.jobs.poll()

    def close(self) -> None:
        for go in self.held:  # a test that has failed leaves nothing to wait for
            go.set()
        self.worker.settle()
        self.scheduler.close()
        self.worker.close()


def computed(toy: Toy, request: Asked, n: int, meta: StepMeta | None = None) -> None:
    """The worker computes the next ``n`` tokens of the one request of ``toy``; what the scheduler says of it."""
    toy.worker.begin(meta or toy.scheduler.step({request.request_id: n}))
    toy.route(request, n)


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

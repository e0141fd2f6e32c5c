"""The scheduler's end: generations, keys, how much of a hit has rows, and the rows of requests that finish."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import kvroute
from cache_manager.errors import KVRouteError
from cache_manager.keys import BlockKey
from cache_manager.ports import StorageBackend
from kvroute.integrations.vllm.answers import FIELD, UNSEEN
from kvroute.integrations.vllm.config import Engine
from kvroute.rollout import open_rollouts
from kvroute.routes import Routes
from kvroute.witness import Run

logger = logging.getLogger(__name__)

SIBLINGS_MAX: Final = 1024
"""Requests with n > 1 of which some completions are done and others are not."""
_ID = re.compile(r"(?P<name>(?:(?P<index>\d+)_)?.+?)(?:-[0-9a-f]{8})?", re.DOTALL)


@dataclass
class StepMeta:
    """What goes to the worker with a step, beside what the inner connector sends."""

    inner: Any
    before: bytes  # of the feed: what has become of blocks
    after: bytes  # of the feed: what to store when the step has written
    admitted: list[list[int]] = field(default_factory=list)  # blocks of each request that joins a step with loads
    loads: dict[str, Run] = field(default_factory=dict)  # blocks whose KV is loaded, by request, in order
    full: list[Run] = field(default_factory=list)  # blocks that this step fills
    asynchronous: frozenset[str] = frozenset()  # those of loads whose KV comes later


class SchedulerRows:
    """Says what becomes of blocks, and reads rows of requests that are done."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.feed = kvroute.BlockFeed(engine.blocks)
        self.view: kvroute.RegionView | None = None
        self.manager: Any = None  # vLLM's KVCacheManager
        self.namespace = engine.namespace
        self.keys = kvroute.KeyChain(self.namespace, engine.layout)
        self.hits_cut = 0
        self._reader: StorageBackend | None = None
        self._rollouts = open_rollouts(engine.settings.rollouts) if engine.settings.rollouts else None
        self._given: dict[int, None] = {}  # blocks given out since the last step was sent
        self._found: dict[str, tuple[int, bool]] = {}  # by request: blocks that were hit locally, KV comes later
        self._loads: dict[str, tuple[Any, int, int, int]] = {}  # request, its blocks whose KV is loaded, tokens
        self._running: dict[str, Any] = {}
        self._admitted: list[list[int]] = []
        self._stored: dict[str, int] = {}  # by request: how many leading blocks need not be stored
        self._unseen = np.zeros(engine.blocks, np.int64)  # lives of blocks whose rows went by their KV
        self._siblings: OrderedDict[str, dict[str, Any]] = OrderedDict()
        kvroute.preload()

    def watch(self, manager: Any) -> None:
        """Learn of every block that is given out: the pool has one way out."""
        self.manager, pool = manager, manager.block_pool
        give: Callable[[int], list[Any]] = pool.get_new_blocks

        def get_new_blocks(num_blocks: int) -> list[Any]:
            blocks = give(num_blocks)
            self._given.update((block.block_id, None) for block in blocks)
            return blocks

        pool.get_new_blocks = get_new_blocks

    def attach(self, region: str) -> None:
        """The worker's rows are in the region of this name."""
        self.view = kvroute.RegionView(region, namespace=self.namespace.fingerprint)

    # ---------------------------------------------------------------- admission

    def matched(self, request: Any, local: int, found: int, asynchronous: bool) -> int:
        """How many of ``found`` tokens to take from outside, beyond ``local`` ones: as many as have rows."""
        self._found[request.request_id] = local // self.engine.tokens, asynchronous
        if not found or not self.engine.gate or not self.engine.settings.store:
            return found
        first, last = local // self.engine.tokens, (local + found) // self.engine.tokens
        there = self._in_store([self._key(request, i) for i in range(first, last)])
        good = there.index(False) if False in there else len(there)
        self.hits_cut += good < len(there)
        return good * self.engine.tokens if good < len(there) else found

    def _in_store(self, keys: Sequence[BlockKey]) -> list[bool]:
        try:
            if self._reader is None:
                self._reader = kvroute.open_store(self.engine.settings.reads)
            return self._reader.contains(keys)
        except KVRouteError as error:
            logger.warning("hits from outside are computed again, the store of rows cannot be asked: %s", error)
            return [False] * len(keys)

    def _key(self, request: Any, block: int) -> BlockKey:
        return self.keys.adopt(bytes(request.block_hashes[block]))

    def admitted(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """The request has these blocks now; the KV of ``external`` tokens is loaded into some."""
        name, tokens = request.request_id, self.engine.tokens
        self._admitted.append(list(blocks))
        if name not in self._found:  # the second call for a load that came later
            return
        first = self._found[name][0]
        last = first + external // tokens
        self._running[name], self._stored[name] = request, last
        if external:  # a part of a block has no key: its rows come in pages or not at all
            partial = self.engine.pages and external % tokens > 0
            self._loads[name] = request, first, last + partial, external
        else:
            del self._found[name]

    # ---------------------------------------------------------------- a step

    def step(self, output: Any, inner: Any) -> StepMeta:
        """What the worker has to know of this step; ``output`` is vLLM's ``SchedulerOutput``."""
        if self._given:
            self.feed.renew(list(self._given))
            self._given.clear()
        loads: dict[str, Run] = {}
        later = frozenset(name for name in self._loads if self._found.pop(name)[1])
        for name, (request, first, last, external) in self._loads.items():
            loads[name] = run = replace(self._run(name, first, last), tokens=external)
            if self.engine.settings.store and run.blocks:
                self.feed.restore({self._key(request, first + i): b for i, b in enumerate(run.blocks)})
                if self.engine.unseen:
                    self._unseen[run.blocks] = self.feed.generations[run.blocks]
        self._loads = {}
        before = self.feed.take()
        runs: list[Run] = []
        full = self._filled(output.num_scheduled_tokens, runs) if self.engine.settings.store else {}
        if self.engine.settings.writes and full:
            self.feed.persist(full)
        admitted, self._admitted = self._admitted if loads else [], []
        return StepMeta(inner, before, self.feed.take(), admitted, loads, runs, later)

    def _filled(self, scheduled: dict[str, int], runs: list[Run]) -> dict[BlockKey, int]:
        """The blocks that this step completes, by key and added to ``runs``. Drafts that may fail have no hashes."""
        full: dict[BlockKey, int] = {}
        for name, tokens in scheduled.items():
            request = self._running.get(name)
            if request is None:
                continue
            end = min((request.num_computed_tokens + tokens) // self.engine.tokens, len(request.block_hashes))
            first = min(self._stored[name], request.num_computed_tokens // self.engine.tokens)
            if end > first:
                runs.append(run := self._run(name, first, end))
                full |= {self._key(request, first + i): block for i, block in enumerate(run.blocks)}
                self._stored[name] = end
        return full

    def _run(self, name: str, first: int, last: int) -> Run:
        """The request's blocks ``[first, last)`` and the one before them."""
        start = max(0, first - 1)
        blocks = [block.block_id for block in self.manager.get_blocks(name).blocks[0][start:last]]
        return Run(blocks[0], blocks[1:]) if first else Run(-1, blocks)

    # ---------------------------------------------------------------- the end

    def finished(self, request: Any, blocks: Sequence[int]) -> dict[str, Any] | None:
        """What goes to the client beside the answer; ``blocks`` are still the request's."""
        for known in (self._found, self._loads, self._running, self._stored):
            known.pop(request.request_id, None)
        status, left = request.status.name, self.engine.settings.rollouts
        if self._rollouts is None or status == "FINISHED_ERROR" or (status.endswith("ABORTED") and left == "response:"):
            return None
        assert self.view is not None, "the handshake comes before the first request"
        stop = min(request.num_tokens - 1, request.num_computed_tokens, len(blocks) * self.engine.tokens)
        match = _ID.fullmatch(request.request_id)
        assert match is not None
        try:
            lives = self.feed.generations[list(blocks)]
            rows = self.view.read(self.engine.spec.name, blocks, 0, max(0, stop), generations=lives)
            version = self.namespace.weights_version
            routes = kvroute.Routes.from_rows(self.engine.spec, rows, weights_version=version, checked=True)
            routes, unseen = self._settled(routes, self._unseen[list(blocks)] == lives)
            told: dict[str, Any] = {match["index"] or "0": self._rollouts.put(match["name"], routes).to_json()}
        except KVRouteError as error:
            logger.warning("request %s has no routes: %s", request.request_id, error)
            return {FIELD: {"error": str(error)}}
        if unseen:
            told[UNSEEN.format(match["index"] or "0")] = unseen
        return {FIELD: told if match["index"] is None else self._with_siblings(request.request_id, told)}

    def _settled(self, routes: Routes, by_kv: NDArray[np.bool_]) -> tuple[Routes, list[list[int]]]:
        """What is answered where rows of the blocks ``by_kv`` went by their KV, which the last router is behind.

        The routes, without that router's layer or, where the operator said so, with it; and then the positions
        ``[start, stop)`` at which it is taken on trust.
        """
        trusted = np.repeat(by_kv, self.engine.tokens)[: len(routes)] & routes.valid
        if not trusted.any():
            return routes, []
        if self.engine.witness == "flagged":
            edges = np.flatnonzero(np.diff(trusted.astype(np.int8), prepend=0, append=0))
            return routes, edges.reshape(-1, 2).tolist()
        layers, ids, valid = routes.layer_ids[:-1], routes.ids[:, :-1], routes.valid
        if not layers:  # there is one router, and nothing says what it chose
            layers, ids, valid = routes.layer_ids, routes.ids, valid & ~trusted
        fields = routes.num_experts, routes.num_layers, routes.start, routes.weights_versions
        return Routes.checked(ids, valid, layers, *fields), []

    def _with_siblings(self, name: str, told: dict[str, Any]) -> dict[str, Any]:
        """By completion: vLLM sends on what comes with the last one of a request only, so that brings all."""
        parent = name.partition("_")[2]
        found = self._siblings.setdefault(parent, {})
        found |= told
        self._siblings.move_to_end(parent)
        if len(self._siblings) > SIBLINGS_MAX:
            self._siblings.popitem(last=False)
        return dict(found)

    def reset(self) -> None:
        """The weights are others now: nothing from before is readable, in no tier."""
        version = self.namespace.weights_version + 1
        self.namespace = replace(self.namespace, weights_version=version)
        self.keys = kvroute.KeyChain(self.namespace, self.engine.layout)
        self.feed.reset(version)
        if self.view is not None:
            self.view.follow(self.namespace.fingerprint)

    def close(self) -> None:
        for each in (self.view, self._reader, self._rollouts):
            if each is not None:
                each.close()


__all__ = ["SchedulerRows", "StepMeta"]

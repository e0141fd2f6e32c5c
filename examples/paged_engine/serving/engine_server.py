"""What prefill and decode share: an engine in a thread of its own behind HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch

from cache_manager.keys import Namespace
from cache_manager.storage import open_store
from paged_engine.engine.engine import Engine
from paged_engine.engine.memory import AnyStore, RemoteStore
from paged_engine.engine.models import build_model, weights_digest
from paged_engine.engine.request import Output, Request
from paged_engine.engine.sequence import State
from paged_engine.engine.text import VOCAB_SIZE
from paged_engine.serving.config import EngineServerConfig
from paged_engine.serving.loop import EngineLoop, Tell
from paged_engine.serving.server import Server
from transfer.node import Node

logger = logging.getLogger(__name__)
T = TypeVar("T")

STALLED_S = 60.0
"""An engine whose step takes longer is not ready."""


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What an engine has computed."""

    steps: int
    computed_tokens: int
    dropped_sequences: int


class EngineServer(Server):
    """A server with an engine: built before HTTP is served, closed after it has ended.

    Subclasses make the engine (:meth:`make_engine`) and the node that carries its blocks (:meth:`make_node`), once.
    """

    config: EngineServerConfig
    node: Node

    def __init__(self, config: EngineServerConfig) -> None:
        super().__init__(config)
        self._store = _store(config)
        try:
            self.engine = self._build()
        except BaseException:
            self._close_store()
            raise
        try:
            self.node = self.make_node()
        except BaseException:
            self.give_back()
            raise
        self.loop = EngineLoop(self.engine, requests_max=config.requests_max)
        self._tell_numbers()

    def make_engine(self, model: torch.nn.Module, namespace: Namespace, store: AnyStore | None) -> Engine:
        raise NotImplementedError

    def make_node(self) -> Node:
        """Of this server's engine, which knows it then."""
        raise NotImplementedError

    def _build(self) -> Engine:
        torch.set_num_threads(self.config.threads)
        model = build_model(self.config.model, seed=self.config.seed, vocab_size=VOCAB_SIZE)
        name = f"{self.config.model}/{weights_digest(model)}"
        namespace = Namespace(name, weights_version=self.config.weights_version, salt=self.config.salt)
        return self.make_engine(model, namespace, self._store)

    def _tell_numbers(self) -> None:
        engine, sources = self.engine, self.sources
        sources.count("requests", lambda: self.loop.counters)
        sources.count("blocks", lambda: engine.manager.counters)
        sources.count("rows", lambda: engine.aux.counters)
        sources.count("store", lambda: engine.aux.store_counters)
        sources.count(
            "engine",
            lambda: EngineCounters(engine.steps, engine.computed_tokens, engine.scheduler.dropped),
        )
        sources.count("transfer_offers", lambda: self.node.counters.offers)
        sources.count("transfer_pulls", lambda: self.node.counters.pulls)
        sources.count("transfer_link", lambda: self.node.counters.link)
        sources.count("transfer_node", lambda: self.node.counters.node)
        sources.gauge("sequences", "Sequences by state.", "state", self._sequences)
        sources.gauge("blocks", "KV blocks; free ones may be cached.", "state", self._blocks)

    def _sequences(self) -> dict[str, float]:
        counts = self.engine.scheduler.counts()
        return {state.name.lower(): counts[state] for state in State if state is not State.FINISHED}

    def _blocks(self) -> dict[str, float]:
        manager, config = self.engine.manager, self.config
        return {
            "device_total": config.device_blocks,
            "device_free": manager.free_device_blocks,
            "host_total": config.host_blocks,
            "host_free": manager.free_host_blocks,
        }

    def _close_store(self) -> None:
        if self._store is not None and not isinstance(self._store, RemoteStore):  # that is the transfer process's
            self._store.flush()
            self._store.close()

    # ---------------------------------------------------------------- for subclasses

    @property
    def namespace(self) -> str:
        """The fingerprint of the namespace that this server's rows and KV are of."""
        return self.engine.aux.namespace.fingerprint.hex()

    async def generate(
        self,
        request: Request,
        add: Callable[[], None],
        answer: Callable[[tuple[Output, ...]], T],
        tell: Tell | None = None,
    ) -> T:
        """:meth:`EngineLoop.submit`, and abort the request when nobody waits for it any more."""
        future: Future[T] = self.loop.submit(request, add, answer, tell)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.loop.abort(request.id)
            raise

    # ---------------------------------------------------------------- life

    def not_ready(self) -> str | None:
        if not self.node.alive:
            return f"the transfer node has ended: {self.node.last_error}"
        if self.loop.failure is not None:
            return f"the engine has failed: {self.loop.failure}"
        if (ago := self.loop.turned_ago_s) > STALLED_S:
            return f"the engine has been in one step for {ago:.0f} s"
        return None

    async def start(self) -> None:
        self.loop.start()

    async def abort_requests(self) -> None:
        self.loop.abort_all()

    async def stop(self) -> None:
        """The node first: nobody may read or write a block of an engine that is being closed."""
        ended = await asyncio.to_thread(self.loop.close, 30.0)
        disconnected = await asyncio.to_thread(self.node.close)
        if not (ended and disconnected):
            logger.error("a thread did not end; memory is left to the operating system")
            return
        self.give_back()

    def give_back(self) -> None:
        """Close the engine, which nothing else uses any more, and what it stores to."""
        self.engine.close()
        self._close_store()


def _store(config: EngineServerConfig) -> AnyStore | None:
    if not config.store:
        return None
    return RemoteStore(config.store) if config.transfer_process else open_store(config.store)


__all__ = ["EngineServer"]

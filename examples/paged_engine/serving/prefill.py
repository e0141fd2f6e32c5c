"""``kvroute prefill``: computes prompts, samples their first tokens and holds the blocks until decode has them."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import torch
from aiohttp import web

from cache_manager.errors import KVRouteError
from cache_manager.keys import Namespace
from paged_engine.engine.memory import AnyStore
from paged_engine.engine.prefill import PrefillEngine
from paged_engine.engine.request import FinishReason, Output
from paged_engine.engine.text import VOCAB_SIZE
from paged_engine.serving.bodies import (
    HandoverBody,
    PrefillAnswer,
    PrefillBody,
    ReleaseBody,
    engine_request,
    parse,
    transfer_id,
)
from paged_engine.serving.config import PrefillConfig
from paged_engine.serving.engine_server import EngineServer
from paged_engine.serving.errors import DrainingError
from paged_engine.serving.nodes import prefill_node
from paged_engine.serving.server import json_response, waited
from transfer.messages import TransferId
from transfer.node import Node


class PrefillServer(EngineServer):
    """Answers ``POST /v1/prefill``."""

    config: PrefillConfig
    engine: PrefillEngine
    node: Node

    def __init__(self, config: PrefillConfig) -> None:
        super().__init__(config)
        self.sources.count("prefill", lambda: self.engine.prefill_counters)
        self.sources.gauge(
            "transfers", "Transfers whose blocks are held.", "state", lambda: {"leased": self.engine.leased_transfers}
        )
        self.job("/v1/prefill", self._prefill)
        self.app.router.add_post("/v1/release", self._release)

    def make_engine(self, model: torch.nn.Module, namespace: Namespace, store: AnyStore | None) -> PrefillEngine:
        return PrefillEngine(model, self.config.engine, namespace, store=store, replay=self.config.replay)

    def make_node(self) -> Node:
        return prefill_node(self.config, self.engine)

    def banner(self) -> str:
        return f" transfer {self.node.address}"

    async def _prefill(self, request: web.Request) -> web.StreamResponse:
        body = parse(PrefillBody, await request.read())
        asked = engine_request(body, VOCAB_SIZE)
        offered: list[TransferId] = []
        gone = threading.Event()  # set when nobody will hear the answer

        def answer(outputs: tuple[Output, ...]) -> PrefillAnswer:
            transfer = self.engine.transfer_of(asked.id)
            if transfer is not None:
                offered.append(transfer)
                if gone.is_set():
                    self._abort(offered)
            if any(output.reason is FinishReason.ABORT for output in outputs):
                raise DrainingError("the request was aborted")
            if transfer is None:
                return PrefillAnswer(kv_transfer=None)
            first = [output.tokens[0] for output in outputs]
            return PrefillAnswer(
                kv_transfer=HandoverBody(
                    transfer=transfer.hex(),
                    prefill=self.config.name,
                    namespace=self.namespace,
                    prompt_tokens=len(asked.prompt),
                    first_tokens=first,
                )
            )

        try:
            found = await self.generate(asked, lambda: self.engine.add(asked), answer)
            response = json_response(found)
            await response.prepare(request)
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            gone.set()
            self._abort(offered)
            raise
        return response

    def _abort(self, offered: list[TransferId]) -> None:
        """Nobody will ask for these; what does not hear of it ends with its lease."""
        with suppress(KVRouteError):
            for transfer in offered:
                self.node.withdraw(transfer, "the answer could not be given")

    async def _release(self, request: web.Request) -> web.Response:
        """Give up a transfer that no decode will ask for; who knows its id, 16 random bytes, was given it."""
        body = parse(ReleaseBody, await request.read())
        self.node.withdraw(transfer_id("transfer", body.transfer), "released")
        return json_response({})

    async def finish_others(self, within_s: float) -> None:
        """Blocks on offer stay while decode may be pulling them."""
        await waited(lambda: self.engine.leased_transfers and self.loop.failure is None, within_s)


__all__ = ["PrefillServer"]

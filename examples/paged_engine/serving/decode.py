"""``kvroute decode``: goes on from prompts that prefill has computed, and answers tokens with their routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import torch
from aiohttp import web

from cache_manager.errors import InvalidInputError
from cache_manager.keys import Namespace
from paged_engine.engine.decode import DecodeEngine
from paged_engine.engine.memory import AnyStore
from paged_engine.engine.request import FinishReason, Output, Request
from paged_engine.engine.sequence import Handover
from paged_engine.engine.text import VOCAB_SIZE
from paged_engine.serving.bodies import (
    AnswerLine,
    DecodeAnswer,
    DecodeBody,
    ErrorLine,
    GapBody,
    HandoverBody,
    SampleAnswer,
    TokensLine,
    check_tokens,
    engine_request,
    parse,
    transfer_id,
)
from paged_engine.serving.config import DecodeConfig
from paged_engine.serving.engine_server import EngineServer
from paged_engine.serving.errors import DrainingError, ServingError
from paged_engine.serving.nodes import decode_node
from paged_engine.serving.server import json_response
from transfer.node import Node


class DecodeServer(EngineServer):
    """Answers ``POST /v1/decode``, with one JSON object or, streamed, with a line of JSON for each batch of tokens."""

    config: DecodeConfig
    engine: DecodeEngine
    node: Node

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self.sources.count("decode", lambda: self.engine.decode_counters)
        self.sources.gauge(
            "pulls", "Pulls whose landing blocks are held.", "state", lambda: {"in_flight": self.engine.pulls_in_flight}
        )
        self.job("/v1/decode", self._decode)

    def make_engine(self, model: torch.nn.Module, namespace: Namespace, store: AnyStore | None) -> DecodeEngine:
        return DecodeEngine(model, self.config.engine, namespace, store=store, replay=self.config.replay)

    def make_node(self) -> Node:
        return decode_node(self.config, self.engine)

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        body = parse(DecodeBody, await request.read())
        asked = engine_request(body, VOCAB_SIZE)
        add = self._adding(asked, body.kv_transfer)
        if body.stream:
            return await self._stream(request, asked, add)
        return json_response(await self.generate(asked, add, _answer))

    def _adding(self, asked: Request, given: HandoverBody | None) -> Callable[[], None]:
        if given is None:
            return lambda: self.engine.add(asked)
        if given.prefill not in self.config.prefills:
            known = ", ".join(self.config.prefills) or "none"
            raise InvalidInputError("kv_transfer.prefill", f"a name in this server's prefills: {known}", given.prefill)
        if given.namespace != self.namespace:
            raise InvalidInputError("kv_transfer.namespace", self.namespace, given.namespace)
        if given.prompt_tokens != len(asked.prompt):
            raise InvalidInputError("kv_transfer.prompt_tokens", len(asked.prompt), given.prompt_tokens)
        check_tokens("kv_transfer.first_tokens", given.first_tokens, VOCAB_SIZE)
        if len(given.first_tokens) != asked.n:
            raise InvalidInputError("kv_transfer.first_tokens", f"{asked.n}, one a sample", len(given.first_tokens))
        transfer = transfer_id("kv_transfer.transfer", given.transfer)
        handover = Handover(transfer, self.config.prefills[given.prefill], tuple(given.first_tokens))
        return lambda: self.engine.take_over(asked, handover)

    async def _stream(self, request: web.Request, asked: Request, add: Callable[[], None]) -> web.StreamResponse:
        """Lines as they come; the last is the whole answer, or what went wrong."""
        loop = asyncio.get_running_loop()
        lines: asyncio.Queue[TokensLine | None] = asyncio.Queue()  # bounded by the tokens that may be generated

        def tell(sample: int, tokens: tuple[int, ...]) -> None:
            loop.call_soon_threadsafe(lines.put_nowait, TokensLine(sample=sample, tokens=list(tokens)))

        working = asyncio.ensure_future(self.generate(asked, add, _answer, tell))
        working.add_done_callback(lambda _: lines.put_nowait(None))
        try:
            first = await lines.get()
            if first is None and working.exception() is not None:
                await working  # nothing has been sent: an answer with a status of its own
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            while first is not None:
                await _write(response, first)
                first = await lines.get()
            try:
                await _write(response, AnswerLine(answer=await working))
            except ServingError as error:
                await _write(response, ErrorLine(message=str(error), status=error.status))
            await response.write_eof()
            return response
        finally:
            if not working.done():
                working.cancel()


async def _write(response: web.StreamResponse, line: msgspec.Struct) -> None:
    await response.write(msgspec.json.encode(line) + b"\n")


def _answer(outputs: tuple[Output, ...]) -> DecodeAnswer:
    """Made in the engine's thread: encoding many rows must not keep HTTP waiting."""
    if any(output.reason is FinishReason.ABORT for output in outputs):
        raise DrainingError("the request was aborted")
    return DecodeAnswer(
        samples=[
            SampleAnswer(
                tokens=list(output.tokens),
                finish_reason=output.reason.value,
                routed_experts=output.routes.to_json(),
                gaps=[GapBody(gap.start, gap.stop, gap.reason) for gap in output.gaps],
            )
            for output in outputs
        ]
    )


__all__ = ["DecodeServer"]

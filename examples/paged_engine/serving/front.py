"""``kvroute front``: the HTTP front. A completion goes through prefill, then decode, and comes back with its routes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import TypeVar, cast

import aiohttp
import msgspec
from aiohttp import web

from cache_manager.errors import InvalidInputError, KVRouteError
from kvroute.encodings import ENCODINGS, Encoding
from paged_engine.engine import text
from paged_engine.serving.answers import TextStream, chunk, completion, last_chunk
from paged_engine.serving.bodies import (
    AnswerLine,
    CompletionBody,
    DecodeAnswer,
    DecodeBody,
    ErrorLine,
    HandoverBody,
    Line,
    PrefillAnswer,
    PrefillBody,
    ReleaseBody,
    Sampling,
    TokensLine,
    check_sampling,
    check_tokens,
    parse,
)
from paged_engine.serving.config import FrontConfig
from paged_engine.serving.errors import UpstreamError
from paged_engine.serving.server import Server, error_body, json_response
from paged_engine.serving.upstream import Servers, TryAnotherError, nobody

MAX_TOKENS = 16
"""OpenAI's default."""
Answer = TypeVar("Answer", PrefillAnswer, DecodeAnswer)
_LINES: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class _Job(msgspec.Struct, frozen=True):
    """A completion that was asked for, checked."""

    id: str
    created_s: int
    prompt: list[int]
    sampling: Sampling
    encoding: Encoding | None


class FrontServer(Server):
    """Answers ``POST /v1/completions``. It keeps nothing: a request that it was working on dies with it."""

    config: FrontConfig

    def __init__(self, config: FrontConfig) -> None:
        super().__init__(config)
        timeout_s = config.connect_timeout_s
        self.prefills = Servers("prefill", config.prefills, connect_timeout_s=timeout_s)
        self.decodes = Servers("decode", config.decodes, connect_timeout_s=timeout_s)
        self._watching: list[asyncio.Task[None]] = []
        self._telling: set[asyncio.Task[None]] = set()
        for servers in (self.prefills, self.decodes):
            self._tell_numbers(servers)
        self.job("/v1/completions", self._completions)
        self.app.router.add_get("/v1/models", self._models)

    def _tell_numbers(self, servers: Servers) -> None:
        doc = "Whether the server was ready when it was last asked."
        self.sources.count(f"{servers.kind}_attempts", lambda: servers.counters)
        self.sources.gauge(
            f"{servers.kind}_ready", doc, "name", lambda: {name: float(ready) for name, ready in servers.ready.items()}
        )

    def not_ready(self) -> str | None:
        for servers in (self.prefills, self.decodes):
            if not any(servers.ready.values()):
                return f"no {servers.kind} server is ready"
        return None

    async def start(self) -> None:
        for servers in (self.prefills, self.decodes):
            await servers.open()
            self._watching.append(asyncio.create_task(servers.watch(self.config.health_s)))

    async def stop(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, *self._telling, return_exceptions=True)
        for servers in (self.prefills, self.decodes):
            await servers.close()

    async def _models(self, _: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [{"id": self.config.model, "object": "model"}]})

    # ---------------------------------------------------------------- completions

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = parse(CompletionBody, await request.read())
        job = self._checked(body)
        name, handover = await self._prefill(job)
        try:
            if body.stream:
                return await self._stream(request, job, handover)
            return json_response(self._completion(job, await self._decode(job, handover)))
        except BaseException:
            if handover is not None:
                self._release(name, handover)
            raise

    def _release(self, name: str, handover: HandoverBody) -> None:
        """The request has failed, or its client has gone away: prefill need not hold its blocks any longer."""
        telling = asyncio.create_task(self.prefills.tell(name, "/v1/release", ReleaseBody(transfer=handover.transfer)))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    def _checked(self, body: CompletionBody) -> _Job:
        if body.model != self.config.model:
            raise InvalidInputError("model", self.config.model, repr(body.model))
        if body.top_p not in (None, 1.0):
            raise InvalidInputError("top_p", "1, or nothing: all tokens may be drawn", body.top_p)
        prompt = text.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        check_tokens("prompt", prompt, text.VOCAB_SIZE)
        stops = list(body.stop_token_ids) if body.ignore_eos else [*body.stop_token_ids, text.END]
        sampling = Sampling(
            max_tokens=MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            n=1 if body.n is None else body.n,
            temperature=1.0 if body.temperature is None else body.temperature,
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            stop_token_ids=stops,
        )
        check_sampling(sampling, text.VOCAB_SIZE)
        if body.routed_experts_encoding not in ENCODINGS:
            wanted = "one of " + ", ".join(ENCODINGS)
            raise InvalidInputError("routed_experts_encoding", wanted, repr(body.routed_experts_encoding))
        encoding = cast("Encoding", body.routed_experts_encoding) if body.return_routed_experts else None
        return _Job(f"cmpl-{secrets.token_hex(12)}", int(time.time()), prompt, sampling, encoding)

    def _completion(self, job: _Job, answer: DecodeAnswer) -> dict[str, object]:
        return completion(job.id, job.created_s, self.config.model, len(job.prompt), answer, job.encoding)

    async def _prefill(self, job: _Job) -> tuple[str, HandoverBody | None]:
        """Have the prompt computed; where that was, and where its blocks are.

        Another server is asked when one cannot, or says nothing for long.
        """
        reasons: list[str] = []
        for attempt, name in enumerate(self.prefills.candidates(self.config.attempts_max)):
            body = PrefillBody(id=f"{job.id}.{attempt}", prompt=job.prompt, sampling=job.sampling)
            try:
                async with asyncio.timeout(self.config.prefill_timeout_s):
                    async with self.prefills.post(name, "/v1/prefill", body) as response:
                        found = _decoded(await response.read(), PrefillAnswer, f"prefill {name}")
                        return name, found.kv_transfer
            except TryAnotherError as error:
                reasons.append(str(error))
            except TimeoutError:
                self.prefills.ready[name] = False
                reasons.append(f"prefill {name}: no answer within {self.config.prefill_timeout_s} s")
        raise nobody("prefill", reasons)

    async def _decode(self, job: _Job, handover: HandoverBody | None) -> DecodeAnswer:
        """Have the request finished somewhere. Nothing has been answered yet: another server may begin again."""
        reasons: list[str] = []
        for attempt, name in enumerate(self.decodes.candidates(self.config.attempts_max)):
            body = _decode_body(job, handover, attempt, stream=False)
            try:
                async with self.decodes.post(name, "/v1/decode", body) as response:
                    return _decoded(await response.read(), DecodeAnswer, f"decode {name}")
            except TryAnotherError as error:
                reasons.append(str(error))
        raise nobody("decode", reasons)

    # ---------------------------------------------------------------- streaming

    async def _stream(self, request: web.Request, job: _Job, handover: HandoverBody | None) -> web.StreamResponse:
        """Server-sent events, as OpenAI has them; an error after the first event is an event too."""
        response: web.StreamResponse | None = None
        texts = [TextStream() for _ in range(job.sampling.n)]
        try:
            async for line in self._lines(job, handover):
                if response is None:
                    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                    await response.prepare(request)
                await _event(response, self._said(job, line, texts))
        except KVRouteError as error:
            if response is None:
                raise
            await _event(response, error_body(str(error), getattr(error, "status", 500)))
        assert response is not None, "a stream has a line or an error"
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _said(self, job: _Job, line: Line, texts: list[TextStream]) -> dict[str, object]:
        match line:
            case TokensLine(sample=sample, tokens=tokens):
                piece = texts[sample].feed(tokens)
                return chunk(job.id, job.created_s, self.config.model, sample, tokens, piece)
            case AnswerLine(answer=answer):
                return last_chunk(self._completion(job, answer), [each.rest() for each in texts])
            case ErrorLine(message=message, status=status):
                return error_body(message, status)
            case _:
                raise AssertionError(line)

    async def _lines(self, job: _Job, handover: HandoverBody | None) -> AsyncIterator[Line]:
        """The lines of a decode server; another is asked as long as there was none."""
        reasons: list[str] = []
        for attempt, name in enumerate(self.decodes.candidates(self.config.attempts_max)):
            body, begun, ended = _decode_body(job, handover, attempt, stream=True), False, False
            try:
                async with self.decodes.post(name, "/v1/decode", body) as response:
                    async for text_line in _text_lines(response):
                        line = _line(text_line, f"decode {name}")
                        begun, ended = True, not isinstance(line, TokensLine)
                        yield line
                if ended:
                    return
                reasons.append(f"decode {name}: the answer broke off")
            except TryAnotherError as error:
                reasons.append(str(error))
            if begun:
                raise UpstreamError("; ".join(reasons))
        raise nobody("decode", reasons)


def _decode_body(job: _Job, handover: HandoverBody | None, attempt: int, *, stream: bool) -> DecodeBody:
    return DecodeBody(
        id=f"{job.id}.{attempt}", prompt=job.prompt, sampling=job.sampling, kv_transfer=handover, stream=stream
    )


def _decoded(answer: bytes, kind: type[Answer], who: str) -> Answer:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TryAnotherError(f"{who}: not the answer that was expected: {error}") from error


def _line(line: bytes, who: str) -> Line:
    try:
        return _LINES.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TryAnotherError(f"{who}: not the line that was expected: {error}") from error


async def _text_lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The lines of a body, of any length."""
    rest = bytearray()
    async for piece in response.content.iter_any():
        rest += piece
        while (at := rest.find(b"\n")) >= 0:
            yield bytes(rest[:at])
            del rest[: at + 1]


async def _event(response: web.StreamResponse, value: dict[str, object]) -> None:
    await response.write(b"data: " + msgspec.json.encode(value) + b"\n\n")


__all__ = ["FrontServer"]

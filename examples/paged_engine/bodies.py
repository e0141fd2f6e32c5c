"""The servers' requests, checked before they are used, and their answers: JSON, or a stream of JSON events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web
from msgspec import Meta

from cache_manager.errors import InvalidInputError
from paged_engine import text
from paged_engine.request import SAMPLES_MAX, Request
from paged_engine.sequence import Handover

DRAW: Final = "completion"
"""Sampling noise depends on this and the seed: the same seed draws the same tokens on every server."""


class Handed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prefill's answer when it has begun, which a request for decode has as ``handover``: 32 hex digits, an address.

    It says nothing of weights and prompts: the transfer itself refuses others, and decode computes the prompt then.
    """

    transfer: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    address: str

    def of(self, prefills: tuple[str, ...]) -> Handover:
        """What the engine takes over; :class:`InvalidInputError` if it is from none of the ``prefills``."""
        if self.address not in prefills:
            known = " or ".join(prefills) or "none: this decode has no --prefill"
            raise InvalidInputError("handover.address", known, repr(self.address)[:80])
        return Handover(bytes.fromhex(self.transfer), self.address)


class Completion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request in OpenAI's form; from ``ignore_eos`` on the keys are vLLM's and kvroute's own."""

    prompt: Annotated[str, Meta(min_length=1)] | Annotated[list[Annotated[int, Meta(ge=0, lt=512)]], Meta(min_length=1)]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    n: Annotated[int, Meta(ge=1, le=SAMPLES_MAX)] = 1
    stream: bool = False
    ignore_eos: bool = False
    return_routed_experts: bool = False
    handover: Handed | None = None

    def request(self, request_id: str, model: str) -> Request:
        """The engine's request; :class:`InvalidInputError` names the field. Encoding a long text takes time."""
        if self.model not in (None, model):
            raise InvalidInputError("model", model, repr(self.model))
        prompt = text.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt
        stops = frozenset() if self.ignore_eos else frozenset({text.END})
        sampled = {"n": self.n, "temperature": self.temperature, "seed": self.seed}
        return Request(request_id, tuple(prompt), self.max_tokens, stop_tokens=stops, draw=DRAW, **sampled)  # type: ignore[arg-type]


def parse(body: bytes) -> Completion:
    """Decode ``body``. :class:`InvalidInputError` says in one line what is wrong."""
    try:
        return msgspec.json.decode(body, type=Completion)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError("body", "a completion as JSON", str(error)[:200]) from error


def answer_of(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value) + b"\n", content_type="application/json")


class Stream:
    """An answer in events: tokens as they come, then the rest of the answer with its routes."""

    def __init__(self, http: web.Request, request_id: str) -> None:
        self._http, self._id = http, request_id
        self._said: dict[int, tuple[int, ...]] = {}
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

    @property
    def begun(self) -> bool:
        return self._response.prepared

    async def say(self, sample: int, generated: tuple[int, ...]) -> None:
        """A failure before the first token can still be answered with its own status."""
        if len(generated) > len(self._said.get(sample, ())):
            choice = self._new(sample, generated, text.decode_whole) | {"finish_reason": None}
            await self._send({"id": self._id, "object": "text_completion", "choices": [choice]})

    async def end(self, answer: dict[str, Any]) -> web.StreamResponse:
        for choice in answer["choices"]:
            choice |= self._new(choice["index"], choice["token_ids"], text.decode)
        await self._send(answer)
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    def _new(self, sample: int, tokens: tuple[int, ...], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        said = self._said.get(sample, ())
        self._said[sample] = tokens
        piece = decode(tokens)[len(text.decode_whole(said)) :]
        return {"index": sample, "text": piece, "token_ids": tokens[len(said) :]}

    async def _send(self, event: dict[str, Any]) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._http)
        await self._response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

"""The servers' requests, checked before they are used, and their answers: JSON, or a stream of JSON events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from cache_manager.errors import InvalidInputError
from paged_engine import text
from paged_engine.request import SAMPLES_MAX, Request
from paged_engine.sequence import Handover


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
    handover: Handover | None = None
    """Prefill's answer. Decode fetches from its own prefills only, whatever address a message names."""

    def request(self, request_id: str, model: str, prefills: Sequence[str]) -> Request:
        """The engine's request; :class:`InvalidInputError` names the field. Encoding a long text takes time."""
        if self.model not in (None, model):
            raise InvalidInputError("model", model, repr(self.model))
        if self.handover is not None and self.handover.address not in prefills:
            known = " or ".join(prefills) or "none: this decode has no --prefill"
            raise InvalidInputError("handover.address", known, repr(self.handover.address)[:80])
        prompt = text.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt
        stops = frozenset() if self.ignore_eos else frozenset({text.END})
        sampled = {"n": self.n, "temperature": self.temperature, "seed": self.seed}
        return Request(request_id, tuple(prompt), self.max_tokens, stop_tokens=stops, **sampled)  # type: ignore[arg-type]


def parse(body: bytes) -> Completion:
    """Decode ``body``. :class:`InvalidInputError` says in one line what is wrong."""
    try:
        return msgspec.json.decode(body, type=Completion)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError("body", "a completion as JSON", str(error)[:200]) from error


def answer_of(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value) + b"\n", content_type="application/json")


class Stream:
    """An answer in events: the new tokens of each sample as they come, then the whole answer with text and routes."""

    def __init__(self, http: web.Request) -> None:
        self._http, self._said = http, Counter[int]()
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

    @property
    def begun(self) -> bool:
        """A failure before the first token can still be answered with its own status."""
        return self._response.prepared

    async def say(self, sample: int, generated: tuple[int, ...]) -> None:
        if new := generated[self._said[sample] :]:
            self._said[sample] = len(generated)
            await self._send({"choices": [{"index": sample, "text": "", "token_ids": new, "finish_reason": None}]})

    async def end(self, answer: dict[str, Any]) -> web.StreamResponse:
        await self._send(answer)
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def _send(self, event: dict[str, Any]) -> None:
        if not self.begun:
            await self._response.prepare(self._http)
        await self._response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

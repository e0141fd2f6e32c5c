"""The front's answers: OpenAI's bodies, with routes in the encoding that was asked for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvroute.encodings import Encoding, encode, refusal
from kvroute.routes import Routes
from paged_engine.engine import text
from paged_engine.serving.bodies import DecodeAnswer, SampleAnswer


def completion(
    request_id: str,
    created_s: int,
    model: str,
    prompt_tokens: int,
    answer: DecodeAnswer,
    encoding: Encoding | None,
) -> dict[str, Any]:
    """The body of a completion; ``encoding`` is ``None`` when no routes were asked for.

    The routes of a choice are ``choices[i].routed_experts``, SGLang's of the first choice ``sglext.routed_experts``.
    Where an encoding has no way to say that rows are missing, and some are, its field is ``None`` and
    ``routed_experts_error`` beside it says why. ``missing_rows`` gives the reasons in every encoding.
    """
    body = _body(request_id, created_s, model, [_choice(i, each, encoding) for i, each in enumerate(answer.samples)])
    tokens = sum(len(sample.tokens) for sample in answer.samples)
    body["usage"] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }
    if encoding == "sglang":
        body["sglext"] = _told("sglang", answer.samples[0])
    return body


def _body(request_id: str, created_s: int, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": request_id,
        "object": "text_completion",
        "created": created_s,
        "model": model,
        "choices": choices,
    }


def _choice(index: int, sample: SampleAnswer, encoding: Encoding | None) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": text.decode(sample.tokens),
        "token_ids": sample.tokens,
        "logprobs": None,
        "finish_reason": sample.finish_reason,
    }
    if encoding is None:
        return choice
    choice["missing_rows"] = msgspec.to_builtins(sample.gaps)
    if encoding != "sglang":
        choice |= _told(encoding, sample)
    return choice


def _told(encoding: Encoding, sample: SampleAnswer) -> dict[str, Any]:
    """The routes of a sample; they come in kvroute's own encoding, and are decoded once where another was asked for."""
    if encoding == "kvroute":
        return {"routed_experts": sample.routed_experts}
    routes = Routes.from_json(sample.routed_experts)
    told = {"routed_experts": encode(routes, encoding)}
    why = refusal(routes, encoding)
    return told if why is None else told | {"routed_experts_error": why}


def chunk(request_id: str, created_s: int, model: str, sample: int, tokens: list[int], piece: str) -> dict[str, Any]:
    """One event of a streamed completion: new tokens of one sample."""
    choice = {"index": sample, "text": piece, "token_ids": tokens, "logprobs": None, "finish_reason": None}
    return _body(request_id, created_s, model, [choice])


def last_chunk(body: dict[str, Any], rests: Sequence[str]) -> dict[str, Any]:
    """The last event: what :func:`completion` has beside the text, of which only ``rests`` were not sent before."""
    choices = [choice | {"text": rest, "token_ids": []} for choice, rest in zip(body["choices"], rests, strict=True)]
    return body | {"choices": choices}


class TextStream:
    """Text of one sample, piece by piece: a character whose bytes are in several tokens is not cut."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._sent = 0

    def feed(self, tokens: Sequence[int]) -> str:
        self._tokens += tokens
        whole = text.decode(self._tokens)
        stop = len(whole.rstrip("\N{REPLACEMENT CHARACTER}"))
        piece, self._sent = whole[self._sent : stop], max(self._sent, stop)
        return piece

    def rest(self) -> str:
        """What was held back: bytes that are no character."""
        return text.decode(self._tokens)[self._sent :]


__all__ = ["TextStream", "chunk", "completion", "last_chunk"]

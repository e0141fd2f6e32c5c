"""What the servers ask of each other and clients of them: JSON bodies, checked before anything is done with them."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from cache_manager.errors import InvalidInputError
from paged_engine.engine.request import SAMPLES_MAX, Request
from transfer.messages import TransferId

TOKEN_MAX = 1 << 31
DRAW = "completion"
"""What sampling noise depends on beside the seed: the same seed draws the same tokens on every server."""


class CompletionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client's request, as OpenAI has it; the last five keys are vLLM's, SGLang's and kvroute's own."""

    model: str
    prompt: str | list[int]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    user: str | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    return_routed_experts: bool = False
    routed_experts_encoding: str = "kvroute"


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a prompt is to be continued."""

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    seed: int = 0
    stop_token_ids: list[int] = []


class PrefillBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks a prefill server to compute a prompt."""

    id: str
    prompt: list[int]
    sampling: Sampling


class HandoverBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a prompt's blocks are: the prefill server by the name that decode's configuration has for it.

    ``transfer`` is the transfer's id, 32 hex digits; ``namespace`` the fingerprint of prefill's namespace.
    """

    transfer: str
    prefill: str
    namespace: str
    prompt_tokens: int
    first_tokens: list[int]


class PrefillAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``kv_transfer`` is ``None`` when the blocks could not be offered; decode computes the prompt then."""

    kv_transfer: HandoverBody | None


class ReleaseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tells a prefill server that no decode will ask for a transfer."""

    transfer: str


class DecodeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks a decode server to continue a prompt; ``stream`` for a line per batch of tokens."""

    id: str
    prompt: list[int]
    sampling: Sampling
    kv_transfer: HandoverBody | None = None
    stream: bool = False


class GapBody(msgspec.Struct, frozen=True):
    """Rows of the positions ``[start, stop)`` are missing, and why."""

    start: int
    stop: int
    reason: str


class SampleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One sample: what was generated, why it ended, and its routes (see ``Routes.to_json``)."""

    tokens: list[int]
    finish_reason: str
    routed_experts: dict[str, Any]
    gaps: list[GapBody]


class DecodeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All samples of a request."""

    samples: list[SampleAnswer]


class TokensLine(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """A line of a streamed answer: what a sample got since the line before."""

    sample: int
    tokens: list[int]


class AnswerLine(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The last line of a streamed answer."""

    answer: DecodeAnswer


class ErrorLine(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """The last line of a streamed answer that failed."""

    message: str
    status: int


Line = TokensLine | AnswerLine | ErrorLine

Body = TypeVar("Body", bound=msgspec.Struct)
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$")
_EXPECTED = re.compile(r"^Expected `(?P<wanted>.*)`, got `(?P<got>.*)`$")
_FIELD = re.compile(r"^Object (?:missing required|contains unknown) field `(?P<name>.*)`$")


def parse(kind: type[Body], text: bytes) -> Body:
    """The body that ``text`` is; :class:`InvalidInputError` names the field, what was wanted and what came."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError("body", "JSON", error) from error


def _named(message: str, kind: type[msgspec.Struct]) -> InvalidInputError:
    where = _WHERE.match(message)
    assert where is not None
    what, path = where["what"], where["path"] or ""
    if found := _FIELD.match(what):
        name = f"{path}.{found['name']}" if path else found["name"]
        if "missing" in what:
            return InvalidInputError(name, "a value", "nothing")
        return InvalidInputError(name, "one of " + ", ".join(kind.__struct_encode_fields__), "a key that is unknown")
    if found := _EXPECTED.match(what):
        return InvalidInputError(path or "body", found["wanted"], found["got"])
    return InvalidInputError(path or "body", "a value that fits", what)


def check_tokens(field: str, tokens: list[int], vocabulary: int, *, low: int = 1) -> None:
    """Raise unless ``tokens`` are ``low`` ids or more, each in ``[0, vocabulary)``."""
    if len(tokens) < low:
        raise InvalidInputError(field, f"at least {low} token", len(tokens))
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise InvalidInputError(field, f"token ids in [0, {vocabulary})", token)


def transfer_id(field: str, text: str) -> TransferId:
    """The transfer that ``text``, 32 hex digits, names."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 16:
        raise InvalidInputError(field, "32 hex digits", repr(text)[:80])
    return TransferId(found)


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Raise unless every value is one that an engine can follow."""
    if not 1 <= sampling.max_tokens < TOKEN_MAX:
        raise InvalidInputError("max_tokens", "an integer of 1 or more", sampling.max_tokens)
    if not 1 <= sampling.n <= SAMPLES_MAX:
        raise InvalidInputError("n", f"1 to {SAMPLES_MAX} samples", sampling.n)
    if not 0.0 <= sampling.temperature <= 100.0:
        raise InvalidInputError("temperature", "a number from 0 to 100", sampling.temperature)
    if not 0 <= sampling.seed < 1 << 63:
        raise InvalidInputError("seed", "an integer in [0, 2**63)", sampling.seed)
    check_tokens("stop_token_ids", sampling.stop_token_ids, vocabulary, low=0)


def engine_request(body: PrefillBody | DecodeBody, vocabulary: int) -> Request:
    """The engine's request for a body; raises unless every value is one that an engine can follow."""
    check_tokens("prompt", body.prompt, vocabulary)
    check_sampling(body.sampling, vocabulary)
    if not 1 <= len(body.id) <= 128:
        raise InvalidInputError("id", "1 to 128 characters", len(body.id))
    sampling = body.sampling
    return Request(
        id=body.id,
        prompt=tuple(body.prompt),
        max_tokens=sampling.max_tokens,
        n=sampling.n,
        temperature=sampling.temperature,
        seed=sampling.seed,
        stop_tokens=frozenset(sampling.stop_token_ids),
        draw=DRAW,
    )

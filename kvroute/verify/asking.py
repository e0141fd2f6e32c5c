"""Asks a server and reads its answers: SGLang's ``/generate`` or the OpenAI completions of vLLM."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import ConfigError, MismatchError, RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.connector import own_field
from kvroute.connector.answers import missing, routes
from kvroute.encodings import ROUTED_EXPERTS
from kvroute.rollout import RolloutStore
from kvroute.routes import Layout

AT_ONCE: Final = 4
"""Requests that are sent together."""
WAIT_S: Final = 600
HEAD: Final = 4
"""Prompts with a common head share 1/HEAD of the longest prompt's length."""

RowIds = NDArray[np.int32]
RowMask = NDArray[np.bool_]

TOKEN_ID_MAX: Final = (1 << 31) - 1
TokenId = Annotated[int, msgspec.Meta(ge=0, le=TOKEN_ID_MAX)]

NO_ROWS: Final = "neither routed_experts nor a handle of kvroute's"


class ServerError(MismatchError):
    """The server gave no readable answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, the kind of question, and how many completions are wanted."""

    kind: str
    prompt: tuple[int, ...]
    n: int = 1


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """One completion. ``tokens`` are those of the prompt and of the answer; the last one has no row."""

    kind: str
    prompt: int
    tokens: tuple[int, ...]
    ids: RowIds  # [tokens - 1, layers, top_k]  sorted; below 0 for cells that did not come
    refused: str = ""  # why no row came
    gaps: tuple[tuple[int, int, str], ...] = ()  # positions [start, stop) whose rows the engine says to be missing, why

    @property
    def known(self) -> RowMask:
        """The cells that came: ``[tokens - 1, layers]``."""
        return np.asarray((self.ids >= 0).all(axis=2))


def check_url(url: str) -> None:
    """Raise :class:`ConfigError` unless this is the address of an HTTP server."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        right = False
    if not right:
        raise ConfigError("--url", "http://HOST:PORT", repr(url))


def exchanged(url: str, body: Any = None) -> bytes:
    """What the server answers to a GET, or to a POST of ``body`` as JSON; :class:`ServerError` if it does not."""
    payload = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, payload, {"Content-Type": "application/json"})  # noqa: S310 - see check_url
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:  # noqa: S310
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        got = f"status {error.code}: {error.read(200)!r}"
        raise ServerError(url, "an answer", got) from error
    except (OSError, HTTPException, ValueError) as error:  # ValueError: an invalid URL
        raise ServerError(url, "an answer", error) from error


def decoded(url: str, content: bytes) -> Any:
    """The JSON that came from there; :class:`ServerError` if it is none."""
    try:
        return msgspec.json.decode(content)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ServerError(url, "an answer in JSON", error) from error


def served_by(url: str) -> tuple[str, str]:
    """The model that the server at ``url`` serves, and its engine: ``SGLang`` or ``vLLM``."""
    models = decoded(f"{url}/v1/models", exchanged(f"{url}/v1/models"))
    try:
        served = models["data"][0]
        return served["id"], "SGLang" if served.get("owned_by") == "sglang" else "vLLM"
    except (TypeError, LookupError, AttributeError) as error:
        wanted = "the models that are served"
        raise ServerError(f"{url}/v1/models", wanted, repr(models)[:200]) from error


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server sent for a question, not yet read, and the seconds until it was there."""

    content: bytes
    seconds: float


class Server:
    """A server at ``url`` that serves the model of ``spec``. SGLang is asked for rows if ``with_rows``."""

    def __init__(
        self,
        url: str,
        spec: AuxBlockDataSpec,
        rollouts: RolloutStore | None,
        new: int,
        seed: int,
        with_rows: bool = True,
    ) -> None:
        check_url(url)
        self.url = url.rstrip("/")
        self.spec = spec
        self._layout = Layout.of(spec)
        self.new = new
        self.seed = seed
        self._rollouts = rollouts
        self._with_rows = with_rows
        self.model, self.engine = served_by(self.url)

    def ask(self, questions: Sequence[Question]) -> Iterator[list[EngineAnswer] | ServerError]:
        """The completions of each question, in order, or why there are none."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            yield from pool.map(lambda question: self.answers(question, self.reply(question)), questions)

    def reply(self, question: Question) -> Reply | ServerError:
        """One exchange over HTTP; nothing of the answer is read."""
        began_s = time.perf_counter()
        try:
            content = exchanged(f"{self.url}{self._path}", self._body(question))
        except ServerError as error:
            return error
        return Reply(content, time.perf_counter() - began_s)

    def answers(
        self,
        question: Question,
        reply: Reply | ServerError,
    ) -> list[EngineAnswer] | ServerError:
        """The completions in a reply to ``question``, or why there are none."""
        try:
            if isinstance(reply, ServerError):
                return reply
            response = decoded(f"{self.url}{self._path}", reply.content)
            completions = self._generated if self.engine == "SGLang" else self._completed
            return [self._read(question, *completion) for completion in completions(question, response)]
        except ServerError as error:
            return error
        except (TypeError, LookupError, AttributeError) as error:
            return ServerError("answer", f"one of {self.engine}'s", repr(error))

    @property
    def _path(self) -> str:
        return "/generate" if self.engine == "SGLang" else "/v1/completions"

    def _body(self, question: Question) -> dict[str, Any]:
        temperature = float(question.n > 1)
        if self.engine == "SGLang":
            sampling = {"max_new_tokens": self.new, "n": question.n, "temperature": temperature, "ignore_eos": True}
            asked = {"input_ids": list(question.prompt), "sampling_params": sampling}
            return {**asked, "return_routed_experts": self._with_rows}
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(question.prompt),
            "max_tokens": self.new,
            "n": question.n,
        }
        return {**body, "temperature": temperature, "seed": self.seed, "ignore_eos": True, "return_token_ids": True}

    def _generated(
        self,
        question: Question,
        response: Any,
    ) -> Iterator[tuple[Any, Any, int, Any]]:
        """For each completion: its tokens, the answer with its routes, its number there, and the engine's own field."""
        for completion in response if isinstance(response, list) else [response]:
            yield (
                completion["output_ids"],
                {**completion, "prompt_token_ids": list(question.prompt)},
                0,
                completion["meta_info"],
            )

    def _completed(
        self,
        _question: Question,
        response: Any,
    ) -> Iterator[tuple[Any, Any, int, Any]]:
        for completion in response["choices"]:
            yield completion["token_ids"], response, completion["index"], completion

    def _read(
        self,
        question: Question,
        new: Any,
        answer: Any,
        index: int,
        field: Any,
    ) -> EngineAnswer:
        tokens = (*question.prompt, *_token_ids(new))
        refused = ""
        gaps: tuple[tuple[int, int, str], ...] = ()
        ids = np.full((len(tokens) - 1, *self.spec.row_shape), -1, np.int32)
        ours = (answer.get("kv_transfer_params") or answer.get("meta_info") or {}).get("kvroute")
        try:
            if ours:
                gaps = missing(answer, index)
                own_routes = routes(answer, index, rollouts=self._rollouts)
                self._layout.check_model(own_routes.layout)
                ids = own_routes.materialize(len(ids), self.spec.attrs["layer_ids"], missing="minus1")
            elif (packed := field.get("routed_experts")) is None:
                refused = NO_ROWS
            else:
                rows = rows_of(packed, self.spec, len(ids))
                ids[: len(rows)] = rows
        except RowError as error:
            refused = str(error)
        return EngineAnswer(question.kind, len(question.prompt), tokens, np.sort(ids, axis=2), refused, gaps)


def _token_ids(new: Any) -> list[int]:
    """The token ids of an answer; :class:`ServerError` for anything else."""
    try:
        return msgspec.convert(new, list[TokenId])
    except msgspec.ValidationError as error:
        wanted = f"integers from 0 to {TOKEN_ID_MAX}"
        raise ServerError("answer token ids", wanted, error) from error


def rows_of(packed: object, spec: AuxBlockDataSpec, due: int) -> RowIds:
    """An engine's own field, not yet judged: ids ``[rows, layers, top_k]`` of the layers with a router.

    Raises :class:`RowError` for anything but an array of such rows.
    """
    (moe, top_k), every = spec.row_shape, spec.attrs["num_layers"]
    array = own_field.unpacked(packed)
    layers = array.size // max(1, due * top_k)
    width = top_k
    if array.ndim == 3:
        _, layers, width = array.shape
    is_other = layers not in (every, moe) or width != top_k or array.dtype.kind not in "iu"
    if is_other or array.size % (layers * top_k):
        wanted = f"integers of {due} rows, {every} layers, top {top_k}"
        raise RowError(ROUTED_EXPERTS, wanted, f"{array.dtype} of shape {array.shape}")
    array = array.reshape(-1, layers, top_k)[:due]
    rows: RowIds = array.astype(np.int32)
    rows[(array < 0) | (array > np.iinfo(np.int32).max)] = -1  # no expert's id, and none is wrapped into one
    return rows if layers == moe else rows[:, list(spec.attrs["layer_ids"])]


def played(
    server: Server,
    requests: int,
    longest: int,
    vocabulary: int,
) -> Iterator[list[EngineAnswer] | ServerError]:
    """Ask a server everything: ``requests`` prompts of at most ``longest`` tokens, chosen by the server's seed.

    In turns prompts with a common head, further turns after their answers, several completions of one prompt and long
    prompts; at the end the first ones again, whose KV the server may have put away and brought back by then.
    """
    source, first, asked = random.Random(server.seed), list[Question](), 0  # noqa: S311 - no secret

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(source.randrange(3, vocabulary) for _ in range(max(1, most)))

    def ask(questions: list[Question]) -> Iterator[list[EngineAnswer] | ServerError]:
        nonlocal asked
        asked += len(questions)
        return server.ask(questions)

    while asked + len(first) < requests:
        head = tokens(longest // HEAD)
        alike = [Question("common heads", head + tokens(source.randrange(longest // HEAD))) for _ in range(AT_ONCE)]
        turns: list[Question] = []
        for answers in ask(alike):
            yield answers
            if not isinstance(answers, ServerError):
                turns.append(Question("further turns", answers[0].tokens + tokens(longest // 16)))
        yield from ask(turns[: AT_ONCE // 2])
        long = Question("long prompts", tokens(longest))
        yield from ask([Question("several completions", head + tokens(longest // HEAD), 3), long])
        first = first or [*alike, long]
    for question in first:  # one by one, the earliest first
        yield from ask([Question("asked again", question.prompt)])


__all__ = [
    "NO_ROWS",
    "EngineAnswer",
    "Question",
    "Reply",
    "Server",
    "ServerError",
    "check_url",
    "decoded",
    "exchanged",
    "played",
    "rows_of",
    "served_by",
]

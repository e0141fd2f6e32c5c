"""One completion of an answer, in whatever form it came, and which routes are its own.

An answer is an engine's own object or the JSON of an OpenAI server: vLLM's ``RequestOutput``, a completion, a chat, a
``response``, the chunks of a stream put together, or an answer of SGLang. The law: routes belong to a completion only
if their token hashes say so, where the answer has token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

from cache_manager.errors import KVRouteError, RowError
from kvroute.connector.fields import FIELD, KEY, LEFT, MTP_FIELD, ROUTES
from kvroute.connector.key import is_void
from kvroute.routes import Routes
from kvroute.routes.token_hash import token_hashes

WHOLE_OBJECTS: Final = {
    "text_completion": "text_completion",
    "chat.completion.chunk": "chat.completion",
}
"""The ``object`` of a stream's chunks, and of the whole answer."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The parts of an answer about the wanted completion."""

    index: int
    request: str  # the answer's id
    tokens: list[int] | None
    prompt: int  # how many of the tokens are the prompt
    entries: Mapping[str, Any]  # under FIELD
    ended: str | None = None  # why the request ended
    key: str | None = None  # of SGLang's request, whose id it is

    @classmethod
    def of(cls, output: Any, index: int) -> Self:
        """Completion ``index`` of ``output``.

        Raises :class:`RowError` for a part of an answer, for an index without a completion, and for another form.
        """
        with parsed("answer"):
            _refuse_parts(output)
            if is_sglang(output):
                return cls._of_sglang(output)
            if field_of(output, "object") == "response":
                return cls._of_response(output, index)
            return cls._of_choice(output, index)

    @classmethod
    def _of_sglang(cls, output: Any) -> Self:
        """Each completion is an answer of its own."""
        meta = mapping(field_of(output, "meta_info"))
        request = str(meta.get("id") or "")
        entries = next(filter(None, reversed(meta.get(FIELD) or ())), None)
        prompt = field_of(output, "prompt_token_ids")
        tokens = _sequence_of(prompt, field_of(output, "output_ids"))
        return cls(0, request, tokens, len(prompt or ()), mapping(entries), key=request or None)

    @classmethod
    def _of_response(cls, output: Any, index: int) -> Self:
        """Each of several turns is a request of its own."""
        prompt = _tokens_of(output, "input_messages")
        tokens = _sequence_of(prompt, _tokens_of(output, "output_messages"))
        entries = mapping(beside(output).get(FIELD))
        return cls(index, _id_of(output), tokens, len(prompt or ()), entries)

    @classmethod
    def _of_choice(cls, output: Any, index: int) -> Self:
        """The choice, or the output, with this number; an answer without any has none that is wrong."""
        choices = choices_of(output)
        if choices and index not in choices:
            wanted = f"one of {sorted(choices)}, as the answer has them"
            raise RowError("index", wanted, index)
        choice = choices.get(index)
        prompt = choice and prompt_of(output, choice)
        tokens = _sequence_of(prompt, field_of(choice, "token_ids"))
        entries = mapping(beside(output).get(FIELD))
        ended = field_of(choice, "finish_reason")
        return cls(index, _id_of(output), tokens, len(prompt or ()), entries, ended)

    @property
    def name(self) -> str:
        """The completion, in words."""
        return f"completion {self.index} of {self.request or 'an answer without an id'}"

    @property
    def what(self) -> str:
        """Its routes, in words."""
        return f"routes of {self.name}"

    @property
    def others(self) -> list[str]:
        """Numbers of the completions whose routes, or whose handles, the answer has."""
        with_routes = mapping(self.entries.get(ROUTES))
        with_handles = mapping(self.entries.get(LEFT))
        return sorted({*with_routes, *with_handles})

    def entry_of(self, kind: str) -> Any:
        """The entry of this kind in the answer.

        Where the only entry has another number, the client's own id began with that: whether it is of this answer the
        tokens have to show.
        """
        entries = self.entries.get(kind)
        if not isinstance(entries, Mapping):
            return entries
        number = str(self.index)
        if number in entries:
            return entries[number]
        if number == "0" and len(entries) == 1 and self.tokens is not None:
            number = self.request.partition("_")[0]
        return entries.get(number)

    def refusal(self, routes: Routes) -> str | None:
        """Why routes do not belong to this answer, in words; ``None`` if they do, or if it has no token ids."""
        if self.tokens is None:
            return None
        hashes = {count: digest for count, digest in routes.token_hashes if count <= len(self.tokens)}
        own_hashes = dict(token_hashes(self.tokens, hashes))
        differ = [count for count in sorted(hashes) if own_hashes[count] != hashes[count]]
        if differ:
            return f"rows of other tokens: the hash of the first {differ[0]} differs"
        rows = self._rows(routes)
        if any(count >= rows for count in hashes):  # an answer without a word has its prompt's hash, one token more
            return None
        return f"rows of tokens that nothing says to be the first {rows} of this answer"

    def proved(self, routes: Routes) -> Routes:
        """:meth:`own`; :class:`RowError` for routes that do not belong to this answer."""
        why = self.refusal(routes)
        if why is not None:
            raise RowError(self.what, "those of this answer's tokens", why)
        return self.own(routes)

    def refusal_by_key(self, routes: Routes, key: str) -> str | None:
        """As :meth:`refusal`, for routes under the key of this answer's request.

        Raises :class:`RowError` if several requests had it.
        """
        assert self.tokens is not None
        if is_void(routes):
            wanted = f"a {KEY} that no other request has had with this prompt"
            raise RowError(self.what, wanted, repr(key))
        due = len(self.tokens) - 1
        if routes.stop < due:  # of a request that was cut earlier, or of another one
            return f"rows of the first {routes.stop} tokens, of {due} that have some"
        return self.refusal(routes)

    def own(self, routes: Routes) -> Routes:
        """``routes`` without rows of tokens that are not in the answer, bound to the answer's tokens."""
        if self.tokens is None:
            return routes
        rows = self._rows(routes)
        counts = {routes.start or rows, self.prompt, rows}
        own_routes = routes.slice(routes.start, max(routes.start, rows))
        return own_routes.bind(self.tokens, [count for count in counts if count <= rows])

    def _rows(self, routes: Routes) -> int:
        """How many first tokens of the answer have rows in ``routes``."""
        assert self.tokens is not None
        return max(0, min(routes.stop, len(self.tokens) - 1))


# -------------------------------------------------------------------- the forms of an answer


def is_sglang(output: Any) -> bool:
    """Whether this answer is of SGLang."""
    return bool(mapping(field_of(output, "meta_info")))


def beside(output: Any) -> Mapping[str, Any]:
    """What vLLM's connectors have put beside the answer."""
    return mapping(field_of(output, "kv_transfer_params"))


def mtp_entry(output: Any, completion: Completion) -> Mapping[str, Any] | None:
    """What the answer has of the completion's rows of an MTP layer."""
    with parsed("answer"):
        entries = mapping(beside(output).get(MTP_FIELD))
        return entries.get(str(completion.index))


def choices_of(output: Any) -> dict[Any, Any]:
    """The completions of an engine's output, or the choices of a server's, by number."""
    return {field_of(choice, "index"): choice for choice in _answers_of(output)}


def prompt_of(output: Any, choice: Any) -> Any:
    """The token ids of the prompt: the choice's own, or those of all of ``output``."""
    own_ids = field_of(choice, "prompt_token_ids")
    return field_of(output, "prompt_token_ids") if own_ids is None else own_ids


def field_of(part: Any, name: str) -> Any:
    """A field of an object or of JSON; ``None`` if there is none."""
    return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)


def mapping(value: Any) -> Mapping[str, Any]:
    """``value``, or an empty mapping in place of anything else."""
    return value if isinstance(value, Mapping) else {}


@contextmanager
def parsed(field: str) -> Iterator[None]:
    """JSON of another form than an engine's is a :class:`RowError`."""
    try:
        yield
    except KVRouteError:
        raise
    except (TypeError, LookupError, AttributeError, ValueError) as error:
        wanted = "one in the form of an engine's or a server's"
        raise RowError(field, wanted, repr(error)) from error


def _sequence_of(prompt: Any, answered: Any) -> list[int] | None:
    """The tokens of a prompt and its answer; ``None`` unless both are known."""
    return None if prompt is None or answered is None else [*prompt, *answered]


def _id_of(output: Any) -> str:
    return str(field_of(output, "request_id") or field_of(output, "id") or "")


def _answers_of(output: Any) -> Sequence[Any]:
    return field_of(output, "outputs") or field_of(output, "choices") or ()


def _tokens_of(response: Any, name: str) -> Any:
    """The token ids of a response's messages of that name, if the request asked for them and it has one turn."""
    messages: Sequence[Any] = field_of(response, name) or ()
    return field_of(messages[0], "tokens") if len(messages) == 1 else None


def _refuse_parts(output: Any) -> None:
    """Raise :class:`RowError` for a part of an answer, as a stream sends it, and for a server's error in its place."""
    if field_of(output, "sequences") is not None or field_of(output, "cum_logprob") is not None:
        got = "one of a beam search, whose beams are made of many requests that the answer does not name"
        raise RowError("routes", "an answer of one request", got)
    kind = field_of(output, "object")
    if kind == "chat.completion.chunk" or (kind == "text_completion" and not _is_whole(output)):
        wanted = "a whole answer: kvroute.integrations.vllm.gathered(chunks) makes one of all chunks of a stream"
        raise RowError("routes", wanted, f"a chunk of a stream, {kind}")
    event = field_of(output, "type")
    if isinstance(event, str) and event.startswith("response."):
        wanted = "a whole answer: the response of response.completed"
        raise RowError("routes", wanted, f"an event of a stream, {event}")
    if isinstance(output, Mapping) and output.get("error"):
        error = mapping(output["error"])
        got = f"the server's error: {error.get('message') or output['error']}"
        raise RowError("routes", "an answer", got)


def _is_whole(output: Any) -> bool:
    """Whether a text completion is more than a chunk of one."""
    if field_of(output, "usage") is not None:
        return True
    names = output if isinstance(output, Mapping) else dir(output)
    return "kv_transfer_params" in names


# -------------------------------------------------------------------- streams


def gathered(chunks: Iterable[Any]) -> dict[str, Any]:
    """The answer in a stream of ``chunks``, completions or a chat; :func:`kvroute.connector.routes` takes it.

    ``chunks`` are all chunks of one stream in order, JSON or a client's objects, without the final ``[DONE]``. The
    answer has the id, and for each choice its tokens and why it ended. No chunk has a handle: the store has the routes.
    Raises :class:`RowError` for no chunk, for chunks of several answers or without token ids (``return_token_ids``),
    and for a server's error.
    """
    answer: dict[str, Any] = {"kv_transfer_params": None}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        with parsed("stream"):
            answer |= _head_of(chunk, answer)
            for delta in _answers_of(chunk):
                _grow(choices, delta)
    if not choices:
        raise RowError("stream", "chunks of an answer", "no choice in any")
    for index, choice in choices.items():
        if choice["token_ids"] is None or prompt_of(answer, choice) is None:
            wanted = "a stream that was asked for with return_token_ids"
            raise RowError(f"token ids of choice {index}", wanted, "none")
    with parsed("stream"):
        return answer | {"choices": [choices[index] for index in sorted(choices)]}


def _head_of(chunk: Any, answer: Mapping[str, Any]) -> dict[str, Any]:
    """What a chunk says of the whole answer, which so far is ``answer``."""
    error = field_of(chunk, "error")
    if error is not None:
        raise RowError("stream", "chunks of an answer", error)
    kind = WHOLE_OBJECTS.get(field_of(chunk, "object") or "")
    request = field_of(chunk, "id")
    if kind is None or request is None:
        wanted = f"one of {sorted(WHOLE_OBJECTS)}, with an id"
        raise RowError("chunk.object", wanted, field_of(chunk, "object"))
    if answer.get("id", request) != request:
        raise RowError("chunk.id", answer["id"], request)
    return {"id": request, "object": kind} | _present(chunk, "prompt_token_ids")


def _grow(choices: dict[int, dict[str, Any]], delta: Any) -> None:
    """Add what a chunk says of one of the ``choices``."""
    index = field_of(delta, "index")
    choice = choices.setdefault(index, {"index": index, "token_ids": None})
    choice |= _present(delta, "prompt_token_ids", "finish_reason", "stop_reason")
    tokens = field_of(delta, "token_ids")
    if tokens is not None:
        choice["token_ids"] = [*(choice["token_ids"] or ()), *tokens]


def _present(part: Any, *names: str) -> dict[str, Any]:
    fields = {name: field_of(part, name) for name in names}
    return {name: value for name, value in fields.items() if value is not None}


__all__ = [
    "Completion",
    "beside",
    "choices_of",
    "field_of",
    "gathered",
    "is_sglang",
    "mapping",
    "mtp_entry",
    "parsed",
    "prompt_of",
]

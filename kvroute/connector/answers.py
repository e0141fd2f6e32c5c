"""The client's end: the routes of an answer, from an engine's own object or from the JSON of an OpenAI server.

Beside an answer goes ``{"kvroute": {"rollouts": {name: handle}, "unseen": {name: spans}, "missing": {name: gaps},
"error": {name: text}}}``. A name is the engine's name of a request: its id, after ``<i>_`` if it is one of several
completions. Several requests may have one name, one after the other. Routes found by a name belong to an answer only if
their token hashes say so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from typing import Any, Final, Self

from cache_manager.errors import KVRouteError, RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.connector import own_field
from kvroute.connector.tickets import TRANSFER
from kvroute.rollout import Absence, RolloutHandle, RolloutStore, open_rollouts
from kvroute.routes import Routes
from kvroute.routes.token_hash import token_hashes

FIELD: Final = "kvroute"
LEFT: Final = "rollouts"
UNSEEN: Final = "unseen"
MISSING: Final = "missing"
ERROR: Final = "error"
START: Final = "start"
"""A request's option under :data:`FIELD`: the position of the first row in its answer."""
UNHANDED: Final = ("abort", "error")
"""Ends of requests after which vLLM may send no handle: its front end has ended them, or never had their last step."""
WHOLE: Final = {"text_completion": "text_completion", "chat.completion.chunk": "chat.completion"}
"""The ``object`` of a stream's chunks, and of the whole answer."""
POLL_S: Final = 0.01
POLL_MAX_S: Final = 0.2
"""Looks into a rollout store are so far apart: each pause is twice the one before."""
ASKED: Final = (START, TRANSFER, LEFT, UNSEEN, MISSING, ERROR)
"""Keys of a request's mapping under :data:`FIELD`. All but the first are of an answer of prefill, which goes on as it
is; of those kvroute reads the second."""


def start_of(asked: Any) -> Any:
    """The start that a request asks for in its mapping ``asked`` under :data:`FIELD`; 0 if it does not.

    Raises :class:`RowError` for anything but a mapping, and for an unknown key.
    """
    if asked is None:
        return 0
    if not isinstance(asked, Mapping):
        raise RowError(FIELD, f"a mapping with {START}", repr(asked))
    for key in asked:
        if key not in ASKED:
            raise RowError(FIELD, f"a mapping with {START}", f"the key {key!r}")
    return asked.get(START, 0)


def routes(
    output: Any,
    index: int = 0,
    *,
    rollouts: RolloutStore | None = None,
    wait_s: float = 5.0,
    spec: AuxBlockDataSpec | None = None,
) -> Routes:
    """The routes of completion ``index`` of ``output``: a ``RequestOutput``, or the response of the OpenAI server.

    They cover the tokens that the model read, which is all but the last; if the request named a ``start``, from that
    position on: :meth:`Routes.merge` joins them to those of an earlier turn. If ``output`` has token ids, the hashes
    that the engine left with the routes prove that they are of these tokens, and the routes are bound to the prompt and
    to exactly the tokens that have rows. Else they keep the engine's binding.

    ``rollouts`` is the store that the engine was configured to leave routes in. An answer without a handle has its
    routes only there: a stream, the second and later prompts of a list, a request that the front end has ended (a stop
    string). The call waits up to ``wait_s`` seconds for routes of these tokens; an error in the answer ends the wait at
    once.

    With ``spec``, the model's :func:`kvroute.routing_spec_from_hf`, an answer that has neither may have its rows in the
    engine's own field, ``routed_experts``: they are bound to the answer's tokens. The engine has refused the field, and
    said why, if one of them is missing.

    Raises :class:`RowError` if there are none, if they are of other tokens, and for an unsound handle.
    """
    with _parsed("answer"):
        asked = _Asked.of(output, index)
    if (told := asked.told_of(LEFT)) is not None:
        handle = RolloutHandle.from_json(told)
        store = open_rollouts("response:") if handle.store == "response" else rollouts
        if store is None:
            wanted = "rollouts=, the store that they were left in"
            raise RowError("routes", wanted, f"a handle of a store of kind {handle.store}")
        found = store.get(handle)
        if isinstance(found, Absence):
            raise RowError("routes", "a rollout that is there and sound", found.value)
        if (why := asked.refusal(found[0])) is not None:
            raise RowError(f"routes of {handle.rollout_id}", "those of this answer's tokens", why)
        return asked.own(found[0])
    if (error := asked.told_of(ERROR)) is not None:
        raise RowError("routes", "an answer with routes", error)
    with _parsed("answer"):
        packed = own_field.of(output, index)
    if packed is not None and spec is not None:
        return own_field.routes(packed, asked.tokens, asked.prompt, spec)
    gaps = asked.told_of(MISSING)
    if rollouts is None and gaps:
        raise RowError("routes", "an answer with all of its rows", f"missing, and why: {gaps}")
    if rollouts is None and packed is not None:
        wanted = "spec=, of the model's rows: kvroute.routing_spec_from_hf(config, block_tokens=1)"
        raise RowError(asked.what, wanted, "rows in the engine's own field, routed_experts")
    if rollouts is None:
        wanted = "an answer with a handle of them, or rollouts=, the store that they were left in"
        got = f"handles of {sorted(asked.left)}" if asked.left else "neither"
        if asked.ended in UNHANDED:
            got += f": the request ended as {asked.ended!r}, and such an answer may have no handle"
        raise RowError(asked.what, wanted, got)
    return _left(asked, rollouts, wait_s)


def unseen(output: Any, index: int = 0) -> tuple[tuple[int, int], ...]:
    """The positions ``[start, stop)`` at which the last router's choice is not proved, with ``witness="flagged"``.

    Their KV was loaded and their rows were matched by that KV, which does not show the last layer's choice.
    """
    with _parsed("answer"):
        spans = _Asked.of(output, index).told_of(UNSEEN) or ()
        return tuple((int(start), int(stop)) for start, stop in spans)


def missing(output: Any, index: int = 0) -> tuple[tuple[int, int, str], ...]:
    """The positions ``[start, stop)`` whose rows another engine lent but which did not come, and why.

    The routes say which rows are missing for any reason; this gives the reasons that the engine knows.
    """
    with _parsed("answer"):
        gaps = _Asked.of(output, index).told_of(MISSING) or ()
        return tuple((int(start), int(stop), str(why)) for start, stop, why in gaps)


def _left(asked: _Asked, rollouts: RolloutStore, wait_s: float) -> Routes:
    """The routes that the engine has left in the store, or leaves there during the wait."""
    if asked.tokens is None or not asked.names:
        wanted = "an answer with an id and token ids, by which rollouts of a name are told apart"
        got = "none: see return_token_ids, of responses enable_response_messages, of a stream gathered(chunks)"
        raise RowError(asked.what, wanted, got)
    give_up_s, pause_s, refused = time.monotonic() + wait_s, POLL_S, dict[str, str]()
    while True:
        for name in asked.names:
            handle = rollouts.find(name)
            if handle is None or handle.put_id in refused:
                continue
            found = rollouts.get(handle)
            if isinstance(found, Absence):
                why: str | None = found.value
            elif (stop := found[0].stop) < len(asked.tokens) - 1:  # perhaps of an earlier request that began alike
                why = f"rows of the first {stop} tokens, of {len(asked.tokens) - 1} that have some"
            elif (why := asked.refusal(found[0])) is None:
                return asked.own(found[0])
            refused[handle.put_id] = f"{name}: {why}"
        if time.monotonic() > give_up_s:
            got = "; ".join(refused.values()) or "neither a handle in the answer nor one in the store"
            raise RowError(asked.what, f"a rollout of this answer's tokens within {wait_s} s", got)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_MAX_S)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The parts of an answer about the wanted completion."""

    index: int
    names: tuple[str, ...]  # its request's possible names in the engine; none where the answer has no id
    tokens: list[int] | None
    prompt: int  # how many of the tokens are the prompt
    told: Mapping[str, Any]
    ended: str | None = None  # why the request ended

    @classmethod
    def of(cls, output: Any, index: int) -> Self:
        """Raises :class:`RowError` for a part of an answer, and for an index without a completion."""
        _refuse_parts(output)
        ended = None
        told = _mapping(_mapping(field_of(output, "kv_transfer_params")).get(FIELD))
        request = field_of(output, "request_id") or field_of(output, "id")
        if meta := _mapping(field_of(output, "meta_info")):  # SGLang: each completion is an answer of its own
            told, request = _mapping(next(filter(None, reversed(meta.get(FIELD) or ())), None)), meta.get("id")
            prompt, answered, names = (
                field_of(output, "prompt_token_ids"),
                field_of(output, "output_ids"),
                [str(request)],
            )
        elif field_of(output, "object") == "response":  # each of several turns is a request of its own
            prompt, answered = _tokens_of(output, "input_messages"), _tokens_of(output, "output_messages")
            names = [f"{request}_0"]
        else:
            choices = {field_of(each, "index"): each for each in answers_of(output)}
            if choices and index not in choices:
                raise RowError("index", f"one of {sorted(choices)}, as the answer has them", index)
            ended = field_of(choices.get(index), "finish_reason")
            prompts = {i: _prompt_of(output, each) for i, each in choices.items()}
            prompt, answered = prompts.get(index), field_of(choices.get(index), "token_ids")
            lists = field_of(output, "outputs") is None
            names = list(dict.fromkeys(_names(str(request), index, prompts, lists=lists))) if request else []
        tokens = None if prompt is None or answered is None else [*prompt, *answered]
        return cls(index, tuple(names), tokens, len(prompt or ()), told, ended)

    @property
    def what(self) -> str:
        return f"routes of completion {self.index} ({' or '.join(self.names[:4]) or 'no id'})"

    @property
    def left(self) -> Mapping[str, Any]:
        return _mapping(self.told.get(LEFT))

    def told_of(self, kind: str) -> Any:
        """The entry of this kind in the answer. Without an id, an answer can have it for one request only."""
        told = self.told.get(kind)
        if not isinstance(told, Mapping):
            return told
        names = self.names or (list(told) if len(told) == 1 else ())
        return next((told[name] for name in names if name in told), None)

    def refusal(self, found: Routes) -> str | None:
        """Why routes do not belong to this answer, in words; ``None`` if they do, or if it has no token ids."""
        if self.tokens is None:
            return None
        theirs = {count: digest for count, digest in found.token_hashes if count <= len(self.tokens)}
        mine = dict(token_hashes(self.tokens, theirs))
        if differ := [count for count in sorted(theirs) if mine[count] != theirs[count]]:
            return f"rows of other tokens: the hash of the first {differ[0]} differs"
        rows = self._rows(found)
        return None if rows in theirs else f"rows of tokens that nothing says to be the first {rows} of this answer"

    def own(self, found: Routes) -> Routes:
        """``found`` without rows of tokens that are not in the answer, bound to the answer's tokens."""
        if self.tokens is None:
            return found
        rows = self._rows(found)
        return found.slice(found.start, max(found.start, rows)).bind(
            self.tokens, [count for count in {found.start or rows, self.prompt, rows} if count <= rows]
        )

    def _rows(self, found: Routes) -> int:
        assert self.tokens is not None
        return max(0, min(found.stop, len(self.tokens) - 1))


def _names(request: str, index: int, prompts: Mapping[int, Any], *, lists: bool) -> Iterator[str]:
    """The engine's possible names for completion ``index`` of an answer whose choices have these prompts.

    A server with ``lists`` of prompts makes a request of each, with the prompt's number after the id, and numbers all
    choices in one sequence. It does not say how many completions a prompt has: if all choices are there, ``n`` divides
    the number of successive choices with the same prompt.
    """
    if len(prompts) > 1 and sorted(prompts) == list(range(len(prompts))):
        runs = gcd(*(len(list(run)) for _, run in groupby(prompts[i] for i in range(len(prompts)))))
        counts = [n for n in range(runs, 0, -1) if runs % n == 0]
    else:
        counts = list(range(1, max(index, 1) + 2))  # the last stands for every larger n
    for n in counts:
        prompt, number = divmod(index, n)
        child = f"{number}_" if n > 1 else ""
        if prompt == 0:
            yield f"{child}{request}"
        if lists:
            yield f"{child}{request}-{prompt}"  # a completion
            yield f"{child}{request}_{prompt}"  # a chat


def _refuse_parts(output: Any) -> None:
    """Raise :class:`RowError` for a part of an answer, as a stream sends it, and for a server's error in its place."""
    kind, event = field_of(output, "object"), field_of(output, "type")
    if field_of(output, "sequences") is not None or field_of(output, "cum_logprob") is not None:
        got = "one of a beam search, whose beams are made of many requests that the answer does not name"
        raise RowError("routes", "an answer of one request", got)
    whole = field_of(output, "usage") is not None or "kv_transfer_params" in (
        output if isinstance(output, Mapping) else dir(output)
    )
    if kind == "chat.completion.chunk" or (kind == "text_completion" and not whole):
        wanted = "a whole answer: kvroute.integrations.vllm.gathered(chunks) makes one of all chunks of a stream"
        raise RowError("routes", wanted, f"a chunk of a stream, {kind}")
    if isinstance(event, str) and event.startswith("response."):
        raise RowError("routes", "a whole answer: the response of response.completed", f"an event of a stream, {event}")
    if isinstance(output, Mapping) and output.get("error"):
        error = _mapping(output["error"])
        raise RowError("routes", "an answer", f"the server's error: {error.get('message') or output['error']}")


def gathered(chunks: Iterable[Any]) -> dict[str, Any]:
    """The answer in a stream of ``chunks``, completions or a chat; :func:`routes` takes it.

    ``chunks`` are all chunks of one stream in order, JSON or a client's objects, without the final ``[DONE]``. The
    answer has the id, and for each choice its tokens and why it ended. No chunk has a handle: the store has the routes.
    Raises :class:`RowError` for no chunk, for chunks of several answers or without token ids (``return_token_ids``),
    and for a server's error.
    """
    answer: dict[str, Any] = {"kv_transfer_params": None}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        with _parsed("stream"):
            if (error := field_of(chunk, "error")) is not None:
                raise RowError("stream", "chunks of an answer", error)
            kind, request = WHOLE.get(field_of(chunk, "object") or ""), field_of(chunk, "id")
            if kind is None or request is None:
                raise RowError("chunk.object", f"one of {sorted(WHOLE)}, with an id", field_of(chunk, "object"))
            if answer.setdefault("id", request) != request:
                raise RowError("chunk.id", answer["id"], request)
            answer |= {"object": kind} | _present(chunk, "prompt_token_ids")
            for each in answers_of(chunk):
                index = field_of(each, "index")
                choice = choices.setdefault(index, {"index": index, "token_ids": None})
                choice |= _present(each, "prompt_token_ids", "finish_reason", "stop_reason")
                if (tokens := field_of(each, "token_ids")) is not None:
                    choice["token_ids"] = [*(choice["token_ids"] or ()), *tokens]
    if not choices:
        raise RowError("stream", "chunks of an answer", "no choice in any")
    for index, choice in choices.items():
        if choice["token_ids"] is None or _prompt_of(answer, choice) is None:
            raise RowError(f"token ids of choice {index}", "a stream that was asked for with return_token_ids", "none")
    with _parsed("stream"):
        return answer | {"choices": [choices[index] for index in sorted(choices)]}


@contextmanager
def _parsed(what: str) -> Iterator[None]:
    """JSON of another form than an engine's is a :class:`RowError`."""
    try:
        yield
    except KVRouteError:
        raise
    except (TypeError, LookupError, AttributeError, ValueError) as error:
        raise RowError(what, "one in the form of an engine's or a server's", repr(error)) from error


def _present(of: Any, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := field_of(of, name)) is not None}


def _prompt_of(output: Any, choice: Any) -> Any:
    own = field_of(choice, "prompt_token_ids")
    return field_of(output, "prompt_token_ids") if own is None else own


def _tokens_of(response: Any, name: str) -> Any:
    """The token ids of a response's messages of that name, if the request asked for them and it has one turn."""
    messages: Sequence[Any] = field_of(response, name) or ()
    return field_of(messages[0], "tokens") if len(messages) == 1 else None


def answers_of(output: Any) -> Sequence[Any]:
    """The completions of an engine's output, or the choices of a server's."""
    return field_of(output, "outputs") or field_of(output, "choices") or ()


def field_of(of: Any, name: str) -> Any:
    """A field of an object or of JSON; ``None`` if there is none."""
    return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)


def _mapping(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else {}


__all__ = [
    "ERROR",
    "FIELD",
    "LEFT",
    "MISSING",
    "START",
    "UNSEEN",
    "gathered",
    "missing",
    "routes",
    "start_of",
    "unseen",
]

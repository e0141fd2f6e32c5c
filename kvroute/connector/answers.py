"""The client's end: the routes of an answer, from an engine's own object or from the JSON of an OpenAI server.

Beside an answer goes ``{"kvroute": {"routes": {i: routes}, "rollouts": {i: handle}, "unseen": {i: spans}, "missing":
{i: gaps}, "error": {i: text}, "routing_weights": {i: weights}}}``. ``i`` is a completion's number among those of its
prompt, ``"0"`` where there is one.
It has routes, as :meth:`Routes.to_json` says, or where a rollout store is used handles of them. An answer without that
has its routes in a rollout store, under the key that its request carried
(:mod:`kvroute.connector.key`). Routes found there belong to an answer only if their token hashes say so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from cache_manager.errors import InvalidInputError, KVRouteError, RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.connector import own_field
from kvroute.connector.key import checked_choice, checked_key, is_void, rollout_id
from kvroute.connector.tickets import TRANSFER
from kvroute.rollout import Absence, RolloutHandle, RolloutStore
from kvroute.routes import Routes, RoutingWeights, SamplingSupport
from kvroute.routes.token_hash import token_hashes

FIELD: Final = "kvroute"
ROUTES: Final = "routes"
LEFT: Final = "rollouts"
UNSEEN: Final = "unseen"
WEIGHTS: Final = "routing_weights"
GAPS: Final = "missing"
ERROR: Final = "error"
START: Final = "start"
"""A request's option under :data:`FIELD`: the position of the first row in its answer."""
MTP_FIELD: Final = "kvroute_mtp"
"""Beside an answer, of the rows of an MTP layer: ``{i: {"routes": routes, "missing": gaps}}``."""
KEY: Final = "key"
"""A request's option under :data:`FIELD`: where its routes lie in a rollout store."""
UNHANDED: Final = ("abort", "error")
"""Ends of requests after which vLLM may send no handle: its front end has ended them, or never had their last step."""
WHOLE_OBJECTS: Final = {"text_completion": "text_completion", "chat.completion.chunk": "chat.completion"}
"""The ``object`` of a stream's chunks, and of the whole answer."""
POLL_S: Final = 0.01
POLL_MAX_S: Final = 0.2
"""Looks into a rollout store are so far apart: each pause is twice the one before."""
OPTIONS: Final = f"a mapping with {START} or {KEY}"
SUPPORTED: Final = (
    "vLLM 0.30 or later with return_sampling_mask (a RequestOutput, or /inference/v1/generate), or SGLang for a "
    "request with return_sampling_mask"
)
"""What answers with sampling supports."""
ASKED: Final = (START, KEY, TRANSFER, ROUTES, WEIGHTS, LEFT, UNSEEN, GAPS, ERROR)
"""Keys of a request's mapping under :data:`FIELD`. All but the first two are of an answer of prefill, which goes on as
it is; of those kvroute reads the first."""


class Options(NamedTuple):
    """A request's own options."""

    start: Any = 0  # judged where the prompt is known
    key: str | None = None


def options_of(options: Any) -> Options:
    """The options that a request has in its mapping ``options`` under :data:`FIELD`.

    Raises :class:`RowError` for anything but a mapping, for an unknown name in it, and for a key that is not one.
    """
    if options is None:
        return Options()
    if not isinstance(options, Mapping):
        raise RowError(FIELD, OPTIONS, repr(options))
    for name in options:
        if name not in ASKED:
            raise RowError(FIELD, OPTIONS, f"the key {name!r}")
    key = checked_key(options[KEY], f"{FIELD}.{KEY}") if KEY in options else None
    return Options(options.get(START, 0), key)


def routes(
    output: Any,
    index: int = 0,
    *,
    rollouts: RolloutStore | None = None,
    key: str | None = None,
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
    string). ``key`` is the one that the request carried, or ``choice_key(key, i)`` for completion ``i`` of ``n > 1``.
    The call waits up to ``wait_s`` seconds for routes of these tokens under this key; an error in the answer ends the
    wait at once.

    With ``spec``, the model's :func:`kvroute.routing_spec_from_hf`, an answer that has neither may have its rows in the
    engine's own field, ``routed_experts``: they are bound to the answer's tokens. The engine has refused the field, and
    said why, if one of them is missing.

    Raises :class:`RowError` if there are none, if they are of other tokens, for an unsound handle, and for a key that
    is none.
    """
    if key is not None:
        checked_choice(key, KEY)
    with _parsed("answer"):
        answer = _Completion.of(output, index)
    encoded = answer.entry_of(ROUTES)
    if encoded is not None:
        return answer.proved(Routes.from_json(encoded))
    encoded = answer.entry_of(LEFT)
    if encoded is not None:
        try:
            handle = RolloutHandle.from_json(encoded)
        except InvalidInputError as unsound:
            raise RowError(unsound.field, unsound.wanted, unsound.got) from unsound
        if rollouts is None:
            wanted = "rollouts=, the store that they were left in"
            raise RowError("routes", wanted, f"a handle of a store of kind {handle.store}")
        rollout = rollouts.get(handle)
        if isinstance(rollout, Absence):
            raise RowError("routes", "a rollout that is there and sound", rollout.value)
        return answer.proved(rollout[0])
    error = answer.entry_of(ERROR)
    if error is not None:
        raise RowError("routes", "an answer with routes", error)
    with _parsed("answer"):
        packed = own_field.of(output, index)
    if packed is not None and spec is not None:
        return own_field.bound_routes(packed, answer.tokens, answer.prompt, spec)
    gaps = answer.entry_of(GAPS)
    if rollouts is None and gaps:
        raise RowError("routes", "an answer with all of its rows", f"missing, and why: {gaps}")
    if rollouts is None and packed is not None:
        wanted = "spec=, of the model's rows: kvroute.routing_spec_from_hf(config, block_tokens=1)"
        raise RowError(answer.what, wanted, "rows in the engine's own field, routed_experts")
    if rollouts is None:
        wanted = "an answer that has them or their handle, or rollouts=, the store that they were left in"
        got = f"those of completions {answer.others}" if answer.others else "neither"
        if answer.ended in UNHANDED:
            got += f": the request ended as {answer.ended!r}, and such an answer may have no handle"
        raise RowError(answer.what, wanted, got)
    return _left(answer, rollouts, key or answer.key, wait_s)


def routing_weights(output: Any, index: int = 0) -> RoutingWeights:
    """The routes of completion ``index`` of ``output``, as :func:`routes` has them, and a weight for each of their ids.

    vLLM returns them with the setting ``routing_weights``. A weight is the float32 that the experts' kernel was given
    for its id; where the engine scales the experts' output, it is the product of both. Ids and weights are of one pass.

    Raises :class:`RowError` if the answer has none, if they are of other ids, and as :func:`routes` does.
    """
    with _parsed("answer"):
        answer = _Completion.of(output, index)
        ids = answer.entry_of(ROUTES)
        encoded = answer.entry_of(WEIGHTS)
    if ids is None or encoded is None:
        wanted = "an answer with weights beside its routes: kvroute's setting routing_weights"
        why = answer.entry_of(ERROR)
        raise RowError(f"routing weights, {answer.what}", wanted, "one without" if why is None else why)
    weights = RoutingWeights.from_json(Routes.from_json(ids), encoded)
    own = answer.proved(weights.routes)
    return RoutingWeights(own, weights.weights[: len(own)])


def mtp_routes(output: Any, index: int = 0) -> Routes:
    """What an MTP layer's router chose for the tokens of completion ``index`` of ``output``, as layer 0 of 1.

    vLLM returns them with the setting ``mtp``. The row at a position is that of the pass in which the layer read this
    token's hidden state with the token behind it; the last token but one is the last with a row. They are bound to the
    tokens as :func:`routes` says, and are never among its rows; :func:`mtp_missing` says why rows are missing.

    Raises :class:`RowError` if the answer has none, and if they are of other tokens.
    """
    answer, entry = _mtp_of(output, index)
    if entry is None:
        wanted = "an answer with rows of an MTP layer: kvroute's setting mtp, and the last of a prompt's completions"
        raise RowError(f"MTP {answer.what}", wanted, "one without")
    if ERROR in entry:
        raise RowError(f"MTP {answer.what}", "an answer with rows", entry[ERROR])
    rows = Routes.from_json(_mapping(entry.get(ROUTES)))
    own = answer.proved(rows)
    if answer.tokens is not None and not any(own.stop < count <= len(answer.tokens) for count, _ in rows.token_hashes):
        wanted = f"a hash of the {own.stop + 1} tokens that its rows were read from"
        raise RowError(f"MTP {answer.what}", wanted, "none: it was cut too far before its end")
    return own


def mtp_missing(output: Any, index: int = 0) -> tuple[tuple[int, int, str], ...]:
    """The positions ``[start, stop)`` at which :func:`mtp_routes` has no row, and why."""
    _, entry = _mtp_of(output, index)
    with _parsed("answer"):
        return tuple((int(start), int(stop), str(why)) for start, stop, why in _mapping(entry).get(GAPS) or ())


def _mtp_of(output: Any, index: int) -> tuple[_Completion, Mapping[str, Any] | None]:
    """The completion, and what the answer has of its MTP layer's rows."""
    with _parsed("answer"):
        answer = _Completion.of(output, index)
        entries = _mapping(_mapping(field_of(output, "kv_transfer_params")).get(MTP_FIELD))
        return answer, entries.get(str(answer.index))


def unseen(output: Any, index: int = 0) -> tuple[tuple[int, int], ...]:
    """The positions ``[start, stop)`` at which the last router's choice is not proved, with ``witness="flagged"``.

    Their KV was loaded and their rows were matched by that KV, which does not show the last layer's choice.
    """
    with _parsed("answer"):
        spans = _Completion.of(output, index).entry_of(UNSEEN) or ()
        return tuple((int(start), int(stop)) for start, stop in spans)


def missing(output: Any, index: int = 0) -> tuple[tuple[int, int, str], ...]:
    """The positions ``[start, stop)`` whose rows another engine lent but which did not come, and why.

    The routes say which rows are missing for any reason; this gives the reasons that the engine knows.
    """
    with _parsed("answer"):
        gaps = _Completion.of(output, index).entry_of(GAPS) or ()
        return tuple((int(start), int(stop), str(why)) for start, stop, why in gaps)


def support(output: Any, index: int = 0, *, prompt: Sequence[int] | None = None) -> SamplingSupport:
    """The sampling supports of completion ``index`` of ``output``: what the engine drew each of its tokens from.

    Engines return them themselves, and no block and no store of kvroute has any: vLLM with ``return_sampling_mask``, in
    a ``RequestOutput`` and in the JSON of ``/inference/v1/generate``; SGLang for a request with
    ``return_sampling_mask``. They begin at the first token of the answer, as a prompt was not drawn, whatever its
    prefix hits are. They are bound to the prompt and to the answer's tokens, and in each is its token.

    ``prompt`` are the prompt's token ids, for an answer that does not have them. :class:`RowError` if there are no
    supports, for a number of them other than that of the tokens, for one without its token, and without token ids.
    """
    with _parsed("answer"):
        completion = _Completion.of(output, index)
        what = f"sampling support of completion {completion.index} of {completion.request or 'an answer without an id'}"
        rows, own_prompt, tokens = _drawn(output, index)
        prompt_ids = own_prompt if prompt is None else prompt
    if rows is None:
        raise RowError(what, SUPPORTED, "an answer with none")
    if tokens is None or prompt_ids is None:
        got = "no token ids" if tokens is None else "those of the completion alone"
        raise RowError(what, "token ids of the completion and of the prompt, in the answer or prompt=", got)
    if len(rows) != len(tokens):
        raise RowError(what, f"one for each of its {len(tokens)} tokens", len(rows))
    return SamplingSupport.of(rows, [*prompt_ids, *tokens], len(prompt_ids))


def _drawn(output: Any, index: int) -> tuple[Any, Any, Any]:
    """The supports of a completion, a list of ids for each token, and the token ids of its prompt and of itself."""
    meta = _mapping(field_of(output, "meta_info"))
    if meta:  # SGLang
        return (
            meta.get("output_token_sampling_mask"),
            field_of(output, "prompt_token_ids"),
            field_of(output, "output_ids"),
        )
    choices = {field_of(choice, "index"): choice for choice in answers_of(output)}
    choice = choices.get(index)
    mask = field_of(choice, "sampling_mask")
    rows = mask if mask is None or isinstance(mask, list) else mask.token_ids
    return rows, choice and _prompt_of(output, choice), field_of(choice, "token_ids")


def _left(answer: _Completion, rollouts: RolloutStore, key: str | None, wait_s: float) -> Routes:
    """The routes that the engine has left in the store under ``key``, or leaves there during the wait."""
    if answer.tokens is None:
        wanted = "an answer with token ids, by which rollouts of a key are told apart"
        got = "none: see return_token_ids, of responses enable_response_messages, of a stream gathered(chunks)"
        raise RowError(answer.what, wanted, got)
    if key is None:
        wanted = f"{KEY}=, the one that its request carried in kv_transfer_params.{FIELD}.{KEY}"
        raise RowError(answer.what, wanted, "neither that nor a handle in the answer")
    name = rollout_id(key, answer.tokens[: answer.prompt])
    give_up_s = time.monotonic() + wait_s
    pause_s = POLL_S
    refused = dict[str, str]()
    while True:
        handle = rollouts.find(name)
        if handle is not None and handle.put_id not in refused:
            rollout = rollouts.get(handle)
            why = rollout.value if isinstance(rollout, Absence) else answer.refusal_by_key(rollout[0], key)
            if why is None:
                assert not isinstance(rollout, Absence)
                return answer.own(rollout[0])
            refused[handle.put_id] = why
        if time.monotonic() > give_up_s:
            got = "; ".join(refused.values()) or "neither a handle in the answer nor one in the store"
            raise RowError(answer.what, f"a rollout of its tokens under the {KEY} {key} within {wait_s} s", got)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_MAX_S)


@dataclass(frozen=True, slots=True)
class _Completion:
    """The parts of an answer about the wanted completion."""

    index: int
    request: str  # the answer's id
    tokens: list[int] | None
    prompt: int  # how many of the tokens are the prompt
    entries: Mapping[str, Any]
    ended: str | None = None  # why the request ended
    key: str | None = None  # of SGLang's request, whose id it is

    @classmethod
    def of(cls, output: Any, index: int) -> Self:
        """Raises :class:`RowError` for a part of an answer, and for an index without a completion."""
        _refuse_parts(output)
        entries = _mapping(_mapping(field_of(output, "kv_transfer_params")).get(FIELD))
        request = str(field_of(output, "request_id") or field_of(output, "id") or "")
        ended = key = None
        meta = _mapping(field_of(output, "meta_info"))
        if meta:  # SGLang: each completion is an answer of its own
            entries = _mapping(next(filter(None, reversed(meta.get(FIELD) or ())), None))
            request = str(meta.get("id") or "")
            key = request or None
            index = 0
            prompt = field_of(output, "prompt_token_ids")
            answered = field_of(output, "output_ids")
        elif field_of(output, "object") == "response":  # each of several turns is a request of its own
            prompt = _tokens_of(output, "input_messages")
            answered = _tokens_of(output, "output_messages")
        else:
            choices = {field_of(choice, "index"): choice for choice in answers_of(output)}
            if choices and index not in choices:
                raise RowError("index", f"one of {sorted(choices)}, as the answer has them", index)
            choice = choices.get(index)
            ended = field_of(choice, "finish_reason")
            prompt = choice and _prompt_of(output, choice)
            answered = field_of(choice, "token_ids")
        tokens = None if prompt is None or answered is None else [*prompt, *answered]
        return cls(index, request, tokens, len(prompt or ()), entries, ended, key)

    @property
    def what(self) -> str:
        return f"routes of completion {self.index} of {self.request or 'an answer without an id'}"

    @property
    def others(self) -> list[str]:
        """Numbers of the completions whose routes, or whose handles, the answer has."""
        return sorted({*_mapping(self.entries.get(ROUTES)), *_mapping(self.entries.get(LEFT))})

    def entry_of(self, kind: str) -> Any:
        """The entry of this kind in the answer.

        Where the only entry has another number, the client's own id began with that: whether it is of this answer the
        tokens have to show.
        """
        entries = self.entries.get(kind)
        if not isinstance(entries, Mapping):
            return entries
        number = str(self.index)
        if number == "0" and len(entries) == 1 and self.tokens is not None and number not in entries:
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
            raise RowError(self.what, f"a {KEY} that no other request has had with this prompt", repr(key))
        if routes.stop < len(self.tokens) - 1:  # of a request that was cut earlier, or of another one
            return f"rows of the first {routes.stop} tokens, of {len(self.tokens) - 1} that have some"
        return self.refusal(routes)

    def own(self, routes: Routes) -> Routes:
        """``routes`` without rows of tokens that are not in the answer, bound to the answer's tokens."""
        if self.tokens is None:
            return routes
        rows = self._rows(routes)
        return routes.slice(routes.start, max(routes.start, rows)).bind(
            self.tokens, [count for count in {routes.start or rows, self.prompt, rows} if count <= rows]
        )

    def _rows(self, routes: Routes) -> int:
        assert self.tokens is not None
        return max(0, min(routes.stop, len(self.tokens) - 1))


def _refuse_parts(output: Any) -> None:
    """Raise :class:`RowError` for a part of an answer, as a stream sends it, and for a server's error in its place."""
    kind = field_of(output, "object")
    event = field_of(output, "type")
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
            error = field_of(chunk, "error")
            if error is not None:
                raise RowError("stream", "chunks of an answer", error)
            kind = WHOLE_OBJECTS.get(field_of(chunk, "object") or "")
            request = field_of(chunk, "id")
            if kind is None or request is None:
                raise RowError("chunk.object", f"one of {sorted(WHOLE_OBJECTS)}, with an id", field_of(chunk, "object"))
            if answer.setdefault("id", request) != request:
                raise RowError("chunk.id", answer["id"], request)
            answer |= {"object": kind} | _present(chunk, "prompt_token_ids")
            for delta in answers_of(chunk):
                index = field_of(delta, "index")
                choice = choices.setdefault(index, {"index": index, "token_ids": None})
                choice |= _present(delta, "prompt_token_ids", "finish_reason", "stop_reason")
                tokens = field_of(delta, "token_ids")
                if tokens is not None:
                    choice["token_ids"] = [*(choice["token_ids"] or ()), *tokens]
    if not choices:
        raise RowError("stream", "chunks of an answer", "no choice in any")
    for index, choice in choices.items():
        if choice["token_ids"] is None or _prompt_of(answer, choice) is None:
            raise RowError(f"token ids of choice {index}", "a stream that was asked for with return_token_ids", "none")
    with _parsed("stream"):
        return answer | {"choices": [choices[index] for index in sorted(choices)]}


@contextmanager
def _parsed(field: str) -> Iterator[None]:
    """JSON of another form than an engine's is a :class:`RowError`."""
    try:
        yield
    except KVRouteError:
        raise
    except (TypeError, LookupError, AttributeError, ValueError) as error:
        raise RowError(field, "one in the form of an engine's or a server's", repr(error)) from error


def _present(part: Any, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := field_of(part, name)) is not None}


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


def field_of(part: Any, name: str) -> Any:
    """A field of an object or of JSON; ``None`` if there is none."""
    return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


__all__ = [
    "ERROR",
    "FIELD",
    "GAPS",
    "KEY",
    "LEFT",
    "MTP_FIELD",
    "ROUTES",
    "START",
    "UNSEEN",
    "WEIGHTS",
    "Options",
    "gathered",
    "missing",
    "mtp_missing",
    "mtp_routes",
    "options_of",
    "routes",
    "routing_weights",
    "support",
    "unseen",
]

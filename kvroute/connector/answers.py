"""The client's end: the routes of an answer, from an engine's own object or from the JSON of an OpenAI server.

:mod:`kvroute.connector.fields` says what is beside an answer. An answer without that has its routes in a rollout store,
under the key that its request carried (:mod:`kvroute.connector.key`). Routes found there belong to an answer only if
their token hashes say so (:mod:`kvroute.connector.completion`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from cache_manager.errors import InvalidInputError, RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.connector import own_field
from kvroute.connector.completion import (
    Completion,
    choices_of,
    field_of,
    gathered,
    is_sglang,
    mapping,
    mtp_entry,
    parsed,
    prompt_of,
)
from kvroute.connector.fields import ERROR, FIELD, GAPS, KEY, LEFT, ROUTES, UNSEEN, WEIGHTS
from kvroute.connector.key import checked_choice, rollout_id
from kvroute.rollout import Absence, RolloutHandle, RolloutStore
from kvroute.routes import Routes, RoutingWeights, SamplingSupport

UNHANDED: Final = ("abort", "error")
"""Ends of requests after which vLLM may send no handle: its front end has ended them, or never had their last step."""
POLL_S: Final = 0.01
POLL_MAX_S: Final = 0.2
"""Looks into a rollout store are so far apart: each pause is twice the one before."""
SUPPORTED: Final = (
    "vLLM 0.30 or later with return_sampling_mask (a RequestOutput, or /inference/v1/generate), or SGLang for a "
    "request with return_sampling_mask"
)
"""What answers with sampling supports."""


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
    answer = Completion.of(output, index)
    encoded = answer.entry_of(ROUTES)
    if encoded is not None:
        return answer.proved(Routes.from_json(encoded))
    handle = answer.entry_of(LEFT)
    if handle is not None:
        return answer.proved(_by_handle(handle, rollouts))
    error = answer.entry_of(ERROR)
    if error is not None:
        raise RowError("routes", "an answer with routes", error)
    with parsed("answer"):
        packed = own_field.of(output, index)
    if packed is not None and spec is not None:
        return own_field.bound_routes(packed, answer.tokens, answer.prompt, spec)
    if rollouts is not None:
        return _by_key(answer, rollouts, key or answer.key, wait_s)
    raise _absence(answer, in_field=packed is not None)


def routing_weights(output: Any, index: int = 0) -> RoutingWeights:
    """The routes of completion ``index`` of ``output``, as :func:`routes` has them, and a weight for each of their ids.

    vLLM and SGLang return them with the setting ``routing_weights``. A weight is the float32 that the experts' kernel
    was given for its id; where vLLM scales the experts' output, it is the product of both, and SGLang with such a model
    refuses the setting. Ids and weights are of one pass.

    Raises :class:`RowError` if the answer has none, if they are of other ids, and as :func:`routes` does.
    """
    with parsed("answer"):
        answer = Completion.of(output, index)
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
    answer = Completion.of(output, index)
    entry = mtp_entry(output, answer)
    what = f"MTP {answer.what}"
    if entry is None:
        wanted = "an answer with rows of an MTP layer: kvroute's setting mtp, and the last of a prompt's completions"
        raise RowError(what, wanted, "one without")
    if ERROR in entry:
        raise RowError(what, "an answer with rows", entry[ERROR])
    rows = Routes.from_json(mapping(entry.get(ROUTES)))
    own = answer.proved(rows)
    if answer.tokens is None:
        return own
    counts = [count for count, _ in rows.token_hashes]
    if not any(own.stop < count <= len(answer.tokens) for count in counts):
        wanted = f"a hash of the {own.stop + 1} tokens that its rows were read from"
        raise RowError(what, wanted, "none: it was cut too far before its end")
    return own


def mtp_missing(output: Any, index: int = 0) -> tuple[tuple[int, int, str], ...]:
    """The positions ``[start, stop)`` at which :func:`mtp_routes` has no row, and why."""
    entry = mtp_entry(output, Completion.of(output, index))
    with parsed("answer"):
        return _gaps(mapping(entry).get(GAPS))


def unseen(output: Any, index: int = 0) -> tuple[tuple[int, int], ...]:
    """The positions ``[start, stop)`` at which the last router's choice is not proved, with ``witness="flagged"``.

    Their KV was loaded and their rows were matched by that KV, which does not show the last layer's choice.
    """
    entry = Completion.of(output, index).entry_of(UNSEEN)
    with parsed("answer"):
        return tuple((int(start), int(stop)) for start, stop in entry or ())


def missing(output: Any, index: int = 0) -> tuple[tuple[int, int, str], ...]:
    """The positions ``[start, stop)`` whose rows another engine lent but which did not come, and why.

    The routes say which rows are missing for any reason; this gives the reasons that the engine knows.
    """
    entry = Completion.of(output, index).entry_of(GAPS)
    with parsed("answer"):
        return _gaps(entry)


def support(
    output: Any,
    index: int = 0,
    *,
    prompt: Sequence[int] | None = None,
) -> SamplingSupport:
    """The sampling supports of completion ``index`` of ``output``: what the engine drew each of its tokens from.

    Engines return them themselves, and no block and no store of kvroute has any: vLLM with ``return_sampling_mask``, in
    a ``RequestOutput`` and in the JSON of ``/inference/v1/generate``; SGLang for a request with
    ``return_sampling_mask``. They begin at the first token of the answer, as a prompt was not drawn, whatever its
    prefix hits are. They are bound to the prompt and to the answer's tokens, and in each is its token.

    ``prompt`` are the prompt's token ids, for an answer that does not have them. :class:`RowError` if there are no
    supports, for a number of them other than that of the tokens, for one without its token, and without token ids.
    """
    what = f"sampling support of {Completion.of(output, index).name}"
    with parsed("answer"):
        drawn = _Drawn.of(output, index)
    rows = drawn.rows
    tokens = drawn.tokens
    prompt_ids = drawn.prompt if prompt is None else prompt
    if rows is None:
        raise RowError(what, SUPPORTED, "an answer with none")
    if tokens is None or prompt_ids is None:
        wanted = "token ids of the completion and of the prompt, in the answer or prompt="
        got = "no token ids" if tokens is None else "those of the completion alone"
        raise RowError(what, wanted, got)
    if len(rows) != len(tokens):
        raise RowError(what, f"one for each of its {len(tokens)} tokens", len(rows))
    return SamplingSupport.of(rows, [*prompt_ids, *tokens], len(prompt_ids))


class _Drawn(NamedTuple):
    """What a completion was drawn from, as its answer has it; each part may be ``None``."""

    rows: Any  # a list of ids for each token
    prompt: Any  # token ids
    tokens: Any  # token ids

    @classmethod
    def of(cls, output: Any, index: int) -> _Drawn:
        if is_sglang(output):
            meta = mapping(field_of(output, "meta_info"))
            rows = meta.get("output_token_sampling_mask")
            return cls(rows, field_of(output, "prompt_token_ids"), field_of(output, "output_ids"))
        choice = choices_of(output).get(index)
        mask = field_of(choice, "sampling_mask")
        rows = mask if mask is None or isinstance(mask, list) else mask.token_ids
        return cls(rows, choice and prompt_of(output, choice), field_of(choice, "token_ids"))


def _gaps(entry: Any) -> tuple[tuple[int, int, str], ...]:
    return tuple((int(start), int(stop), str(why)) for start, stop, why in entry or ())


# -------------------------------------------------------------------- where routes are found


def _by_handle(encoded: Any, rollouts: RolloutStore | None) -> Routes:
    """The routes that the answer's handle names."""
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
    return rollout[0]


def _by_key(
    answer: Completion,
    rollouts: RolloutStore,
    key: str | None,
    wait_s: float,
) -> Routes:
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
    refused = dict[str, str]()  # why, by put
    for pause_s in _pauses():
        handle = rollouts.find(name)
        if handle is not None and handle.put_id not in refused:
            rollout = rollouts.get(handle)
            why = rollout.value if isinstance(rollout, Absence) else answer.refusal_by_key(rollout[0], key)
            if why is None:
                assert not isinstance(rollout, Absence)
                return answer.own(rollout[0])
            refused[handle.put_id] = why
        if time.monotonic() > give_up_s:
            break
        time.sleep(pause_s)
    wanted = f"a rollout of its tokens under the {KEY} {key} within {wait_s} s"
    got = "; ".join(refused.values()) or "neither a handle in the answer nor one in the store"
    raise RowError(answer.what, wanted, got)


def _pauses() -> Iterator[float]:
    """Seconds between looks into a store, without end."""
    pause_s = POLL_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, POLL_MAX_S)


def _absence(answer: Completion, *, in_field: bool) -> RowError:
    """Why there are no routes, where no rollout store is at hand: ``in_field``, the engine's own field has rows."""
    gaps = answer.entry_of(GAPS)
    if gaps:
        wanted = "an answer with all of its rows"
        return RowError("routes", wanted, f"missing, and why: {gaps}")
    if in_field:
        wanted = "spec=, of the model's rows: kvroute.routing_spec_from_hf(config, block_tokens=1)"
        return RowError(answer.what, wanted, "rows in the engine's own field, routed_experts")
    wanted = "an answer that has them or their handle, or rollouts=, the store that they were left in"
    got = "neither"
    if answer.others:
        got = f"those of completions {answer.others}"
    if answer.ended in UNHANDED:
        got += f": the request ended as {answer.ended!r}, and such an answer may have no handle"
    return RowError(answer.what, wanted, got)


__all__ = [
    "gathered",
    "missing",
    "mtp_missing",
    "mtp_routes",
    "routes",
    "routing_weights",
    "support",
    "unseen",
]

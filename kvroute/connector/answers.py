"""The client's end: the routes of an answer, from an engine's own object or from the JSON of an OpenAI server."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cache_manager.errors import RowError
from kvroute.rollout import Absence, RolloutHandle, RolloutStore, open_rollouts
from kvroute.routes import Routes

FIELD: Final = "kvroute"
UNSEEN: Final = "{}.unseen"
POLL_S: Final = 0.01


def routes(output: Any, index: int = 0, *, rollouts: RolloutStore | None = None, wait_s: float = 5.0) -> Routes:
    """The routes of completion ``index`` of ``output``: a ``RequestOutput``, or the response of the OpenAI server.

    They cover the tokens that were given to the model, which the last one never was, and are bound to the tokens where
    ``output`` has them. ``rollouts`` is the store that the engine was configured to leave routes in. It is the only way
    to those of a request that the front end has ended (a stop string): up to ``wait_s`` seconds are waited for them.

    Raises :class:`RowError` when there are none, and for anything that is no sound handle of them.
    """
    told = (_field(output, "kv_transfer_params") or {}).get(FIELD) or {}
    handle = RolloutHandle.from_json(told[str(index)]) if str(index) in told else None
    if handle is None and rollouts is not None:
        handle = _left(output, index, rollouts, wait_s)
    store = open_rollouts("response:") if handle is not None and handle.store == "response" else rollouts
    if handle is None or store is None:
        got = told.get("error", "neither") if handle is None else f"a handle of a store of kind {handle.store}"
        raise RowError("routes", "an answer with routes, or rollouts=, the store that they were left in", got)
    found = store.get(handle)
    if isinstance(found, Absence):
        raise RowError("routes", "a rollout that is there and sound", found.value)
    return _of_tokens(found[0], output, index)


def _left(output: Any, index: int, rollouts: RolloutStore, wait_s: float) -> RolloutHandle | None:
    """The handle of routes that came with no answer. vLLM's server puts the number of the prompt behind the id."""
    request, give_up_s = _field(output, "request_id") or _field(output, "id"), time.monotonic() + wait_s
    child = f"{index}_" if len(_answers(output)) > 1 else ""
    while True:
        for name in (f"{child}{request}", f"{child}{request}-0"):
            if (handle := rollouts.find(name)) is not None:
                return handle
        if time.monotonic() > give_up_s:
            return None
        time.sleep(POLL_S)


def unseen(output: Any, index: int = 0) -> tuple[tuple[int, int], ...]:
    """The positions ``[start, stop)`` at which nothing proves what the last router chose, with ``witness="flagged"``.

    Their KV was loaded and their rows went by that KV, in which the last layer's choice cannot be seen.
    """
    spans = ((_field(output, "kv_transfer_params") or {}).get(FIELD) or {}).get(UNSEEN.format(index)) or ()
    return tuple((int(start), int(stop)) for start, stop in spans)


def _of_tokens(found: Routes, output: Any, index: int) -> Routes:
    """``found`` without rows of tokens that were not answered, bound to those that were."""
    prompt = _field(output, "prompt_token_ids")
    answer = next((each for each in _answers(output) if _field(each, "index") == index), None)
    answered = None if answer is None else _field(answer, "token_ids")
    prompt = prompt if prompt is not None else answer and _field(answer, "prompt_token_ids")
    if prompt is None or answered is None:
        return found
    tokens = [*prompt, *answered]
    return found.slice(0, min(found.stop, len(tokens) - 1)).bind(tokens)


def _answers(output: Any) -> Sequence[Any]:
    return _field(output, "outputs") or _field(output, "choices") or ()


def _field(of: Any, name: str) -> Any:
    return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)


__all__ = ["FIELD", "UNSEEN", "routes", "unseen"]

"""What vLLM's engine core hears of weights, and when it answers. It asks no connector, so its methods are wrapped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from typing import Any, Final

import msgspec

from kvroute.connector.answers import FIELD
from kvroute.connector.versions import version_of

logger = logging.getLogger(__name__)

HARMLESS: Final = (
    "compute_weight_checksums",
    "get_model_inspection",
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
)
"""Calls to all workers that leave the weights as they are. Any other may change them: a name says little, and a
function nothing."""
STEPS: Final = ("step", "step_with_batch_queue")


def follow() -> None:
    """Engine cores of this process tell the connector of their scheduler, where it is ours, what they are told.

    Called before the first has its methods taken for its loop; harmless when called again.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc  # type: ignore[import-not-found]

    for kind in (EngineCore, EngineCoreProc):
        for name in {*HEARD, *STEPS} & set(vars(kind)):
            call = vars(kind)[name]
            if not hasattr(call, FIELD):
                setattr(kind, name, made := answering(call) if name in STEPS else heard(HEARD[name], call))
                setattr(made, FIELD, True)


def heard(hear: Callable[..., None], call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, of which ``hear`` is told first. Its signature stays: by that vLLM decodes what a client has sent."""

    @wraps(call)
    def wrapped(core: Any, *args: Any, **kwargs: Any) -> Any:
        for rows in _rows_of(getattr(getattr(core, "scheduler", None), "connector", None)):
            hear(rows.weights, *args, **kwargs)
        return call(core, *args, **kwargs)

    return wrapped


def _rows_of(connector: Any) -> list[Any]:
    """The rows of a scheduler's ``connector`` where it is ours, and of those inside it, as MultiConnector has."""
    rows, inner = getattr(connector, "_scheduler_rows", None), getattr(connector, "sub_connectors", ())
    return [*([] if rows is None else [rows]), *(found for each in inner for found in _rows_of(each))]


def _set_weight_version(weights: Any, weight_version: str) -> None:
    if (version := version_of(weight_version)) is None:
        logger.warning("weights version %r is no whole number: rows have no version", weight_version)
    weights.changed(version)


def _collective_rpc(weights: Any, method: Any, *_: Any, **__: Any) -> None:
    if method not in HARMLESS:
        weights.changed()


def _add_lora(weights: Any, lora_request: Any) -> None:
    if lora_request.lora_int_id in weights.adapters:  # maybe other weights in the place of those that were there
        weights.changed()
    weights.adapters.add(lora_request.lora_int_id)


HEARD: Final[dict[str, Callable[..., None]]] = {
    "set_weight_version": _set_weight_version,
    "collective_rpc": _collective_rpc,
    "add_lora": _add_lora,
    "pause_scheduler": lambda weights, *_, **__: weights.paused(),
    "resume_scheduler": lambda weights: weights.resumed(),
}


def answering(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``step`` of an engine core whose answers go out when what goes with them is there.

    Those of one step that wait go to their client together, because it handles hundreds of messages much slower than
    one with as many answers; others wait for none. An engine without a queue of answers is in the process of its
    client, who waits here.
    """

    @wraps(step)
    def stepped(core: Any) -> Any:
        by_client, executed = step(core)
        queue = getattr(core, "output_queue", None)
        for client, sent in (by_client or {}).items():
            waiting = [each for each in sent.outputs if _awaited(each) is not None]
            if queue is None:
                _bring(waiting)
            elif waiting:
                ids = set(map(id, waiting))
                sent.outputs = [each for each in sent.outputs if id(each) not in ids]
                later = msgspec.structs.replace(sent, outputs=waiting, scheduler_stats=None, finished_requests=None)
                _put_when_ready(queue, client, later)
        return by_client, executed

    return stepped


def _put_when_ready(queue: Any, client: int, sent: Any) -> None:
    lock, awaited = threading.Lock(), [_awaited(each) for each in sent.outputs]
    left = len(awaited)

    def ready(_: Any) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        _bring(sent.outputs)
        queue.put_nowait((client, sent))

    for told in awaited:
        told.add_done_callback(ready)


def _awaited(output: Any) -> Any:
    told = (output.kv_transfer_params or {}).get(FIELD)
    return told if isinstance(told, Future) else None


def _bring(outputs: list[Any]) -> None:
    for output in outputs:
        output.kv_transfer_params = {**output.kv_transfer_params, **_awaited(output).result()}

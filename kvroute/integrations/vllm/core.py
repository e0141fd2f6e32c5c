"""What vLLM's engine core hears of weights, and when it answers. It asks no connector, so its methods are wrapped."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial, wraps
from typing import Any, Final

import msgspec

from cache_manager.errors import ConfigError
from kvroute.connector.answers import FIELD
from kvroute.connector.versions import Versions, version_of

logger = logging.getLogger(__name__)

HARMLESS: Final = (
    "compute_weight_checksums",
    "get_model_inspection",
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
)
"""Calls to all workers that leave the weights as they are. Any other may change them: a name says little, and a
function nothing."""
TOGETHER_S: Final = 0.005
"""How long an answer that is ready waits at most for others of its step, so that they go out together."""


def follow(weights: Versions) -> None:
    """Tell ``weights`` what the engine core is told, whose constructor calls this.

    Raises :class:`ConfigError` where there is none: nobody would say when a version is over.
    """
    from vllm.v1.engine.core import EngineCore  # type: ignore[import-not-found]

    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), EngineCore):
        frame = frame.f_back
    if frame is None:
        raise ConfigError("the caller of kvroute's connector", "vLLM's EngineCore, whose weights it follows", "another")
    core, adapters = frame.f_locals["self"], set[int]()

    def set_weight_version(weight_version: str) -> None:
        if (version := version_of(weight_version)) is None:
            logger.warning("weights version %r is no whole number: rows have no version", weight_version)
        weights.changed(version)

    def collective_rpc(method: Any, *_: Any, **__: Any) -> None:
        if method not in HARMLESS:
            weights.changed()

    def add_lora(lora_request: Any) -> None:
        if lora_request.lora_int_id in adapters:  # maybe other weights in the place of those that were there
            weights.changed()
        adapters.add(lora_request.lora_int_id)

    def pause_scheduler(*_: Any, **__: Any) -> None:
        weights.paused()

    def resume_scheduler() -> None:
        weights.resumed()

    for step in ("step", "step_with_batch_queue"):
        setattr(core, step, _answering(core, getattr(core, step)))
    for hear in (set_weight_version, collective_rpc, add_lora, pause_scheduler, resume_scheduler):
        setattr(core, hear.__name__, _heard(hear, getattr(core, hear.__name__)))


def _heard(hear: Callable[..., None], call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, of which ``hear`` is told first. Its signature stays: by that vLLM decodes what a client has sent."""

    @wraps(call)
    def heard(*args: Any, **kwargs: Any) -> Any:
        hear(*args, **kwargs)
        return call(*args, **kwargs)

    return heard


def _answering(core: Any, step: Callable[[], Any]) -> Callable[[], Any]:
    """``step`` of an engine core whose answers go out when what goes with them is there.

    An answer that waits holds up no other. An engine without a queue of answers is in the process of its client, who
    waits here.
    """

    @wraps(step)
    def stepped() -> Any:
        by_client, executed = step()
        queue = getattr(core, "output_queue", None)
        for client, sent in (by_client or {}).items():
            waiting = [each for each in sent.outputs if each.kv_transfer_params and _awaited(each)]
            if waiting and queue is not None:
                ids = set(map(id, waiting))
                sent.outputs = [each for each in sent.outputs if id(each) not in ids]
                answers = _Answers(queue, client, sent, len(waiting))
            for output in waiting:
                if queue is None:
                    _bring(output, _awaited(output))
                else:
                    _awaited(output).add_done_callback(partial(answers.ready, output))
        return by_client, executed

    return stepped


class _Answers:
    """The answers of a step to one client that wait. Those that are ready go out together: a client handles hundreds
    of messages much slower than one with as many answers, and so does the thread that sends them.
    """

    def __init__(self, queue: Any, client: int, sent: Any, waiting: int) -> None:
        self._queue, self._client, self._waiting = queue, client, waiting
        self._sent = msgspec.structs.replace(sent, outputs=[], scheduler_stats=None, finished_requests=None)
        self._lock = threading.Lock()
        self._ready: list[Any] = []

    def ready(self, output: Any, told: Future[dict[str, Any]]) -> None:
        """What this answer waits for is there: it goes out with the last one, or within :data:`TOGETHER_S`."""
        _bring(output, told)
        with self._lock:
            self._waiting -= 1
            self._ready.append(output)
            later = self._waiting > 0
            if later and len(self._ready) > 1:  # and goes with the first
                return
        if not (later and self._timed()):
            self._send()

    def _timed(self) -> bool:
        """Whether a timer sends what is ready."""
        timer = threading.Timer(TOGETHER_S, self._send)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # a process may have no more threads
            return False
        return True

    def _send(self) -> None:
        with self._lock:  # so that they go out in the order in which they were ready
            ready, self._ready = self._ready, []
            if ready:
                self._queue.put_nowait((self._client, msgspec.structs.replace(self._sent, outputs=ready)))


def _awaited(output: Any) -> Any:
    told = output.kv_transfer_params.get(FIELD)
    return told if isinstance(told, Future) else None


def _bring(output: Any, told: Future[dict[str, Any]]) -> None:
    output.kv_transfer_params = {**output.kv_transfer_params, **told.result()}

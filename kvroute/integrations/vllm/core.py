"""Wrappers of vLLM's engine core, which has no hooks: they pass on changes of weights, and delay answers."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final

import msgspec

from cache_manager.errors import ConfigError
from kvroute.connector.behind import Behind
from kvroute.connector.fields import FIELD
from kvroute.connector.versions import AS_LOADED, version_of
from kvroute.integrations.vllm import blocks, versions
from kvroute.integrations.vllm.field import awaited, join

logger = logging.getLogger(__name__)

HARMLESS: Final = (
    "compute_weight_checksums",
    "get_model_inspection",
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
)
"""Calls to all workers that leave the weights as they are. Any other call may change them, whatever its name."""
STEPS: Final = ("step", "step_with_batch_queue")
SENDING: Final = "_kvroute_sending"
SENDING_S: Final = 10.0
"""How long a core that shuts down waits for messages that wait for rows."""


_HEARING: Final[list[tuple[Any, weakref.ref[Any]]]] = []


def follow_cores() -> None:
    """Let the engine cores of this process pass on what they are told to the rows of :func:`hears`.

    Call it before the first core's loop takes its methods; a second call is harmless.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc  # type: ignore[import-not-found]

    versions.let_versions_be_given(EngineCore)
    for kind in (EngineCore, EngineCoreProc):
        for name in {*HEARD, *STEPS} & set(vars(kind)):
            call = vars(kind)[name]
            if not hasattr(call, FIELD):
                setattr(kind, name, wrapper := answering(call) if name in STEPS else heard(HEARD[name], call))
                setattr(wrapper, FIELD, True)


def check_alone(config: Any) -> None:
    """Raise :class:`ConfigError` if rows of this ``config``, or of one that it is a copy of, hear a core already: those
    of a second connector inside a MultiConnector, or of a second core, whose changes of weights could not be told
    apart."""
    if any(reference() is not None and _same(config, followed) for followed, reference in _HEARING):
        wanted = (
            "one connector of kvroute in an engine, inside a MultiConnector too, and a VllmConfig of its own for each "
            "engine of a process"
        )
        raise ConfigError("kv_connector", wanted, f"a second one for configuration {config.instance_id}")


def hears(config: Any, rows: Any) -> None:
    """These ``rows`` belong to the engine core with this ``config``, or with the one that it is a copy of: their
    connector may be inside another."""
    _HEARING[:] = [
        *((followed, reference) for followed, reference in _HEARING if reference() is not None),
        (config, weakref.ref(rows)),
    ]


def hears_no_more(rows: Any) -> None:
    """The core of these ``rows`` has shut down."""
    _HEARING[:] = [(config, reference) for config, reference in _HEARING if reference() is not rows]


def heard(hear: Callable[..., None], call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, after a call of ``hear``. The signature stays, because vLLM decodes a client's message by it."""

    @wraps(call)
    def wrapped(core: Any, *args: Any, **kwargs: Any) -> Any:
        for rows in _rows_of_core(core):
            hear(rows.weights, *args, **kwargs)
        return call(core, *args, **kwargs)

    return wrapped


def _rows_of_core(core: Any) -> list[Any]:
    """The rows of a core, if it has any yet."""
    own_config: Any = getattr(core, "vllm_config", None)
    if own_config is None:
        return []
    followed = [reference() for config, reference in _HEARING if _same(config, own_config)]
    return [rows for rows in followed if rows is not None]


def _same(config: Any, other: Any) -> bool:
    """Whether both are of one core. A copy of a configuration keeps its id; one made anew from it keeps the unchanged
    parts."""
    return bool(config.instance_id == other.instance_id or config.model_config is other.model_config)


def check_followed(rows: Any) -> None:
    """Raise :class:`ConfigError` for rows whose scheduler works without a core of this process that reports to them:
    their versions could be wrong."""
    if not rows.followed:
        wanted = "a connector that gives those inside it vLLM's own configuration, or a copy"
        raise ConfigError("kv_connector", wanted, "one with another: kvroute learns nothing about weights")


def _set_weight_version(weights: Any, weight_version: str) -> None:
    if (version := version_of(weight_version)) is None:
        wanted = f"a whole number from 0 to {AS_LOADED - 1}"
        logger.warning("kvroute: weights version: wanted %s, got %r: rows have no version", wanted, weight_version)
    weights.changed(version)


def _collective_rpc(weights: Any, method: Any, *_: Any, **__: Any) -> None:
    if method not in HARMLESS:
        weights.changed()


def _add_lora(weights: Any, lora_request: Any) -> None:
    if lora_request.lora_int_id in weights.adapters:  # maybe other weights replace the earlier ones
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
    """``step`` of an engine core: each answer goes out when its data is there, without waiting for other answers.

    Answers told together go to their client together. An engine without a queue of answers runs in its client's
    process, which waits here.
    """

    @wraps(step)
    def stepped(core: Any) -> Any:
        fields = list[Sending]()
        for rows in _rows_of_core(core):
            rows.followed = True
            if rows.field is not None:
                fields.append(sending(core, rows.field))
            if not rows.blocks_followed:  # up to 0.28 a connector hears nothing of the manager
                blocks.follow_pool(rows, core.scheduler.kv_cache_manager)
        by_client, executed = step(core)
        for field_sending in fields:
            field_sending.send()
        queue = getattr(core, "output_queue", None)
        for client, sent in (by_client or {}).items():
            waiting = [output for output in sent.outputs if output.kv_transfer_params and awaited(output) is not None]
            if queue is None:
                for output in waiting:
                    _bring(output, awaited(output).result())
            elif waiting:
                ids = set(map(id, waiting))
                sent.outputs = [output for output in sent.outputs if id(output) not in ids]
                later = msgspec.structs.replace(sent, outputs=[], scheduler_stats=None, finished_requests=None)
                _put_when_ready(queue, client, later, waiting)
        return by_client, executed

    return stepped


class Sending:
    """The outputs of one engine core, which get their rows before they go out.

    Beside a device the rows may be written after the outputs are there. Then a thread waits for them, and all messages
    of the core go through it, so that they stay in order; the core itself waits for nothing.
    """

    def __init__(self, core: Any, field: Any) -> None:
        self.field = field
        self._scheduler = core.scheduler
        self._update = core.scheduler.update_from_output
        self._at_hand: list[Callable[[], None]] = []  # one, unless a step has raised behind its update
        self._behind: Behind | None = None
        self._queue = getattr(core, "output_queue", None)
        core.scheduler.update_from_output = self.update
        if self._queue is not None and field.stream.late:
            put, behind = self._queue.put_nowait, Behind("kvroute-field")
            self._queue.put_nowait = lambda message: behind.put(partial(put, message))
            self._behind = behind
        field.sending = self

    def update(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        update = self.field.update
        by_client, step = update(self._scheduler, self._update, scheduler_output, model_runner_output)
        apart = self._queue is None or len(by_client or ()) > 1
        messages = self._messages(by_client)
        self._at_hand.append(partial(self.field.fill, messages, step, apart=apart))
        return by_client

    def _messages(self, by_client: Any) -> list[list[Any]]:
        """The outputs that go to a front end together. One in this process gets no message."""
        messages: list[list[Any]] = []
        for sent in (by_client or {}).values():
            if self._queue is None:
                messages += [[output] for output in sent.outputs]
            else:
                messages += [[output] for output in sent.outputs if awaited(output) is not None]
                messages.append([output for output in sent.outputs if awaited(output) is None])
        return messages

    def send(self) -> None:
        """Fill the outputs of the step that is over; and end the requests that have failed in earlier ones."""
        at_hand, self._at_hand = self._at_hand, []
        for fill in at_hand:
            if self._behind is None:
                fill()
            else:
                self._behind.put(fill)
        if self.field.failed:
            self.field.end_failed(self._scheduler)

    def close(self) -> None:
        """The core shuts down: what waits goes out, and its calls are its own again."""
        if self._behind is not None and self._queue is not None:
            self._behind.close(SENDING_S)
            del self._queue.put_nowait
        del self._scheduler.update_from_output


def sending(core: Any, field: Any) -> Sending:
    """Of this core, made before its first step."""
    sender: Sending | None = vars(core).get(SENDING)
    if sender is None:
        sender = Sending(core, field)
        setattr(core, SENDING, sender)
    return sender


def _put_when_ready(queue: Any, client: int, sent: Any, outputs: list[Any]) -> None:
    lock = threading.Lock()
    waiting = {awaited(output): output for output in outputs}  # by its answer

    def ready(answer: Any) -> None:
        if answer not in waiting:  # it went out with another answer
            return
        with lock:
            answers = [answer for answer in waiting if answer.value is not None]
            outputs = [waiting.pop(answer) for answer in answers]
        for answer, output in zip(answers, outputs, strict=True):
            _bring(output, answer.value)
        if answers:
            queue.put_nowait((client, msgspec.structs.replace(sent, outputs=outputs)))

    for answer in list(waiting):
        answer.add_done_callback(ready)


def _bring(output: Any, data: Any) -> None:
    join(output, data)

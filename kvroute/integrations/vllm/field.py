"""Rows in vLLM's own field: ``EngineCoreOutput.routed_experts``, and so ``RequestOutput.outputs[i].routed_experts``.

The engine core's end is :class:`Field`. Each output of a step gets the rows of the tokens that the model has read since
the request's last output, because the front end may end a request at any of them (a stop string, an abort); it
concatenates these chunks when the request ends. The front end's end is :func:`guard_front_end`: an answer that lacks a
row has no field, and says why. It marks each request, so that a front end without it gets no rows: it would make a
shorter array of them. :func:`take_over` turns vLLM's own flag into the connector's setting, and guards the front end
where a configuration asks for the field: every front end makes its configuration itself.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from functools import wraps
from typing import Any, Final

import numpy as np

from cache_manager.errors import RowError
from kvroute.connector.fields import FIELD, GAPS
from kvroute.connector.messages import StepMeta
from kvroute.connector.scheduler import SchedulerRows
from kvroute.connector.step_rows import StepRows
from kvroute.connector.tickets import MissingSpan
from kvroute.integrations.vllm.versions import PREFIX

logger = logging.getLogger(__name__)

LOST: Final = "kvroute_field"
"""From the engine core to the front end, beside an output that lacks rows: ``{"gaps": [...], "fails": bool}``."""
ROWS: Final = "kvroute_rows"
"""From the engine core to the front end, beside one output of a message: the rows of all of them, in one piece, because
each array is encoded and decoded by itself."""
GUARDED: Final = "kvroute_field"
"""In ``SamplingParams.extra_args``: the front end of this request has :func:`guard_front_end`."""
UNGUARDED: Final = (
    "the front end of this request does not read kvroute's rows: it is not vLLM's Python one, or its process has "
    "not loaded kvroute's plugin before it made its configuration"
)
SESSION: Final = "a session, whose prompt grows, has no field"
WRAPPED: Final = "_kvroute_field"
FLAG: Final = "enable_return_routed_experts"
SHORT: Final = "the engine core sent rows of other tokens than those of the answer"
_JOINING: Final = threading.Lock()


class Field:
    """The field of one engine core's outputs. ``layers`` are all of the model, ``[tokens, layers, top_k]`` as stock's:
    ``uint8`` up to 256 experts, ``uint16`` above, and 0 in layers without a router."""

    def __init__(self, rows: SchedulerRows, layers: int) -> None:
        assert rows.stream is not None, "settings.field"
        spec = rows.engine.spec
        self.rows, self.stream = rows, rows.stream
        self.failed: deque[str] = deque()
        """Requests that have failed for a missing row, and that the scheduler does not know of yet."""
        self.sending: Any = None
        """What sends the outputs of the core, and is to be closed with it."""
        self._layer_ids = np.array(spec.attrs["layer_ids"])
        self._shape = (layers, spec.row_shape[1])
        self._dtype = np.dtype("uint8" if spec.attrs["num_experts"] <= 256 else "uint16")
        self._fails = rows.engine.settings.on_missing == "fail"
        self._number = 0  # of the step whose outputs are at hand; 0: none is

    # ---------------------------------------------------------------- the scheduling thread

    def begins(self, request: Any) -> None:
        """The request has come: who reads its field?"""
        if request.sampling_params is None:
            return
        if not (request.sampling_params.extra_args or {}).get(GUARDED):
            self.stream.refuse(request.request_id, UNGUARDED)
        elif request.resumable:
            self.stream.refuse(request.request_id, SESSION)

    def ended(self, request: Any, blocks: Sequence[int]) -> None:
        """The request has ended and still has these blocks."""
        if request.sampling_params is not None:
            self.stream.ended(request, _start(request), blocks, self._number or self.rows.steps)

    def preempted(self, request: Any) -> None:
        """The request is about to lose its blocks."""
        if request.sampling_params is not None:
            self.stream.preempted(request, _start(request), request.num_computed_tokens, self.rows.steps)

    def update(self, scheduler: Any, update: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        """``update_from_output`` of vLLM's scheduler: what it returns, and the rows that belong to it."""
        requests = scheduler.requests
        stale = {
            name
            for name in scheduler_output.num_scheduled_tokens
            if (request := requests.get(name)) is not None and getattr(request, "num_stale_output_tokens", 0) > 0
        }
        self._number = _number_of(scheduler_output.kv_connector_metadata) or self.rows.steps
        try:
            by_client = update(scheduler_output, model_runner_output)
        finally:
            number, self._number = self._number, 0
        outputs = [
            (output.request_id, None if output.finish_reason is not None else requests.get(output.request_id))
            for sent in (by_client or {}).values()
            for output in sent.outputs
        ]
        return by_client, self.stream.take(outputs, number, start=_start, stale=stale)

    def end_failed(self, scheduler: Any) -> None:
        """Requests that have failed in the meantime end in the scheduler, too."""
        from vllm.v1.request import RequestStatus  # type: ignore[import-not-found]

        names = [self.failed.popleft() for _ in range(len(self.failed))]
        present = [name for name in names if name in scheduler.requests]
        scheduler.finish_requests(present, RequestStatus.FINISHED_ERROR)

    # ---------------------------------------------------------------- the thread that sends

    def fill(self, messages: Sequence[Sequence[Any]], step: StepRows, *, apart: bool) -> None:
        """Give each output its rows, or tell it why its answer has none. The step is that of :meth:`update`, and the
        outputs of one of the ``messages`` go to their front end together; those of requests that go on are in the last
        message, if they are not ``apart``."""
        try:
            outcomes, steady = self.stream.read(step, apart=apart)
        except Exception as error:  # the outputs go out whatever happens
            logger.exception("the rows of %d outputs cannot be read", sum(map(len, messages)))
            outcomes, steady = self.stream.lose(step, repr(error)), None
        by_id = {outcome.piece.name: outcome for outcome in outcomes}
        for outputs in messages:
            with_rows: list[tuple[Any, Any]] = []
            for output in outputs if by_id else ():
                outcome = by_id.get(output.request_id)
                if outcome is None:
                    continue
                if outcome.rows is None:
                    self._lose(output, outcome.gaps)
                else:
                    with_rows.append((output, outcome.rows))
            names = [output.request_id for output, _ in with_rows]
            parts = [rows for _, rows in with_rows]
            counts = [len(rows) for rows in parts]
            if steady is not None and step.steady is not None and outputs is messages[-1]:
                names += step.steady.names
                parts.append(steady)
                counts += step.steady.counts
            if len(with_rows) == len(names) == 1:
                output, rows = with_rows[0]
                output.routed_experts = self._array(rows)
            elif names:
                join(outputs[0], {ROWS: self._together(names, counts, parts)})

    def _together(self, names: Sequence[str], counts: Sequence[int], parts: Sequence[Any]) -> dict[str, Any]:
        """The rows of several outputs as plain values; :func:`_divide` is the other end."""
        array = self._array(parts[0] if len(parts) == 1 else np.concatenate(parts))
        return {
            "requests": names,
            "counts": counts,
            "shape": list(array.shape[1:]),
            "dtype": array.dtype.str,
            "data": array.tobytes(),
        }

    def _array(self, ids: Any) -> Any:
        if len(self._layer_ids) == self._shape[0]:
            return ids.astype(self._dtype, copy=False)
        array = np.zeros((len(ids), *self._shape), self._dtype)
        array[:, self._layer_ids] = ids
        return array

    def _lose(self, output: Any, gaps: Sequence[MissingSpan]) -> None:
        name = output.request_id
        tokens = sum(stop - start for start, stop, _ in gaps)
        start, _, why = gaps[0]
        self.rows.meter.lose_field(why)
        logger.warning("request %s has no routed_experts: %d rows missing, from %d on: %s", name, tokens, start, why)
        if self._fails or why == UNGUARDED:  # such a front end would say nothing
            if output.finish_reason is None:
                self.failed.append(name)
            output.new_token_ids, output.new_logprobs = [], None
            output.finish_reason = _error()
        if why != UNGUARDED:
            join(output, {LOST: {"gaps": [list(gap) for gap in gaps], "fails": self._fails}})


def _error() -> Any:
    from vllm.v1.engine import FinishReason  # type: ignore[import-not-found]

    return FinishReason.ERROR


def join(output: Any, data: Mapping[str, Any]) -> None:
    """Add ``data`` beside an answer; any thread may."""
    with _JOINING:
        output.kv_transfer_params = {**(output.kv_transfer_params or {}), **data}


def awaited(output: Any) -> Any:
    """The data beside an answer that goes out in a message of its own when it is there, or ``None``."""
    beside = (output.kv_transfer_params or {}).get(FIELD)
    return beside if isinstance(beside, Future) else None


def _start(request: Any) -> int:
    """The first position whose row the client wants."""
    start: int = getattr(request.sampling_params, "routed_experts_prompt_start", 0)
    prompt: int = request.num_prompt_tokens
    return min(start, prompt)


def _number_of(metadata: Any) -> int:
    """The number of a step, in the message of our connector or of one that has ours inside; 0: there is none."""
    if isinstance(metadata, StepMeta):
        return metadata.number
    inside = getattr(metadata, "metadata", ())
    return next((number for part in inside if (number := _number_of(part))), 0) if inside else 0


# -------------------------------------------------------------------- the front end


class _Dropped(list[Any]):
    """The chunks of an answer that lacks a row: there are none, and none is added."""

    def append(self, _: Any) -> None:
        return


def guard_front_end() -> None:
    """In the front end: an answer that lacks a row has no field at all, and says why. A second call is harmless."""
    from vllm.outputs import RequestOutput  # type: ignore[import-not-found]
    from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found]
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState  # type: ignore[import-not-found]

    if hasattr(OutputProcessor.process_outputs, WRAPPED):
        return
    wrappers = {
        (AsyncLLM, "__init__"): _saying,
        (OutputProcessor, "add_request"): _adding,
        (OutputProcessor, "process_outputs"): dividing,
        (RequestState, "make_request_output"): _with_field,
        (RequestOutput, "add"): _merging,
    }
    for (owner, name), wrapper in wrappers.items():
        call = getattr(owner, name)
        wrapped = wraps(call)(wrapper(call))
        setattr(wrapped, WRAPPED, True)
        setattr(owner, name, wrapped)


def _saying(init: Callable[..., Any]) -> Callable[..., Any]:
    """``AsyncLLM.__init__``: other people's front ends (prime-rl's) ask the model's configuration whether answers have
    the field. The engine's processes have their own copy by then, which says no, so that vLLM captures nothing."""

    def start(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, *args, **kwargs)
        settings = settings_in(vllm_config.kv_transfer_config) or {}
        if settings.get("field") and hasattr(vllm_config.model_config, FLAG):
            setattr(vllm_config.model_config, FLAG, True)

    return start


def _adding(add: Callable[..., Any]) -> Callable[..., Any]:
    """``OutputProcessor.add_request``: tell the engine core who reads the rows, and remember the first position whose
    row the client wants."""

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.sampling_params is not None:
            request.sampling_params = params = copy(request.sampling_params)
            params.extra_args = {**(params.extra_args or {}), GUARDED: True}
        result = add(self, request, *args, **kwargs)
        state = self.request_states.get(request.request_id)
        if state is not None and request.sampling_params is not None:
            state.kvroute_start = getattr(request.sampling_params, "routed_experts_prompt_start", 0)
        return result

    return add_request


def dividing(process: Callable[..., Any]) -> Callable[..., Any]:
    """``OutputProcessor.process_outputs``: each request gets its rows, and we hear which ones have lost a row."""

    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            if not output.kv_transfer_params:
                continue
            together = output.kv_transfer_params.pop(ROWS, None)
            if together is not None:
                _divide(self.request_states, together)
            lost = output.kv_transfer_params.pop(LOST, None)
            output.kv_transfer_params = output.kv_transfer_params or None
            state = self.request_states.get(output.request_id)
            if lost is None or state is None:
                continue
            gaps = [(start, stop, why) for start, stop, why in lost["gaps"]]
            _drop(state, gaps)
            if lost["fails"] and state.queue is not None:
                (start, stop, why), *_ = gaps
                error = RowError("routed_experts", "all rows of the request", f"none of [{start}, {stop}): {why}")
                state.queue.put(error)
        return process(self, engine_core_outputs, *args, **kwargs)

    return process_outputs


def _divide(states: Mapping[str, Any], together: Mapping[str, Any]) -> None:
    """Add the rows of a message to those of their requests, copied: a long request keeps nobody else's."""
    array = np.frombuffer(together["data"], together["dtype"]).reshape(-1, *together["shape"])
    first = 0
    for name, count in zip(together["requests"], together["counts"], strict=True):
        state = states.get(name)
        if state is not None:
            state.routed_experts_chunks.append(array[first : first + count].copy())
        first += count


def _with_field(make: Callable[..., Any]) -> Callable[..., Any]:
    """``RequestState.make_request_output``: never a shorter array, and the reason beside an answer without one.

    It is called for each output of each step; its first five parameters are those of every release.
    """

    def make_request_output(
        self: Any,
        new_token_ids: Any,
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: Any,
        kv_transfer_params: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if finish_reason is not None:
            _check_rows(self)
            missing = getattr(_family(self), "kvroute_missing", None)
            if missing:
                params = kv_transfer_params or {}
                beside = dict(params.get(FIELD) or {})
                beside[GAPS] = {**beside.get(GAPS, {}), **missing}
                kv_transfer_params = {**params, FIELD: beside}
        return make(
            self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, *args, **kwargs
        )

    return make_request_output


def _merging(add: Callable[..., Any]) -> Callable[..., Any]:
    """``RequestOutput.add``, which up to 0.30 loses the field where chunks of a stream wait for their client."""

    def merge(self: Any, next_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = add(self, next_output, *args, **kwargs)
        merged = {completion.index: completion for completion in self.outputs}
        for completion in next_output.outputs:
            if completion.routed_experts is not None:
                merged[completion.index].routed_experts = completion.routed_experts
        return result

    return merge


def _check_rows(state: Any) -> None:
    """The chunks of a request that ends cover just its tokens: rows of surplus ones go, and a gap drops them all."""
    chunks = state.routed_experts_chunks
    if not chunks or state.detokenizer is None:
        return
    start = min(getattr(state, "kvroute_start", 0), state.prompt_len)
    due = max(0, state.prompt_len + state.detokenizer.num_output_tokens() - 1 - start)
    rows = sum(len(chunk) for chunk in chunks)
    if rows > due:  # a stop string among several tokens of one step
        state.routed_experts_chunks = [np.concatenate(chunks)[:due]]
    elif rows < due:
        _drop(state, [(start + rows, start + due, SHORT)])


def _drop(state: Any, gaps: Sequence[MissingSpan]) -> None:
    """The answer has no field, for these gaps; the last answer of a prompt says so for all of its completions."""
    state.routed_experts_chunks = _Dropped()
    missing = vars(_family(state)).setdefault("kvroute_missing", {})
    missing[str(state.request_index)] = [list(gap) for gap in gaps]


def _family(state: Any) -> Any:
    """What all completions of a prompt share."""
    return state if state.parent_req is None else state.parent_req


# -------------------------------------------------------------------- the flag


def take_over() -> None:
    """vLLM's own flag beside a connector of kvroute asks kvroute for the field, and not vLLM's capture.

    A router has one hook, and stock refuses many connectors beside its flag. A second call is harmless.
    """
    from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]

    create = EngineArgs.create_engine_config
    if hasattr(create, WRAPPED):
        return

    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = settings_in(self.kv_transfer_config)
        if settings is not None:
            places = [self, getattr(self, "aux_output_config", None)]
            flagged = [place for place in places if getattr(place, FLAG, False)]
            if flagged and settings.setdefault("field", True):
                for place in flagged:
                    setattr(place, FLAG, False)
            if settings.get("field"):
                guard_front_end()  # this process has the front end
        return create(self, *args, **kwargs)

    setattr(create_engine_config, WRAPPED, True)
    EngineArgs.create_engine_config = create_engine_config


def settings_in(transfer: Any) -> dict[str, Any] | None:
    """The settings of kvroute's connector in a ``KVTransferConfig`` or in its JSON, also inside a MultiConnector;
    ``None``: there is no such connector. The operator's own mapping, so that a change of it counts."""
    if transfer is None:
        return None
    name = transfer.get("kv_connector") if isinstance(transfer, dict) else transfer.kv_connector
    extra = _extra(transfer)
    if (name or "").startswith(PREFIX):
        settings: Any = extra.setdefault("kvroute", {})
        return settings if isinstance(settings, dict) else None
    inside = extra.get("connectors")
    parts = inside if isinstance(inside, list) else []
    return next((inner_settings for part in parts if (inner_settings := settings_in(part)) is not None), None)


def _extra(transfer: Any) -> dict[str, Any]:
    if isinstance(transfer, dict):
        extra: dict[str, Any] = transfer.setdefault("kv_connector_extra_config", {})
        return extra
    own: dict[str, Any] = transfer.kv_connector_extra_config
    return own


__all__ = ["FLAG", "Field", "awaited", "guard_front_end", "join", "settings_in", "take_over"]

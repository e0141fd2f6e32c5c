"""Answers on their way to clients: their routes are made and left behind SGLang's scheduler, which waits for nothing.

The scheduler's thread reads the rows of a request that is over, because its pages are about to be given out again. A
thread of kvroute fills SGLang's own field, binds the routes to their tokens and leaves them for the client. SGLang
makes its message with the answer when it always does; the message is sent when all rows in it are there. It is the last
one of its requests, so messages about others may overtake it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.errors import KVRouteError, RowError
from cache_manager.publish import Rows
from cache_manager.spec import AuxBlockDataSpec
from kvroute.connector.behind import Behind
from kvroute.connector.fields import FIELD
from kvroute.connector.key import Key
from kvroute.connector.left import LeftRoutes, LeftValues, Tokens, settled
from kvroute.connector.meter import Meter
from kvroute.connector.tickets import MissingSpan, gaps_of
from kvroute.integrations.sglang import versions
from kvroute.routes import Layout, Routes, RoutingWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """How many answers may wait for their routes to be left; a further one has SGLang's field, and no routes.

    ``nbytes_max`` bounds their rows, of more than one answer. ``close_s`` is how long an engine that shuts down waits.
    """

    answers_max: int = 4096
    nbytes_max: int = 4 << 30
    close_s: float = 10.0


@dataclass(frozen=True, slots=True)
class RequestRows:
    """The rows of a request's positions from ``start`` on, as they were read at its end."""

    spec: AuxBlockDataSpec
    rows: Rows
    labels: Rows
    start: int
    by_kv: NDArray[np.bool_] | None  # [n], rows matched by KV, which cannot prove the last router's choice
    reasons: Mapping[int, str]  # for rows that did not come, by page of the request
    flagged: bool  # the setting ``witness``
    weights: int  # :attr:`Versions.changes` when they were read
    mixed: bool  # :attr:`Versions.mixed` then
    routing_weights: Rows | None = None  # float32, of the ids in ``rows``, where they are wanted
    same_from: int = 0  # tokens from this position on were sampled with these weights, and KV of no others

    @property
    def stop(self) -> int:
        return self.start + len(self.rows.valid)

    def behind(self, kept: RequestRows) -> RequestRows:
        """These rows, but at its positions those of ``kept``, an earlier computation from position 0 on.

        Tokens were sampled with those, so none of them is replaced; one that is missing is filled where the same
        weights have computed it again, as in :meth:`RequestJournal.record`.
        """
        same_from = kept.stop if kept.weights != self.weights or kept.mixed else kept.same_from
        count = max(0, min(kept.stop, self.stop) - self.start)
        positions = np.arange(self.start, self.start + count)
        filled = ~kept.rows.valid[positions] & self.rows.valid[:count] & (positions >= same_from)
        old = np.zeros(len(self.rows.valid), np.bool_)
        old[:count] = ~filled
        page = self.spec.block_tokens
        after = {block: why for block, why in self.reasons.items() if (block + 1) * page > self.start + count}
        weights = self.routing_weights
        if weights is not None and kept.routing_weights is not None:
            weights = _joined(kept.routing_weights, weights, old, positions[~filled])
        by_kv = self.by_kv
        if by_kv is not None and kept.by_kv is not None:
            by_kv = by_kv.copy()
            by_kv[old] = kept.by_kv[positions[~filled]]
        return replace(
            self,
            rows=_joined(kept.rows, self.rows, old, positions[~filled]),
            labels=_joined(kept.labels, self.labels, old, positions[~filled]),
            routing_weights=weights,
            by_kv=by_kv,
            reasons=after | dict(kept.reasons),
            same_from=same_from,
        )

    def routes(self) -> tuple[Routes, list[list[int]], list[MissingSpan]]:
        """The routes, the positions ``[start, stop)`` at which the last router's choice is not proved, and the gaps
        with a known reason."""
        routes = Routes.from_rows(self.spec, self.rows, self.start, weights_version=self.labels)
        unseen: list[list[int]] = []
        if self.by_kv is not None:
            routes, unseen = settled(routes, self.by_kv, flagged=self.flagged)
        return routes, unseen, gaps_of(routes.missing, self.reasons, self.spec.block_tokens)

    def weights_of(self, routes: Routes) -> RoutingWeights | None:
        """The weights of the ids in ``routes``, which :meth:`routes` made; ``None`` where they are not wanted."""
        read = self.routing_weights
        return None if read is None else RoutingWeights(routes, read.values)

    @property
    def nbytes(self) -> int:
        """Of ids and weights."""
        weights = self.routing_weights
        return self.rows.values.nbytes + (0 if weights is None else weights.values.nbytes)


def _joined(kept: Rows, rows: Rows, old: NDArray[np.bool_], positions: NDArray[np.int64]) -> Rows:
    """``rows``, and where they are ``old [n]`` those of ``kept`` at the ``positions`` there."""
    values, valid = rows.values.copy(), rows.valid.copy()
    values[old], valid[old] = kept.values[positions], kept.valid[positions]
    return Rows(values, valid)


@dataclass(slots=True, eq=False)
class Answer:
    """What SGLang sends of a request's rows. It is all there when the answer is ``ready``."""

    field: torch.Tensor  # SGLang's own: int32 [n, layers of the model, top_k]
    begun_s: float
    data: Any = None  # kvroute's, beside it
    ready: bool = False


@dataclass(slots=True)
class AnswerCounters:
    """Of requests that asked for their rows."""

    left: int = 0  # answers whose routes were left for the client
    failed: int = 0  # answers that say why there are no routes
    refused: int = 0  # answers without routes, because too many waited for theirs to be left


class Apart(Protocol):
    """Leaves routes elsewhere. The calls are described at :class:`kvroute.integrations.sglang.apart.AnswersApart`."""

    def put(self, key: Key, rows: RequestRows | KVRouteError, tokens: Tokens | None) -> LeftValues: ...
    def close(self) -> None: ...


class Answers:
    """Makes the answers of requests, in the order of their ends, on a thread that the first one starts.

    ``left`` takes the routes, if the operator wants any, and makes the client's data; with ``apart`` that takes them.
    Both are owned. The scheduler's thread calls :meth:`begin` and :meth:`send`, which return at once.
    """

    def __init__(
        self,
        spec: AuxBlockDataSpec,
        left: LeftRoutes | None,
        meter: Meter,
        limits: AnswerLimits = AnswerLimits(),
        apart: Apart | None = None,
    ) -> None:
        self.counters = AnswerCounters()
        self._spec, self._left, self._meter, self._limits, self.apart = spec, left, meter, limits, apart
        self._layers = list(spec.attrs["layer_ids"])
        self._lock = threading.Lock()
        self._waiting = 0  # answers
        self._waiting_nbytes = 0
        self._refused = deque[tuple[Key, Tokens | None, KVRouteError]](maxlen=max(1, limits.answers_max))

    @cached_property
    def _behind(self) -> Behind:
        return Behind("kvroute-answers")

    def begin(self, rid: str, rows: RequestRows | KVRouteError, positions: int, tokens: Tokens | None) -> Answer:
        """The answer of a request that is over, with so many ``positions``; or with the error that kept its rows from
        being read. The key of its routes in a rollout store is SGLang's ``rid``."""
        field = np.zeros((positions, self._spec.attrs["num_layers"], self._spec.row_shape[1]), np.int32)
        answer = Answer(torch.from_numpy(field), time.monotonic())
        key = Key(rid, of_client=True)
        nbytes = rows.nbytes if isinstance(rows, RequestRows) else 0
        with self._lock:
            full = self._full(nbytes)
            if full is None:
                self._waiting += 1
                self._waiting_nbytes += nbytes
        if full is None:
            self._behind.put(partial(self._make, answer, key, rows, tokens, nbytes))
        else:
            self._refuse(answer, key, rows, tokens, full)
        return answer

    def _full(self, nbytes: int) -> RowError | None:
        """Why there is no room for a further answer with so many bytes of rows; held: _lock."""
        limits = self._limits
        if self._waiting >= limits.answers_max:
            return RowError("answers whose routes are not left yet", f"{limits.answers_max} at most", "more")
        if self._waiting and self._waiting_nbytes + nbytes > limits.nbytes_max:
            return RowError("rows of answers whose routes are not left yet", f"{limits.nbytes_max} bytes", "more")
        return None

    def send(self, outbox: Outbox, message: Any, answers: Mapping[str, Answer]) -> None:
        """Send SGLang's ``message`` with these ``answers``, by ``rid``, when all of them are ready."""
        call = partial(outbox.deliver, message, answers)
        if all(answer.ready for answer in answers.values()):
            call()
        else:
            self._behind.put(call)

    def close(self) -> None:
        """Wait for answers under way, and close the store. One that hangs is left to the thread."""
        has_thread = "_behind" in vars(self)
        if has_thread and not self._behind.close(self._limits.close_s):
            return
        for owned in (self.apart, self._left):
            if owned is not None:
                owned.close()

    # ---------------------------------------------------------------- the thread

    def _make(
        self, answer: Answer, key: Key, rows: RequestRows | KVRouteError, tokens: Tokens | None, nbytes: int
    ) -> None:
        try:
            answer.data = self._data(answer, key, rows, tokens)
        finally:  # whatever it was, the client waits no longer
            with self._lock:
                self._waiting -= 1
                self._waiting_nbytes -= nbytes
            self._meter.took("answer", time.monotonic() - answer.begun_s)
            answer.ready = True

    def _data(self, answer: Answer, key: Key, rows: RequestRows | KVRouteError, tokens: Tokens | None) -> Any:
        """Fill the field, and leave the routes; the client's data, with the reason if there are no routes."""
        why: KVRouteError
        try:
            try:
                routes, unseen, gaps = self._fill(answer.field.numpy(), rows)
            except KVRouteError as error:
                if self.apart is not None:  # no earlier routes are found in their place
                    self.apart.put(key, error, tokens)
                raise
            if self._left is None:
                return None
            if self.apart is None:
                weights = rows.weights_of(routes) if isinstance(rows, RequestRows) else None
                values = self._left.put(key, routes, tokens, unseen, gaps, weights)
            else:
                values = self.apart.put(key, rows, tokens)
            data = self._left.answer(key, values, tokens)
        except KVRouteError as error:
            why = error
        except Exception as error:  # an answer waits
            logger.exception("routes of request %s are lost", key.text)
            why = RowError("routes", "left for the client", repr(error))
        else:
            self.counters.left += 1
            return data[FIELD]
        self.counters.failed += 1
        if self._left is None:
            return None
        self._left.void(key, tokens, Layout.of(self._spec))
        return self._left.fail(key, why)[FIELD]

    def _fill(
        self, field: NDArray[np.int32], rows: RequestRows | KVRouteError
    ) -> tuple[Routes, list[list[int]], list[MissingSpan]]:
        """:meth:`RequestRows.routes`, which are now in the field, too: missing ids as -1, which is no expert.

        Layers without a router are 0, as in SGLang. Raises what kept the rows from being read; then all are missing.
        """
        field[:, self._layers] = -1
        if isinstance(rows, KVRouteError):
            raise rows
        routes, unseen, gaps = rows.routes()
        field[:, self._layers] = np.where(routes.known[:, :, None], routes.ids.astype(np.int32), -1)
        return routes, unseen, gaps

    def _refuse(
        self,
        answer: Answer,
        key: Key,
        rows: RequestRows | KVRouteError,
        tokens: Tokens | None,
        why: KVRouteError,
    ) -> None:
        """Too many answers wait: this one has its field alone. The scheduler's thread fills it."""
        self.counters.refused += 1
        try:
            self._fill(answer.field.numpy(), rows)
        except KVRouteError as error:
            why = error
        if self._left is not None:
            answer.data = self._left.fail(key, why)[FIELD]
            prompt = tokens and Tokens(tokens.ids[: tokens.prompt], tokens.prompt)  # which names its rollout
            self._refused.append((key, prompt, why))
            self._behind.put(self._forget_earlier)
        answer.ready = True

    def _forget_earlier(self) -> None:
        """Have routes of earlier requests under the keys of refused ones forgotten; the thread does it."""
        while self._refused and self._left is not None:
            key, prompt, why = self._refused.popleft()
            if self.apart is None:
                self._left.void(key, prompt, Layout.of(self._spec))
            else:
                with suppress(KVRouteError):
                    self.apart.put(key, why, prompt)


class Outbox:
    """SGLang's messages to its detokenizer, which two threads send: one lock keeps them apart.

    ``sender`` is SGLang's wrapper of the socket, whose ``send_output`` goes through here from now on.
    """

    def __init__(self, sender: Any) -> None:
        self._send = sender.send_output
        self._lock = threading.Lock()
        self._kept: list[Any] | None = None
        sender.send_output = self.send

    def send(self, message: Any, *arguments: Any) -> None:
        """What SGLang sends, on the scheduler's thread."""
        if self._kept is not None:
            self._kept.append(message)
            return
        with self._lock:
            self._send(message, *arguments)

    def kept(self, stream: Callable[[], object]) -> list[Any]:
        """The messages that ``stream`` sends, not sent."""
        messages = self._kept = []
        try:
            stream()
        finally:
            self._kept = None
        return messages

    def deliver(self, message: Any, answers: Mapping[str, Answer]) -> None:
        """Send a message with kvroute's data of the answers in it. Any thread may call it."""
        entries: Sequence[list[Any]] = [[answers[rid].data] for rid in message.rids]
        if any(data is not None for (data,) in entries):
            versions.add_information(message, FIELD, entries)
        with self._lock:
            self._send(message)


__all__ = ["Answer", "AnswerCounters", "AnswerLimits", "Answers", "Outbox", "RequestRows"]

"""Ties request ids and a rollout store together: what ``RoutingReplayConfig`` configures.

An engine submits the routes of each sample that ends and goes on; a thread stores them, in order. What becomes of each
is told by its :class:`Ticket`, by the counters, and by :meth:`RoutingReplayManager.close`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, Final, ParamSpec, Self, TypeVar

from cache_manager.errors import ConfigError, KVRouteError, StorageError, StoreClosedError
from cache_manager.ports import Absence
from cache_manager.spec import AuxBlockDataSpec
from kvroute.capture.canary import CANARY_OF, check_canary
from kvroute.config import RoutingReplayConfig
from kvroute.rollout import open_rollouts
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.ids import previous_turn, rollout_id_of
from kvroute.rollout.port import RolloutStore
from kvroute.rollout.shard import fetch_routes
from kvroute.routes import Layout, Routes

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)

REASONS_MAX: Final = 8
"""Failures that an error names; the others are counted in it."""


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """``waiting_max`` rollouts of ``waiting_nbytes_max`` bytes together wait for the store; a further one is refused.

    ``close_s`` bounds how long :meth:`RoutingReplayManager.close` waits for what was submitted.
    """

    waiting_max: int = 4096
    waiting_nbytes_max: int = 1 << 30
    close_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("waiting_max", "waiting_nbytes_max"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, "an integer of 1 or more", repr(value))
        if not self.close_s > 0:
            raise ConfigError("close_s", "seconds above 0", repr(self.close_s))


@dataclass(frozen=True, slots=True)
class ReplayCounters:
    """What a manager has done so far; every rollout submitted is stored, failed, refused or waiting."""

    submitted: int = 0
    stored: int = 0
    failed: int = 0
    refused: int = 0  # too many were waiting, or the manager was closed
    waiting: int = 0  # now
    waiting_nbytes: int = 0  # now
    turns_deleted: int = 0  # by only_last_turn
    turn_failures: int = 0  # an earlier turn that could not be deleted


@dataclass(frozen=True, slots=True)
class Ticket:
    """What becomes of one rollout that was submitted. Safe from several threads."""

    rollout_id: str
    future: Future[RolloutHandle]

    @property
    def done(self) -> bool:
        return self.future.done()

    @property
    def unstored(self) -> StorageError:
        return StorageError(f"rollout {self.rollout_id}: closed before it was stored")

    def result(self, timeout_s: float | None = None) -> RolloutHandle:
        """The handle, as soon as the rollout is stored; ``StorageError`` when it was not, or not within ``timeout_s``.

        ``timeout_s=0`` does not wait.
        """
        try:
            return self.future.result(timeout_s)
        except TimeoutError:
            raise StorageError(f"rollout {self.rollout_id} is not stored yet") from None
        except CancelledError:
            raise self.unstored from None


class _OneThread:
    """Does calls in order. A call that hangs keeps no interpreter from ending, as one of an executor's would."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, lambda: call(*args, **kwargs)))
        return future

    def end(self, *, wait: bool) -> None:
        """Nothing more is begun: what waits is cancelled."""
        while not self._calls.empty():
            if (waiting := self._calls.get()) is not None:
                waiting[0].cancel()
        self._calls.put(None)
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while (waiting := self._calls.get()) is not None:
            future, call = waiting
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 (it is not lost: the future has it)
                    future.set_exception(error)
            del waiting, future, call  # a thread without work keeps nothing alive


class RoutingReplayManager:
    """Stores what a ``RoutingReplayConfig`` says, where it says. Safe from several threads.

    ``spec`` is the engine's routing spec (with ``debug_mode`` the canary spec of it); a configuration that does not fit
    it, or is off, is a :class:`ConfigError`. ``store`` takes the place of the one that the configuration names, and is
    owned and closed like it.
    """

    def __init__(
        self,
        config: RoutingReplayConfig,
        spec: AuxBlockDataSpec,
        *,
        store: RolloutStore | None = None,
        limits: ReplayLimits | None = None,
    ) -> None:
        if not config.enable_routing_replay:
            raise ConfigError("enable_routing_replay", "true, for there to be a manager", False)
        if config.debug_mode != (CANARY_OF in spec.attrs):
            raise ConfigError("debug_mode", f"{CANARY_OF in spec.attrs}, as the engine's rows are", config.debug_mode)
        self.config = config.fitted(spec)
        self.spec = spec
        self.limits = limits or ReplayLimits()
        self.store = open_rollouts(config.rollout_url) if store is None else store
        self._thread = _OneThread("kvroute-rollouts")
        self._lock = threading.Lock()
        self._closed = False
        self._counters = ReplayCounters()
        self._reasons: list[str] = []

    def check(self, request_id: str, samples: int = 1) -> None:
        """Raise :class:`InvalidInputError` for a request id that no rollout can be named by."""
        rollout_id_of(request_id, samples - 1)

    def submit(self, request_id: str, routes: Routes, *, sample: int = 0) -> Ticket:
        """Have the routes of a sample stored, and go on.

        Never waits: where too much is waiting already, or the manager is closed, the ticket says that the rollout was
        refused. :class:`InvalidInputError` for an id that can be none, for routes of another model, and, with
        ``debug_mode``, an ``AssertionError`` that names the first row that is in the wrong place.
        """
        rollout_id = rollout_id_of(request_id, sample)
        self._check_routes(routes)
        with self._lock:
            refused = self._refusal(rollout_id, routes.ids.nbytes)
            future: Future[RolloutHandle]
            if refused is not None:
                future = Future()
                future.set_exception(refused)
                self._count(submitted=1, refused=1, reason=refused)
                return Ticket(rollout_id, future)
            future = self._thread.submit(self._serve, rollout_id, routes)
            self._count(submitted=1, waiting=1, waiting_nbytes=routes.ids.nbytes)
        ticket = Ticket(rollout_id, future)
        future.add_done_callback(lambda _: self._cancelled(ticket, routes))
        return ticket

    # ---------------------------------------------------------------- the end

    @property
    def counters(self) -> ReplayCounters:
        """The counts of this moment, consistent with each other."""
        with self._lock:
            return self._counters

    def close(self) -> None:
        """Store what was submitted, make it durable, close the store; idempotent.

        Raises ``StorageError`` that names rollouts that were not stored, now or earlier, and what the store itself
        failed at; all is closed all the same.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            last = self._thread.submit(int)
        problems: list[str] = []
        try:
            last.result(self.limits.close_s)  # one thread, in order
        except TimeoutError:
            problems.append(f"{self.counters.waiting} rollouts are not stored after {self.limits.close_s:.1f} s")
        self._thread.end(wait=not problems)
        try:
            self.store.close()
        except StorageError as error:
            problems.append(str(error))
        with self._lock:
            problems += self._reasons
            more = self._counters.failed + self._counters.refused - len(self._reasons)
        if problems:
            raise StorageError("rollouts were lost: " + "; ".join([*problems, *([f"and {more} more"] if more else ())]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- the thread

    def _serve(self, rollout_id: str, routes: Routes) -> RolloutHandle:
        try:
            handle = self._put(rollout_id, routes)
        except Exception as error:
            reason = StorageError(f"rollout {rollout_id} was not stored: {error}")
            self._end(routes, failed=1, reason=reason)
            raise reason from error
        if self.config.only_last_turn:
            self._delete_turn_before(rollout_id)
        self._end(routes, stored=1)
        return handle

    def _put(self, rollout_id: str, routes: Routes) -> RolloutHandle:
        handle = self.store.put(rollout_id, routes)
        if self.config.debug_mode:
            back = fetch_routes(self.store, handle)
            if isinstance(back, Absence):
                raise StorageError(f"{back.value} right after it was put")
            check_canary(self.spec, back)
        return handle

    def _delete_turn_before(self, rollout_id: str) -> None:
        """After the put of a turn, so that a trainer always finds one of the two."""
        before = previous_turn(rollout_id)
        try:
            handle = None if before is None else self.store.find(before)
            if handle is not None:
                self.store.delete(handle)
        except KVRouteError as error:
            logger.warning("rollout %s: the turn before could not be deleted: %s", rollout_id, error)
            with self._lock:
                self._count(turn_failures=1)
        else:
            with self._lock:
                self._count(turns_deleted=int(handle is not None))

    def _cancelled(self, ticket: Ticket, routes: Routes) -> None:
        if ticket.future.cancelled():
            self._end(routes, failed=1, reason=ticket.unstored)

    def _end(self, routes: Routes, *, reason: StorageError | None = None, **by: int) -> None:
        with self._lock:
            self._count(waiting=-1, waiting_nbytes=-routes.ids.nbytes, reason=reason, **by)

    # ---------------------------------------------------------------- held: _lock

    def _refusal(self, rollout_id: str, nbytes: int) -> StorageError | None:
        now, limits = self._counters, self.limits
        if self._closed:
            return StoreClosedError(f"rollout {rollout_id} was refused: the routing replay manager is closed")
        if now.waiting >= limits.waiting_max or now.waiting_nbytes + nbytes > limits.waiting_nbytes_max:
            wait = f"{now.waiting} rollouts of {now.waiting_nbytes} bytes wait for the store"
            return StorageError(f"rollout {rollout_id} was refused: {wait}")
        return None

    def _count(self, *, reason: StorageError | None = None, **by: int) -> None:
        self._counters = replace(self._counters, **{k: getattr(self._counters, k) + n for k, n in by.items()})
        if reason is not None and len(self._reasons) < REASONS_MAX:
            self._reasons.append(str(reason))

    # ---------------------------------------------------------------- what fits

    def _check_routes(self, routes: Routes) -> None:
        Layout.of(self.spec).check_model(routes.layout)
        if self.config.debug_mode:
            check_canary(self.spec, routes)


__all__ = ["ReplayCounters", "ReplayLimits", "RoutingReplayManager", "Ticket"]

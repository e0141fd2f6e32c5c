"""Ties request ids and a rollout store together: what ``RoutingReplayConfig`` configures.

An engine submits the routes of each sample that ends and goes on; a thread stores them, in order. What becomes of each
is told by its future, by the counters, and by :meth:`RoutingReplayManager.close`.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Final, Self

from cache_manager.errors import ConfigError, InvalidInputError, StorageError, StoreClosedError
from cache_manager.ports import Absence
from cache_manager.spec import AuxBlockDataSpec
from kvroute.capture.canary import CANARY_OF, check_canary
from kvroute.checks import whole
from kvroute.config import RoutingReplayConfig
from kvroute.rollout import open_rollouts
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.ids import previous_turn, rollout_id_of
from kvroute.rollout.port import RolloutStore
from kvroute.rollout.shard import fetch_routes
from kvroute.routes import Layout, Routes

logger = logging.getLogger(__name__)

REASONS_MAX: Final = 8
"""Failures that an error names; the others are counted in it."""


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
class _Waiting:
    """A rollout that was submitted, and what becomes of it."""

    rollout_id: str
    routes: Routes
    future: Future[RolloutHandle]


class RoutingReplayManager:
    """Stores what a ``RoutingReplayConfig`` says, where it says. Safe from several threads.

    ``spec`` is the engine's routing spec (with ``debug_mode`` the canary spec of it); a configuration that does not fit
    it, or is off, is a :class:`ConfigError`. ``store`` takes the place of the one that the configuration names, and is
    owned and closed like it. ``waiting_max`` rollouts of ``waiting_nbytes_max`` bytes together wait for the store; a
    further one is refused. ``close_s`` bounds how long :meth:`close` waits for what was submitted.
    """

    def __init__(
        self,
        config: RoutingReplayConfig,
        spec: AuxBlockDataSpec,
        *,
        store: RolloutStore | None = None,
        waiting_max: int = 4096,
        waiting_nbytes_max: int = 1 << 30,
        close_s: float = 60.0,
    ) -> None:
        if not config.enable_routing_replay:
            raise ConfigError("enable_routing_replay", "true, for there to be a manager", False)
        if config.debug_mode != (CANARY_OF in spec.attrs):
            raise ConfigError("debug_mode", f"{CANARY_OF in spec.attrs}, as the engine's rows are", config.debug_mode)
        self._waiting_max = whole("waiting_max", waiting_max, 1)
        self._waiting_nbytes_max, self._close_s = whole("waiting_nbytes_max", waiting_nbytes_max, 1), close_s
        if not isinstance(close_s, (int, float)) or not 0 <= close_s <= threading.TIMEOUT_MAX:
            raise InvalidInputError("close_s", "seconds, 0 or more", repr(close_s))
        self.config = config.fitted(spec)
        self.spec = spec
        self.store = open_rollouts(config.rollout_url) if store is None else store
        self._lock = threading.Lock()
        self._closed = False
        self._counters = ReplayCounters()
        self._reasons: list[str] = []
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()
        # A put that hangs keeps no interpreter from ending, as one of an executor's thread would.
        self._thread = threading.Thread(target=self._work, name="kvroute-rollouts", daemon=True)
        self._thread.start()

    def check(self, request_id: str, samples: int = 1) -> None:
        """Raise :class:`InvalidInputError` for a request id that no rollout can be named by."""
        rollout_id_of(request_id, samples - 1)

    def submit(self, request_id: str, routes: Routes, *, sample: int = 0) -> Future[RolloutHandle]:
        """Have the routes of a sample stored, and go on; the future has the handle, or the ``StorageError``.

        Never waits: where too much is waiting already, or the manager is closed, the future says that the rollout was
        refused. :class:`InvalidInputError` for an id that can be none, for routes of another model, and, with
        ``debug_mode``, an ``AssertionError`` that names the first row that is in the wrong place.
        """
        rollout_id = rollout_id_of(request_id, sample)
        Layout.of(self.spec).check_model(routes.layout)
        if self.config.debug_mode:
            check_canary(self.spec, routes)
        waiting = _Waiting(rollout_id, routes, Future())
        waiting.future.set_running_or_notify_cancel()  # not to be cancelled: the thread tells what becomes of it
        with self._lock:
            self._count(submitted=1, waiting=1, waiting_nbytes=routes.ids.nbytes)
            refused = self._refusal(rollout_id)
            if refused is None:
                self._queue.put(waiting)
        if refused is not None:
            self._end(waiting, refused, refused=1)
        return waiting.future

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
            self._queue.put(None)
        problems: list[str] = []
        if threading.current_thread() is self._thread:  # a future's callback closes
            self._work()
        else:
            self._thread.join(self._close_s)
        if left := self.counters.waiting:
            problems.append(f"{left} rollouts are not stored after {self._close_s:.1f} s")
        while (waiting := self._next()) is not None:
            self._end(waiting, StorageError(f"rollout {waiting.rollout_id}: closed before it was stored"), failed=1)
        self._queue.put(None)
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

    def _work(self) -> None:
        while (waiting := self._queue.get()) is not None:
            try:
                handle = self._put(waiting)
            except BaseException as error:  # noqa: BLE001 (it is not lost: the future, the counters and close have it)
                reason = StorageError(f"rollout {waiting.rollout_id} was not stored: {_said(error)}")
                reason.__cause__ = error
                self._end(waiting, reason, failed=1)
            else:
                self._end(waiting, handle, stored=1)
            del waiting  # a thread without work keeps nothing alive

    def _put(self, waiting: _Waiting) -> RolloutHandle:
        handle = self.store.put(waiting.rollout_id, waiting.routes)
        if self.config.debug_mode:
            back = fetch_routes(self.store, handle)
            if isinstance(back, Absence):
                raise StorageError(f"{back.value} right after it was put")
            check_canary(self.spec, back)
        if self.config.only_last_turn and (before := previous_turn(waiting.rollout_id)) is not None:
            self._delete(before)  # after the put, so that a trainer always finds one of the two
        return handle

    def _delete(self, rollout_id: str) -> None:
        try:
            if (handle := self.store.find(rollout_id)) is not None:
                self.store.delete(handle)
        except BaseException as error:  # noqa: BLE001 (the turn after it is stored)
            logger.warning("rollout %s, the turn before, could not be deleted: %s", rollout_id, _said(error))
            with self._lock:
                self._count(turn_failures=1)
        else:
            with self._lock:
                self._count(turns_deleted=int(handle is not None))

    def _next(self) -> _Waiting | None:
        try:
            return self._queue.get_nowait()
        except Empty:
            return None

    def _end(self, waiting: _Waiting, became: RolloutHandle | StorageError, **by: int) -> None:
        """Count what became of a rollout, then tell."""
        with self._lock:
            self._count(waiting=-1, waiting_nbytes=-waiting.routes.ids.nbytes, **by)
            if isinstance(became, StorageError) and len(self._reasons) < REASONS_MAX:
                self._reasons.append(str(became))
        try:
            if isinstance(became, StorageError):
                waiting.future.set_exception(became)
            else:
                waiting.future.set_result(became)
        except BaseException:
            logger.exception("a callback of rollout %s failed", waiting.rollout_id)

    # ---------------------------------------------------------------- held: _lock

    def _refusal(self, rollout_id: str) -> StorageError | None:
        now = self._counters  # with this one
        if self._closed:
            return StoreClosedError(f"rollout {rollout_id} was refused: the routing replay manager is closed")
        if now.waiting > self._waiting_max or now.waiting_nbytes > self._waiting_nbytes_max:
            wait = f"{now.waiting} rollouts of {now.waiting_nbytes} bytes would wait for the store"
            return StorageError(f"rollout {rollout_id} was refused: {wait}")
        return None

    def _count(self, **by: int) -> None:
        self._counters = replace(self._counters, **{k: getattr(self._counters, k) + n for k, n in by.items()})


def _said(error: BaseException) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # noqa: BLE001 (of a store: its error cannot even be told)
        return type(error).__name__

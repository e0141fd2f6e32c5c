"""Connects request ids with a rollout store, as ``RoutingReplayConfig`` says.

An engine submits the routes of each sample that ends and goes on; a thread stores them, in order. The result is in the
sample's future, the counters, and the errors of :meth:`RoutingReplayManager.close`.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from cache_manager.errors import ConfigError, StorageError, StoreClosedError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.integrations.fastdeploy.config import RoutingReplayConfig
from kvroute.rollout import open_rollouts
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.ids import previous_turn, rollout_id_of
from kvroute.rollout.port import RolloutStore
from kvroute.routes import Layout, Routes

logger = logging.getLogger(__name__)

REASONS_MAX: Final = 8
"""Failures that an error names; the others are counted in it."""
WAITING_MAX: Final = 4096
WAITING_NBYTES_MAX: Final = 1 << 30
CLOSE_S: Final = 60.0
"""How long a close waits for what was submitted."""


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


class _Waiting(NamedTuple):
    """A submitted rollout, and the future of its result."""

    rollout_id: str
    routes: Routes
    future: Future[RolloutHandle]


class RoutingReplayManager(AbstractContextManager["RoutingReplayManager"]):
    """Stores rollouts where a ``RoutingReplayConfig`` says. Safe from several threads.

    ``spec`` is the engine's routing spec; a configuration that does not fit it, or is off, is a :class:`ConfigError`.
    ``store`` takes the place of the one that the configuration names, and is owned and closed like it. A rollout beside
    :data:`WAITING_MAX` others that wait for the store, or :data:`WAITING_NBYTES_MAX` of them, is refused.
    """

    def __init__(
        self, config: RoutingReplayConfig, spec: AuxBlockDataSpec, *, store: RolloutStore | None = None
    ) -> None:
        if not config.enable_routing_replay:
            raise ConfigError("enable_routing_replay", "true, for there to be a manager", False)
        self.config = config.fitted(spec)
        self.spec = spec
        self.store = open_rollouts(config.rollout_url) if store is None else store
        self._lock = threading.RLock()
        self._closed = False
        self._counters = ReplayCounters()
        self._reasons: list[str] = []
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()
        # A put that hangs in a daemon thread does not keep the interpreter from ending; in an executor's it would.
        self._thread = threading.Thread(target=self._work, name="kvroute-rollouts", daemon=True)
        self._thread.start()

    def submit(self, request_id: str, routes: Routes, *, sample: int = 0) -> Future[RolloutHandle]:
        """Have the routes of a sample stored, and go on; the future has the handle, or the ``StorageError``.

        Never waits: where too much is waiting already, or the manager is closed, the future says that the rollout was
        refused. :class:`InvalidInputError` for an id that can be none, and for routes of another model.
        """
        rollout_id = rollout_id_of(request_id, sample)
        Layout.of(self.spec).check_model(routes.layout)
        waiting = _Waiting(rollout_id, routes, Future())
        waiting.future.set_running_or_notify_cancel()  # not to be cancelled: the thread sets the result
        with self._lock:
            now = self._count(submitted=1, waiting=1, waiting_nbytes=routes.ids.nbytes)
            refused = f"rollout {rollout_id} was refused: "
            if self._closed:
                error: StorageError = StoreClosedError(refused + "the routing replay manager is closed")
            elif now.waiting > WAITING_MAX or now.waiting_nbytes > WAITING_NBYTES_MAX:
                wait = f"{now.waiting} rollouts of {now.waiting_nbytes} bytes would wait for the store"
                error = StorageError(refused + wait)
            else:
                self._queue.put(waiting)
                return waiting.future
        self._end(waiting, error, refused=1)
        return waiting.future

    @property
    def counters(self) -> ReplayCounters:
        """The counts of this moment, consistent with each other."""
        with self._lock:
            return self._counters

    def close(self) -> None:
        """Store the submitted rollouts, then close the store; idempotent.

        Raises ``StorageError`` that names rollouts that were not stored, now or earlier, and the store's own failure;
        everything is closed nevertheless.
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
            self._thread.join(CLOSE_S)
        if unstored := self.counters.waiting:
            problems.append(f"{unstored} rollouts are not stored after {CLOSE_S:.1f} s")
        with suppress(Empty):
            while (waiting := self._queue.get_nowait()) is not None:
                self._end(waiting, StorageError(f"rollout {waiting.rollout_id}: closed before it was stored"), failed=1)
        self._queue.put(None)
        try:
            self.store.close()
        except StorageError as error:
            problems.append(str(error))
        problems += self._reasons
        if more := self.counters.failed + self.counters.refused - len(self._reasons):
            problems.append(f"and {more} more")
        if problems:
            raise StorageError("rollouts were lost: " + "; ".join(problems))

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- the thread

    def _work(self) -> None:
        while (waiting := self._queue.get()) is not None:
            try:
                became: RolloutHandle | StorageError = self._put(waiting)
                self._end(waiting, became, stored=1)
            except BaseException as error:  # noqa: BLE001 (the future, the counters and close have it)
                became = StorageError(f"rollout {waiting.rollout_id} was not stored: {error!r}")
                became.__cause__ = error
                self._end(waiting, became, failed=1)
            del waiting  # an idle thread keeps no rollout alive

    def _put(self, waiting: _Waiting) -> RolloutHandle:
        handle = self.store.put(waiting.rollout_id, waiting.routes)
        if self.config.only_last_turn and (before := previous_turn(waiting.rollout_id)) is not None:
            try:  # after the put, so that a trainer always finds one of the two
                if (earlier := self.store.find(before)) is not None:
                    self.store.delete(earlier)
                    self._count(turns_deleted=1)
            except BaseException as error:  # noqa: BLE001 (the turn after it is stored)
                logger.warning("rollout %s, the turn before, could not be deleted: %r", before, error)
                self._count(turn_failures=1)
        return handle

    def _end(self, waiting: _Waiting, became: RolloutHandle | StorageError, **by: int) -> None:
        """Count the result of a rollout, then complete its future."""
        self._count(waiting=-1, waiting_nbytes=-waiting.routes.ids.nbytes, **by)
        try:
            if isinstance(became, StorageError):
                self._reasons += [str(became)][: REASONS_MAX - len(self._reasons)]
                waiting.future.set_exception(became)
            else:
                waiting.future.set_result(became)
        except BaseException:
            logger.exception("a callback of rollout %s failed", waiting.rollout_id)

    def _count(self, **by: int) -> ReplayCounters:
        with self._lock:
            counted = {k: getattr(self._counters, k) + n for k, n in by.items()}
            self._counters = replace(self._counters, **counted)
            return self._counters

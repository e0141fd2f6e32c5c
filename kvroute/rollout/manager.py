"""Ties request ids, journals and a rollout store together: what ``RoutingReplayConfig`` configures.

An engine submits the routes of each sample that ends and goes on; a thread stores them, in order. What becomes of each
is told by its :class:`Ticket`, by the counters, and by :meth:`RoutingReplayManager.close`, which raises for every
failure that nobody has asked about.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final, Self

from cache_manager.errors import ConfigError, InvalidInputError, KVRouteError, StorageError, StoreClosedError
from cache_manager.ports import Absence
from cache_manager.spec import AuxBlockDataSpec
from kvroute.capture.canary import CANARY_OF, check_canary
from kvroute.config import RoutingReplayConfig
from kvroute.journal import RequestJournal
from kvroute.rollout import open_rollouts
from kvroute.rollout.handle import RolloutHandle
from kvroute.rollout.ids import previous_turn, rollout_id_of
from kvroute.rollout.port import RolloutStore
from kvroute.rollout.shard import fetch_routes
from kvroute.routes import Routes

logger = logging.getLogger(__name__)

REASONS_MAX: Final = 8
"""Failures that an error names; the others are counted in it."""
UNTOLD_MAX: Final = 4096
"""Failures that are remembered until somebody asks; of earlier ones only the number."""


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """``waiting_max`` rollouts of ``waiting_nbytes_max`` bytes together wait for the store; a further one is refused.

    ``journals_max`` requests have a journal at once. ``close_s`` bounds how long :meth:`RoutingReplayManager.close` and
    :meth:`~RoutingReplayManager.flush` wait for what was submitted.
    """

    waiting_max: int = 4096
    waiting_nbytes_max: int = 1 << 30
    journals_max: int = 65_536
    close_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("waiting_max", "waiting_nbytes_max", "journals_max"):
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
    refused: int = 0  # too many were waiting
    waiting: int = 0  # now
    waiting_nbytes: int = 0  # now
    turns_deleted: int = 0  # by only_last_turn
    turn_failures: int = 0  # an earlier turn that could not be deleted


class Ticket:
    """What becomes of one rollout that was submitted. Safe from several threads."""

    __slots__ = ("_future", "asked", "rollout_id")

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.asked = False
        """Whether somebody has been told how it ended."""
        self._future: Future[RolloutHandle] = Future()

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> RolloutHandle:
        """The handle, as soon as the rollout is stored; ``StorageError`` when it was not, or not within ``timeout_s``.

        ``timeout_s=0`` does not wait.
        """
        try:
            handle = self._future.result(timeout_s)
        except TimeoutError:
            raise StorageError(f"rollout {self.rollout_id} is not stored yet") from None
        except StorageError:
            self.asked = True
            raise
        self.asked = True
        return handle


class RoutingReplayManager:
    """Stores what a ``RoutingReplayConfig`` says, where it says. Safe from several threads; a journal belongs to one.

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
        self._journals: dict[tuple[str, int], RequestJournal] = {}
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Ticket, Routes]] = deque()
        self._busy = self._closing = self._closed = False
        self._counters = ReplayCounters()
        self._untold: deque[tuple[Ticket, str]] = deque()
        self._forgotten = 0  # failures too many to be told one by one
        self._thread = threading.Thread(target=self._serve, name="kvroute-rollouts", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- requests

    def check(self, request_id: str, samples: int = 1) -> None:
        """Raise :class:`InvalidInputError` for a request id that no rollout can be named by."""
        rollout_id_of(request_id, samples - 1)

    def journal(self, request_id: str, sample: int = 0) -> RequestJournal:
        """The journal of a sample, made when it is first asked for and kept until it is submitted or forgotten.

        For engines that keep none themselves: record rows, settle tokens, then :meth:`submit` without routes.
        """
        self.check(request_id, sample + 1)
        with self._changed:
            self._check_open()
            journal = self._journals.get((request_id, sample))
            if journal is None:
                if len(self._journals) >= self.limits.journals_max:
                    raise InvalidInputError("journals", f"at most {self.limits.journals_max} requests", "one more")
                journal = self._journals[request_id, sample] = RequestJournal(self.spec)
            return journal

    def forget(self, request_id: str, sample: int = 0) -> None:
        """Drop a sample's journal; idempotent."""
        with self._changed:
            self._journals.pop((request_id, sample), None)

    def submit(self, request_id: str, routes: Routes | None = None, *, sample: int = 0) -> Ticket:
        """Have the routes of a sample stored, and go on; without ``routes`` those of its journal, which ends.

        Never waits: where too much is waiting already, the ticket says that
        it was refused. :class:`InvalidInputError` for an id that can be none, for routes of another model, and, with
        ``debug_mode``, an ``AssertionError`` that names the first row that is in the wrong place.
        """
        ticket = Ticket(rollout_id_of(request_id, sample))
        if routes is None:
            with self._changed:
                journal = self._journals.pop((request_id, sample), None)
            if journal is None:
                raise InvalidInputError("request id", "one with a journal, or routes", repr(request_id))
            routes = journal.routes()
        self._check_routes(routes)
        nbytes = routes.ids.nbytes
        with self._changed:
            self._check_open()
            now = self._counters
            self._count(submitted=1)
            full = len(self._waiting) >= self.limits.waiting_max
            if full or now.waiting_nbytes + nbytes > self.limits.waiting_nbytes_max:
                reason = f"{now.waiting} rollouts of {now.waiting_nbytes} bytes wait for the store"
                self._count(refused=1)
                self._fail(ticket, StorageError(f"rollout {ticket.rollout_id} was refused: {reason}"))
                return ticket
            self._count(waiting=1, waiting_nbytes=nbytes)
            self._waiting.append((ticket, routes))
            self._changed.notify_all()
        return ticket

    # ---------------------------------------------------------------- the end

    @property
    def counters(self) -> ReplayCounters:
        """The counts of this moment, consistent with each other."""
        with self._changed:
            return self._counters

    def flush(self) -> None:
        """Return when what was submitted before is stored, and on stable storage, as far as the store has any.

        ``StorageError`` when that takes longer than ``limits.close_s``, and when the store cannot do it. A rollout that
        could not be stored is its ticket's to tell.
        """
        with self._changed:
            self._check_open()
        self._drain()
        self.store.flush()

    def close(self) -> None:
        """Store what was submitted, make it durable, close the store; idempotent.

        Raises ``StorageError`` that names what was not stored and whose ticket nobody has asked, and what the store
        itself failed at; all is closed all the same.
        """
        with self._changed:
            if self._closing:
                return
            self._closing = True
        problems: list[str] = []
        try:
            self._drain()
        except StorageError as error:
            problems.append(str(error))
        with self._changed:
            self._closed = True
            for ticket, routes in self._waiting:
                self._count(waiting=-1, waiting_nbytes=-routes.ids.nbytes, failed=1)
                self._fail(ticket, StorageError(f"rollout {ticket.rollout_id}: closed before it was stored"))
            self._waiting.clear()
            self._journals.clear()
            self._changed.notify_all()
        if not problems:
            self._thread.join()  # it has nothing left to do
        try:
            self.store.close()
        except StorageError as error:
            problems.append(str(error))
        untold = [reason for ticket, reason in self._untold if not ticket.asked]
        problems += untold[:REASONS_MAX]
        if more := max(len(untold) - REASONS_MAX, 0) + self._forgotten:
            problems.append(f"and {more} more rollouts")
        if problems:
            raise StorageError("rollouts were lost: " + "; ".join(problems))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- the thread

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                ticket, routes = self._waiting.popleft()
                self._busy = True
            try:
                handle = self._put(ticket.rollout_id, routes)
            except Exception as error:  # noqa: BLE001 - this thread's loop edge: the ticket has the reason
                self._end(routes, failed=1)
                with self._changed:
                    self._fail(ticket, _as_storage_error(ticket.rollout_id, error))
            else:
                self._end(routes, stored=1)
                ticket._future.set_result(handle)
                if self.config.only_last_turn:
                    self._delete_turn_before(ticket.rollout_id)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

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
        if before is None:
            return
        try:
            handle = self.store.find(before)
            if handle is not None:
                self.store.delete(handle)
        except KVRouteError as error:
            logger.warning("rollout %s: the turn before could not be deleted: %s", rollout_id, error)
            with self._changed:
                self._count(turn_failures=1)
        else:
            with self._changed:
                self._count(turns_deleted=int(handle is not None))

    def _drain(self) -> None:
        limit_s = self.limits.close_s
        with self._changed:
            if not self._changed.wait_for(lambda: not (self._waiting or self._busy), limit_s):
                raise StorageError(f"{self._counters.waiting} rollouts are not stored after {limit_s:.1f} s")

    # ---------------------------------------------------------------- held: _changed

    def _end(self, routes: Routes, **by: int) -> None:
        with self._changed:
            self._count(waiting=-1, waiting_nbytes=-routes.ids.nbytes, **by)

    def _fail(self, ticket: Ticket, reason: StorageError) -> None:
        """The ticket has the reason before anybody can find it done."""
        if len(self._untold) == UNTOLD_MAX:
            self._forgotten += not self._untold.popleft()[0].asked
        self._untold.append((ticket, str(reason)))
        ticket._future.set_exception(reason)

    def _count(self, **by: int) -> None:
        self._counters = replace(self._counters, **{k: getattr(self._counters, k) + n for k, n in by.items()})

    def _check_open(self) -> None:
        if self._closing:
            raise StoreClosedError("the routing replay manager is closed")

    def _check_routes(self, routes: Routes) -> None:
        attrs = self.spec.attrs
        for name in ("layer_ids", "num_experts", "num_layers"):
            if getattr(routes, name) != attrs[name]:
                raise InvalidInputError(f"routes.{name}", attrs[name], getattr(routes, name))
        if routes.top_k != self.spec.row_shape[1]:
            raise InvalidInputError("routes.top_k", self.spec.row_shape[1], routes.top_k)
        if self.config.debug_mode:
            check_canary(self.spec, routes)


def _as_storage_error(rollout_id: str, error: Exception) -> StorageError:
    told = StorageError(f"rollout {rollout_id} was not stored: {error}")
    told.__cause__ = error
    return told


__all__ = ["ReplayCounters", "ReplayLimits", "RoutingReplayManager", "Ticket"]

"""The thread of a node: it owns a link, runs what the engine asks for, and outlives whatever peers send."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

from transfer.errors import TransferError
from transfer.link import Arrival, Link, Peer, PeerLost

ARRIVALS_MAX: Final = 64
"""Taken from the link before anything else gets its turn."""

LOGGED_PEERS_MAX: Final = 1024

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class NodeClosedError(TransferError):
    """The node was closed, its thread has ended, or this is a forked process."""


class NodeFullError(TransferError):
    """More commands wait than the node takes; nothing was changed, try again."""

    def __init__(self, commands_max: int) -> None:
        super().__init__(f"commands_max: wanted at most {commands_max} waiting commands, got one more")


@dataclass(slots=True)
class NodeCounters:
    """What a node's thread has met: messages, peers that were lost, commands that did not fit, errors it bore."""

    arrivals: int = 0
    peers_lost: int = 0
    commands: int = 0
    commands_refused: int = 0
    errors: int = 0


class Worker(Protocol):
    """What a node does in its thread; ``now_s`` is monotonic. Whatever it raises is counted, logged and borne."""

    def arrived(self, arrival: Arrival, now_s: float) -> bool:
        """Act on a message, without releasing it; whether it made sense."""

    def lost(self, peer: Peer) -> None: ...

    def turn(self, now_s: float) -> float | None:
        """Do what is due, and a bounded part of what can be done; when the next turn is wanted, at the latest."""

    def begin_close(self, now_s: float, /) -> None:
        """Say goodbye. The link is closed after this."""

    def end_close(self) -> None:
        """The link is closed and has let go of every buffer."""


class NodeThread:
    """Runs a :class:`Worker` and the commands given to it until :meth:`close`.

    ``alive`` is ``False`` once the thread has ended, ``last_error`` is what it bore last, in words. ``turn_max_s`` is
    how long it sleeps when nothing is due.
    """

    def __init__(
        self, link: Link, worker: Worker, name: str, commands_max: int = 4096, turn_max_s: float = 0.25
    ) -> None:
        self.last_error = ""
        self.counters = NodeCounters()  # its own: who keeps it copies it
        self._link = link
        self._worker = worker
        self._commands: deque[Callable[[float], None]] = deque()
        self._commands_max = commands_max
        self._turn_max_s = turn_max_s
        self._entering = threading.Lock()
        self._stopping = False
        self._linger_s = 0.0
        self._pid = os.getpid()
        self._logged: OrderedDict[Peer, None] = OrderedDict()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._pid == os.getpid() and self._thread.is_alive()

    def check_alive(self) -> None:
        """Raise :class:`NodeClosedError` unless there is a thread. A fork may not wait for a lock: it may be held."""
        if not self.alive:
            raise NodeClosedError(f"{self._thread.name}: closed, ended or forked; {self.last_error or 'no error'}")

    def submit(self, command: Callable[[float], None]) -> None:
        """Have ``command`` run by the thread, with the time. :class:`NodeFullError`, :class:`NodeClosedError`."""
        self.check_alive()
        with self._entering:
            if self._stopping:
                raise NodeClosedError(f"{self._thread.name} is closed")
            if len(self._commands) >= self._commands_max:
                self.counters.commands_refused += 1
                raise NodeFullError(self._commands_max)
            self._commands.append(command)
        self._link.wake()

    def close(self, linger_s: float, wait_s: float) -> bool:
        """Run the commands that wait, say goodbye, close the link; whether the thread ended within ``wait_s``."""
        if self._pid != os.getpid():
            return True
        with self._entering:
            self._stopping = True
            self._linger_s = linger_s
        self._link.wake()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            timeout_s = 0.0
            while not self._stopping:
                timeout_s = self._once(timeout_s)
        finally:
            with self._entering:
                self._stopping = True
            self._commands_now()
            self._attempt(lambda: self._worker.begin_close(time.monotonic()))
            self._attempt(lambda: self._link.close(self._linger_s))
            self._attempt(self._worker.end_close)

    def _once(self, timeout_s: float) -> float:
        """One round; how long the next may wait for something to happen."""
        came = self._attempt(lambda: self._link.poll(timeout_s, ARRIVALS_MAX))
        if came is None:  # the link itself failed: no faster than this
            time.sleep(self._turn_max_s)
        self._commands_now()  # first: a message may be about what the engine asked for just before
        for item in came or ():
            if isinstance(item, PeerLost):
                self.counters.peers_lost += 1
                self._attempt(partial(self._worker.lost, item.peer))
            else:
                self._arrived(item)
        due_s = self._attempt(lambda: self._worker.turn(time.monotonic()))
        return self._turn_max_s if due_s is None else min(max(due_s - time.monotonic(), 0.0), self._turn_max_s)

    def _commands_now(self) -> None:
        for _ in range(len(self._commands)):
            command = self._commands.popleft()
            self.counters.commands += 1
            self._attempt(partial(command, time.monotonic()))

    def _arrived(self, arrival: Arrival) -> None:
        self.counters.arrivals += 1
        try:
            sense = self._attempt(lambda: self._worker.arrived(arrival, time.monotonic()))
        finally:
            arrival.release()
        if sense is False and arrival.peer not in self._logged:
            self._logged[arrival.peer] = None
            if len(self._logged) > LOGGED_PEERS_MAX:
                self._logged.popitem(last=False)
            log.warning("%s: %r sends what is no message; it is counted from now on", self._thread.name, arrival.peer)

    def _attempt(self, act: Callable[[], _T]) -> _T | None:
        try:
            return act()
        except Exception as error:
            self.counters.errors += 1
            self.last_error = f"{type(error).__name__}: {error}"
            log.exception("%s goes on after an error", self._thread.name)
            return None


__all__ = ["NodeClosedError", "NodeCounters", "NodeFullError", "NodeThread", "Worker"]

"""A process's end of all its transfers: it lends and borrows blocks, never waits, and is polled.

A node has one thread, which owns its link, its offers and its pulls, and survives every message of peers. The engine's
requests come to it as commands. Every public method but ``close`` returns at once and may be called by any thread.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar, TypeVarTuple

import msgspec

from cache_manager.errors import BlockBusyError, KVRouteError
from cache_manager.keys import Namespace
from cache_manager.record import RecordHeader
from transfer.actions import Action, BlockSink, Finished, Missing, OfferedBlock, Reason, Release, Send, WantedBlock
from transfer.counters import Counters
from transfer.errors import LocalProtocolError, NodeClosedError, NodeFullError, RemoteProtocolError, SinkError
from transfer.identity import Identity
from transfer.limits import TransferLimits
from transfer.link import Arrival, Link, LinkEvent, PeerFound
from transfer.messages import TO_OFFERS, Outcome, Records, TransferId, decode, encode
from transfer.offers import Offers
from transfer.pulls import Pulls

ARRIVALS_MAX: Final = 64
"""Most items taken from the link before other work gets its turn."""

COMMANDS_MAX: Final = 4096
"""Most calls that may wait for the thread."""

SENDS_A_TURN: Final = 16
TURN_MAX_S: Final = 0.25
CLOSE_S: Final = 10.0

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


def new_transfer() -> TransferId:
    """An id for an offer; it may be drawn in another process than the node's."""
    return TransferId(secrets.token_bytes(16))


class _Command(NamedTuple):
    """A request to the node's thread: one of its verbs, and the arguments, the transfer first."""

    verb: Callable[..., list[Action]]
    arguments: tuple[Any, ...]


class _Guarded(msgspec.Struct, frozen=True):
    """A sink whose errors cost one record each."""

    sink: BlockSink
    failed: Callable[[str], None]

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        try:
            return self.sink.install(part, index, header, payload)
        except BlockBusyError:
            raise
        except Exception as error:  # the engine's code may raise anything; counted and logged
            self.failed("sink")
            raise SinkError(f"part {part} of block {index}: {type(error).__name__}: {error}") from error


class Node:
    """Lends blocks to other nodes and borrows theirs. It owns ``link`` from here on, and closes it.

    ``notify`` is called in the node's thread when :meth:`poll` has something new; it must not block.
    """

    def __init__(
        self,
        link: Link,
        identity: Identity,
        limits: TransferLimits | None = None,
        *,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        limits = limits or TransferLimits()
        self.address = link.address
        self.last_error = ""
        self._link = link
        self._counters = Counters()
        self._offers = Offers(identity, limits, self._counters)
        self._pulls = Pulls(identity, limits, self._counters)
        self._notify = notify
        self._ended: deque[Release | Finished] = deque()  # bounded by the transfers in flight, if the engine polls
        self._lock = threading.Lock()  # for the fields below, which the engine's threads use
        self._commands: deque[_Command] = deque()
        self._lent: set[TransferId] = set()
        self._pulled: set[TransferId] = set()
        self._stopping = False
        self._linger_s = 0.0
        self._logged: set[str] = set()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvroute-node", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            link.close(0.0)
            raise

    # ---------------------------------------------------------------- the engine's side

    @property
    def alive(self) -> bool:
        return self._pid == os.getpid() and self._thread.is_alive()

    @property
    def lent(self) -> frozenset[TransferId]:
        """The offers whose :class:`Release` has not been reported: what they lend may still be sent."""
        return frozenset(self._lent)

    @property
    def counters(self) -> Counters:
        return replace(
            self._counters,
            offers_in_flight=len(self._lent),
            pulls_in_flight=len(self._pulled),
            link=getattr(self._link, "counters", None),
        )

    def offer(
        self,
        transfer: TransferId,
        blocks: Sequence[OfferedBlock] = (),
        *,
        is_open: bool = False,
        lease_s: float | None = None,
    ) -> None:
        """Lend ``blocks`` to the puller of ``transfer``; ``is_open``: more come by :meth:`grow`, until :meth:`seal`.

        :class:`Release` comes once; if there was no room it comes with a detail. Raises :class:`LocalProtocolError` for
        an id that is being lent, :class:`NodeFullError` or :class:`NodeClosedError`; then no :class:`Release` comes.
        """
        arguments = transfer, tuple(blocks), time.monotonic(), is_open, lease_s
        self._submit(_Command(self._offers.offer, arguments), self._lent)

    def grow(self, transfer: TransferId, blocks: Sequence[OfferedBlock]) -> None:
        """Add blocks to an open offer; harmless when it has ended."""
        self._submit(_Command(self._offers.grow, (transfer, tuple(blocks), time.monotonic())))

    def seal(self, transfer: TransferId) -> None:
        """No more blocks come; harmless when the offer has ended."""
        self._submit(_Command(self._offers.seal, (transfer, time.monotonic())))

    def withdraw(self, transfer: TransferId, why: str) -> None:
        """Give an offer up; harmless when it has ended."""
        log.debug("offer %s withdrawn: %s", transfer.hex(), why)
        self._submit(_Command(self._offers.withdraw, (transfer,)))

    def pull(self, transfer: TransferId, address: str, wanted: Sequence[WantedBlock], sink: BlockSink) -> None:
        """Pull ``wanted`` blocks from the node at ``address`` into ``sink``, until :class:`Finished` comes.

        ``address`` comes from the operator or the engine's hand-over, never from a peer's message. The offer may come
        later than the pull, and its blocks later still. A pull that cannot begin ends with a :class:`Finished` with a
        reason. Raises :class:`LocalProtocolError` for a transfer that is being pulled, :class:`NodeFullError` or
        :class:`NodeClosedError`; then no :class:`Finished` comes.
        """
        self._submit(_Command(self._begin_pull, (transfer, tuple(wanted), address, sink)), self._pulled)

    def abort(self, transfer: TransferId, why: str) -> None:
        """Give a pull up; harmless when it has ended. Its :class:`Finished` comes as always."""
        log.debug("pull %s aborted: %s", transfer.hex(), why)
        self._submit(_Command(self._pulls.abort, (transfer,)))

    def reset(self, namespace: Namespace) -> None:
        """Rows belong to this namespace from here on; every offer and every pull ends. There is always room for it."""
        self._submit(_Command(self._reset, (namespace,)))

    def poll(self) -> list[Release | Finished]:
        """The transfers that ended since the last call, each returned once."""
        ended = list[Release | Finished]()
        with suppress(IndexError):  # several threads may poll: each end goes to one of them
            while True:
                ended.append(self._ended.popleft())
        return ended

    def close(self, linger_s: float = 0.5) -> bool:
        """End everything, at the latest after ``linger_s`` and a margin; ``poll`` then returns the last ends.

        ``False``: the thread did not end. Blocks that ``poll`` does not report must not be touched, and a sink may
        still be called.
        """
        if self._pid != os.getpid():
            return True
        with self._lock:
            self._stopping = True
            self._linger_s = linger_s
        self._link.wake()
        self._thread.join(linger_s + CLOSE_S)
        return not self._thread.is_alive()

    def _submit(self, command: _Command, new: set[TransferId] | None = None) -> None:
        """Have the thread do ``command``; with ``new``, it begins a transfer that must not be in there."""
        # First: a forked child must not wait for a lock that may be held for ever.
        if not self.alive:
            raise NodeClosedError(f"the node is closed, has ended or was forked; {self.last_error or 'no error'}")
        with self._lock:
            if self._stopping:
                raise NodeClosedError("the node is closed")
            if len(self._commands) >= COMMANDS_MAX and command.verb != self._reset:
                raise NodeFullError("COMMANDS_MAX", COMMANDS_MAX, "one more command")
            transfer = command.arguments[0]
            if new is not None and transfer in new:
                verb = "lent" if new is self._lent else "pulled"
                raise LocalProtocolError(f"transfer: wanted one that is not {verb}, got {transfer.hex()}")
            self._commands.append(command)
            if new is not None:  # last: if a signal handler raises before it, no id stays that is never released
                new.add(transfer)
        self._link.wake()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            timeout_s = 0.0
            while not self._stopping:
                timeout_s = self._once(timeout_s)
        finally:
            with self._lock:
                self._stopping = True
            self._commands_now()
            self._attempt(lambda: self._act([*self._offers.close(), *self._pulls.close()]))
            self._attempt(self._link.close, self._linger_s)

    def _once(self, timeout_s: float) -> float:
        """One round; returns how long the next may wait for an event."""
        came = self._attempt(self._link.poll, timeout_s, ARRIVALS_MAX)
        if came is None:  # the link itself failed: pause before the next try
            time.sleep(TURN_MAX_S)
        self._commands_now()  # first: a message may concern the engine's latest request
        for item in came or ():
            self._attempt(self._arrived, item)
        due_s = self._attempt(self._turn)
        return TURN_MAX_S if due_s is None else min(max(due_s - time.monotonic(), 0.0), TURN_MAX_S)

    def _commands_now(self) -> None:
        for _ in range(len(self._commands)):
            self._attempt(self._do, self._commands.popleft())

    def _do(self, command: _Command) -> None:
        try:
            actions = command.verb(*command.arguments)
        except Exception as error:
            foreseen = isinstance(error, KVRouteError)
            actions = self._undone(command, str(error) if foreseen else f"{type(error).__name__}: {error}")
            self._act(actions)
            if not (actions and foreseen):
                raise
        else:
            self._act(actions)

    def _undone(self, command: _Command, why: str) -> list[Action]:
        """A failed command ends its transfer: ``poll`` reports it, and no peer waits for blocks that will not come."""
        verb, (transfer, *arguments) = command
        if verb == self._begin_pull:
            missing = tuple(
                Missing(part, block.index, Reason.ABORTED) for block in arguments[0] for part in block.parts
            )
            return [Finished(transfer, 0, missing, Reason.ABORTED, why)]
        with self._lock:  # the call that brought the command may just be noting it
            lent = transfer in self._lent
        if lent and verb != self._offers.seal:  # a second seal takes nothing from the peer
            return self._offers.withdraw(transfer, why) or [Release(transfer, Outcome.ABORTED, why)]
        return []

    def _begin_pull(
        self, transfer: TransferId, wanted: Sequence[WantedBlock], address: str, sink: BlockSink
    ) -> list[Action]:
        return self._pulls.pull(
            self._link.connect(address), transfer, wanted, _Guarded(sink, self._engine_failed), time.monotonic()
        )

    def _reset(self, namespace: Namespace) -> list[Action]:
        return [*self._offers.reset(namespace), *self._pulls.reset(namespace)]

    def _arrived(self, item: LinkEvent) -> None:
        if isinstance(item, Arrival):
            try:
                self._act(self._received(item, time.monotonic()))
            except RemoteProtocolError as error:
                self._counters.bad_messages += 1
                if self._logs("bad"):
                    log.warning("%r and perhaps others send invalid messages: %s", item.peer[:80], error)
            finally:
                item.release()
        elif isinstance(item, PeerFound):
            self._act(self._pulls.peer_found(item.peer, time.monotonic()))
        else:
            self._counters.peers_lost += 1
            self._pulls.peer_lost(item.peer)

    def _received(self, arrival: Arrival, now_s: float) -> list[Action]:
        message = decode(arrival.control)
        if arrival.bulk and not isinstance(message, Records):
            raise RemoteProtocolError(f"{type(message).__name__}: wanted no bulk, got {len(arrival.bulk)} frames")
        if isinstance(message, TO_OFFERS):
            return self._offers.receive(arrival.peer, message, now_s)
        return self._pulls.receive(arrival.peer, message, arrival.bulk, now_s)

    def _turn(self) -> float:
        """Do what is due, and send a bounded number of messages; returns when the next turn is due."""
        now_s = time.monotonic()
        self._act(self._offers.tick(now_s))
        self._act(self._pulls.tick(now_s))
        for _ in range(SENDS_A_TURN):
            send = self._offers.next_records()
            if send is None:
                return min(self._offers.next_due_s(), self._pulls.next_due_s())
            self._send(send)
        return now_s

    # ---------------------------------------------------------------- what sessions answer

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._attempt(self._send, action)  # an end behind it is reported all the same
            else:
                self._report(action)

    def _send(self, send: Send) -> None:
        if not self._link.send(send.peer, encode(send.message), send.bulk):
            session = self._pulls if isinstance(send.message, TO_OFFERS) else self._offers
            session.unsent(send, time.monotonic())

    def _report(self, ended: Release | Finished) -> None:
        with self._lock:
            (self._lent if isinstance(ended, Release) else self._pulled).discard(ended.transfer)
        self._ended.append(ended)
        if isinstance(ended, Release) and ended.detail and self._logs("offer"):
            log.warning("offer %s has failed: %s; further ones are counted", ended.transfer.hex(), ended.detail)
        try:
            self._notify()
        except Exception:  # noqa: BLE001 - as for sinks
            self._engine_failed("notify")

    def _engine_failed(self, what: str) -> None:
        """The engine's code has raised: its error does not stop the thread's work."""
        self._counters.engine_errors += 1
        if self._logs(what):
            log.exception("the engine's %s failed; further errors are counted", what)

    def _attempt(self, act: Callable[[*_Ts], _T], *args: *_Ts) -> _T | None:
        try:
            return act(*args)
        except Exception as error:
            self._counters.errors += 1
            self.last_error = f"{type(error).__name__}: {error}"
            if self._logs(type(error).__name__):
                log.exception("the node goes on after an error")
            return None

    def _logs(self, kind: str) -> bool:
        """Whether this is the first of its kind, which is logged; later ones are only counted."""
        first = kind not in self._logged
        self._logged.add(kind)
        return first

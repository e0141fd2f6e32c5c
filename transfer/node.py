"""A process's end of all its transfers: it lends blocks and borrows them, asks without waiting, and is polled.

A node has one thread, which owns its link, its offers and its pulls, and outlives whatever peers send. What the engine
asks for comes to it as commands. Every public method but ``close`` returns at once and may be called by any thread.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar

import transfer.actions as does
from cache_manager.errors import BlockBusyError, KVRouteError
from cache_manager.keys import Namespace
from cache_manager.record import RecordHeader
from transfer.actions import Finished, Install, OfferedBlock, Reason, Release, Send, WantedBlock
from transfer.counters import NodeCounters, ThreadCounters
from transfer.errors import LocalProtocolError, NodeClosedError, NodeFullError, RemoteProtocolError, TransferError
from transfer.identity import Identity
from transfer.limits import TransferLimits
from transfer.link import Arrival, Came, Link, PeerFound, PeerLost
from transfer.messages import Bye, Outcome, Records, ToOffers, TransferId, decode, encode
from transfer.offers import Offers
from transfer.pulls import Pulls

ARRIVALS_MAX: Final = 64
"""Taken from the link before anything else gets its turn."""

SENDS_A_TURN: Final = 16
SUMS_A_TURN: Final = 16
"""Records summed before they are asked for, while there is nothing else to do."""

TURN_MAX_S: Final = 0.25
CLOSE_S: Final = 10.0
LOG_PAUSE_S: Final = 60.0
"""Between two lines of one kind in the log."""

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_P = ParamSpec("_P")


def new_transfer() -> TransferId:
    """An id for an offer, which may be drawn in another process than the node's."""
    return TransferId(secrets.token_bytes(16))


class BlockSink(Protocol):
    """Where pulled records go: the engine's side, called in the node's thread."""

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        """Put a record, which was verified, in its place. ``payload`` is valid during the call.

        ``False``: the block has another generation now; the record is dropped and reported missing. A
        :class:`~cache_manager.errors.BlockBusyError` has it sent again later.
        """


class _Command(NamedTuple):
    """What an engine's thread asks of the node's: one of its verbs, for which transfer, and what it says besides."""

    verb: str
    transfer: TransferId
    said: tuple[Any, ...] = ()


class Node:
    """Lends blocks to other nodes and borrows theirs. It owns ``link`` from here on, and closes it.

    ``notify`` is called in the node's thread when :meth:`poll` has something new; it must not block. At most
    ``commands_max`` calls may wait for the thread.
    """

    def __init__(
        self,
        link: Link,
        identity: Identity,
        limits: TransferLimits | None = None,
        *,
        commands_max: int = 4096,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        limits = limits or TransferLimits()
        self.address = link.address
        self.last_error = ""
        self._link = link
        self._offers, self._pulls = Offers(identity, limits), Pulls(identity, limits)
        self._notify = notify
        self._counters = ThreadCounters()
        self._ended: deque[Release | Finished] = deque()  # bounded by what is in flight, while the engine polls
        self._lock = threading.Lock()  # for what the engine's threads touch, below
        self._commands: deque[_Command] = deque()
        self._commands_max = commands_max
        self._lent: set[TransferId] = set()
        self._sinks: dict[TransferId, BlockSink] = {}
        self._stopping = False
        self._linger_s = 0.0
        self._logged_s: dict[str, float] = {}
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvroute-node", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- the engine's side

    @property
    def alive(self) -> bool:
        return self._pid == os.getpid() and self._thread.is_alive()

    @property
    def counters(self) -> NodeCounters:
        offers, pulls, link = self._offers, self._pulls, getattr(self._link, "counters", None)
        mine, lent, borrowed = replace(self._counters), replace(offers.counters), replace(pulls.counters)
        return NodeCounters(mine, lent, borrowed, link, offers.in_flight, pulls.in_flight)

    def offer(
        self,
        transfer: TransferId,
        blocks: Sequence[OfferedBlock] = (),
        *,
        is_open: bool = False,
        lease_s: float | None = None,
    ) -> None:
        """Lend ``blocks`` to the puller of ``transfer``; ``is_open``: more come by :meth:`grow`, until :meth:`seal`.

        :class:`Release` is told once; it also comes, with a detail, when there was no room. Raises
        :class:`LocalProtocolError` for an id that is being lent, :class:`NodeFullError` or :class:`NodeClosedError`;
        then there will be none.
        """
        self._submit(_Command("offer", transfer, (tuple(blocks), is_open, lease_s)))

    def grow(self, transfer: TransferId, blocks: Sequence[OfferedBlock]) -> None:
        """Add blocks to an open offer; harmless when it has ended."""
        self._submit(_Command("grow", transfer, (tuple(blocks),)))

    def seal(self, transfer: TransferId) -> None:
        """No more blocks come; harmless when the offer has ended."""
        self._submit(_Command("seal", transfer))

    def withdraw(self, transfer: TransferId, why: str) -> None:
        """Give an offer up; harmless when it has ended."""
        log.debug("offer %s withdrawn: %s", transfer.hex(), why)
        self._submit(_Command("withdraw", transfer))

    def pull(self, transfer: TransferId, address: str, wanted: Sequence[WantedBlock], sink: BlockSink) -> None:
        """Pull what is ``wanted`` of the node at ``address`` into ``sink``, until :class:`Finished` is told.

        ``address`` comes from the operator or the engine's hand-over, never from a peer's message. The offer may come
        later than the pull, and its blocks later still. Whatever cannot be begun is told as a :class:`Finished` with a
        reason. Raises :class:`LocalProtocolError` for a transfer that is being pulled, :class:`NodeFullError` or
        :class:`NodeClosedError`, and then there will be none.
        """
        self._submit(_Command("pull", transfer, (address, tuple(wanted))), sink)

    def abort(self, transfer: TransferId, why: str) -> None:
        """Give a pull up; harmless when it has ended. Its :class:`Finished` comes as ever."""
        log.debug("pull %s aborted: %s", transfer.hex(), why)
        self._submit(_Command("abort", transfer))

    def reset(self, namespace: Namespace) -> None:
        """Rows belong to this namespace from here on; every offer and every pull ends."""
        self._submit(_Command("reset", TransferId(b""), (namespace,)))

    def poll(self) -> list[Release | Finished]:
        """What ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self, linger_s: float = 0.5) -> bool:
        """End everything, at the latest after ``linger_s`` and a margin; ``poll`` then has the rest.

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

    def _submit(self, command: _Command, sink: BlockSink | None = None) -> None:
        # First: a fork may not wait for a lock, as it may be held.
        if not self.alive:
            raise NodeClosedError(f"the node is closed, has ended or was forked; {self.last_error or 'no error'}")
        verb, transfer, _ = command
        with self._lock:
            if self._stopping:
                raise NodeClosedError("the node is closed")
            if len(self._commands) >= self._commands_max:
                self._counters.commands_refused += 1
                raise NodeFullError("commands_max", self._commands_max, "one more command")
            if verb == "offer":
                if transfer in self._lent:
                    raise LocalProtocolError(f"transfer: wanted one that is not lent, got {transfer.hex()}")
                self._lent.add(transfer)
            elif sink is not None:
                if transfer in self._sinks:
                    raise LocalProtocolError(f"transfer: wanted one that is not pulled, got {transfer.hex()}")
                self._sinks[transfer] = sink
            self._commands.append(command)
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
        """One round; how long the next may wait for something to happen."""
        came = self._attempt(self._link.poll, timeout_s, ARRIVALS_MAX)
        if came is None:  # the link itself failed: no faster than this
            time.sleep(TURN_MAX_S)
        self._commands_now()  # first: a message may be about what the engine asked for just before
        for item in came or ():
            self._attempt(self._arrived, item)
        due_s = self._attempt(self._turn)
        return TURN_MAX_S if due_s is None else min(max(due_s - time.monotonic(), 0.0), TURN_MAX_S)

    def _commands_now(self) -> None:
        for _ in range(len(self._commands)):
            self._counters.commands += 1
            self._attempt(self._do, self._commands.popleft())

    def _do(self, command: _Command) -> None:
        try:
            actions = self._begin(command, time.monotonic())
        except Exception as error:
            foreseen = isinstance(error, KVRouteError)
            actions = self._refused(command, str(error) if foreseen else f"{type(error).__name__}: {error}")
            self._act(actions)
            if not (actions and foreseen):
                raise
        else:
            self._act(actions)

    def _begin(self, command: _Command, now_s: float) -> Sequence[does.Action]:
        """Do what the engine asked for."""
        offers, pulls, begun = self._offers, self._pulls, None
        match command:
            case _Command("offer", transfer, (blocks, is_open, lease_s)):
                begun = offers.offer(transfer, blocks, now_s, is_open=is_open, lease_s=lease_s)
            case _Command("grow", transfer, (blocks,)):
                begun = offers.grow(transfer, blocks, now_s)
            case _Command("seal", transfer):
                begun = offers.seal(transfer, now_s)
            case _Command("withdraw", transfer):
                begun = offers.withdraw(transfer)
            case _Command("pull", transfer, (address, wanted)):
                begun = pulls.pull(self._link.connect(address), transfer, wanted, now_s)
            case _Command("abort", transfer):
                begun = pulls.abort(transfer)
            case _Command("reset", _, (namespace,)):
                begun = [*offers.reset(namespace), *pulls.reset(namespace)]
        if begun is None:
            raise TransferError("transfers_max or peers_max are in flight")
        return begun

    def _refused(self, command: _Command, why: str) -> Sequence[does.Action]:
        """What cannot be had is told by ``poll``, and no peer waits for blocks that will not come."""
        match command:
            case _Command("offer", transfer):
                return [Release(transfer, Outcome.ABORTED, why)]
            case _Command("grow", transfer):
                ended = self._offers.withdraw(transfer)
                return [replace(a, detail=why) if isinstance(a, Release) else a for a in ended]
            case _Command("pull", transfer, (_, wanted)):
                missing = tuple(does.Missing(part, b.index, Reason.ABORTED) for b in wanted for part in b.parts)
                return [Finished(transfer, does.PullResult(0, missing, Reason.ABORTED, why))]
        return []

    def _arrived(self, item: Came) -> None:
        if isinstance(item, Arrival):
            self._counters.arrivals += 1
            try:
                self._act(self._heard(item, time.monotonic()))
            except RemoteProtocolError as error:
                self._counters.bad_messages += 1
                if self._logs("bad"):
                    log.warning("%r and perhaps others send what is no message: %s", item.peer[:80], error)
            finally:
                item.release()
        elif isinstance(item, PeerFound):
            self._act(self._pulls.peer_found(item.peer, time.monotonic()))
        else:
            assert isinstance(item, PeerLost)
            self._counters.peers_lost += 1
            self._offers.peer_lost(item.peer)
            self._pulls.peer_lost(item.peer)

    def _heard(self, arrival: Arrival, now_s: float) -> list[does.Action]:
        message, peer = decode(arrival.control), arrival.peer
        if arrival.bulk and not isinstance(message, Records):
            raise RemoteProtocolError(f"{type(message).__name__}: wanted no bulk, got {len(arrival.bulk)} frames")
        if isinstance(message, ToOffers) or (isinstance(message, Bye) and self._offers.greeted(peer, message.boot_id)):
            return self._offers.receive(peer, message, now_s)
        return self._pulls.receive(peer, message, arrival.bulk, now_s)

    def _turn(self) -> float | None:
        """Do what is due, and a bounded part of what can be done; when the next turn is wanted, at the latest."""
        now_s = time.monotonic()
        offers, pulls = self._offers, self._pulls
        for session in (offers, pulls):
            due_s = session.next_due_s()
            if due_s is not None and due_s <= now_s:
                self._act(session.tick(now_s))
        for _ in range(SENDS_A_TURN):
            send = offers.next_records()
            if send is None:
                break
            self._send(send)
        else:
            return now_s
        if offers.sum_ahead(SUMS_A_TURN):
            return now_s
        return min((s for s in (offers.next_due_s(), pulls.next_due_s()) if s is not None), default=None)

    # ---------------------------------------------------------------- what sessions answer

    def _act(self, actions: Iterable[does.Action]) -> None:
        if installs := [action for action in actions if isinstance(action, Install)]:
            self._install(installs)  # first: what a session says about records comes after them
        for action in actions:
            match action:
                case Send():
                    self._send(action)
                case Release() | Finished():
                    self._tell(action)
                case does.Cut(peer):
                    self._link.cut(peer)

    def _send(self, send: Send) -> None:
        if not self._link.send(send.peer, encode(send.message), send.bulk):
            session = self._pulls if isinstance(send.message, ToOffers) else self._offers
            session.unsent(send, time.monotonic())

    def _install(self, installs: Sequence[Install]) -> None:
        """Have the records of a message put in place, then settle them at once."""
        outcomes: list[tuple[Install, bool]] = []
        for install in installs:
            try:
                sink = self._sinks[install.transfer]
                placed = sink.install(install.part, install.index, install.header, install.payload)
            except BlockBusyError:
                self._pulls.postponed(install)
                continue
            except Exception:  # the engine's code: its error costs this record only
                self._counters.sink_errors += 1
                if self._logs("sink"):
                    log.exception("the sink of pull %s failed", install.transfer.hex())
                placed = False
            outcomes.append((install, placed))
        self._act(self._pulls.installed(outcomes, time.monotonic()))

    def _tell(self, ended: Release | Finished) -> None:
        with self._lock:
            if isinstance(ended, Release):
                self._lent.discard(ended.transfer)
            else:
                del self._sinks[ended.transfer]
        self._ended.append(ended)
        try:
            self._notify()
        except Exception:  # the engine's code: its error stops nothing that the thread is in the middle of
            self._counters.notify_errors += 1
            if self._logs("notify"):
                log.exception("the notify callback of a node failed")

    def _attempt(self, act: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return act(*args, **kwargs)
        except Exception as error:
            self._counters.errors += 1
            self.last_error = f"{type(error).__name__}: {error}"
            if self._logs(type(error).__name__):
                log.exception("the node goes on after an error")
            return None

    def _logs(self, kind: str) -> bool:
        """Whether a line of this kind may be written: the others are counted only."""
        now_s = time.monotonic()
        if due := now_s >= self._logged_s.get(kind, now_s):
            self._logged_s[kind] = now_s + LOG_PAUSE_S
        return due

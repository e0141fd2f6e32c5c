"""The two ends of a transfer as an engine uses them: it asks without waiting, and polls what became of it.

Each node has one thread, which owns its link and its session. Every public method but ``close`` returns at once and may
be called from any thread.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol, TypeVar

from cache_manager.errors import BlockBusyError, KVRouteError
from cache_manager.record import RecordHeader
from transfer.actions import (
    DecodeAction,
    Finished,
    Install,
    Missing,
    OfferedBlock,
    PrefillAction,
    PullResult,
    Reason,
    Release,
    Send,
    WantedBlock,
)
from transfer.decode import DecodeSession
from transfer.errors import LocalProtocolError
from transfer.identity import Identity
from transfer.limits import TransferLimits
from transfer.link import Arrival, Link, Peer, ServingLink
from transfer.messages import Outcome, TransferId, encode
from transfer.node_thread import NodeClosedError, NodeCounters, NodeFullError, NodeThread, Worker
from transfer.offer import PrefillCounters
from transfer.prefill import PrefillSession
from transfer.pull import DecodeCounters

SENDS_A_TURN: Final = 16
SEALS_A_TURN: Final = 16
"""Records summed before they are asked for, while there is nothing else to do."""

CLOSE_S: Final = 10.0

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class BlockSink(Protocol):
    """Where pulled records go: the engine's side, called in the node's thread."""

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        """Put a record, which was verified, in its place. ``payload`` is valid during the call.

        ``False``: the block has another generation now; the record is dropped and reported missing. A
        :class:`~cache_manager.errors.BlockBusyError` has it sent again later.
        """


@dataclass(frozen=True, slots=True)
class PrefillNodeCounters:
    """``notify_errors`` are exceptions of ``notify``."""

    node: NodeCounters
    session: PrefillCounters
    in_flight: int
    notify_errors: int


@dataclass(frozen=True, slots=True)
class DecodeNodeCounters:
    """``sink_errors`` are exceptions of sinks, whose records are missing, ``notify_errors`` those of ``notify``."""

    node: NodeCounters
    session: DecodeCounters
    in_flight: int
    sink_errors: int
    notify_errors: int


class _Notify:
    """The engine's callback, of which no error stops what the thread is in the middle of."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self.errors = 0
        self._notify = notify

    def __call__(self) -> None:
        try:
            self._notify()
        except Exception:
            self.errors += 1
            log.exception("the notify callback of a node failed")


class _Node:
    """What the engine has of either side: a worker, and the thread that runs it."""

    def __init__(self, link: Link, worker: Worker, name: str, commands_max: int) -> None:
        self._thread = NodeThread(link, worker, name, commands_max)

    @property
    def alive(self) -> bool:
        return self._thread.alive

    @property
    def last_error(self) -> str:
        return self._thread.last_error

    def close(self, linger_s: float = 0.5) -> bool:
        """End everything, at the latest after ``linger_s`` and a margin; ``poll`` then has the rest.

        ``False``: the thread did not end. Blocks that ``poll`` does not report must not be touched, and a sink may
        still be called.
        """
        return self._thread.close(linger_s, linger_s + CLOSE_S)


class PrefillNode(_Node):
    """Offers blocks to decode nodes. It owns ``link`` from here on, and closes it.

    ``notify`` is called in the node's thread when :meth:`poll` has something new; it must not block.
    """

    def __init__(
        self,
        link: ServingLink,
        identity: Identity,
        limits: TransferLimits | None = None,
        *,
        commands_max: int = 4096,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = link.address
        self._worker = _PrefillWorker(link, PrefillSession(identity, limits or TransferLimits()), notify)
        super().__init__(link, self._worker, "kvroute-prefill-node", commands_max)

    @property
    def counters(self) -> PrefillNodeCounters:
        session, errors = self._worker.session, self._worker.notify.errors
        return PrefillNodeCounters(replace(self._thread.counters), replace(session.counters), session.in_flight, errors)

    def offer(self, blocks: Sequence[OfferedBlock], *, lease_s: float | None = None) -> TransferId:
        """Hold ``blocks`` for whoever pulls the id that is answered.

        The blocks must be leased until :meth:`poll` tells :class:`Release`; that also comes, with a detail, when there
        was no room. Raises :class:`NodeFullError` or :class:`NodeClosedError`, and nothing is held.
        """
        transfer = TransferId(secrets.token_bytes(16))
        self._thread.submit(lambda now_s: self._worker.offer(transfer, blocks, now_s, lease_s))
        return transfer

    def abort(self, transfer: TransferId, reason: str) -> None:
        """Give an offer up; harmless when it has ended."""
        log.debug("transfer %s aborted: %s", transfer.hex(), reason)
        self._thread.submit(lambda _: self._worker.act(self._worker.session.abort(transfer)))

    def reset(self, namespace: bytes) -> None:
        """Rows belong to the namespace with this fingerprint from here on; every offer ends."""
        self._thread.submit(lambda _: self._worker.act(self._worker.session.reset(namespace)))

    def poll(self) -> list[Release]:
        """What ended since the last call."""
        return _drain(self._worker.released)


class DecodeNode(_Node):
    """Pulls blocks from prefill nodes. It owns ``link`` from here on, and closes it.

    ``notify`` is called in the node's thread when a pull is over; it must not block.
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
        self._worker = _DecodeWorker(link, DecodeSession(identity, limits or TransferLimits()), notify)
        super().__init__(link, self._worker, "kvroute-decode-node", commands_max)

    @property
    def counters(self) -> DecodeNodeCounters:
        worker, session = self._worker, self._worker.session
        errors = worker.sink_errors, worker.notify.errors
        return DecodeNodeCounters(replace(self._thread.counters), replace(session.counters), session.in_flight, *errors)

    def pull(self, address: str, transfer: TransferId, wanted: Sequence[WantedBlock], sink: BlockSink) -> None:
        """Pull what is ``wanted`` into ``sink``; the engine holds the landing blocks until :class:`Finished`.

        ``address`` comes from the operator or the front, never from a peer's message. Whatever cannot be begun is told
        as a :class:`Finished` with a reason. Raises :class:`LocalProtocolError` for a transfer that is being pulled,
        :class:`NodeFullError` or :class:`NodeClosedError`, and then there will be none.
        """
        self._thread.check_alive()
        self._worker.enter(transfer, sink)
        try:
            self._thread.submit(lambda now_s: self._worker.pull(address, transfer, wanted, now_s))
        except (NodeClosedError, NodeFullError):
            self._worker.leave(transfer)
            raise

    def abort(self, transfer: TransferId, reason: str) -> None:
        """Give a pull up; harmless when it has ended. Its :class:`Finished` comes as ever."""
        log.debug("pull %s aborted: %s", transfer.hex(), reason)
        self._thread.submit(lambda now_s: self._worker.act(self._worker.session.abort(transfer), now_s))

    def reset(self, namespace: bytes) -> None:
        """Rows belong to the namespace with this fingerprint from here on; every pull ends."""
        self._thread.submit(lambda now_s: self._worker.act(self._worker.session.reset(namespace), now_s))

    def poll(self) -> list[Finished]:
        """What ended since the last call."""
        return _drain(self._worker.done)


class _PrefillWorker:
    def __init__(self, link: Link, session: PrefillSession, notify: Callable[[], None]) -> None:
        self.notify = _Notify(notify)
        self.link = link
        self.session = session
        self.released: deque[Release] = deque()  # bounded by the offers in flight, while the engine polls

    def offer(self, transfer: TransferId, blocks: Sequence[OfferedBlock], now_s: float, lease_s: float | None) -> None:
        try:
            refused = "" if self.session.offer(transfer, blocks, now_s, lease_s) else "transfers_max are in flight"
        except LocalProtocolError as error:
            refused = str(error)
        if refused:
            self._release(Release(transfer, Outcome.ABORTED, refused))

    def act(self, actions: Iterable[PrefillAction]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send(action)
                case Release():
                    self._release(action)

    def _release(self, released: Release) -> None:
        self.released.append(released)
        self.notify()

    def _send(self, send: Send) -> None:
        on_sent = partial(self._let_go, send) if send.bulk else None
        if not self.link.send(send.peer, encode(send.message), send.bulk, on_sent):
            self.session.unsent(send, time.monotonic())

    def _let_go(self, send: Send) -> None:
        self.act(self.session.let_go(send))

    def arrived(self, arrival: Arrival, now_s: float) -> bool:
        before = self.session.counters.bad_messages
        self.act(self.session.receive(arrival.peer, arrival.control, arrival.bulk, now_s))
        return self.session.counters.bad_messages == before

    def lost(self, peer: Peer) -> None:
        self.session.peer_lost(peer)

    def turn(self, now_s: float) -> float | None:
        self.act(self.session.tick(now_s))
        for peer in self.session.slow_peers(now_s):
            self.link.cut(peer)
        for _ in range(SENDS_A_TURN):
            send = self.session.next_records()
            if send is None:
                break
            self._send(send)
        else:
            return now_s
        if self.session.seal_ahead(SEALS_A_TURN):
            return now_s
        return self.session.next_due_s()

    def begin_close(self, _now_s: float, /) -> None:
        self.act(self.session.close())

    def end_close(self) -> None:
        assert not self.session.in_flight, "a closed link holds no buffer"


class _DecodeWorker:
    def __init__(self, link: Link, session: DecodeSession, notify: Callable[[], None]) -> None:
        self.notify = _Notify(notify)
        self.link = link
        self.session = session
        self.sink_errors = 0
        self._lock = threading.Lock()  # for what the engine's threads touch, below
        self._sinks: dict[TransferId, BlockSink] = {}
        self.done: deque[Finished] = deque()  # bounded by the pulls in flight, while the engine polls

    def enter(self, transfer: TransferId, sink: BlockSink) -> None:
        with self._lock:
            if transfer in self._sinks:
                raise LocalProtocolError(f"transfer: wanted one that is not being pulled, got {transfer.hex()}")
            self._sinks[transfer] = sink

    def leave(self, transfer: TransferId) -> None:
        with self._lock:
            del self._sinks[transfer]

    def pull(self, address: str, transfer: TransferId, wanted: Sequence[WantedBlock], now_s: float) -> None:
        try:
            actions = self.session.pull(self.link.connect(address), transfer, wanted, now_s)
            refused = "transfers_max or peers_max are in flight" if actions is None else ""
        except KVRouteError as error:
            actions, refused = None, str(error)
        if actions is None:
            missing = tuple(Missing(part, b.index, Reason.ABORTED) for b in wanted for part in b.parts)
            result = PullResult(0, missing, Reason.ABORTED, refused, 0, acknowledged=False)
            self._finish(Finished(transfer, result))
        else:
            self.act(actions, now_s)

    def act(self, actions: Iterable[DecodeAction], now_s: float) -> None:
        installs: list[Install] = []
        others: list[Send | Finished] = []
        for action in actions:
            if isinstance(action, Install):
                installs.append(action)
            else:
                others.append(action)
        if installs:  # first: what a session says about records comes after them
            self._install(installs, now_s)
        for action in others:
            if isinstance(action, Finished):
                self._finish(action)
            elif not self.link.send(action.peer, encode(action.message)):
                self.session.unsent(action, now_s)

    def _install(self, installs: Sequence[Install], now_s: float) -> None:
        """Have the records of a message put in place, then settle them at once."""
        outcomes: list[tuple[Install, bool]] = []
        for install in installs:
            sink = self._sinks.get(install.transfer)
            assert sink is not None, "a record for a pull that is over"
            try:
                placed = sink.install(install.part, install.index, install.header, install.payload)
            except BlockBusyError:
                self.session.postponed(install)
                continue
            except Exception:  # the engine's code: its error costs this record only
                self.sink_errors += 1
                log.exception("the sink of pull %s failed", install.transfer.hex())
                placed = False
            outcomes.append((install, placed))
        self.act(self.session.installed(outcomes, now_s), now_s)

    def _finish(self, finished: Finished) -> None:
        with self._lock:
            del self._sinks[finished.transfer]
        self.done.append(finished)
        self.notify()

    def arrived(self, arrival: Arrival, now_s: float) -> bool:
        before = self.session.counters.bad_messages
        self.act(self.session.receive(arrival.peer, arrival.control, arrival.bulk, now_s), now_s)
        return self.session.counters.bad_messages == before

    def lost(self, peer: Peer) -> None:
        self.session.peer_lost(peer)

    def turn(self, now_s: float) -> float | None:
        self.act(self.session.tick(now_s), now_s)
        return self.session.next_due_s()

    def begin_close(self, now_s: float, /) -> None:
        self.act(self.session.close(), now_s)

    def end_close(self) -> None:
        assert not self.session.in_flight, "a closed session pulls nothing"


def _drain(queue: deque[_T]) -> list[_T]:
    return [queue.popleft() for _ in range(len(queue))]

"""Bulk by Mooncake's TransferEngine, everything else by ZeroMQ; sessions see a link like any other.

Decode lends each prefill peer a window of registered memory. Prefill writes bulk there, then says over ZeroMQ where it
lies. Decode copies it out before anybody verifies it: whatever a late or repeated write does to the window afterwards,
the bytes that were summed are the bytes that are installed. A range is written again only after decode has said that it
was copied.

The native engine lives in a process of its own (:mod:`.mooncake_engine`), and so what it does to a process is done to
that one: when it ends, hangs or is killed, what was under way goes over ZeroMQ and another is started after
``pause_s``. So does what cannot go this way: small messages, no window yet, an engine that failed a moment ago.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cache_manager.record import Buffer
from cache_manager.spec import align
from transfer import mooncake_calls as calls
from transfer import mooncake_wire as wire
from transfer.errors import RemoteProtocolError
from transfer.link import Arrival, Peer, PeerLost
from transfer.mooncake_engine import PAGE_NBYTES, Arena, EngineProcess, MooncakeUnavailableError
from transfer.mooncake_writes import PLAIN, BulkSender, MooncakeLinkSettings
from transfer.zmq_link import ZmqLink

UNSAID_POLL_S: Final = 0.001
LOOK_S: Final = 0.25
"""How often it is looked what became due, at least."""


@dataclass(slots=True, eq=False)
class _Lent:
    """A window that this side lends to a server; ``offset`` in the arena."""

    offset: int
    life: bytes = b""  # of the grant; empty: not granted
    ready_s: float = 0.0


class MooncakeLink:
    """A :class:`~transfer.link.Link` around ``zmq``, which it owns and closes. Both ends have to be one.

    Bulk goes by the engine from the end that serves to the one that connected. Raises
    :class:`MooncakeUnavailableError` where Mooncake cannot be imported, :class:`TransferError` where its engine does
    not start.
    """

    def __init__(self, zmq: ZmqLink, settings: MooncakeLinkSettings | None = None) -> None:
        self.settings = settings = settings or MooncakeLinkSettings()
        self.counts: Counter[str] = Counter()
        self._zmq = zmq
        self._pid = os.getpid()
        self._closed = False
        self._serves = bool(zmq.address)
        self._window_nbytes = align(settings.window_nbytes, PAGE_NBYTES)
        self._lent: dict[Peer, _Lent] = {}
        self._frees: list[tuple[Peer, wire.Free]] = []
        self._restart_s = 0.0
        self._ready_by_s = 0.0
        nbytes = settings.staging_nbytes if self._serves else settings.windows_max * self._window_nbytes
        self._arena = Arena(nbytes)
        self._engine = self._start()
        try:
            self._engine.wait_ready(settings.start_s)
        except BaseException:
            self._engine.end()
            self._arena.close()
            zmq.close(0)
            raise
        self._sender = BulkSender(zmq, settings, self._arena, self.counts)

    @property
    def address(self) -> str:
        return self._zmq.address

    @property
    def engine_pid(self) -> int:
        """Of the native engine's process of the moment."""
        return self._engine.pid

    def connect(self, address: str) -> Peer:
        peer = self._zmq.connect(address)
        if not self._serves and peer not in self._lent and len(self._lent) < self.settings.windows_max:
            self._lent[peer] = _Lent(len(self._lent) * self._window_nbytes)
        return peer

    def send(
        self,
        peer: Peer,
        control: bytes,
        bulk: Sequence[Buffer] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> bool:
        self._lend(peer)
        taken = self._sender.send(self._engine, peer, control, bulk, on_sent) if bulk else None
        return self._zmq.send(peer, PLAIN + control, bulk, on_sent) if taken is None else taken

    def poll(self, timeout_s: float, limit: int = 64) -> list[Arrival | PeerLost]:
        self._keep_engine()
        self._advance()
        if self._sender.report():
            timeout_s = 0.0
        items: list[Arrival | PeerLost] = []
        wait_s = min(timeout_s, UNSAID_POLL_S if self._frees or self._sender.unsaid else LOOK_S)
        for item in self._zmq.poll(wait_s, limit):
            if isinstance(item, PeerLost):
                self._lost(item.peer)
                items.append(item)
            elif item.control[:1] == PLAIN:
                items.append(Arrival(item.peer, bytes(item.control)[1:], item.bulk, item.release))
            else:
                try:
                    if (arrival := self._internal(item)) is not None:
                        items.append(arrival)
                except RemoteProtocolError:
                    self.counts["bad_messages"] += 1
                finally:
                    item.release()
        self._advance()
        return items

    def cut(self, peer: Peer) -> None:
        self._zmq.cut(peer)

    def wake(self) -> None:
        self._zmq.wake()

    def close(self, linger_s: float = 0.5) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # a fork's copy: socket, engine and memory are the parent's
        give_up_s = time.monotonic() + linger_s
        while self._sender.waits and time.monotonic() < give_up_s:
            self._keep_engine()
            self._advance()
            time.sleep(UNSAID_POLL_S)
        self._engine.end()
        self._zmq.close(linger_s)
        self._sender.close()
        self._arena.close()

    # ---------------------------------------------------------------- the engine's process

    def _start(self) -> EngineProcess:
        settings = self.settings
        self._ready_by_s = time.monotonic() + settings.start_s
        start = calls.Start(
            settings.host,
            settings.protocol,
            settings.device,
            self._arena.nbytes,
            registered=not self._serves or settings.protocol != "tcp",
        )
        return EngineProcess(self._arena, start, self._zmq.wake_fd, settings.write_s)

    def _keep_engine(self) -> None:
        """Hear the engine; end one that hangs; start another when there is none."""
        engine, now_s = self._engine, time.monotonic()
        for done in engine.take():
            self._sender.done(done.number, done.code)
        unready = engine.ready is None and now_s > self._ready_by_s
        if not engine.gone and (unready or self._sender.stuck or (engine.ready is not None and engine.ready.error)):
            engine.end()
        if not engine.gone:
            return
        if not self._restart_s:
            self._restart_s = now_s + self.settings.pause_s
            self.counts["engines_lost"] += 1
            self._sender.engine_gone()
            for lent in self._lent.values():  # nobody can write to them any more
                lent.life, lent.ready_s = b"", 0.0
        elif now_s >= self._restart_s:
            try:
                self._engine = self._start()
                self._restart_s = 0.0
            except OSError:  # no process, no memory: as long as that lasts
                self.counts["restarts_failed"] += 1
                self._restart_s = now_s + self.settings.pause_s

    # ---------------------------------------------------------------- windows

    def _lend(self, peer: Peer) -> None:
        """Grant a server its window, before the first message of a connection."""
        lent, ready = self._lent.get(peer), self._engine.ready
        if lent is None or lent.life or ready is None or self._engine.gone or time.monotonic() < lent.ready_s:
            return
        life = secrets.token_bytes(16)
        grant = wire.Grant(life, ready.port, ready.base + lent.offset, self._window_nbytes)
        if self._zmq.send(peer, wire.encode(grant)):
            lent.life = life

    def _lost(self, peer: Peer) -> None:
        self._sender.lost(peer)
        if lent := self._lent.get(peer):
            if lent.life:
                lent.ready_s = time.monotonic() + self.settings.quarantine_s
            lent.life = b""
        self._frees = [free for free in self._frees if free[0] != peer]

    def _internal(self, item: Arrival) -> Arrival | None:
        match wire.decode(bytes(item.control)):
            case wire.Grant() as grant:
                host = self._zmq.host_of(item.peer)
                if host is None:
                    raise RemoteProtocolError("a grant from a peer that does not serve us")
                self._sender.grant(item.peer, grant, host)
                return None
            case wire.Landed() as landed:
                return self._on_landed(item, landed)
            case wire.Free() as free:
                self._sender.freed(item.peer, free)
                return None

    def _on_landed(self, item: Arrival, landed: wire.Landed) -> Arrival:
        lent = self._lent.get(item.peer)
        if lent is None or lent.life != landed.life or not lent.life:
            raise RemoteProtocolError("bulk landed in a window that is not granted")
        if len(item.bulk) != 1 or not wire.inside(landed.ranges, self._window_nbytes):
            raise RemoteProtocolError("bulk landed outside its window")
        # A copy of its own: what is verified next must not change any more.
        window = self._arena.view[lent.offset : lent.offset + self._window_nbytes]
        bulk = [memoryview(bytes(window[offset : offset + n])) for offset, n in landed.ranges]
        self._frees.append((item.peer, wire.Free(landed.life, landed.number)))
        self.counts["messages_landed"] += 1
        return Arrival(item.peer, bytes(item.bulk[0]), bulk)

    def _advance(self) -> None:
        self._frees = [(peer, free) for peer, free in self._frees if not self._zmq.send(peer, wire.encode(free))]
        self._sender.advance()


__all__ = ["MooncakeLink", "MooncakeLinkSettings", "MooncakeUnavailableError"]

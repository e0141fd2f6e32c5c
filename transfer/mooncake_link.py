"""Bulk by Mooncake's TransferEngine, everything else by ZeroMQ; sessions see a link like any other.

Decode lends each prefill peer a window of registered memory. Prefill writes bulk there, then says over ZeroMQ where it
lies. Decode copies it out before anybody verifies it: whatever a late or repeated write does to the window afterwards,
the bytes that were summed are the bytes that are installed. A range is written again only after decode has said that it
was copied; after a failed write, whose slices may go on for a while, range and sources rest for ``quarantine_s``.

The engine runs in this process: only calls that do not wait are made, by the one thread that owns the link, and bulk is
read from where it lies, which another process could not. What cannot go this way (small messages, no window, an engine
that failed a moment ago) goes over ZeroMQ.
"""

from __future__ import annotations

import ctypes
import mmap
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from cache_manager.errors import ConfigError
from cache_manager.record import Buffer
from cache_manager.spec import align
from transfer import mooncake_wire as wire
from transfer.errors import RemoteProtocolError, TransferError
from transfer.link import Arrival, Peer, PeerLost
from transfer.zmq_link import ZmqLink

WRITES_POLL_S: Final = 0.001
_PLAIN: Final = bytes((wire.PLAIN,))


class MooncakeUnavailableError(TransferError):
    """The Mooncake wheel or a library that it needs is not here."""


@dataclass(frozen=True, slots=True)
class MooncakeLinkSettings:
    """``host`` is this machine as the engine's peers reach it. Messages with less bulk than ``bulk_nbytes_min`` go over
    ZeroMQ. ``quarantine_s`` is ``MC_TRANSFER_TIMEOUT`` (30 s) and a margin."""

    host: str = "127.0.0.1"
    protocol: str = "tcp"
    device: str = ""
    window_nbytes: int = 32 << 20
    windows_max: int = 16
    writes_max: int = 8
    bulk_nbytes_min: int = 64 << 10
    quarantine_s: float = 35.0
    pause_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("window_nbytes", "windows_max", "writes_max", "bulk_nbytes_min"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= wire.WINDOW_NBYTES_MAX:
                raise ConfigError(name, f"an integer from 1 to {wire.WINDOW_NBYTES_MAX}", repr(value))
        for name in ("quarantine_s", "pause_s"):
            if not 0 < getattr(self, name) < 3600:
                raise ConfigError(name, "seconds in (0, 3600)", getattr(self, name))


@dataclass(slots=True, eq=False)
class _Lent:
    """A window that this side lends to a server."""

    memory: mmap.mmap
    base: int
    life: bytes = b""  # of the grant; empty: not granted
    ready_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Granted:
    """A client's window, as this side writes to it."""

    grant: wire.Grant
    target: str
    window: wire.Window
    down_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Write:
    """A message whose bulk is on its way into a window."""

    peer: Peer
    granted: _Granted
    number: int
    control: bytes
    bulk: Sequence[Buffer]
    landed: wire.Landed
    on_sent: Callable[[], None] | None
    batches: list[int] = field(default_factory=list)  # submitted, not known to be over
    sources: list[Any] = field(default_factory=list)
    refused: bool = False  # the engine did not take all of it, or some of it failed
    landed_now: bool = False
    held_s: float = 0.0  # not 0: failed; range and sources rest until then
    by_zmq: int = 0  # messages with these buffers that ZeroMQ still has


class MooncakeLink:
    """A :class:`~transfer.link.Link` around ``zmq``, which it owns and closes. Both ends have to be one.

    Raises :class:`MooncakeUnavailableError` where Mooncake cannot be imported, :class:`TransferError` where its engine
    does not start.
    """

    def __init__(self, zmq: ZmqLink, settings: MooncakeLinkSettings | None = None) -> None:
        self.settings = settings or MooncakeLinkSettings()
        self.counts: Counter[str] = Counter()
        self._zmq = zmq
        self._lent: dict[Peer, _Lent] = {}
        self._granted: dict[Peer, _Granted] = {}
        self._writes: list[_Write] = []
        self._frees: list[tuple[Peer, wire.Free]] = []
        self._numbers = 0
        self._closed = False
        try:
            self._engine = _start_engine(self.settings)
        except TransferError:
            zmq.close(0)
            raise

    @property
    def address(self) -> str:
        return self._zmq.address

    def connect(self, address: str) -> Peer:
        peer = self._zmq.connect(address)
        if peer not in self._lent and len(self._lent) < self.settings.windows_max:
            memory = mmap.mmap(-1, align(self.settings.window_nbytes))
            base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            if code := self._engine.register_memory(base, len(memory)):
                raise TransferError(f"Mooncake register_memory of {len(memory)} bytes: {code}")
            self._lent[peer] = _Lent(memory, base)
        return peer

    def send(
        self,
        peer: Peer,
        control: bytes,
        bulk: Sequence[Buffer] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> bool:
        self._lend(peer)
        granted = self._granted.get(peer)
        nbytes = sum(map(_nbytes, bulk))
        if (
            granted is None
            or not self.settings.bulk_nbytes_min <= nbytes <= granted.window.nbytes // 2
            or len(bulk) > wire.RANGES_MAX
            or time.monotonic() < granted.down_s
        ):
            return self._zmq.send(peer, _PLAIN + control, bulk, on_sent)
        if sum(w.peer == peer for w in self._writes) >= self.settings.writes_max:
            return False
        return self._write(peer, granted, control, bulk, on_sent)

    def _write(
        self,
        peer: Peer,
        granted: _Granted,
        control: bytes,
        bulk: Sequence[Buffer],
        on_sent: Callable[[], None] | None,
    ) -> bool:
        number, self._numbers = self._numbers, self._numbers + 1
        start = granted.window.take(number, sum(align(_nbytes(b)) for b in bulk))
        if start is None:
            return False
        ranges = []
        for buffer in bulk:
            ranges.append((start, _nbytes(buffer)))
            start += align(_nbytes(buffer))
        landed = wire.Landed(granted.grant.life, number, ranges)
        write = _Write(peer, granted, number, control, bulk, landed, on_sent)
        # They keep the buffers where they are.
        write.sources = [np.frombuffer(buffer, np.uint8) for buffer in bulk if _nbytes(buffer)]
        base = granted.grant.base
        pieces = _merged(
            [(s.ctypes.data, base + at, n) for s, (at, n) in zip(write.sources, _filled(ranges), strict=True)]
        )
        for source, target, nbytes in pieces:
            # One by one: of a batch, transfer_check_status tells how its first piece fares, and nothing of the rest.
            batch = int(self._engine.transfer_submit_write(granted.target, source, target, nbytes))
            if batch == 0:
                write.refused = True
                break
            write.batches.append(batch)
        if write.refused and not write.batches:  # nothing was submitted: nothing will be written
            granted.window.give(number)
            self._pause(granted)
            return self._zmq.send(peer, _PLAIN + control, bulk, on_sent)
        self._writes.append(write)
        return True

    def poll(self, timeout_s: float, limit: int = 64) -> list[Arrival | PeerLost]:
        self._advance()
        items: list[Arrival | PeerLost] = []
        wait_s = min(timeout_s, WRITES_POLL_S) if self._writes or self._frees else timeout_s
        for item in self._zmq.poll(wait_s, limit):
            if isinstance(item, PeerLost):
                self._lost(item.peer)
                items.append(item)
            elif item.control[:1] == _PLAIN:
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
        """Lets go of every buffer; what Mooncake still reads then is memory that lives, for nobody who would use it."""
        if self._closed:
            return
        self._closed = True
        give_up_s = time.monotonic() + linger_s
        while any(not w.held_s and not w.landed_now for w in self._writes) and time.monotonic() < give_up_s:
            self._advance()
            time.sleep(WRITES_POLL_S)
        self._zmq.close(linger_s)
        for lent in self._lent.values():
            self._engine.unregister_memory(lent.base)
        del self._engine
        writes, self._writes = self._writes, []
        for write in writes:
            write.sources.clear()
            if write.on_sent is not None:
                write.on_sent()

    # ---------------------------------------------------------------- windows

    def _lend(self, peer: Peer) -> None:
        """Grant a server its window, before the first message of a connection."""
        lent = self._lent.get(peer)
        if lent is None or lent.life or time.monotonic() < lent.ready_s:
            return
        life = secrets.token_bytes(16)
        grant = wire.Grant(life, self._engine.get_rpc_port(), lent.base, len(lent.memory))
        if self._zmq.send(peer, wire.encode(grant)):
            lent.life = life

    def _lost(self, peer: Peer) -> None:
        self._granted.pop(peer, None)
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
                self._granted[item.peer] = _Granted(grant, f"{host}:{grant.port}", wire.Window(grant.nbytes))
                return None
            case wire.Landed() as landed:
                return self._on_landed(item, landed)
            case wire.Free(life, number):
                granted = self._granted.get(item.peer)
                if granted is not None and granted.grant.life == life and self._idle(granted, number):
                    granted.window.give(number)
                return None

    def _on_landed(self, item: Arrival, landed: wire.Landed) -> Arrival:
        lent = self._lent.get(item.peer)
        if lent is None or lent.life != landed.life or not lent.life:
            raise RemoteProtocolError("bulk landed in a window that is not granted")
        if len(item.bulk) != 1 or not wire.inside(landed.ranges, len(lent.memory)):
            raise RemoteProtocolError("bulk landed outside its window")
        # A copy of its own: what is verified next must not change any more.
        bulk = [memoryview(lent.memory[offset : offset + n]) for offset, n in landed.ranges]
        self._frees.append((item.peer, wire.Free(landed.life, landed.number)))
        self.counts["messages_landed"] += 1
        return Arrival(item.peer, bytes(item.bulk[0]), bulk)

    # ---------------------------------------------------------------- writes

    def _idle(self, granted: _Granted, number: int) -> bool:
        """Whether no write of ours uses the range any more: only an honest FREE comes then."""
        return not any(w.number == number and w.granted is granted for w in self._writes)

    def _advance(self) -> None:
        self._frees = [(peer, free) for peer, free in self._frees if not self._zmq.send(peer, wire.encode(free))]
        done = [write for write in self._writes if self._over(write)]
        if done:
            self._writes = [write for write in self._writes if write not in done]
        for write in done:
            write.sources.clear()
            if write.on_sent is not None:
                write.on_sent()

    def _over(self, write: _Write) -> bool:
        """Move a write on; whether its buffers are free and it is told, or lost with its peer."""
        now_s = time.monotonic()
        current = self._granted.get(write.peer) is write.granted
        if write.held_s:
            if now_s < write.held_s or write.by_zmq:
                return False
            write.granted.window.give(write.number)
            return True
        if not write.landed_now:
            for batch in list(write.batches):
                status = int(self._engine.transfer_check_status(batch))
                if status:  # asked for until it is not 0, and never again
                    write.batches.remove(batch)
                    write.refused |= status < 0
            if write.refused:
                self._failed(write, current, now_s)
                return False
            if write.batches:
                return False
            write.landed_now = True
            self.counts["messages_written"] += 1
        return not current or self._zmq.send(write.peer, wire.encode(write.landed), [write.control])

    def _failed(self, write: _Write, current: bool, now_s: float) -> None:
        self.counts["writes_failed"] += 1
        write.held_s = now_s + self.settings.quarantine_s
        self._pause(write.granted)

        def sent() -> None:
            write.by_zmq = 0

        if current and self._zmq.send(write.peer, _PLAIN + write.control, write.bulk, sent):
            write.by_zmq = 1

    def _pause(self, granted: _Granted) -> None:
        granted.down_s = time.monotonic() + self.settings.pause_s


def _start_engine(settings: MooncakeLinkSettings) -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise MooncakeUnavailableError(
            f"mooncake: wanted TransferEngine, got {error}; pip install 'kvroute[mooncake-cpu]', then kvroute doctor"
        ) from error
    engine = TransferEngine()
    if code := engine.initialize(settings.host, "P2PHANDSHAKE", settings.protocol, settings.device):
        raise TransferError(f"Mooncake's TransferEngine on {settings.host} did not start: {code}")
    return engine


def _filled(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(at, nbytes) for at, nbytes in ranges if nbytes]


def _merged(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(source, target, bytes) with those joined that follow each other at both ends.

    >>> _merged([(0, 64, 10), (10, 74, 5), (15, 128, 1)])
    [(0, 64, 15), (15, 128, 1)]
    """
    merged: list[tuple[int, int, int]] = []
    for source, target, nbytes in pieces:
        if merged:
            s, t, n = merged[-1]
            if (s + n, t + n) == (source, target):
                merged[-1] = s, t, n + nbytes
                continue
        merged.append((source, target, nbytes))
    return merged


def _nbytes(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


__all__ = ["MooncakeLink", "MooncakeLinkSettings", "MooncakeUnavailableError"]

"""The sending half of a Mooncake link: messages whose bulk is written into a peer's window, and what becomes of them.

Bulk is copied into memory that is shared with the engine's process, so its buffers are the sender's again at once,
whatever happens to the write. A write that fails, or of which nothing is heard, goes by ZeroMQ from that copy; its
range in the window, into which pieces of it may go on arriving for a while, rests for ``quarantine_s``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import numpy as np

from cache_manager.errors import ConfigError
from cache_manager.record import Buffer
from cache_manager.spec import align
from transfer import mooncake_calls as calls
from transfer import mooncake_wire as wire
from transfer.frames import nbytes_of
from transfer.link import Peer
from transfer.mooncake_engine import Arena, EngineProcess
from transfer.zmq_link import ZmqLink

PLAIN: Final = bytes((wire.PLAIN,))
STUCK_S: Final = 150.0
"""An engine that has not ended a write after so long never will (a first write to a stopped peer takes 62 s)."""


@dataclass(frozen=True, slots=True)
class MooncakeLinkSettings:
    """What a Mooncake link can be told.

    ``host`` is this machine as the engine's peers reach it. A client lends a window of ``window_nbytes`` to each of at
    most ``windows_max`` servers; a server stages what it writes in ``staging_nbytes``. Both take memory as they are
    used. Messages with less bulk than ``bulk_nbytes_min`` go over ZeroMQ, at most ``writes_max`` others at a time are
    written to one peer. A write of which nothing is heard for ``write_s`` goes over ZeroMQ, too, and its range is not
    written again for ``quarantine_s``; its peer gets everything over ZeroMQ for ``pause_s``, twice as long each time up
    to ``pause_max_s``. An engine has ``start_s`` to start.
    """

    host: str = "127.0.0.1"
    protocol: str = "tcp"
    device: str = ""
    window_nbytes: int = 32 << 20
    windows_max: int = 16
    staging_nbytes: int = 64 << 20
    writes_max: int = 8
    bulk_nbytes_min: int = 64 << 10
    write_s: float = 5.0
    quarantine_s: float = 35.0
    pause_s: float = 5.0
    pause_max_s: float = 60.0
    start_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("window_nbytes", "windows_max", "staging_nbytes", "writes_max", "bulk_nbytes_min"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= wire.WINDOW_NBYTES_MAX:
                raise ConfigError(name, f"an integer from 1 to {wire.WINDOW_NBYTES_MAX}", repr(value))
        for name in ("write_s", "quarantine_s", "pause_s", "pause_max_s", "start_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 3600:
                raise ConfigError(name, "seconds in (0, 3600)", repr(value))


class Phase(Enum):
    WRITING = auto()  # the engine was asked
    WRITTEN = auto()  # the peer is to be told
    FAILED = auto()  # is to go by ZeroMQ
    RESTING = auto()  # delivered or lost; the ranges may still be written to or read
    ENDED = auto()


NEXT: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.WRITING: frozenset({Phase.WRITTEN, Phase.FAILED, Phase.RESTING}),
    Phase.WRITTEN: frozenset({Phase.FAILED, Phase.ENDED}),
    Phase.FAILED: frozenset({Phase.RESTING}),
    Phase.RESTING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Granted:
    """A client's window, as this side writes to it. Not used until ``down_s``; the next pause is ``pause_s``."""

    grant: wire.Grant
    target: str
    window: wire.Window
    pause_s: float
    down_s: float = 0.0


@dataclass(slots=True, eq=False)
class Write:
    """A message on its way. ``answered``: the engine has ended it, or is gone itself."""

    peer: Peer
    granted: Granted
    control: bytes
    staged: list[memoryview]
    landed: wire.Landed
    asked_s: float
    phase: Phase = Phase.WRITING
    answered: bool = False
    rest_s: float = 0.0
    zmq_holds: bool = False  # a message out of the staged memory

    def step(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], (self.phase, phase)
        self.phase = phase


class BulkSender:
    """Windows that were granted to this side, and the writes into them. ``staging`` is all its own."""

    def __init__(self, zmq: ZmqLink, settings: MooncakeLinkSettings, staging: Arena, counts: Counter[str]) -> None:
        self.granted: dict[Peer, Granted] = {}
        self._zmq = zmq
        self._settings = settings
        self._counts = counts
        self._staging = wire.Window(staging.nbytes)
        self._view = staging.view
        self._bytes = np.frombuffer(staging.view, np.uint8)
        self._writes: dict[int, Write] = {}
        self._told: list[Callable[[], None]] = []
        self._numbers = 0

    @property
    def unsaid(self) -> bool:
        """Whether something waits for ZeroMQ to have room."""
        return any(w.phase in (Phase.WRITTEN, Phase.FAILED) for w in self._writes.values())

    @property
    def waits(self) -> bool:
        """Whether a message is neither delivered nor given up."""
        return any(w.phase not in (Phase.RESTING, Phase.ENDED) for w in self._writes.values())

    @property
    def stuck(self) -> bool:
        now_s = time.monotonic()
        return any(not w.answered and now_s > w.asked_s + STUCK_S for w in self._writes.values())

    def grant(self, peer: Peer, grant: wire.Grant, host: str) -> None:
        window = wire.Window(grant.nbytes)
        self.granted[peer] = Granted(grant, f"{host}:{grant.port}", window, self._settings.pause_s)

    def freed(self, peer: Peer, free: wire.Free) -> None:
        """``peer`` has copied a message out; not believed of a range that is still being written."""
        granted = self.granted.get(peer)
        if granted is not None and granted.grant.life == free.life and free.number not in self._writes:
            granted.window.give(free.number)

    def lost(self, peer: Peer) -> None:
        self.granted.pop(peer, None)
        for write in self._writes.values():
            if write.peer == peer:
                self._peer_gone(write)

    def send(
        self,
        engine: EngineProcess,
        peer: Peer,
        control: bytes,
        bulk: Sequence[Buffer],
        on_sent: Callable[[], None] | None,
    ) -> bool | None:
        """Like a link's ``send``; ``None``: this message has to go another way, and nothing was done."""
        granted = self.granted.get(peer)
        sizes = [nbytes_of(buffer) for buffer in bulk]
        if granted is None or not self._settings.bulk_nbytes_min <= sum(sizes) <= granted.window.nbytes // 2:
            return None
        now_s = time.monotonic()
        if len(bulk) > wire.RANGES_MAX or now_s < granted.down_s or self._hangs(granted):
            return None
        active = sum(w.peer == peer and w.phase is Phase.WRITING for w in self._writes.values())
        if active >= self._settings.writes_max:
            return False
        number, self._numbers = self._numbers, self._numbers + 1
        nbytes = sum(map(align, sizes))
        offset, there = self._staging.take(number, nbytes), granted.window.take(number, nbytes)
        if offset is None or there is None:
            self._give(number, granted)
            return False if active else None  # what is active makes room soon, what rests does not
        ranges, staged = self._stage(offset, there, bulk, sizes)
        end = ranges[-1][0] + ranges[-1][1] - there
        if not engine.write(calls.Write(number, granted.target, offset, granted.grant.base + there, end)):
            self._give(number, granted)
            return None
        landed = wire.Landed(granted.grant.life, number, ranges)
        self._writes[number] = Write(peer, granted, control, staged, landed, now_s)
        if on_sent is not None:
            self._told.append(on_sent)
        return True

    def done(self, number: int, code: int) -> None:
        """The engine has ended a write."""
        write = self._writes.get(number)
        if write is None or write.answered:
            return
        write.answered = True
        if write.phase is not Phase.WRITING:
            return
        if code == 1:
            write.step(Phase.WRITTEN)
            write.granted.pause_s = self._settings.pause_s
            self._counts["messages_written"] += 1
        else:
            self._fail(write)

    def engine_gone(self) -> None:
        for write in self._writes.values():
            write.answered = True
            if write.phase is Phase.WRITING:
                self._fail(write)

    def report(self) -> bool:
        """Tell the senders whose buffers were read; whether there were any."""
        told, self._told = self._told, []
        for on_sent in told:
            on_sent()
        return bool(told)

    def advance(self) -> None:
        """Move every write on as far as it goes now."""
        now_s = time.monotonic()
        for number, write in list(self._writes.items()):
            if write.phase is Phase.WRITING and now_s > write.asked_s + self._settings.write_s:
                self._fail(write)
            if write.phase is Phase.WRITTEN:
                self._say_landed(number, write)
            if write.phase is Phase.FAILED:
                self._send_plain(write)
            if write.phase is Phase.RESTING and write.answered and not write.zmq_holds and now_s >= write.rest_s:
                write.step(Phase.ENDED)
                del self._writes[number]
                self._give(number, write.granted)

    def close(self) -> None:
        """Forget every write. Nobody reads the staged memory any more: engine and ZeroMQ are closed."""
        self.report()
        self._writes.clear()
        del self._bytes

    def _hangs(self, granted: Granted) -> bool:
        """Whether the engine still has a write to this window that was given up."""
        return any(w.granted is granted and w.phase is Phase.RESTING and not w.answered for w in self._writes.values())

    def _stage(
        self, offset: int, there: int, bulk: Sequence[Buffer], sizes: list[int]
    ) -> tuple[list[tuple[int, int]], list[memoryview]]:
        """Copy ``bulk`` to where it is sent from, laid out as it will lie in the window: one piece for the engine."""
        ranges, staged = [], []
        for buffer, nbytes in zip(bulk, sizes, strict=True):
            if nbytes:
                self._bytes[offset : offset + nbytes] = np.frombuffer(buffer, np.uint8)
            staged.append(self._view[offset : offset + nbytes])
            ranges.append((there, nbytes))
            offset += align(nbytes)
            there += align(nbytes)
        return ranges, staged

    def _say_landed(self, number: int, write: Write) -> None:
        if self.granted.get(write.peer) is not write.granted:
            self._fail(write)  # another window since: what landed in the old one, nobody looks at
        elif self._zmq.send(write.peer, wire.encode(write.landed), [write.control]):
            write.step(Phase.ENDED)
            del self._writes[number]
            self._staging.give(number)  # its range in the window is the peer's to give back

    def _send_plain(self, write: Write) -> None:
        def sent() -> None:
            write.zmq_holds = False

        if self._zmq.send(write.peer, PLAIN + write.control, write.staged, sent):
            write.zmq_holds = True
            write.step(Phase.RESTING)

    def _fail(self, write: Write) -> None:
        self._counts["writes_failed"] += 1
        now_s, granted = time.monotonic(), write.granted
        write.rest_s = now_s + self._settings.quarantine_s
        if now_s >= granted.down_s:
            granted.down_s = now_s + granted.pause_s
            granted.pause_s = min(2 * granted.pause_s, self._settings.pause_max_s)
        write.step(Phase.FAILED)

    def _peer_gone(self, write: Write) -> None:
        """Its peer is gone."""
        if write.phase is Phase.WRITTEN:
            write.step(Phase.FAILED)
        if write.phase is not Phase.RESTING:
            write.step(Phase.RESTING)
            write.rest_s = time.monotonic()  # the window went with the peer; only the engine may still read

    def _give(self, number: int, granted: Granted) -> None:
        self._staging.give(number)
        granted.window.give(number)

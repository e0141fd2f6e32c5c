"""Links in memory that misbehave on purpose, for tests of sessions and nodes.

A :class:`Network` carries frames between its endpoints; one seed decides what it drops, doubles, delays (and so
reorders), cuts and flips, and when it is full. Time is the caller's: nothing arrives before its time has come. Payloads
are read only on delivery, as by a zero-copy socket: so a buffer that changes too early is noticed.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from cache_manager.record import Buffer
from transfer.errors import LocalProtocolError
from transfer.link import Arrival, Came, Peer, PeerLost

QUEUE_MAX = 1024


@dataclass(frozen=True, slots=True)
class Faults:
    """Each is a probability for one message, except ``delay_s``: the longest delay of a delayed message."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 1.0
    truncate: float = 0.0
    flip: float = 0.0
    full: float = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            if not 0 <= getattr(self, f.name) < 1e6:
                raise LocalProtocolError(f"{f.name}: wanted a number of at least 0, got {getattr(self, f.name)}")


@dataclass(slots=True, eq=False)
class _Message:
    sender: LoopbackLink
    to: Peer
    control: bytes
    bulk: tuple[Buffer, ...]


class Network:
    """Endpoints by name, and the messages on their way between them.

    ``clock`` gives monotonic seconds; a fixed one lets the test decide when time passes. ``happened`` counts each kind
    of fault. ``tap`` is called with (sender, receiver, control) of every message sent.
    """

    def __init__(
        self,
        seed: int = 0,
        faults: Faults = Faults(),
        *,
        clock: Callable[[], float] = time.monotonic,
        queue_max: int = QUEUE_MAX,
        tap: Callable[[Peer, Peer, bytes], None] | None = None,
    ) -> None:
        self.faults = faults
        self.happened: Counter[str] = Counter()
        self.clock = clock
        self._random = random.Random(seed)  # noqa: S311 - faults must repeat for a seed
        self._queue_max = queue_max
        self._tap = tap
        self._endpoints: dict[Peer, LoopbackLink] = {}
        self._flying: list[tuple[float, int, _Message]] = []  # a heap by (time, number)
        self._sent = 0
        self._latest_s = 0.0
        self.changed = threading.Condition()

    def endpoint(self, name: str) -> LoopbackLink:
        """A link under ``name``; an earlier one is lost, with the messages on their way to it."""
        peer = Peer(name.encode())
        with self.changed:
            if before := self._endpoints.get(peer):
                before.open = False
            link = self._endpoints[peer] = LoopbackLink(self, peer)
            return link

    def crash(self, name: str) -> None:
        """The process at ``name`` is gone, with every buffer of its own; what it sent before may still arrive."""
        peer = Peer(name.encode())
        with self.changed:
            link = self._endpoints.pop(peer, None)
            if link is None:
                return
            link.open = False
            for _, _, message in self._flying:
                if message.sender is link:  # its memory is gone, but not the network's copies
                    message.bulk = tuple(bytes(b) for b in message.bulk)
            for other in self._endpoints.values():
                if peer in other.known:
                    other.inbox.append(PeerLost(peer))
            self.happened["crash"] += 1
            self.changed.notify_all()

    def flying(self) -> int:
        """Messages on their way, with duplicates."""
        with self.changed:
            return len(self._flying)

    # ---------------------------------------------------------------- for links; `changed` is held

    def take(
        self,
        sender: LoopbackLink,
        to: Peer,
        control: bytes,
        bulk: tuple[Buffer, ...],
    ) -> bool:
        dice, faults, now_s = self._random, self.faults, self.clock()
        if not sender.open or len(self._flying) >= self._queue_max or self._happens("full", faults.full):
            return False
        if to not in self._endpoints:
            return False
        if self._tap:
            self._tap(sender.name, to, control)
        copies = 1 + self._happens("duplicate", faults.duplicate)
        message = _Message(sender, to, control, bulk)
        for _ in range(copies):
            at = now_s + (dice.random() * faults.delay_s if self._happens("delay", faults.delay) else 0.0)
            self.happened["reorder"] += at < self._latest_s
            self._latest_s = max(self._latest_s, at)
            heapq.heappush(self._flying, (at, self._sent, message))
            self._sent += 1
        self.changed.notify_all()
        return True

    def deliver(self) -> None:
        """Deliver all messages whose time has come."""
        now_s = self.clock()
        while self._flying and self._flying[0][0] <= now_s:
            _, _, message = heapq.heappop(self._flying)
            target = self._endpoints.get(message.to)
            if target is None:
                self.happened["lost"] += 1
            elif not self._happens("drop", self.faults.drop):
                if len(target.inbox) >= self._queue_max:
                    self.happened["lost"] += 1
                else:
                    target.inbox.append(self._arrival(message))

    def due_s(self) -> float | None:
        return self._flying[0][0] if self._flying else None

    def drop_from(self, link: LoopbackLink) -> None:
        """Drop the messages of ``link`` that are on their way."""
        self._flying = [f for f in self._flying if f[2].sender is not link]
        heapq.heapify(self._flying)
        if self._endpoints.get(link.name) is link:
            del self._endpoints[link.name]

    def _arrival(self, message: _Message) -> Arrival:
        frames = [bytearray(message.control), *(bytearray(b) for b in message.bulk)]
        if self._happens("truncate", self.faults.truncate):
            if len(frames) > 1 and self._random.random() < 0.3:
                frames.pop()
            else:
                cut = self._random.choice(frames)
                del cut[self._random.randrange(len(cut)) :]
        if self._happens("flip", self.faults.flip):
            hit = self._random.choice(frames[1:] or frames)
            if hit:
                bit = self._random.randrange(8 * len(hit))
                hit[bit >> 3] ^= 1 << (bit & 7)
        return Arrival(message.sender.name, bytes(frames[0]), tuple(memoryview(bytes(b)) for b in frames[1:]))

    def _happens(self, fault: str, probability: float) -> bool:
        if probability and self._random.random() < probability:
            self.happened[fault] += 1
            return True
        return False


class LoopbackLink:
    """An endpoint of a :class:`Network`; a :class:`transfer.link.Link`, except for the chosen faults."""

    def __init__(self, network: Network, name: Peer) -> None:
        self.name = name
        self.open = True
        self.known: set[Peer] = set()
        self.inbox: deque[Came] = deque()
        self._network = network
        self._woken = False

    @property
    def address(self) -> str:
        return "loopback://" + self.name.decode()

    def connect(self, address: str) -> Peer:
        peer = Peer(address.removeprefix("loopback://").encode())
        self.known.add(peer)
        return peer

    def send(self, peer: Peer, control: bytes, bulk: Sequence[Buffer] = ()) -> bool:
        with self._network.changed:
            return self._network.take(self, peer, control, tuple(bulk))

    def poll(self, timeout_s: float, limit: int = 64) -> list[Came]:
        network = self._network
        with network.changed:
            network.deliver()
            if not self.inbox and not self._woken and timeout_s > 0:
                due_s = network.due_s()
                wait_s = timeout_s if due_s is None else min(timeout_s, max(0.0, due_s - network.clock()))
                network.changed.wait(wait_s)
                network.deliver()
            self._woken = False
            came = [self.inbox.popleft() for _ in range(min(limit, len(self.inbox)))]
            self.known.update(c.peer for c in came if isinstance(c, Arrival))
        return came

    def cut(self, peer: Peer) -> None:
        """Does nothing: a delivered payload is a copy, whether it is read or not."""

    def wake(self) -> None:
        with self._network.changed:
            self._woken = True
            self._network.changed.notify_all()

    def close(self, linger_s: float = 0.5) -> None:  # noqa: ARG002 - memory has nothing to wait for
        """Deliver due messages; the others are lost."""
        with self._network.changed:
            self._network.deliver()
            self._network.drop_from(self)
            self.open = False

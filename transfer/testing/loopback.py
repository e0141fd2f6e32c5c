"""Links in memory that misbehave on purpose, for a simulation of sessions: one thread, and no time but the caller's.

A :class:`Network` carries frames between its endpoints; one seed decides what it drops, doubles, delays (and so
reorders), cuts and flips, and when it is full. Nothing arrives before its time has come. Payloads are read only on
delivery, as by a zero-copy socket: so a buffer that changes too early is noticed.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache_manager.record import Buffer
from transfer.link import Arrival, LinkEvent, Peer, PeerLost


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


@dataclass(slots=True, eq=False)
class _Message:
    sender: LoopbackLink
    to: Peer
    control: bytes
    bulk: tuple[Buffer, ...]


class Network:
    """Endpoints by name, and the messages on their way between them.

    ``clock`` gives monotonic seconds. ``happened`` counts each kind of fault. ``tap`` is called with (sender, receiver,
    control) of every message sent.
    """

    def __init__(
        self,
        seed: int,
        faults: Faults,
        *,
        clock: Callable[[], float],
        queue_max: int,
        tap: Callable[[Peer, Peer, bytes], None],
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

    def endpoint(self, name: str) -> LoopbackLink:
        """A link under ``name``, in place of one that has crashed."""
        peer = Peer(name.encode())
        link = self._endpoints[peer] = LoopbackLink(self, peer)
        return link

    def crash(self, name: str) -> None:
        """The process at ``name`` is gone, with every buffer of its own; what it sent before may still arrive."""
        link = self._endpoints.pop(Peer(name.encode()))
        for _, _, message in self._flying:
            if message.sender is link:  # its memory is gone, but not the network's copies
                message.bulk = tuple(bytes(b) for b in message.bulk)
        for other in self._endpoints.values():
            if link.name in other.known:
                other.inbox.append(PeerLost(link.name))
        self.happened["crash"] += 1

    def flying(self) -> int:
        """Messages on their way, with duplicates."""
        return len(self._flying)

    def take(self, sender: LoopbackLink, to: Peer, control: bytes, bulk: tuple[Buffer, ...]) -> bool:
        dice, faults, now_s = self._random, self.faults, self.clock()
        if len(self._flying) >= self._queue_max or self._happens("full", faults.full) or to not in self._endpoints:
            return False
        self._tap(sender.name, to, control)
        message = _Message(sender, to, control, bulk)
        for _ in range(1 + self._happens("duplicate", faults.duplicate)):
            at = now_s + (dice.random() * faults.delay_s if self._happens("delay", faults.delay) else 0.0)
            self.happened["reorder"] += at < self._latest_s
            self._latest_s = max(self._latest_s, at)
            heapq.heappush(self._flying, (at, self._sent, message))
            self._sent += 1
        return True

    def deliver(self) -> None:
        """Deliver all messages whose time has come."""
        while self._flying and self._flying[0][0] <= self.clock():
            _, _, message = heapq.heappop(self._flying)
            target = self._endpoints.get(message.to)
            if target is None or len(target.inbox) >= self._queue_max:
                self.happened["lost"] += 1
            elif not self._happens("drop", self.faults.drop):
                target.inbox.append(self._arrival(message))

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
    """An endpoint of a :class:`Network`: as much of a :class:`transfer.link.Link` as sessions need."""

    def __init__(self, network: Network, name: Peer) -> None:
        self.name = name
        self.known: set[Peer] = set()
        self.inbox: deque[LinkEvent] = deque()
        self._network = network

    def connect(self, address: str) -> Peer:
        peer = Peer(address.removeprefix("loopback://").encode())
        self.known.add(peer)
        return peer

    def send(self, peer: Peer, control: bytes, bulk: Sequence[Buffer] = ()) -> bool:
        return self._network.take(self, peer, control, tuple(bulk))

    def poll(self, limit: int = 64) -> list[LinkEvent]:
        self._network.deliver()
        came = [self.inbox.popleft() for _ in range(min(limit, len(self.inbox)))]
        self.known.update(c.peer for c in came if isinstance(c, Arrival))
        return came

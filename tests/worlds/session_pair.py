"""A prefill and a decode session face to face: each receives the other's messages, unless the test intervenes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cache_manager.errors import KVRouteError
from cache_manager.keys import Namespace
from cache_manager.record import OfferedRecord, RecordHeader
from transfer.actions import Action, Finished, OfferedBlock, Release, Send, WantedBlock
from transfer.counters import Counters
from transfer.errors import RemoteProtocolError
from transfer.identity import Identity
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.messages import (
    BootId,
    Message,
    Outcome,
    Part,
    Pull,
    Range,
    Records,
    Renew,
    Space,
    TransferId,
    decode,
    encode,
)
from transfer.offers import Offers
from transfer.pulls import Pulls

P, D, E = Peer(b"P"), Peer(b"D"), Peer(b"E")
PARTS = (Part("rows", b"layout-of-rows-1", 64, 4), Part("kv", b"layout-of-kv-123", 32, 4))
NAMESPACE = Namespace("m", 1)
OTHER = Namespace("m", 2)
P_RUN, D_RUN, E_RUN = BootId(b"the run of pre 1"), BootId(b"the run of dec 1"), BootId(b"the run of eve 1")
LIMITS = TransferLimits(lease_s=10, lease_max_s=60, retry_s=2, retries_max=3, records_nbytes_max=100)
T = TransferId(b"the transfer id1")


def key(index: int) -> bytes:
    return bytes([index]) * 32


def payload(part: int, index: int) -> bytes:
    return bytes([16 * part + index]) * PARTS[part].nbytes


def record(part: int, index: int) -> OfferedRecord:
    return OfferedRecord(key(index), PARTS[part].fingerprint, 1, 1, b"\x0f" + bytes(7), payload(part, index))


def blocks(n: int, without: tuple[tuple[int, int], ...] = ()) -> list[OfferedBlock]:
    return [
        OfferedBlock(i, key(i), tuple(None if (p, i) in without else record(p, i) for p in range(len(PARTS))))
        for i in range(n)
    ]


def wanted(n: int, parts: tuple[int, ...] = (0, 1)) -> list[WantedBlock]:
    return [WantedBlock(i, key(i), parts) for i in range(n)]


def space(namespace: Namespace = NAMESPACE) -> Space:
    """The namespace as peers tell it."""
    return Identity(P_RUN, namespace, PARTS).space


def want(n: int, parts: int = 3, start: int = 0) -> list[Range]:
    return [Range(start, parts, b"".join(key(i) for i in range(start, start + n)))]


def pull_of(wants: list[Range], epoch: int = 1, transfer: TransferId = T, run: BootId = D_RUN) -> Pull:
    """A pull of a peer whose identity is prefill's."""
    return Pull(run, transfer, epoch, Identity(P_RUN, NAMESPACE, PARTS).digest, wants)


def bulk_of(records: Records) -> list[memoryview]:
    return [memoryview(payload(entry.part, entry.index)) for entry in records.entries]


class Pair:
    """``lose(message)`` says whether a message is lost, ``place(part, index)`` whether a record can be placed."""

    def __init__(
        self,
        limits: TransferLimits = LIMITS,
        *,
        d_parts: tuple[Part, ...] = PARTS,
        d_namespace: Namespace = NAMESPACE,
        lose: Callable[[Message], bool] = lambda _: False,
    ) -> None:
        self.prefill = Offers(Identity(P_RUN, NAMESPACE, PARTS), limits, Counters())
        self.decode = Pulls(Identity(D_RUN, d_namespace, d_parts), limits, Counters())
        self.lose = lose
        self.now_s = 0.0
        self.place: Callable[[int, int], bool] = lambda *_: True
        self.installed: list[tuple[int, int, bytes]] = []
        self.finished: list[Finished] = []
        self.released: list[Release] = []
        self.bad_messages = 0
        self.said: list[Message] = []
        self._queue: deque[tuple[Peer, Send]] = deque()

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        """The pair is where records of its pulls land."""
        assert header.key == key(index)
        if placed := self.place(part, index):
            self.installed.append((part, index, bytes(payload)))
        return placed

    def do(self, who: Peer, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._queue.append((who, action))
                case Release():
                    self.released.append(action)
                case Finished():
                    self.finished.append(action)

    def talk(self) -> None:
        """Until neither side has a message to send."""
        while True:
            while self._queue:
                sender, send = self._queue.popleft()
                self.said.append(send.message)
                if not self.lose(send.message):
                    self.hear(send.peer, sender, send.message, [memoryview(bytes(b)) for b in send.bulk])
            send = self.prefill.next_records()
            if send is None:
                return
            self._queue.append((P, send))

    def hear(self, who: Peer, sender: Peer, message: Message, bulk: list[memoryview] | None = None) -> None:
        heard = decode(encode(message))
        if who == P:
            self.do(who, self.prefill.receive(sender, heard, self.now_s))
        else:
            try:
                self.do(who, self.decode.receive(sender, heard, bulk or [], self.now_s))
            except RemoteProtocolError:
                self.bad_messages += 1

    def pass_time(self, seconds: float, step_s: float = 0.25) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + step_s)
            self.do(P, self.prefill.tick(self.now_s))
            self.do(D, self.decode.tick(self.now_s))
            self.talk()

    def offer(self, offered: list[OfferedBlock], transfer: TransferId = T, *, is_open: bool = False) -> None:
        self.do(P, self.prefill.offer(transfer, offered, self.now_s, is_open))
        self.talk()

    def pull(self, n: int, parts: tuple[int, ...] = (0, 1), transfer: TransferId = T, peer: Peer = P) -> None:
        self.do(D, self.decode.pull(peer, transfer, wanted(n, parts), self, self.now_s))
        self.talk()

    @property
    def outcomes(self) -> list[Outcome]:
        """How the transfers ended whose blocks are free."""
        return [release.outcome for release in self.released]

    @property
    def result(self) -> Finished:
        """Of the one pull that has ended."""
        (finished,) = self.finished
        return finished


def pulled(limits: TransferLimits = LIMITS) -> Pair:
    """A transfer of one block that was pulled, and whose records are lost."""
    pair = Pair(limits, lose=lambda message: isinstance(message, Records))
    pair.offer(blocks(1))
    pair.pull(1)
    return pair


def waits(pair: Pair, transfer: TransferId = T) -> bool:
    """Whether a pull of decode's waits at prefill for its offer; any other one is answered."""
    return pair.prefill.receive(D, Renew(D_RUN, transfer), pair.now_s) == []


def refused(call: Callable[[], object]) -> str:
    """What the error says that ``call`` raises; empty where it does not."""
    try:
        call()
    except KVRouteError as error:
        return f"{type(error).__name__}: {error}"
    return ""

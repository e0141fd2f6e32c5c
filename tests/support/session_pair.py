"""A prefill and a decode session face to face: what one says the other hears, unless the test comes between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cache_manager.keys import Namespace
from cache_manager.record import OfferedRecord
from transfer.actions import Cut, Finished, Install, OfferedBlock, Release, Send, WantedBlock
from transfer.errors import RemoteProtocolError
from transfer.identity import Identity
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.messages import BootId, Message, Outcome, Part, Range, Records, Space, TransferId, decode, encode
from transfer.offers import Offers
from transfer.pulls import Pulls

P, D, E = Peer(b"P"), Peer(b"D"), Peer(b"E")
PARTS = (Part("rows", b"layout-of-rows-1", 64, 4), Part("kv", b"layout-of-kv-123", 32, 4))
NAMESPACE = Namespace("m", 1)
OTHER = Namespace("m", 2)
P_RUN, D_RUN, E_RUN = BootId(b"the run of pre 1"), BootId(b"the run of dec 1"), BootId(b"the run of eve 1")
LIMITS = TransferLimits(lease_s=10, lease_max_s=60, retry_s=2, retries_max=3, credit_nbytes=200, records_max=2)
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


class Pair:
    """``lose(message)`` says whether a message is lost."""

    def __init__(
        self,
        limits: TransferLimits = LIMITS,
        *,
        d_parts: tuple[Part, ...] = PARTS,
        d_namespace: Namespace = NAMESPACE,
        lose: Callable[[Message], bool] = lambda _: False,
    ) -> None:
        self.prefill = Offers(Identity(P_RUN, NAMESPACE, PARTS), limits)
        self.decode = Pulls(Identity(D_RUN, d_namespace, d_parts), limits)
        self.lose = lose
        self.now_s = 0.0
        self.place: Callable[[Install], bool] = lambda _: True
        self.installed: list[tuple[int, int, bytes]] = []
        self.finished: list[Finished] = []
        self.released: list[Release] = []
        self.cut: list[Peer] = []
        self.bad_messages = 0
        self.said: list[Message] = []
        self._queue: deque[tuple[Peer, Send]] = deque()

    def do(self, who: Peer, actions: list[object] | None) -> None:
        for action in actions or ():
            if isinstance(action, Send):
                self._queue.append((who, action))
            elif isinstance(action, Cut):
                self.cut.append(action.peer)
            elif isinstance(action, Release):
                self.released.append(action)
            elif isinstance(action, Finished):
                self.finished.append(action)
            else:
                ok = self.place(action)
                if ok:
                    self.installed.append((action.part, action.index, bytes(action.payload)))
                self.do(D, self.decode.installed([(action, ok)], self.now_s))

    def talk(self) -> None:
        """Until nobody has anything to say."""
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

    def pull(self, n: int, parts: tuple[int, ...] = (0, 1), transfer: TransferId = T) -> None:
        self.do(D, self.decode.pull(P, transfer, wanted(n, parts), self.now_s))
        self.talk()


def pulled() -> Pair:
    """A transfer of one block that was pulled, and whose records are lost."""
    pair = Pair(lose=lambda message: isinstance(message, Records))
    pair.prefill.offer(T, blocks(1), 0.0)
    pair.pull(1)
    return pair


def outcomes(pair: Pair) -> list[Outcome]:
    """How the transfers ended whose blocks are free."""
    return [release.outcome for release in pair.released]

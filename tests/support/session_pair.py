"""A prefill and a decode session face to face: what one says the other hears, unless the test comes between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cache_manager.record import OfferedRecord
from transfer.actions import Finished, Install, OfferedBlock, Release, Send, WantedBlock
from transfer.decode import DecodeSession
from transfer.identity import Identity
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.messages import BootId, Message, Outcome, Part, Records, TransferId, encode
from transfer.prefill import PrefillSession

P, D, E = Peer(b"P"), Peer(b"D"), Peer(b"E")
PARTS = (Part("rows", b"layout-of-rows-1", 64, 4), Part("kv", b"layout-of-kv-123", 32, 4))
NAMESPACE = b"the namespace 16"
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


class Pair:
    """``lose(message)`` says whether a message is lost; ``hold`` keeps buffers with the link until told."""

    def __init__(
        self,
        limits: TransferLimits = LIMITS,
        *,
        d_parts: tuple[Part, ...] = PARTS,
        d_namespace: bytes = NAMESPACE,
        lose: Callable[[Message], bool] = lambda _: False,
    ) -> None:
        self.prefill = PrefillSession(Identity(P_RUN, NAMESPACE, PARTS), limits)
        self.decode = DecodeSession(Identity(D_RUN, d_namespace, d_parts), limits)
        self.lose = lose
        self.now_s = 0.0
        self.hold = False
        self.held: list[Send] = []
        self.place: Callable[[Install], bool] = lambda _: True
        self.installed: list[tuple[int, int, bytes]] = []
        self.finished: list[Finished] = []
        self.released: list[Release] = []
        self.said: list[Message] = []
        self._queue: deque[tuple[Peer, Send]] = deque()

    def do(self, who: Peer, actions: list[object] | None) -> None:
        for action in actions or ():
            if isinstance(action, Send):
                self._queue.append((who, action))
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
                if send.bulk:
                    self.held.append(send)
                    if not self.hold:
                        self.let_go()
            send = self.prefill.next_records()
            if send is None:
                return
            self._queue.append((P, send))

    def hear(self, who: Peer, sender: Peer, message: Message, bulk: list[memoryview] | None = None) -> None:
        session = self.prefill if who == P else self.decode
        self.do(who, session.receive(sender, encode(message), bulk or [], self.now_s))

    def let_go(self) -> None:
        held, self.held = self.held, []
        for send in held:
            self.do(P, self.prefill.let_go(send))

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

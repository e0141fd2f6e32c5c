"""The prefill side of transfers: offers blocks, sends what decode asks for, says when they are free.

A transfer belongs to the run that pulled it first; nobody else gets a byte of it or ends it. What comes after the end
is answered and counted, and changes nothing. The life of a transfer is in ``offer.py``.

Sans-IO: no clock, thread, socket or randomness. Times are monotonic seconds of the caller's clock, ids come in.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence

from cache_manager.record import Buffer
from transfer.actions import OfferedBlock, PrefillAction, Release, Send
from transfer.errors import IncompatiblePeerError, LocalProtocolError, RemoteProtocolError
from transfer.greeted import Greeted
from transfer.identity import Identity, check_peer
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.messages import (
    MINOR,
    Abort,
    Absent,
    Ack,
    Bye,
    Credit,
    Gone,
    GoneReason,
    Hello,
    Outcome,
    Pull,
    Records,
    Refuse,
    Released,
    Renew,
    TransferId,
    Welcome,
    decode,
)
from transfer.offer import PULLED, Ended, Event, Offer, PrefillCounters, State, check_blocks


class PrefillSession:
    """All transfers of one prefill process.

    A node calls :meth:`receive` for what arrives, :meth:`tick` when :meth:`next_due_s` has come (often is fine), acts
    on what they answer, and then sends what :meth:`next_records` has until there is no more. Whatever a peer sends, no
    method raises because of it. :class:`LocalProtocolError` is for mistakes of this side.
    """

    def __init__(self, identity: Identity, limits: TransferLimits) -> None:
        self.identity = identity
        self.limits = limits
        self.counters = PrefillCounters()  # its own: who keeps it copies it
        self._transfers: dict[TransferId, Offer] = {}  # every state but RELEASED
        self._ended: OrderedDict[TransferId, Ended] = OrderedDict()  # those in ENDING among them
        self._peers = Greeted(limits.peers_max)
        self._ending: dict[TransferId, None] = {}  # those in ENDING
        self._ready: OrderedDict[TransferId, None] = OrderedDict()  # with something to send and credit for it
        self._stalled: list[TransferId] = []  # those whose records the link refused, to be tried again
        self._resend_s = 0.0
        self._unsealed: deque[TransferId] = deque(maxlen=limits.transfers_max)
        self._expiries: list[tuple[float, TransferId]] = []  # a heap; a renewed transfer is pushed again when popped

    # ---------------------------------------------------------------- the engine's side

    @property
    def in_flight(self) -> int:
        """Transfers whose blocks are not free yet."""
        return len(self._transfers)

    def offer(
        self, transfer: TransferId, blocks: Sequence[OfferedBlock], now_s: float, lease_s: float | None = None
    ) -> bool:
        """Hold ``blocks`` for whoever pulls ``transfer`` within ``lease_s``; ``False``: no room, nothing changed.

        The payloads must not change until :class:`Release` has been said. Raises :class:`LocalProtocolError` for an id
        that is not new, or blocks that do not have the session's parts.
        """
        if len(transfer) != 16 or transfer in self._transfers or transfer in self._ended:
            raise LocalProtocolError(f"transfer: wanted 16 bytes that are new, got {transfer.hex()}")
        check_blocks(blocks, self.identity.parts)
        if len(self._transfers) >= self.limits.transfers_max:
            return False
        lease_s = self.limits.lease_s if lease_s is None else lease_s
        end_s = now_s + self.limits.lease_max_s
        offered = Offer(transfer, {b.index: b for b in blocks}, min(now_s + lease_s, end_s), end_s)
        self._transfers[transfer] = offered
        if len(self._expiries) > 2 * self.limits.transfers_max:  # most are of transfers that ended early
            self._expiries = [entry for entry in self._expiries if entry[1] in self._transfers]
            heapq.heapify(self._expiries)
        heapq.heappush(self._expiries, (offered.expires_s, transfer))
        self._unsealed.append(transfer)  # of too many the oldest are sealed when they are sent
        self.counters.offered += 1
        return True

    def abort(self, transfer: TransferId) -> list[PrefillAction]:
        """Give a transfer up; harmless when it has ended."""
        found = self._live(transfer)
        return self._end(found, Outcome.ABORTED) if found else []

    def reset(self, namespace: bytes) -> list[PrefillAction]:
        """This side's rows belong to another namespace from here on: every transfer ends, every peer must say hello."""
        self.identity = Identity(self.identity.boot_id, namespace, self.identity.parts)
        actions = self._end_all(Outcome.RESET)
        self._peers = Greeted(self.limits.peers_max)
        return actions

    def close(self) -> list[PrefillAction]:
        """End every transfer and say goodbye. Close the link after this, and tell what it lets go of."""
        byes: list[PrefillAction] = [Send(peer, Bye(self.identity.boot_id)) for peer in self._peers]
        return self._end_all(Outcome.ABORTED) + byes

    # ---------------------------------------------------------------- the link's side

    def receive(self, peer: Peer, control: Buffer, bulk: Sequence[memoryview], now_s: float) -> list[PrefillAction]:
        """What to do about a message; nothing of it is kept."""
        actions = self._expire(now_s)
        try:
            message = decode(control)
            if bulk:
                raise RemoteProtocolError(f"{type(message).__name__}: wanted no bulk, got {len(bulk)} frames")
        except RemoteProtocolError:
            self.counters.bad_messages += 1
            return actions
        match message:
            case Hello():
                actions += self._on_hello(peer, message)
            case Pull() | Credit() | Renew() | Ack() | Abort():
                actions += self._on_transfer_message(peer, message, now_s)
            case Bye():
                actions += self._on_bye(peer, message)
            case _:
                self.counters.bad_messages += 1
        return actions

    def tick(self, now_s: float) -> list[PrefillAction]:
        """End what has outlived its lease; links that were full may be tried again."""
        if self._stalled and now_s >= self._resend_s:
            for transfer in self._stalled:
                if (found := self._live(transfer)) and found.wanted:
                    self._ready[transfer] = None
            self._stalled.clear()
        return self._expire(now_s)

    def next_due_s(self) -> float | None:
        """When :meth:`tick` has something to do, at the earliest."""
        first = [expiry_s for expiry_s, _ in self._expiries[:1]]
        return min([*first, self._resend_s] if self._stalled else first, default=None)

    def next_records(self) -> Send | None:
        """The next records to send, transfers taking turns; ``None``: nothing, or no credit, or the link was full."""
        while self._ready:
            found = self._transfers[next(iter(self._ready))]
            if found.peer is None or not self._peers.has(found.peer, found.boot_id):
                del self._ready[found.id]  # lost: it will say hello and pull again
                continue
            send = found.take(self.identity.parts, self.limits, self._peers.frame_nbytes_max(found.peer))
            if found.wanted and send:
                self._ready.move_to_end(found.id)
            else:
                del self._ready[found.id]  # all sent, or out of credit
            if send:
                return send
        return None

    def seal_ahead(self, records_max: int) -> bool:
        """Seal records that nobody has asked for yet, so that they go out at once; whether there may be more."""
        for _ in range(records_max):
            if not self._unsealed:
                return False
            found = self._transfers.get(self._unsealed[0])
            if found is None or found.state is not State.OFFERED or not found.seal_next():
                self._unsealed.popleft()
        return bool(self._unsealed)

    def unsent(self, send: Send, now_s: float) -> None:
        """The link refused ``send``, which is said before anything else. Records are tried again after a
        :meth:`tick`; for whatever else it was, the peer asks again.
        """
        self.counters.sends_refused += 1
        message = send.message
        if not isinstance(message, Records):
            return
        found = self._transfers.get(TransferId(message.transfer))
        assert found is not None, "records of a transfer whose blocks are free"
        found.take_back(message, self.identity.parts)
        self._ready.pop(found.id, None)
        self._stalled.append(found.id)
        self._resend_s = now_s + self.limits.resend_s

    def let_go(self, send: Send) -> list[PrefillAction]:
        """The link no longer reads the buffers of ``send``."""
        assert isinstance(send.message, Records), "only records have buffers"
        found = self._transfers.get(TransferId(send.message.transfer))
        assert found is not None, "blocks were released under the link"
        assert found.in_link > 0, "let go of more than was sent"
        self.counters.records_sent += len(send.message.entries)
        found.in_link -= 1
        if found.state is State.ENDING and not found.in_link:
            return self._release(found, Event.LET_GO)
        return []

    def slow_peers(self, now_s: float) -> list[Peer]:
        """Whom to cut off: peers that still have not read what they pulled, a lease after that of the transfer."""
        slow: list[Peer] = []
        for transfer in self._ending:
            found = self._transfers[transfer]
            if now_s >= found.expires_s + self.limits.lease_s:
                found.expires_s = now_s  # again after another lease
                assert found.peer is not None, "nobody pulled what the link holds"
                slow.append(found.peer)
        self.counters.slow_peers += len(slow)
        return slow

    def peer_lost(self, peer: Peer) -> None:
        """The link lost ``peer``: it has to say hello again. Its transfers stay until their leases end."""
        self._peers.forget(peer)

    # ---------------------------------------------------------------- messages

    def _on_hello(self, peer: Peer, hello: Hello) -> list[PrefillAction]:
        own = self.identity
        try:
            check_peer(own, hello.namespace, hello.parts)
            if hello.frame_nbytes_max < own.nbytes_max:
                raise IncompatiblePeerError("frame_nbytes_max", f"at least {own.nbytes_max}", hello.frame_nbytes_max)
            if not self._peers.enter(peer, hello):
                raise IncompatiblePeerError("peers", f"at most {self.limits.peers_max} with transfers", "one more")
        except IncompatiblePeerError as error:
            self._peers.forget(peer)
            self.counters.refused_peers += 1
            return [Send(peer, Refuse(error.field[:256], str(error.wanted)[:256], str(error.got)[:256], hello.boot_id))]
        welcome = Welcome(own.boot_id, own.namespace, list(own.parts), MINOR, self.limits.lease_ms, hello.boot_id)
        return [Send(peer, welcome)]

    def _on_transfer_message(
        self, peer: Peer, message: Pull | Credit | Renew | Ack | Abort, now_s: float
    ) -> list[PrefillAction]:
        if not self._peers.has(peer, message.boot_id):
            self.counters.stranger_messages += 1
            return [Send(peer, Refuse("hello", "a hello of this run first", type(message).__name__, message.boot_id))]
        self._peers.heard(peer)
        found = self._live(TransferId(message.transfer))
        if found is None:
            return self._on_late(peer, message)
        if found.peer is None:
            if not isinstance(message, (Pull, Abort)) and not (isinstance(message, Ack) and not message.installed):
                self.counters.stale_messages += 1  # only a pull makes an owner
                return []
        elif (found.peer, found.boot_id) != (peer, message.boot_id):
            self.counters.foreign_messages += 1
            return [Send(peer, Gone(message.transfer, GoneReason.FOREIGN))]
        found.expires_s = max(found.expires_s, min(now_s + self.limits.lease_s, found.expires_max_s))
        match message:
            case Pull():
                return self._on_pull(peer, found, message)
            case Credit():
                self._on_credit(found, message)
                return []
            case Renew():
                return []
            case Ack():
                return self._on_ack(peer, found, message)
            case Abort():
                return self._end(found, Outcome.ABORTED, tell=False)

    def _on_pull(self, peer: Peer, found: Offer, pull: Pull) -> list[PrefillAction]:
        if pull.epoch <= found.epoch:
            self.counters.stale_messages += 1
            return []
        if found.peer is None:
            found.peer, found.boot_id = peer, pull.boot_id
            self._peers.own(peer, 1)
            self.counters.pulled += 1
        absent, mismatches = found.want(pull)
        self.counters.attempts += 1
        self.counters.key_mismatches += mismatches
        self.counters.records_absent += len(absent)
        if found.wanted:
            self._ready[found.id] = None
        else:
            self._ready.pop(found.id, None)
        return [Send(peer, Absent(found.id, found.epoch, absent))] if absent else []

    def _on_credit(self, found: Offer, credit: Credit) -> None:
        if credit.epoch != found.epoch:
            self.counters.stale_messages += 1
            return
        found.granted_nbytes = max(found.granted_nbytes, credit.nbytes)
        if found.wanted:
            self._ready[found.id] = None

    def _on_ack(self, peer: Peer, found: Offer, ack: Ack) -> list[PrefillAction]:
        if ack.epoch < found.epoch:
            self.counters.stale_messages += 1
            return []
        heard: list[PrefillAction] = [Send(peer, Released(found.id, Outcome.ACKED))]
        if found.peer is None:  # nothing was wanted; an ack again is then heard from this peer only
            found.peer, found.boot_id = peer, ack.boot_id
        return heard + self._end(found, Outcome.ACKED, tell=False)

    def _on_late(self, peer: Peer, message: Pull | Credit | Renew | Ack | Abort) -> list[PrefillAction]:
        ended = self._ended.get(TransferId(message.transfer))
        if ended is None:
            self.counters.unknown_transfers += 1
            reason = GoneReason.UNKNOWN
        elif ended.peer is not None and (ended.peer, ended.boot_id) != (peer, message.boot_id):
            self.counters.foreign_messages += 1
            reason = GoneReason.FOREIGN
        else:
            self.counters.late_messages += 1
            if isinstance(message, Ack) and ended.outcome is Outcome.ACKED:
                return [Send(peer, Released(message.transfer, Outcome.ACKED))]
            reason = GoneReason(ended.outcome.value)
        return [] if isinstance(message, (Abort, Credit)) else [Send(peer, Gone(message.transfer, reason))]

    def _on_bye(self, peer: Peer, bye: Bye) -> list[PrefillAction]:
        if not self._peers.has(peer, bye.boot_id):
            self.counters.stranger_messages += 1
            return []
        self._peers.forget(peer)
        own = [t for t in self._transfers.values() if (t.peer, t.boot_id) == (peer, bye.boot_id) and t.state in PULLED]
        return [a for t in own for a in self._end(t, Outcome.ABORTED, tell=False)]

    # ---------------------------------------------------------------- sending and ending

    def _live(self, transfer: TransferId) -> Offer | None:
        found = self._transfers.get(transfer)
        return None if found is None or found.state is State.ENDING else found

    def _expire(self, now_s: float) -> list[PrefillAction]:
        actions: list[PrefillAction] = []
        while self._expiries and self._expiries[0][0] <= now_s:
            _, transfer = heapq.heappop(self._expiries)
            found = self._live(transfer)
            if found is None:
                continue
            if found.expires_s > now_s:
                heapq.heappush(self._expiries, (found.expires_s, transfer))
            else:
                actions += self._end(found, Outcome.EXPIRED)
        return actions

    def _end_all(self, outcome: Outcome) -> list[PrefillAction]:
        live = [t for t in self._transfers.values() if t.state is not State.ENDING]
        return [a for t in live for a in self._end(t, outcome)]

    def _end(self, found: Offer, outcome: Outcome, *, tell: bool = True) -> list[PrefillAction]:
        """The transfer is over. Its owner is told unless it knows; its blocks go now or when the link lets go."""
        found.outcome = outcome
        setattr(self.counters, outcome.value, getattr(self.counters, outcome.value) + 1)
        self._ended[found.id] = Ended(outcome, found.peer, found.boot_id)
        while len(self._ended) > self.limits.remembered_max:
            self._ended.popitem(last=False)
        self._ready.pop(found.id, None)
        found.wanted.clear()
        if found.state in PULLED:
            assert found.peer is not None
            self._peers.own(found.peer, -1)
        told: list[PrefillAction] = []
        if tell and found.peer is not None and self._peers.has(found.peer, found.boot_id):
            told.append(Send(found.peer, Gone(found.id, GoneReason(outcome.value))))
        if found.in_link:
            found.apply(Event.END_HELD)
            self._ending[found.id] = None
            return told
        return told + self._release(found, Event.END_FREE)

    def _release(self, found: Offer, event: Event) -> list[PrefillAction]:
        found.apply(event)
        assert found.outcome is not None, "released without an outcome"
        del self._transfers[found.id]
        self._ending.pop(found.id, None)
        return [Release(found.id, found.outcome)]

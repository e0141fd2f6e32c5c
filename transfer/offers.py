"""All offers of one process: who may have them, what is sent next, and when they end.

An offer belongs to the run that pulled it first; no other gets a byte of it or ends it. What comes after the end is
answered and counted, and changes nothing. A pull that comes before its offer waits for it. One offer: ``offer.py``.

Sans-IO: no clock, thread, socket or randomness. Times are monotonic seconds of the caller's clock, ids come in.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import transfer.messages as wire
from cache_manager.keys import Namespace
from transfer.actions import Action, Cut, OfferedBlock, Release, Send
from transfer.counters import OfferCounters
from transfer.errors import IncompatiblePeerError, LocalProtocolError
from transfer.identity import Identity, check_peer
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.offer import Ended, Event, Offer, State, check_blocks


class Offers:
    """A node calls :meth:`receive` for what arrives, :meth:`tick` when :meth:`next_due_s` has come (often is fine),
    acts on what they answer, and then sends what :meth:`next_records` has until there is no more. Whatever a peer
    sends, no method raises because of it. :class:`LocalProtocolError` is for mistakes of this side; it changes nothing.
    """

    def __init__(self, identity: Identity, limits: TransferLimits) -> None:
        self.identity = identity
        self.limits = limits
        self.counters = OfferCounters()  # its own: who keeps it copies it
        self._offers: dict[wire.TransferId, Offer] = {}
        self._ended: OrderedDict[wire.TransferId, Ended] = OrderedDict()
        self._expected: dict[wire.TransferId, None] = {}  # of these, those that were pulled only; the oldest first
        self._peers: OrderedDict[Peer, wire.Hello] = OrderedDict()  # who said hello; the one heard last at the end
        self._owners: Counter[Peer] = Counter()  # offers by owner, also by one that was lost; no zeros
        self._ready: OrderedDict[wire.TransferId, None] = OrderedDict()  # with something to send and credit for it
        self._stalled: list[wire.TransferId] = []  # those whose records the link refused, to be tried again
        self._resend_s = 0.0
        self._unsummed: OrderedDict[wire.TransferId, None] = OrderedDict()
        self._expiries: list[tuple[float, wire.TransferId]] = []  # a heap; a renewed offer is pushed again when popped

    # ---------------------------------------------------------------- the engine's side

    @property
    def in_flight(self) -> int:
        """Offers that are not over yet."""
        return len(self._offers) - len(self._expected)

    def offer(
        self,
        transfer: wire.TransferId,
        blocks: Sequence[OfferedBlock],
        now_s: float,
        *,
        is_open: bool = False,
        lease_s: float | None = None,
    ) -> list[Action] | None:
        """Lend ``blocks`` to the peer that pulls ``transfer`` within ``lease_s``; ``None``: no room, nothing changed.

        ``is_open``: more blocks come, until :meth:`seal`. Raises :class:`LocalProtocolError` for an id that is not new,
        or blocks that do not have the session's parts.
        """
        found = self._offers.get(transfer)
        if len(transfer) != 16 or transfer in self._ended or not (found is None or found.state is State.EXPECTED):
            raise LocalProtocolError(f"transfer: wanted 16 bytes that are new, got {transfer.hex()}")
        check_blocks(blocks, self.identity.parts)
        if self.in_flight >= self.limits.transfers_max:
            return None
        lease_s = self.limits.lease_s if lease_s is None else lease_s
        end_s = now_s + self.limits.lease_max_s
        if found is None:
            found = self._offers[transfer] = Offer(transfer)
        else:
            del self._expected[transfer]
        self._expire_at(found, min(now_s + lease_s, end_s), end_s)
        found.apply(Event.OFFER)
        self.counters.offered += 1
        self._grown(found, found.grow(blocks))
        if not is_open:
            found.seal()
        return [] if found.asked is None else self._owned(found, found.asked)

    def _expire_at(self, found: Offer, expires_s: float, expires_max_s: float) -> None:
        found.expires_s, found.expires_max_s = expires_s, expires_max_s
        if len(self._expiries) > 4 * self.limits.transfers_max:  # most are of offers that ended early
            self._expiries = [entry for entry in self._expiries if entry[1] in self._offers]
            heapq.heapify(self._expiries)
        heapq.heappush(self._expiries, (expires_s, found.id))

    def grow(self, transfer: wire.TransferId, blocks: Sequence[OfferedBlock], now_s: float) -> list[Action]:
        """Add blocks to an open offer, which renews its lease. Harmless when it has ended."""
        if (found := self._open(transfer, now_s)) is None:
            return []
        check_blocks(blocks, self.identity.parts, found.blocks)
        return self._grown(found, found.grow(blocks))

    def seal(self, transfer: wire.TransferId, now_s: float) -> list[Action]:
        """No more blocks come: what is wanted beyond them is absent. Harmless when the offer has ended."""
        found = self._open(transfer, now_s)
        return [] if found is None else self._grown(found, found.seal())

    def withdraw(self, transfer: wire.TransferId) -> list[Action]:
        """Give an offer up; harmless when it has ended."""
        found = self._offers.get(transfer)
        return self._end(found, wire.Outcome.ABORTED) if found and transfer not in self._expected else []

    def reset(self, namespace: Namespace) -> list[Action]:
        """This side's rows belong to another namespace from here on: every offer ends, every peer must say hello."""
        self.identity = replace(self.identity, namespace=namespace)
        actions = self._end_all(wire.Outcome.RESET)
        self._peers.clear()
        return actions

    def close(self) -> list[Action]:
        """End every offer and say goodbye."""
        byes: list[Action] = [Send(peer, wire.Bye(self.identity.boot_id)) for peer in self._peers]
        return self._end_all(wire.Outcome.ABORTED) + byes

    def _open(self, transfer: wire.TransferId, now_s: float) -> Offer | None:
        found = self._offers.get(transfer)
        if transfer in self._expected or (found is None and transfer not in self._ended):
            raise LocalProtocolError(f"transfer: wanted one that was offered, got {transfer.hex()}")
        if found is not None and found.state is not State.OPEN:
            raise LocalProtocolError(f"transfer {transfer.hex()}: wanted an open offer, got one that is sealed")
        if found is not None:
            self._renew(found, now_s)
        return found

    def _grown(self, found: Offer, absent: list[wire.Place]) -> list[Action]:
        if found.unsummed:
            self._unsummed[found.id] = None
        if found.wanted:
            self._ready[found.id] = None
        self.counters.records_absent += len(absent)
        return [Send(found.peer, wire.Absent(found.id, found.epoch, absent))] if absent and found.peer else []

    # ---------------------------------------------------------------- the link's side

    def receive(self, peer: Peer, message: wire.ToOffers | wire.Bye, now_s: float) -> list[Action]:
        """What to do about a message; nothing of it is kept but a pull that is early."""
        actions = self._expire(now_s)
        match message:
            case wire.Hello():
                return actions + self._on_hello(peer, message)
            case wire.Bye():
                return actions + self._on_bye(peer, message)
            case _:
                return actions + self._on_transfer_message(peer, message, now_s)

    def tick(self, now_s: float) -> list[Action]:
        """End what has outlived its lease; links that were full may be tried again."""
        if self._stalled and now_s >= self._resend_s:
            for transfer in self._stalled:
                if (found := self._offers.get(transfer)) and found.wanted:
                    self._ready[transfer] = None
            self._stalled.clear()
        return self._expire(now_s)

    def next_due_s(self) -> float | None:
        """When :meth:`tick` has something to do, at the earliest."""
        due = [expiry_s for expiry_s, _ in self._expiries[:1]]
        if self._stalled:
            due.append(self._resend_s)
        return min(due, default=None)

    def next_records(self) -> Send | None:
        """The next records to send, offers taking turns; ``None``: nothing, or no credit, or the link was full."""
        while self._ready:
            found = self._offers[next(iter(self._ready))]
            if found.peer is None or not self.greeted(found.peer, found.boot_id):
                del self._ready[found.id]  # lost: it will say hello and pull again
                continue
            send = found.take(self.identity.parts, self.limits, self._peers[found.peer].frame_nbytes_max)
            if found.wanted and send:
                self._ready.move_to_end(found.id)
            else:
                del self._ready[found.id]  # all sent, or out of credit
            if send is not None:
                assert isinstance(send.message, wire.Records)
                self.counters.records_sent += len(send.message.entries)
                return send
        return None

    def sum_ahead(self, records_max: int) -> bool:
        """Sum records that no peer has asked for yet, so that they go out at once; whether there may be more."""
        for _ in range(records_max):
            if not self._unsummed:
                return False
            found = self._offers.get(next(iter(self._unsummed)))
            if found is None or not found.sum_next():
                self._unsummed.popitem(last=False)
        return bool(self._unsummed)

    def unsent(self, send: Send, now_s: float) -> None:
        """The link refused ``send``. Records are tried again after a :meth:`tick`; for anything else the peer asks."""
        self.counters.sends_refused += 1
        message = send.message
        if not isinstance(message, wire.Records):
            return
        found = self._offers[wire.TransferId(message.transfer)]
        found.take_back(message, self.identity.parts)
        self.counters.records_sent -= len(message.entries)
        self._ready.pop(found.id, None)
        self._stalled.append(found.id)
        self._resend_s = now_s + self.limits.resend_s

    def peer_lost(self, peer: Peer) -> None:
        """The link lost ``peer``: it has to say hello again. Its offers stay until their leases end."""
        self._peers.pop(peer, None)

    def _on_hello(self, peer: Peer, hello: wire.Hello) -> list[Action]:
        own = self.identity
        try:
            check_peer(own, hello.namespace, hello.parts)
            if hello.frame_nbytes_max < own.nbytes_max:
                raise IncompatiblePeerError("frame_nbytes_max", f"at least {own.nbytes_max}", hello.frame_nbytes_max)
            if not self._remember(peer, hello):
                raise IncompatiblePeerError("peers", f"at most {self.limits.peers_max} with transfers", "one more")
        except IncompatiblePeerError as error:
            self._peers.pop(peer, None)
            self.counters.refused_peers += 1
            field, wanted, got = (str(text)[:256] for text in (error.field, error.wanted, error.got))
            return [Send(peer, wire.Refuse(field, wanted, got, hello.boot_id))]
        welcome = wire.Welcome(own.boot_id, own.space, list(own.parts), wire.MINOR, self.limits.lease_ms, hello.boot_id)
        return [Send(peer, welcome)]

    def _remember(self, peer: Peer, hello: wire.Hello) -> bool:
        """Remember ``peer``; of too many, the one that was silent longest and owns no offer is forgotten."""
        if peer not in self._peers and len(self._peers) >= self.limits.peers_max:
            idle = next((known for known in self._peers if known not in self._owners), None)
            if idle is None:
                return False
            del self._peers[idle]
            self.counters.forgotten_peers += 1
        self._peers[peer] = hello
        self._peers.move_to_end(peer)
        return True

    def greeted(self, peer: Peer, boot_id: bytes) -> bool:
        """Whether ``peer`` is remembered by a hello of the run ``boot_id``."""
        hello = self._peers.get(peer)
        return hello is not None and hello.boot_id == boot_id

    def _on_transfer_message(self, peer: Peer, message: wire.OfTransfer, now_s: float) -> list[Action]:
        if not self.greeted(peer, message.boot_id):
            self.counters.stranger_messages += 1
            return [
                Send(peer, wire.Refuse("hello", "a hello of this run first", type(message).__name__, message.boot_id))
            ]
        self._peers.move_to_end(peer)
        found = self._offers.get(wire.TransferId(message.transfer))
        if found is None:
            return self._on_absent_offer(peer, message, now_s)
        if found.peer is None:
            if not isinstance(message, (wire.Pull, wire.Abort)) and not (
                isinstance(message, wire.Ack) and not message.installed
            ):
                self.counters.stale_messages += 1  # only a pull makes an owner
                return []
        elif (found.peer, found.boot_id) != (peer, message.boot_id):
            self.counters.foreign_messages += 1
            return [Send(peer, wire.Gone(message.transfer, wire.Outcome.FOREIGN))]
        self._renew(found, now_s)
        match message:
            case wire.Pull():
                return self._on_pull(peer, found, message)
            case wire.Credit():
                return self._on_credit(found, message)
            case wire.Ack():
                return self._on_ack(peer, found, message)
            case wire.Abort():
                return self._end(found, wire.Outcome.ABORTED, tell=False)

    def _on_pull(self, peer: Peer, found: Offer, pull: wire.Pull) -> list[Action]:
        if pull.epoch <= found.epoch:
            self.counters.stale_messages += 1
            return []
        is_new, found.peer, found.boot_id = found.peer is None, peer, pull.boot_id
        if found.state is State.EXPECTED:
            found.epoch, found.asked = pull.epoch, pull
            return [Send(peer, wire.Later(found.id, pull.epoch))]
        return self._owned(found, pull) if is_new else self._wanted(found, pull)

    def _owned(self, found: Offer, pull: wire.Pull) -> list[Action]:
        """Its first pull makes a peer the owner of an offer."""
        assert found.peer is not None, "somebody has pulled it"
        found.asked = None
        self._owners[found.peer] += 1
        self.counters.pulled += 1
        return self._wanted(found, pull)

    def _wanted(self, found: Offer, pull: wire.Pull) -> list[Action]:
        absent, mismatches = found.want(pull)
        self.counters.attempts += 1
        self.counters.key_mismatches += mismatches
        self._ready.pop(found.id, None)
        assert found.peer is not None, "somebody has pulled it"
        later: list[Action] = [Send(found.peer, wire.Later(found.id, found.epoch))] if found.later else []
        return self._grown(found, absent) + later

    def _on_credit(self, found: Offer, credit: wire.Credit) -> list[Action]:
        if credit.epoch != found.epoch:
            self.counters.stale_messages += 1
            return []
        found.granted_nbytes = max(found.granted_nbytes, credit.nbytes)
        return self._grown(found, [])

    def _on_ack(self, peer: Peer, found: Offer, ack: wire.Ack) -> list[Action]:
        if ack.epoch < found.epoch:
            self.counters.stale_messages += 1
            return []
        if found.peer is None:  # nothing was wanted; an ack again is then heard from this peer only
            found.peer, found.boot_id = peer, ack.boot_id
            self._owners[peer] += 1
        return self._end(found, wire.Outcome.ACKED)

    def _on_absent_offer(self, peer: Peer, message: wire.OfTransfer, now_s: float) -> list[Action]:
        transfer = wire.TransferId(message.transfer)
        ended = self._ended.get(transfer)
        if ended is None and isinstance(message, wire.Pull):  # it may come: the pull waits for it, for a bounded time
            self.counters.early_pulls += 1
            self._expected[transfer] = None
            found = self._offers[transfer] = Offer(transfer)
            self._expire_at(found, now_s + self.limits.early_s, now_s + self.limits.early_s)
            oldest = self._offers[next(iter(self._expected))]
            gone = [] if len(self._expected) <= self.limits.transfers_max else self._end(oldest, wire.Outcome.UNKNOWN)
            return self._on_pull(peer, found, message) + gone
        if ended is None:
            self.counters.unknown_transfers += 1
            outcome = wire.Outcome.UNKNOWN
        elif ended.peer is not None and (ended.peer, ended.boot_id) != (peer, message.boot_id):
            self.counters.foreign_messages += 1
            outcome = wire.Outcome.FOREIGN
        else:
            self.counters.late_messages += 1
            outcome = ended.outcome
        return [] if isinstance(message, wire.Abort) else [Send(peer, wire.Gone(transfer, outcome))]

    def _on_bye(self, peer: Peer, bye: wire.Bye) -> list[Action]:
        if not self.greeted(peer, bye.boot_id):
            self.counters.stranger_messages += 1
            return []
        del self._peers[peer]
        own = [o for o in self._offers.values() if (o.peer, o.boot_id) == (peer, bye.boot_id)]
        return [a for o in own for a in self._end(o, wire.Outcome.ABORTED, tell=False)]

    def _renew(self, found: Offer, now_s: float) -> None:
        found.expires_s = max(found.expires_s, min(now_s + self.limits.lease_s, found.expires_max_s))

    def _expire(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        while self._expiries and self._expiries[0][0] <= now_s:
            _, transfer = heapq.heappop(self._expiries)
            found = self._offers.get(transfer)
            if found is None:
                continue
            if found.expires_s > now_s:
                heapq.heappush(self._expiries, (found.expires_s, transfer))
                continue
            if transfer in self._expected:
                actions += self._end(found, wire.Outcome.UNKNOWN)
                continue
            actions += self._end(found, wire.Outcome.EXPIRED)
            if found.peer is not None:  # the link may still have messages for it, which it does not read
                self.counters.slow_peers += 1
                actions.append(Cut(found.peer))
        return actions

    def _end_all(self, outcome: wire.Outcome) -> list[Action]:
        return [a for o in list(self._offers.values()) for a in self._end(o, outcome)]

    def _end(self, found: Offer, outcome: wire.Outcome, *, tell: bool = True) -> list[Action]:
        """The offer is over. Its owner is told unless it knows. One that was never made is not remembered."""
        found.apply(Event.END)
        del self._offers[found.id]
        self._ready.pop(found.id, None)
        self._unsummed.pop(found.id, None)
        told: list[Action] = []
        if found.peer is not None and tell and self.greeted(found.peer, found.boot_id):
            told.append(Send(found.peer, wire.Gone(found.id, outcome)))
        if found.id in self._expected:
            del self._expected[found.id]
            self.counters.unknown_transfers += outcome is wire.Outcome.UNKNOWN
            return told
        setattr(self.counters, outcome.value, getattr(self.counters, outcome.value) + 1)
        self._ended[found.id] = Ended(outcome, found.peer, found.boot_id)
        while len(self._ended) > self.limits.remembered_max:
            self._ended.popitem(last=False)
        if found.peer is not None:
            self._owners[found.peer] -= 1
            if not self._owners[found.peer]:
                del self._owners[found.peer]
        return [*told, Release(found.id, outcome)]

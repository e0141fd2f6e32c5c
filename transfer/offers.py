"""All offers of one process: which peer may have them, what is sent next, and when they end.

An offer belongs to the run that pulled it first; no other run gets a byte of it or ends it. A message after the end is
answered and counted, and changes nothing. A pull that comes before its offer waits for it. One offer is in
``offer.py``.

Sans-IO: no clock, thread, socket or randomness. Times are monotonic seconds of the caller's clock; ids are arguments.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import transfer.messages as wire
from cache_manager.keys import Namespace
from transfer.actions import Action, Cut, OfferedBlock, Release, Send
from transfer.counters import Counters
from transfer.errors import IncompatiblePeerError, LocalProtocolError, NodeFullError
from transfer.identity import Identity, check_peer
from transfer.kept import KeptBuffers
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.offer import Event, Offer, Owner, State, check_blocks


class _Early(NamedTuple):
    """A pull that waits for its offer."""

    owner: Owner
    pull: wire.Pull
    until_s: float


class Offers:
    """A node calls :meth:`receive` for what arrives, :meth:`tick` when :meth:`next_due_s` has come (often is fine),
    does the actions that they return, and then sends the messages of :meth:`next_records` until there is none. No
    message of a peer makes a method raise. :class:`LocalProtocolError` is for mistakes of this side; nothing has
    changed then.
    """

    def __init__(self, identity: Identity, limits: TransferLimits, counters: Counters) -> None:
        self.identity = identity
        self.limits = limits
        self.counters = counters
        self._offers: dict[wire.TransferId, Offer] = {}
        self._early: OrderedDict[wire.TransferId, _Early] = OrderedDict()  # in the order in which their waits end
        self._ended: OrderedDict[wire.TransferId, tuple[wire.Outcome, Owner | None]] = OrderedDict()
        self._runs: OrderedDict[Peer, bytes] = OrderedDict()  # run of each greeted peer; the one heard last at the end
        self._ready: OrderedDict[wire.TransferId, None] = OrderedDict()  # offers with records to send
        self._stalled: list[wire.TransferId] = []  # offers whose records the link refused, to be tried again
        self._resend_s = math.inf
        self._look_s = math.inf  # nothing ends before
        self._kept = KeptBuffers()

    # ---------------------------------------------------------------- the engine's side

    @property
    def in_flight(self) -> int:
        """Offers that are not over yet."""
        return len(self._offers)

    def offer(
        self,
        transfer: wire.TransferId,
        blocks: Sequence[OfferedBlock],
        now_s: float,
        is_open: bool = False,
        lease_s: float | None = None,
    ) -> list[Action]:
        """Lend ``blocks`` to the peer that pulls ``transfer`` within ``lease_s``.

        ``is_open``: more blocks come, until :meth:`seal`. Raises :class:`LocalProtocolError` for an id that is not new,
        or blocks without the session's parts, and :class:`NodeFullError`.
        """
        if len(transfer) != 16 or transfer in self._ended or transfer in self._offers:
            raise LocalProtocolError(f"transfer: wanted 16 bytes that are new, got {transfer.hex()}")
        check_blocks(blocks, self.identity.parts)
        if self.in_flight >= self.limits.transfers_max:
            raise NodeFullError("transfers_max", self.limits.transfers_max, "one more offer")
        end_s = now_s + self.limits.lease_max_s
        expires_s = min(now_s + (self.limits.lease_s if lease_s is None else lease_s), end_s)
        found = self._offers[transfer] = Offer(transfer, expires_s, end_s)
        self._look_s = min(self._look_s, expires_s)
        self.counters.offered += 1
        found.grow(blocks)
        if not is_open:
            found.seal()
        early = self._early.pop(transfer, None)
        return [] if early is None else self._on_pull(found, early.owner, early.pull)

    def grow(self, transfer: wire.TransferId, blocks: Sequence[OfferedBlock], now_s: float) -> list[Action]:
        """Add blocks to an open offer, which renews its lease. Harmless when it has ended."""
        if (found := self._open(transfer, now_s)) is None:
            return []
        check_blocks(blocks, self.identity.parts, found.blocks)
        return self._grown(found, found.grow(blocks))

    def seal(self, transfer: wire.TransferId, now_s: float) -> list[Action]:
        """No more blocks come: other wanted blocks are absent. Harmless when the offer has ended."""
        found = self._open(transfer, now_s)
        return [] if found is None else self._grown(found, found.seal())

    def withdraw(self, transfer: wire.TransferId, detail: str = "") -> list[Action]:
        """Give an offer up; harmless when it has ended."""
        found = self._offers.get(transfer)
        return [] if found is None else self._end(found, wire.Outcome.ABORTED, detail=detail)

    def reset(self, namespace: Namespace) -> list[Action]:
        """This side's rows belong to another namespace from here on: every offer ends, every peer must say hello."""
        self.identity = replace(self.identity, namespace=namespace)
        actions = [a for o in list(self._offers.values()) for a in self._end(o, wire.Outcome.RESET)]
        while self._early:
            actions += self._end_early(wire.Outcome.RESET)
        self._runs.clear()
        return actions

    def close(self) -> list[Action]:
        """End every offer and say goodbye."""
        byes: list[Action] = [Send(peer, wire.Bye(self.identity.boot_id)) for peer in self._runs]
        return [a for o in list(self._offers.values()) for a in self._end(o, wire.Outcome.ABORTED)] + byes

    def _open(self, transfer: wire.TransferId, now_s: float) -> Offer | None:
        found = self._offers.get(transfer)
        if found is None and transfer not in self._ended:
            raise LocalProtocolError(f"transfer: wanted one that was offered, got {transfer.hex()}")
        if found is not None:
            if found.state is not State.OPEN:
                raise LocalProtocolError(f"transfer {transfer.hex()}: wanted an open offer, got one that is sealed")
            self._renew(found, now_s)
        return found

    def _grown(self, found: Offer, absent: list[wire.Place]) -> list[Action]:
        if found.wanted:
            self._ready[found.id] = None
        self.counters.records_absent += len(absent)
        return [Send(found.owner[0], wire.Absent(found.id, found.epoch, absent))] if absent and found.owner else []

    # ---------------------------------------------------------------- the link's side

    def receive(self, peer: Peer, message: wire.ToOffers | wire.Bye, now_s: float) -> list[Action]:
        """The actions for a message; only an early pull is kept."""
        actions = self._expire(now_s) if self._look_s <= now_s else []
        match message:
            case wire.Hello():
                return actions + self._on_hello(peer, message)
            case wire.Bye():
                return actions + self._on_bye((peer, message.boot_id))
            case _:
                return actions + self._on_transfer_message((peer, message.boot_id), message, now_s)

    def tick(self, now_s: float) -> list[Action]:
        """End offers that have outlived their leases, and retry refused records."""
        if self._resend_s <= now_s:
            for transfer in self._stalled:
                if (found := self._offers.get(transfer)) and found.wanted:
                    self._ready[transfer] = None
            self._stalled.clear()
            self._resend_s = math.inf
        return self._expire(now_s) if self._look_s <= now_s else []

    def next_due_s(self) -> float:
        """When :meth:`tick` has something to do, at the earliest."""
        return min(self._look_s, self._resend_s)

    def next_records(self) -> Send | None:
        """The next records to send, offers taking turns; ``None``: nothing, or the link was full."""
        while self._ready:
            found = self._offers[next(iter(self._ready))]
            if not (found.owner and self.greeted(*found.owner)):
                del self._ready[found.id]  # the peer was lost: it will say hello and pull again
                continue
            send = found.take(self.limits.records_nbytes_max, self._kept)
            if found.wanted:
                self._ready.move_to_end(found.id)
            else:
                del self._ready[found.id]
            assert isinstance(send.message, wire.Records)
            self.counters.records_sent += len(send.message.entries)
            return send
        return None

    def unsent(self, send: Send, now_s: float) -> None:
        """The link refused ``send``. Records are tried again after a :meth:`tick`; for others the peer asks again."""
        self.counters.sends_refused += 1
        message = send.message
        if isinstance(message, wire.Records):
            found = self._offers[wire.TransferId(message.transfer)]
            found.take_back(message)
            self.counters.records_sent -= len(message.entries)
            self._ready.pop(found.id, None)
            self._stalled.append(found.id)
            self._resend_s = min(self._resend_s, now_s + self.limits.resend_s)  # another peer's records may wait, too

    def peer_lost(self, peer: Peer) -> None:
        """The link lost ``peer``: it has to say hello again. Its offers stay until their leases end."""
        self._runs.pop(peer, None)

    def greeted(self, peer: Peer, boot_id: bytes) -> bool:
        """Whether ``peer`` has said hello for the run ``boot_id``, and is remembered."""
        return self._runs.get(peer) == boot_id

    def _on_hello(self, peer: Peer, hello: wire.Hello) -> list[Action]:
        own = self.identity
        try:
            check_peer(own, hello.namespace, hello.parts)
            self._remember(peer, hello.boot_id)
        except IncompatiblePeerError as error:
            self._runs.pop(peer, None)
            self.counters.refused_peers += 1
            field, wanted, got = (str(text)[:256] for text in (error.field, error.wanted, error.got))
            return [Send(peer, wire.Refuse(field, wanted, got, hello.boot_id))]
        lease_ms = int(self.limits.lease_s * 1000)
        return [Send(peer, wire.Welcome(own.boot_id, own.space, list(own.parts), lease_ms, hello.boot_id))]

    def _remember(self, peer: Peer, boot_id: bytes) -> None:
        """Remember ``peer``; of too many, the one that was silent longest and owns no offer is forgotten."""
        if peer not in self._runs and len(self._runs) >= self.limits.peers_max:
            owners = {o.owner[0] for o in self._offers.values() if o.owner}
            idle = next((known for known in self._runs if known not in owners), None)
            if idle is None:
                raise IncompatiblePeerError("peers", f"at most {self.limits.peers_max} with transfers", "one more")
            del self._runs[idle]
            self.counters.forgotten_peers += 1
        self._runs[peer] = boot_id
        self._runs.move_to_end(peer)

    def _on_transfer_message(self, who: Owner, message: wire.OfTransfer, now_s: float) -> list[Action]:
        peer, run = who
        if self._runs.get(peer) != run:  # not greeted
            self.counters.stranger_messages += 1
            return [Send(peer, wire.Refuse("hello", "a hello of this run first", type(message).__name__, run))]
        self._runs.move_to_end(peer)
        found = self._offers.get(wire.TransferId(message.transfer))
        if found is None:
            return self._without_offer(who, message, now_s)
        if found.owner not in (None, who):
            self.counters.foreign_messages += 1
            return [Send(peer, wire.Gone(message.transfer, wire.Outcome.FOREIGN))]
        if found.owner is None and isinstance(message, wire.Renew):  # only a pull makes an owner
            self.counters.stale_messages += 1
            return []
        self._renew(found, now_s)
        match message:
            case wire.Pull() if message.epoch > found.epoch:
                return self._on_pull(found, who, message)
            case wire.Pull():
                self.counters.stale_messages += 1
            case wire.Ack():  # also from a peer that wanted nothing, and so has not pulled
                found.owner = who
                return self._end(found, wire.Outcome.ACKED)
            case wire.Abort():
                return self._end(found, wire.Outcome.ABORTED, tell=False)
        return []

    def _on_pull(self, found: Offer, who: Owner, pull: wire.Pull) -> list[Action]:
        """The first pull of an offer makes its peer the owner."""
        self.counters.pulled += found.owner is None
        found.owner = who
        absent = found.want(pull)
        self._ready.pop(found.id, None)
        later: list[Action] = [Send(who[0], wire.Later(found.id, found.epoch))] if found.later else []
        return self._grown(found, absent) + later

    def _without_offer(self, who: Owner, message: wire.OfTransfer, now_s: float) -> list[Action]:
        transfer = wire.TransferId(message.transfer)
        early = self._early.get(transfer)
        ended, owner = self._ended.get(transfer, (None, early and early.owner))
        if owner not in (None, who):
            self.counters.foreign_messages += 1
            return [Send(who[0], wire.Gone(transfer, wire.Outcome.FOREIGN))]
        if ended is not None:
            self.counters.late_messages += 1
            return [] if isinstance(message, wire.Abort) else [Send(who[0], wire.Gone(transfer, ended))]
        if isinstance(message, wire.Pull):  # its offer may still come: the pull waits a bounded time
            self.counters.early_pulls += early is None
            until_s = early.until_s if early else now_s + self.limits.early_s
            self._early[transfer] = _Early(who, message, until_s)
            self._look_s = min(self._look_s, until_s)
            told: list[Action] = [Send(who[0], wire.Later(transfer, message.epoch))]
            return told + (self._end_early() if len(self._early) > self.limits.transfers_max else [])
        if early is not None and isinstance(message, wire.Renew):
            return []
        self._early.pop(transfer, None)
        self.counters.unknown_transfers += 1
        return [] if isinstance(message, wire.Abort) else [Send(who[0], wire.Gone(transfer, wire.Outcome.UNKNOWN))]

    def _on_bye(self, who: Owner) -> list[Action]:
        if not self.greeted(*who):
            self.counters.stranger_messages += 1
            return []
        del self._runs[who[0]]
        for transfer in [transfer for transfer, early in self._early.items() if early.owner == who]:
            del self._early[transfer]
        own = [o for o in self._offers.values() if o.owner == who]
        return [a for o in own for a in self._end(o, wire.Outcome.ABORTED, tell=False)]

    def _renew(self, found: Offer, now_s: float) -> None:
        found.expires_s = max(found.expires_s, min(now_s + self.limits.lease_s, found.expires_max_s))

    def _expire(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        while self._early and next(iter(self._early.values())).until_s <= now_s:
            actions += self._end_early()
        for found in [o for o in self._offers.values() if o.expires_s <= now_s]:
            actions += self._end(found, wire.Outcome.EXPIRED)
            if found.owner is not None:  # the link may still hold messages that the peer does not read
                self.counters.slow_peers += 1
                actions.append(Cut(found.owner[0]))
        waits = [early.until_s for early in list(self._early.values())[:1]]
        self._look_s = min([*waits, *(o.expires_s for o in self._offers.values())], default=math.inf)
        return actions

    def _end_early(self, outcome: wire.Outcome = wire.Outcome.UNKNOWN) -> list[Action]:
        """End the wait of the pull that has waited longest."""
        transfer, early = self._early.popitem(last=False)
        self.counters.unknown_transfers += outcome is wire.Outcome.UNKNOWN
        return [Send(early.owner[0], wire.Gone(transfer, outcome))] if self.greeted(*early.owner) else []

    def _end(self, found: Offer, outcome: wire.Outcome, *, tell: bool = True, detail: str = "") -> list[Action]:
        """End the offer; its owner is told unless it knows already."""
        found.apply(Event.END)
        del self._offers[found.id]
        self._ready.pop(found.id, None)
        setattr(self.counters, outcome.value, getattr(self.counters, outcome.value) + 1)
        self._ended[found.id] = outcome, found.owner
        while len(self._ended) > self.limits.remembered_max:
            self._ended.popitem(last=False)
        told: list[Action] = []
        if found.owner is not None and tell and self.greeted(*found.owner):
            told.append(Send(found.owner[0], wire.Gone(found.id, outcome)))
        return [*told, Release(found.id, outcome, detail)]

"""All offers of one process: which peer may have them, what is sent next, and when they end.

An offer belongs to the run that pulled it first; no other run gets a byte of it or ends it. A pull whose identity has
another digest is refused. A message after the end is answered and counted, and changes nothing. A pull that comes
before its offer waits for it. One offer is in ``offer.py``.

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
from transfer.actions import Action, OfferedBlock, Release, Send
from transfer.counters import Counters
from transfer.errors import LocalProtocolError, NodeFullError
from transfer.identity import Identity
from transfer.kept import KeptBuffers
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.messages import Outcome, TransferId
from transfer.offer import Offer, Owner, check_blocks


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
        self._lease_ms = int(limits.lease_s * 1000)
        self._offers: dict[TransferId, Offer] = {}
        self._early: OrderedDict[TransferId, _Early] = OrderedDict()  # in the order in which their waits end
        self._ended: OrderedDict[TransferId, tuple[Outcome, Owner | None]] = OrderedDict()
        self._ready: OrderedDict[TransferId, None] = OrderedDict()  # offers with records to send
        self._stalled: dict[TransferId, None] = {}  # offers whose records the link refused
        self._broken: list[Action] = []  # the ends of offers whose records could not be read
        self._next_check_s = math.inf  # nothing is due before this time
        self._kept = KeptBuffers()

    # ---------------------------------------------------------------- the engine's side

    @property
    def in_flight(self) -> int:
        """Offers that are not over yet."""
        return len(self._offers)

    def offer(
        self,
        transfer: TransferId,
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
        if lease_s is None:
            lease_s = self.limits.lease_s
        end_s = now_s + self.limits.lease_max_s
        expires_s = min(now_s + lease_s, end_s)
        offer = Offer(transfer, expires_s, end_s)
        self._offers[transfer] = offer
        self._check_by(expires_s)
        self.counters.offered += 1
        offer.grow(blocks)
        if not is_open:
            offer.seal()
        early = self._early.pop(transfer, None)
        return [] if early is None else self._on_pull(offer, early.owner, early.pull)

    def grow(self, transfer: TransferId, blocks: Sequence[OfferedBlock], now_s: float) -> list[Action]:
        """Add blocks to an open offer, which renews its lease. Harmless when it has ended."""
        offer = self._open(transfer, now_s)
        if offer is None:
            return []
        check_blocks(blocks, self.identity.parts, offer.blocks)
        return self._grown(offer, offer.grow(blocks))

    def seal(self, transfer: TransferId, now_s: float) -> list[Action]:
        """No more blocks come: other wanted blocks are absent. Harmless when the offer has ended."""
        offer = self._open(transfer, now_s)
        return [] if offer is None else self._grown(offer, offer.seal())

    def withdraw(self, transfer: TransferId, detail: str = "") -> list[Action]:
        """Give an offer up; harmless when it has ended."""
        offer = self._offers.get(transfer)
        return [] if offer is None else self._end(offer, Outcome.ABORTED, detail=detail)

    def reset(self, namespace: Namespace) -> list[Action]:
        """This side's rows belong to another namespace from here on: every offer ends, and every pull that waits."""
        self.identity = replace(self.identity, namespace=namespace)
        return self._end_all(Outcome.RESET)

    def close(self) -> list[Action]:
        """End every offer, and every pull that waits."""
        return self._end_all(Outcome.ABORTED)

    def _open(self, transfer: TransferId, now_s: float) -> Offer | None:
        offer = self._offers.get(transfer)
        if offer is None:
            if transfer not in self._ended:
                raise LocalProtocolError(f"transfer: wanted one that was offered, got {transfer.hex()}")
            return None
        if offer.sealed:
            raise LocalProtocolError(f"transfer {transfer.hex()}: wanted an open offer, got one that is sealed")
        self._renew(offer, now_s)
        return offer

    def _grown(self, offer: Offer, absent: list[wire.Place]) -> list[Action]:
        """Send what is wanted and there, in turn, and tell the owner what is absent."""
        if offer.wanted:
            self._ready[offer.id] = None
        self.counters.records_absent += len(absent)
        if not absent or offer.owner is None:
            return []
        peer, boot_id = offer.owner
        return [Send(peer, wire.Absent(boot_id, offer.id, offer.epoch, absent))]

    # ---------------------------------------------------------------- the link's side

    def receive(self, peer: Peer, message: wire.ToOffers, now_s: float) -> list[Action]:
        """The actions for a message; only an early pull is kept."""
        actions = self.tick(now_s)
        who = peer, message.boot_id
        if isinstance(message, wire.Bye):
            return actions + self._on_bye(who)
        transfer = message.transfer
        if isinstance(message, wire.Pull) and message.identity != self.identity.digest:
            self.counters.refused_pulls += 1
            return [*actions, Send(peer, self.identity.refuse(message.boot_id, transfer))]
        offer = self._offers.get(transfer)
        if offer is None:
            return actions + self._without_offer(who, message, now_s)
        return actions + self._on_transfer_message(offer, who, message, now_s)

    def tick(self, now_s: float) -> list[Action]:
        """End offers that have outlived their leases, and retry refused records."""
        return self._expire(now_s) if self._next_check_s <= now_s else []

    def next_due_s(self) -> float:
        """When :meth:`tick` has something to do, at the earliest."""
        return self._next_check_s

    def next_records(self) -> Send | None:
        """The next records to send, offers taking turns; ``None``: nothing, or the link was full.

        An offer whose records cannot be read ends, with the next :meth:`tick`: its lender's memory is not there.
        """
        send: Send | None = None
        while self._ready and send is None:
            offer = self._offers[next(iter(self._ready))]
            try:
                send = offer.take(self.limits.records_nbytes_max, self._lease_ms, self._kept)
            except Exception as error:  # noqa: BLE001 - it comes with the Release
                self.counters.engine_errors += 1
                detail = f"its records cannot be read: {type(error).__name__}: {error}"
                self._broken += self._end(offer, Outcome.ABORTED, detail=detail)
                self._check_by(-math.inf)
        if send is None:
            return None
        if offer.wanted:
            self._ready.move_to_end(offer.id)
        else:
            del self._ready[offer.id]
        assert isinstance(send.message, wire.Records)
        self.counters.records_sent += len(send.message.entries)
        return send

    def unsent(self, send: Send, now_s: float) -> None:
        """The link refused ``send``. Records are tried again after a :meth:`tick`; for others the peer asks again."""
        self.counters.sends_refused += 1
        message = send.message
        if isinstance(message, wire.Records):
            offer = self._offers[message.transfer]
            offer.take_back(message, now_s, self.limits.resend_s, self.limits.retry_s)
            self.counters.records_sent -= len(message.entries)
            self._ready.pop(offer.id, None)
            self._stalled[offer.id] = None
            self._check_by(offer.resend_s)

    def _on_transfer_message(self, offer: Offer, who: Owner, message: wire.OfTransfer, now_s: float) -> list[Action]:
        if offer.owner not in (None, who):
            self.counters.foreign_messages += 1
            return [_gone(who, offer.id, Outcome.FOREIGN)]
        if offer.owner is None and isinstance(message, wire.Renew):  # only a pull makes an owner
            self.counters.stale_messages += 1
            return []
        self._renew(offer, now_s)
        match message:
            case wire.Pull() if message.epoch > offer.epoch:
                return self._on_pull(offer, who, message)
            case wire.Pull():
                self.counters.stale_messages += 1
            case wire.Ack():  # also from a peer that wanted nothing, and so has not pulled
                offer.owner = who
                return self._end(offer, Outcome.ACKED)
            case wire.Abort():
                return self._end(offer, Outcome.ABORTED, tell=False)
        return []

    def _on_pull(self, offer: Offer, who: Owner, pull: wire.Pull) -> list[Action]:
        """The first pull of an offer makes its peer the owner."""
        self.counters.pulled += offer.owner is None
        offer.owner = who
        absent = offer.want(pull)
        self._ready.pop(offer.id, None)
        actions = self._grown(offer, absent)
        if offer.later:
            actions.append(self._later(who, pull))
        return actions

    def _without_offer(self, who: Owner, message: wire.OfTransfer, now_s: float) -> list[Action]:
        transfer = message.transfer
        early = self._early.get(transfer)
        outcome, owner = self._ended.get(transfer, (Outcome.UNKNOWN, early and early.owner))
        if owner not in (None, who):
            self.counters.foreign_messages += 1
            return [_gone(who, transfer, Outcome.FOREIGN)]
        if transfer in self._ended:
            self.counters.late_messages += 1
        elif isinstance(message, wire.Pull):
            return self._wait(early, who, message, now_s)
        elif early is not None and isinstance(message, wire.Renew):
            return []
        else:
            self._early.pop(transfer, None)
            self.counters.unknown_transfers += 1
        return [] if isinstance(message, wire.Abort) else [_gone(who, transfer, outcome)]

    def _wait(self, early: _Early | None, who: Owner, pull: wire.Pull, now_s: float) -> list[Action]:
        """The offer of ``pull`` may still come: it waits a bounded time, in place of an earlier one."""
        self.counters.early_pulls += early is None
        until_s = now_s + self.limits.early_s if early is None else early.until_s
        self._early[pull.transfer] = _Early(who, pull, until_s)
        self._check_by(until_s)
        actions = [self._later(who, pull)]
        if len(self._early) > self.limits.transfers_max:
            actions += self._end_early()
        return actions

    def _on_bye(self, who: Owner) -> list[Action]:
        """The run ends: what it has pulled is over, and it is not told."""
        for transfer, early in list(self._early.items()):
            if early.owner == who:
                del self._early[transfer]
        actions: list[Action] = []
        for offer in list(self._offers.values()):
            if offer.owner == who:
                actions += self._end(offer, Outcome.ABORTED, tell=False)
        return actions

    def _later(self, who: Owner, pull: wire.Pull) -> Action:
        peer, boot_id = who
        return Send(peer, wire.Later(boot_id, pull.transfer, pull.epoch, self._lease_ms))

    def _renew(self, offer: Offer, now_s: float) -> None:
        offer.expires_s = max(offer.expires_s, min(now_s + self.limits.lease_s, offer.expires_max_s))

    def _check_by(self, due_s: float) -> None:
        self._next_check_s = min(self._next_check_s, due_s)

    def _expire(self, now_s: float) -> list[Action]:
        """End what has waited long enough, and let stalled offers send again when their pauses are over."""
        actions, self._broken = self._broken, []
        self._next_check_s = math.inf
        while self._early:
            first = next(iter(self._early.values()))
            if first.until_s > now_s:
                self._check_by(first.until_s)
                break
            actions += self._end_early()
        for offer in list(self._offers.values()):
            if offer.expires_s <= now_s:
                actions += self._end(offer, Outcome.EXPIRED)
            else:
                self._check_by(offer.expires_s)
        for transfer in list(self._stalled):
            offer = self._offers[transfer]
            if offer.resend_s > now_s:
                self._check_by(offer.resend_s)
                continue
            del self._stalled[transfer]
            if offer.wanted:
                self._ready[transfer] = None
        return actions

    def _end_all(self, outcome: Outcome) -> list[Action]:
        actions, self._broken = self._broken, []
        for offer in list(self._offers.values()):
            actions += self._end(offer, outcome)
        while self._early:
            actions += self._end_early(outcome)
        return actions

    def _end_early(self, outcome: Outcome = Outcome.UNKNOWN) -> list[Action]:
        """End the wait of the pull that has waited longest."""
        transfer, early = self._early.popitem(last=False)
        self.counters.unknown_transfers += outcome is Outcome.UNKNOWN
        return [_gone(early.owner, transfer, outcome)]

    def _end(self, offer: Offer, outcome: Outcome, *, tell: bool = True, detail: str = "") -> list[Action]:
        """End the offer; its owner is told unless it knows already."""
        del self._offers[offer.id]
        self._ready.pop(offer.id, None)
        self._stalled.pop(offer.id, None)
        count = getattr(self.counters, outcome.value)
        setattr(self.counters, outcome.value, count + 1)
        self._ended[offer.id] = outcome, offer.owner
        while len(self._ended) > self.limits.remembered_max:
            self._ended.popitem(last=False)
        actions: list[Action] = []
        if offer.owner is not None and tell:
            actions.append(_gone(offer.owner, offer.id, outcome))
        return [*actions, Release(offer.id, outcome, detail)]


def _gone(who: Owner, transfer: TransferId, outcome: Outcome) -> Action:
    peer, boot_id = who
    return Send(peer, wire.Gone(boot_id, transfer, outcome))

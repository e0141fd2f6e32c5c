"""All pulls of one process: they request records, check them, install them once, and report.

A record is handed out for installation at most once, after its header, key, size and sum were found right. One pull is
in ``pull.py``.

An *epoch* is one attempt: when nothing has come for ``retry_s``, or the other side has forgotten this one, decode asks
anew for the missing records. A record of an older epoch is as good as any.

Sans-IO: no clock, thread, socket or randomness. Times are monotonic seconds of the caller's clock; ids are arguments.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import transfer.messages as wire
from cache_manager.keys import Namespace
from transfer.actions import Action, BlockSink, Finished, Missing, Reason, Send, WantedBlock
from transfer.counters import Counters
from transfer.errors import IncompatiblePeerError, LocalProtocolError, NodeFullError
from transfer.identity import Identity, check_peer
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.messages import TransferId
from transfer.pull import Pulling, payloads_of, places_of

RENEWALS_A_LEASE: Final = 3
RENEW_S_MIN: Final = 0.02
"""Shortest renewal interval, whatever lease the other side claims."""


class Pulls:
    """A node calls :meth:`receive` for what arrives and :meth:`tick` when :meth:`next_due_s` has come (often is fine),
    and does the actions that they return, in order. Whatever a peer sends, :meth:`receive` raises at most
    :class:`RemoteProtocolError`. :class:`LocalProtocolError` is for mistakes of this side.
    """

    def __init__(self, identity: Identity, limits: TransferLimits, counters: Counters) -> None:
        self.identity = identity
        self.limits = limits
        self.counters = counters
        self._pulls: dict[TransferId, Pulling] = {}
        self._acking = 0  # how many of these the engine knows to be finished
        self._ended: OrderedDict[TransferId, None] = OrderedDict()
        self._next_check_s = math.inf  # nothing is due before this time

    # ---------------------------------------------------------------- the engine's side

    @property
    def in_flight(self) -> int:
        """Pulls that have not finished."""
        return len(self._pulls) - self._acking

    def pull(
        self, peer: Peer, transfer: TransferId, wanted: Sequence[WantedBlock], sink: BlockSink, now_s: float
    ) -> list[Action]:
        """Begin to pull ``wanted`` blocks from ``peer``. No blocks are fine: prefill may then release the offer.

        Raises :class:`LocalProtocolError` for an id that was pulled before, an index given twice or an invalid part,
        and :class:`NodeFullError`.
        """
        if len(transfer) != 16 or transfer in self._pulls or transfer in self._ended:
            raise LocalProtocolError(f"transfer: wanted 16 bytes not pulled before, got {transfer.hex()}")
        keys = places_of(wanted, len(self.identity.parts))
        limits = self.limits
        if self.in_flight >= limits.transfers_max:
            raise NodeFullError("transfers_max", limits.transfers_max, "one more pull")
        while self._acking >= limits.transfers_max:
            self._close(next(pull for pull in self._pulls.values() if pull.acking))
        pull = Pulling(
            id=transfer,
            peer=peer,
            sink=sink,
            outstanding=keys,
            due_s=now_s + limits.retry_s,
            last_sent_s=now_s,
            give_up_s=now_s + limits.lease_max_s,
            renew_s=_renew_s(limits.lease_s),
        )
        self._pulls[transfer] = pull
        self.counters.pulls += 1
        self._next_check_s = min(self._next_check_s, pull.next_check_s)
        return [self._next(pull, now_s)] if keys else self._settle(pull, now_s)

    def abort(self, transfer: TransferId) -> list[Action]:
        """Give a pull up; harmless when it has finished."""
        pull = self._pulls.get(transfer)
        return [] if pull is None or pull.acking else self._fail(pull, Reason.ABORTED, "")

    def reset(self, namespace: Namespace) -> list[Action]:
        """This side's rows belong to another namespace from here on: every pull ends."""
        self.identity = replace(self.identity, namespace=namespace)
        return self._fail_all(Reason.RESET, "")

    def close(self) -> list[Action]:
        """End every pull and say goodbye."""
        peers = dict.fromkeys(pull.peer for pull in self._pulls.values())
        bye = wire.Bye(self.identity.boot_id)
        return self._fail_all(Reason.ABORTED, "closed") + [Send(peer, bye) for peer in peers]

    # ---------------------------------------------------------------- the link's side

    def receive(self, peer: Peer, message: wire.ToPulls, bulk: Sequence[memoryview], now_s: float) -> list[Action]:
        """The actions for a message; its records are installed when this returns. :class:`RemoteProtocolError`, and no
        change, for bulk that does not fit the message.
        """
        payloads = payloads_of(message, bulk, self.identity.parts) if isinstance(message, wire.Records) else ()
        pull = self._pulls.get(message.transfer)
        if pull is None or message.boot_id != self.identity.boot_id:
            self.counters.stale_messages += 1
            return []
        if pull.peer != peer:
            self.counters.foreign_messages += 1
            return []
        pull.pause_s = 0.0
        match message:
            case wire.Gone():
                return self._fail(pull, Reason.GONE, message.outcome.value)
            case wire.Refuse():
                return self._on_refuse(pull, message)
            case wire.Records():
                self._hear_lease(pull, message.lease_ms)
                if pull.take(message, payloads, self.identity.parts, self.counters):
                    return self._settled(pull, now_s)
            case _ if message.epoch != pull.epoch or pull.acking:
                self.counters.stale_messages += 1
            case wire.Absent():
                if pull.give_up(message, self.counters):
                    return self._settled(pull, now_s)
            case wire.Later():
                self._hear_lease(pull, message.lease_ms)
                self.counters.told_later += 1
                pull.retries = 0
        return []

    def tick(self, now_s: float) -> list[Action]:
        """Ask again, renew leases and give up, as far as due."""
        actions: list[Action] = []
        if now_s < self._next_check_s:
            return actions
        for pull in list(self._pulls.values()):
            if pull.due_s <= now_s:
                actions += self._retry(pull, now_s)
            elif pull.next_check_s <= now_s:
                actions.append(self._next(pull, now_s))
        self._next_check_s = min((pull.next_check_s for pull in self._pulls.values()), default=math.inf)
        return actions

    def next_due_s(self) -> float:
        """When :meth:`tick` has something to do, at the earliest."""
        return self._next_check_s

    def unsent(self, send: Send, now_s: float) -> None:
        """The link refused ``send``; report this before any other event. It is tried again when the peer is found, or
        after a growing pause.
        """
        self.counters.sends_refused += 1
        message = send.message
        if isinstance(message, (wire.Pull, wire.Ack)):
            pull = self._pulls.get(message.transfer)
            if pull is not None:
                pull.refused(now_s, self.limits.resend_s, self.limits.retry_s)
                self._next_check_s = min(self._next_check_s, pull.resend_s)

    def peer_found(self, peer: Peer, now_s: float) -> list[Action]:
        """The link can reach ``peer``: send now what it has refused, or lost."""
        unsent = [pull for pull in self._pulls.values() if pull.peer == peer and not pull.sent]
        return [self._next(pull, now_s) for pull in unsent]

    def peer_lost(self, peer: Peer) -> None:
        """The link lost ``peer``: ask for missing records again when it is found, or when that is due."""
        for pull in self._pulls.values():
            if pull.peer == peer:
                pull.sent = False

    def _on_refuse(self, pull: Pulling, refuse: wire.Refuse) -> list[Action]:
        self.counters.refusals += 1
        try:
            check_peer(self.identity, refuse.namespace, refuse.parts)
        except IncompatiblePeerError as error:
            return self._fail(pull, Reason.REFUSED, str(error))
        return self._fail(pull, Reason.REFUSED, "peer's identity is equal, but it got another digest")

    def _hear_lease(self, pull: Pulling, lease_ms: int) -> None:
        pull.renew_s = _renew_s(lease_ms / 1000)
        self._next_check_s = min(self._next_check_s, pull.next_check_s)

    def _settled(self, pull: Pulling, now_s: float) -> list[Action]:
        """Records were settled: after the last one comes the ack."""
        pull.retries = 0
        pull.due_s = now_s + self.limits.retry_s
        return [] if pull.outstanding else self._settle(pull, now_s)

    def _settle(self, pull: Pulling, now_s: float) -> list[Action]:
        """Everything is settled: tell the engine now, and tell prefill until it confirms."""
        pull.settle()
        self._acking += 1
        return [self._finished(pull), self._next(pull, now_s)]

    def _retry(self, pull: Pulling, now_s: float) -> list[Action]:
        if now_s >= pull.give_up_s:
            return self._fail(pull, Reason.TIMEOUT, f"lease_max_s = {self.limits.lease_max_s}")
        if pull.retries >= self.limits.retries_max:
            return self._fail(pull, Reason.TIMEOUT, f"{pull.retries} retries")
        self.counters.retries += 1
        pull.retries += 1
        pull.due_s = now_s + self.limits.retry_s
        pull.sent = False
        return [self._next(pull, now_s)]

    def _next(self, pull: Pulling, now_s: float) -> Send:
        return Send(pull.peer, pull.next_message(self.identity, now_s))

    def _fail_all(self, reason: Reason, detail: str) -> list[Action]:
        actions: list[Action] = []
        for pull in list(self._pulls.values()):
            actions += self._fail(pull, reason, detail)
        return actions

    def _fail(self, pull: Pulling, reason: Reason, detail: str) -> list[Action]:
        """The pull ends early; prefill is told unless it knows. If all was settled, the pull is just done."""
        self._close(pull)
        if pull.acking:
            return []
        pull.missing += [Missing(part, index, reason) for part, index in pull.outstanding]
        actions: list[Action] = []
        if reason not in (Reason.GONE, Reason.REFUSED):
            actions.append(Send(pull.peer, wire.Abort(self.identity.boot_id, pull.id, reason.value)))
        return [*actions, self._finished(pull, reason, detail)]

    def _finished(self, pull: Pulling, reason: Reason | None = None, detail: str = "") -> Finished:
        if reason is None:
            self.counters.done += 1
        else:
            self.counters.failed += 1
        return Finished(pull.id, pull.installed, tuple(pull.missing), reason, detail)

    def _close(self, pull: Pulling) -> None:
        """No more messages are sent for this pull."""
        self._acking -= pull.acking
        del self._pulls[pull.id]
        self._ended[pull.id] = None
        while len(self._ended) > self.limits.remembered_max:
            self._ended.popitem(last=False)


def _renew_s(lease_s: float) -> float:
    """How long a side may be silent that keeps a lease of ``lease_s``."""
    return max(lease_s / RENEWALS_A_LEASE, RENEW_S_MIN)

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
from dataclasses import dataclass, field, replace
from typing import Final

import transfer.messages as wire
from cache_manager.keys import Namespace
from transfer.actions import Action, BlockSink, Finished, Missing, Reason, Send, WantedBlock
from transfer.counters import Counters
from transfer.errors import IncompatiblePeerError, LocalProtocolError, NodeFullError
from transfer.identity import Identity, check_peer
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.pull import Event, Pulling, State, payloads_of, places_of

RENEWALS_A_LEASE: Final = 3
RENEW_S_MIN: Final = 0.02
"""Shortest renewal interval, whatever lease the other side claims."""


@dataclass(slots=True, eq=False)
class _Peer:
    """This side's state with a peer."""

    boot_id: bytes | None = None  # the prefill run that sent a welcome; None: none yet, or lost
    renew_s: float = math.inf
    hello_s: float = -math.inf  # when the last hello was sent
    pulls: dict[wire.TransferId, Pulling] = field(default_factory=dict)
    again_s: float = math.inf  # when refused messages are tried again
    pause_s: float = 0.0  # the pause before that; twice as long each time


class Pulls:
    """A node calls :meth:`receive` for what arrives and :meth:`tick` when :meth:`next_due_s` has come (often is fine),
    and does the actions that they return, in order. Whatever a peer sends, :meth:`receive` raises at most
    :class:`RemoteProtocolError`. :class:`LocalProtocolError` is for mistakes of this side.
    """

    def __init__(self, identity: Identity, limits: TransferLimits, counters: Counters) -> None:
        self.identity = identity
        self.limits = limits
        self.counters = counters
        self._pulls: dict[wire.TransferId, Pulling] = {}
        self._acking = 0  # how many of these the engine knows to be finished
        self._peers: dict[Peer, _Peer] = {}  # of pulls in flight, and a few more
        self._ended: OrderedDict[wire.TransferId, None] = OrderedDict()
        self._look_s = math.inf  # nothing is due before this time

    # ---------------------------------------------------------------- the engine's side

    @property
    def in_flight(self) -> int:
        """Pulls that have not finished."""
        return len(self._pulls) - self._acking

    def pull(
        self, peer: Peer, transfer: wire.TransferId, wanted: Sequence[WantedBlock], sink: BlockSink, now_s: float
    ) -> list[Action]:
        """Begin to pull ``wanted`` blocks from ``peer``. No blocks are fine: prefill may then release the offer.

        Raises :class:`LocalProtocolError` for an id that was pulled before, an index given twice or an invalid part,
        and :class:`NodeFullError`.
        """
        if len(transfer) != 16 or transfer in self._pulls or transfer in self._ended:
            raise LocalProtocolError(f"transfer: wanted 16 bytes not pulled before, got {transfer.hex()}")
        keys, limits = places_of(wanted, len(self.identity.parts)), self.limits
        if self.in_flight >= limits.transfers_max:
            raise NodeFullError("transfers_max", limits.transfers_max, "one more pull")
        known = self._known(peer)
        while self._acking >= limits.transfers_max:
            self._close(next(p for p in self._pulls.values() if p.state is State.ACKING), Event.GIVE_UP)
        pull = Pulling(transfer, peer, sink, keys, now_s + limits.retry_s, now_s, now_s + limits.lease_max_s)
        self._pulls[transfer] = known.pulls[transfer] = pull
        self.counters.pulls += 1
        self._look_s = min(self._look_s, pull.due_s, now_s + known.renew_s)
        return self._send_next(pull, now_s) if keys else self._settle(pull, now_s)

    def abort(self, transfer: wire.TransferId) -> list[Action]:
        """Give a pull up; harmless when it has finished."""
        pull = self._pulls.get(transfer)
        return self._fail(pull, Reason.ABORTED, "") if pull and pull.state is State.PULLING else []

    def reset(self, namespace: Namespace) -> list[Action]:
        """This side's rows belong to another namespace from here on: every pull ends, every peer is greeted anew."""
        self.identity = replace(self.identity, namespace=namespace)
        actions = self._fail_all(list(self._pulls.values()), Reason.RESET, "")
        self._peers.clear()
        return actions

    def close(self) -> list[Action]:
        """End every pull and say goodbye."""
        actions = self._fail_all(list(self._pulls.values()), Reason.ABORTED, "closed")
        bye = wire.Bye(self.identity.boot_id)
        return actions + [Send(peer, bye) for peer, known in self._peers.items() if known.boot_id]

    # ---------------------------------------------------------------- the link's side

    def receive(
        self, peer: Peer, message: wire.ToPulls | wire.Bye, bulk: Sequence[memoryview], now_s: float
    ) -> list[Action]:
        """The actions for a message; its records are installed when this returns. :class:`RemoteProtocolError`, and no
        change, for bulk that does not fit the message.
        """
        match message:
            case wire.Bye() | wire.Welcome() | wire.Refuse():
                known = self._peers.get(peer)
                if known is not None and isinstance(message, wire.Bye) and known.boot_id == message.boot_id:
                    self.peer_lost(peer)
                    return self._fail_all(list(known.pulls.values()), Reason.GONE, "bye")
                if known is None or isinstance(message, wire.Bye) or message.to != self.identity.boot_id:
                    self.counters.stale_messages += 1
                    return []
                if isinstance(message, wire.Welcome):
                    return self._on_welcome(known, message, now_s)
                return self._on_refuse(peer, known, message, now_s)
            case _:
                payloads = payloads_of(message, bulk, self.identity.parts) if isinstance(message, wire.Records) else ()
                pull = self._pulls.get(wire.TransferId(message.transfer))
                if pull is None:
                    self.counters.stale_messages += 1
                    return []
                if pull.peer != peer:
                    self.counters.foreign_messages += 1
                    return []
                return self._on_pull_message(pull, message, payloads, now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Ask again, renew leases and give up, as far as due."""
        actions: list[Action] = []
        if now_s < self._look_s:
            return actions
        for peer, known in self._peers.items():
            if known.again_s <= now_s:
                actions += self.peer_found(peer, now_s)
        for pull in list(self._pulls.values()):
            if pull.due_s <= now_s:
                actions += self._retry(pull, now_s)
            elif now_s >= pull.spoken_s + self._peers[pull.peer].renew_s:
                actions += self._send_next(pull, now_s)
        waits = [min(p.due_s, p.spoken_s + self._peers[p.peer].renew_s) for p in self._pulls.values()]
        self._look_s = min([*waits, *(known.again_s for known in self._peers.values())], default=math.inf)
        return actions

    def next_due_s(self) -> float:
        """When :meth:`tick` has something to do, at the earliest."""
        return self._look_s

    def unsent(self, send: Send, now_s: float) -> None:
        """The link refused ``send``; report this before any other event. It is tried again when the peer is found, or
        after a growing pause.
        """
        self.counters.sends_refused += 1
        message, known = send.message, self._peers.get(send.peer)
        if known is None:
            return
        if isinstance(message, wire.Hello):
            known.hello_s = -math.inf
            for each in known.pulls.values():
                each.asked = False
        elif isinstance(message, (wire.Pull, wire.Ack)) and (
            pull := known.pulls.get(wire.TransferId(message.transfer))
        ):
            pull.asked = False
        if known.pulls:
            known.pause_s = min(2 * known.pause_s or self.limits.resend_s, self.limits.retry_s)
            known.again_s = now_s + known.pause_s
            self._look_s = min(self._look_s, known.again_s)

    def peer_found(self, peer: Peer, now_s: float) -> list[Action]:
        """The link can reach ``peer``: send the refused messages now."""
        known = self._peers.get(peer)
        if known is None or known.again_s == math.inf:
            return []
        known.again_s = math.inf
        return [a for p in list(known.pulls.values()) if not p.asked for a in self._send_next(p, now_s)]

    def peer_lost(self, peer: Peer) -> None:
        """The link lost ``peer``: greet it again, and ask for missing records again, when that is due."""
        if known := self._peers.get(peer):
            known.boot_id, known.renew_s, known.hello_s = None, math.inf, -math.inf

    def _on_welcome(self, known: _Peer, welcome: wire.Welcome, now_s: float) -> list[Action]:
        if known.boot_id == welcome.boot_id:
            return []
        try:
            check_peer(self.identity, welcome.namespace, welcome.parts)
        except IncompatiblePeerError as error:
            return self._refused(known, str(error))
        known.boot_id, known.pause_s = welcome.boot_id, 0.0
        known.renew_s = max(welcome.lease_ms / 1000 / RENEWALS_A_LEASE, RENEW_S_MIN)
        self._look_s = min(self._look_s, now_s + known.renew_s)
        actions: list[Action] = []
        for pull in list(known.pulls.values()):
            pull.asked = False
            actions += self._send_next(pull, now_s)
        return actions

    def _on_refuse(self, peer: Peer, known: _Peer, refuse: wire.Refuse, now_s: float) -> list[Action]:
        if refuse.field != "hello":
            return self._refused(known, f"{refuse.field}: wanted {refuse.wanted}, got {refuse.got}")
        if known.boot_id is None:
            return []  # a hello is on its way
        self.peer_lost(peer)
        return self._greet(peer, known, now_s) if known.pulls else []

    def _refused(self, known: _Peer, detail: str) -> list[Action]:
        self.counters.refusals += 1
        known.boot_id, known.renew_s, known.hello_s = None, math.inf, -math.inf  # no hello is on its way
        return self._fail_all(list(known.pulls.values()), Reason.REFUSED, detail)

    def _on_pull_message(
        self,
        pull: Pulling,
        message: wire.Records | wire.Absent | wire.Gone | wire.Later,
        payloads: Sequence[memoryview],
        now_s: float,
    ) -> list[Action]:
        match message:
            case wire.Gone():
                return self._fail(pull, Reason.GONE, message.outcome.value)
            case wire.Records():
                if pull.take(message, payloads, self.identity.parts, self.counters):
                    return self._settled(pull, now_s)
            case _ if message.epoch != pull.epoch or pull.state is State.ACKING:
                self.counters.stale_messages += 1
            case wire.Absent():
                if pull.give_up(message, self.counters):
                    return self._settled(pull, now_s)
            case wire.Later():
                self.counters.told_later += 1
                pull.retries = 0
        return []

    def _settled(self, pull: Pulling, now_s: float) -> list[Action]:
        """Records were settled: after the last one comes the ack."""
        pull.retries = 0
        pull.due_s = now_s + self.limits.retry_s
        return [] if pull.outstanding else self._settle(pull, now_s)

    def _settle(self, pull: Pulling, now_s: float) -> list[Action]:
        """Everything is settled: tell the engine now, and tell prefill until it confirms."""
        pull.apply(Event.ALL_SETTLED)
        pull.asked = False
        self._acking += 1
        return [self._finished(pull), *self._send_next(pull, now_s)]

    def _retry(self, pull: Pulling, now_s: float) -> list[Action]:
        if pull.retries >= self.limits.retries_max or now_s >= pull.give_up_s:
            why = f"{pull.retries} retries" if now_s < pull.give_up_s else f"lease_max_s = {self.limits.lease_max_s}"
            return self._fail(pull, Reason.TIMEOUT, why)
        self.counters.retries += 1
        pull.retries += 1
        pull.due_s = now_s + self.limits.retry_s
        pull.asked = False
        return self._send_next(pull, now_s)

    def _send_next(self, pull: Pulling, now_s: float) -> list[Action]:
        """The message that the pull's state needs: a hello first, a renewal if all was sent."""
        known = self._peers[pull.peer]
        if known.boot_id is None:
            return self._greet(pull.peer, known, now_s)
        return [Send(pull.peer, pull.next_message(self.identity.boot_id, now_s))]

    def _greet(self, peer: Peer, known: _Peer, now_s: float) -> list[Action]:
        if now_s < known.hello_s + self.limits.retry_s:
            return []  # one is on its way
        known.hello_s = now_s
        return [Send(peer, self.identity.hello())]

    def _known(self, peer: Peer) -> _Peer:
        """The state with ``peer``; of too many peers, one without pulls is forgotten."""
        if peer not in self._peers:
            if len(self._peers) >= self.limits.peers_max:
                idle = next((p for p, known in self._peers.items() if not known.pulls), None)
                if idle is None:
                    raise NodeFullError("peers_max", self.limits.peers_max, "one more peer")
                del self._peers[idle]
                self.counters.forgotten_peers += 1
            self._peers[peer] = _Peer()
        return self._peers[peer]

    def _fail_all(self, pulls: Sequence[Pulling], reason: Reason, detail: str) -> list[Action]:
        return [action for pull in pulls for action in self._fail(pull, reason, detail)]

    def _fail(self, pull: Pulling, reason: Reason, detail: str) -> list[Action]:
        """The pull ends early; prefill is told unless it knows. If all was settled, the pull is just done."""
        if pull.state is State.ACKING:
            self._close(pull, Event.GIVE_UP)
            return []
        pull.missing += [Missing(part, index, reason) for part, index in pull.outstanding]
        told: list[Action] = []
        if self._peers[pull.peer].boot_id is not None and reason is not Reason.GONE:
            told.append(Send(pull.peer, wire.Abort(self.identity.boot_id, pull.id, reason.value)))
        self._close(pull, Event.FAIL)
        return [*told, self._finished(pull, reason, detail)]

    def _finished(self, pull: Pulling, reason: Reason | None = None, detail: str = "") -> Finished:
        if reason is None:
            self.counters.done += 1
        else:
            self.counters.failed += 1
        return Finished(pull.id, pull.installed, tuple(pull.missing), reason, detail)

    def _close(self, pull: Pulling, event: Event) -> None:
        """No more messages are sent for this pull."""
        self._acking -= pull.state is State.ACKING
        pull.apply(event)
        del self._pulls[pull.id], self._peers[pull.peer].pulls[pull.id]
        self._ended[pull.id] = None
        while len(self._ended) > self.limits.remembered_max:
            self._ended.popitem(last=False)

"""All pulls of one process: asks for records, checks them, has them installed once, says so.

A record is handed out for installation at most once, after its header, key, size and sum were found right. One pull is
in ``pull.py``.

An *epoch* is one attempt: when nothing has come for ``retry_s``, or the other side has lost sight of this one, decode
asks anew for what is still missing. A record of an older epoch is as good as any, but moves no credit.

Sans-IO: no clock, thread, socket or randomness. Times are monotonic seconds of the caller's clock, ids come in.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import transfer.messages as wire
from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from transfer.actions import Action, Finished, Install, Missing, PullResult, Reason, Send, WantedBlock
from transfer.counters import PullCounters
from transfer.errors import IncompatiblePeerError, LocalProtocolError
from transfer.identity import Identity, check_peer
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.pull import Event, Greeting, Pulling, State, payloads_of, places_of

RENEWALS_A_LEASE: Final = 3
RENEW_S_MIN: Final = 0.02
"""However short a lease the other side claims to have."""


class Pulls:
    """A node calls :meth:`receive` for what arrives and :meth:`tick` when :meth:`next_due_s` has come (often is fine),
    and acts on what they answer, in order. Whatever a peer sends, no method raises because of it.
    :class:`LocalProtocolError` is for mistakes of this side.
    """

    def __init__(self, identity: Identity, limits: TransferLimits) -> None:
        if limits.credit_nbytes < 2 * identity.nbytes_max:  # so that what is left of it when none is due holds a record
            raise ConfigError("credit_nbytes", f"at least 2 records of {identity.nbytes_max}", limits.credit_nbytes)
        if limits.frame_nbytes_max < identity.nbytes_max:
            raise ConfigError("frame_nbytes_max", f"at least {identity.nbytes_max}, a record", limits.frame_nbytes_max)
        self.identity = identity
        self.limits = limits
        self.counters = PullCounters()  # its own: who keeps it copies it
        self._pulls: dict[wire.TransferId, Pulling] = {}
        self._acking = 0  # of these, those that have finished for the engine
        self._peers: dict[Peer, Greeting] = {}  # of pulls in flight, and a few more
        self._ended: OrderedDict[wire.TransferId, None] = OrderedDict()
        self._due: list[tuple[float, wire.TransferId]] = []  # a heap; of a pull's entries only that at wake_s counts
        self._unsaid: dict[Peer, None] = {}  # to whom the link refused a message

    # ---------------------------------------------------------------- the engine's side

    @property
    def in_flight(self) -> int:
        """Pulls that have not finished."""
        return len(self._pulls) - self._acking

    def pull(
        self, peer: Peer, transfer: wire.TransferId, wanted: Sequence[WantedBlock], now_s: float
    ) -> list[Action] | None:
        """Begin to pull what is ``wanted`` from ``peer``; ``None``: no room, nothing changed. Nothing wanted is fine:
        prefill then learns that it may let go.

        Raises :class:`LocalProtocolError` for an id that was pulled before, an index given twice or a part that is not.
        """
        if len(transfer) != 16 or transfer in self._pulls or transfer in self._ended:
            raise LocalProtocolError(f"transfer: wanted 16 bytes not pulled before, got {transfer.hex()}")
        keys = places_of(wanted, len(self.identity.parts))
        if self.in_flight >= self.limits.transfers_max or not self._make_room(peer):
            return None
        while self._acking >= self.limits.transfers_max:
            self._close(next(p for p in self._pulls.values() if p.state is State.ACKING), Event.GIVE_UP)
        pull = Pulling(transfer, peer, keys, now_s + self.limits.retry_s, now_s, now_s + self.limits.lease_max_s)
        self._pulls[transfer] = pull
        self._peers[peer].pulls[transfer] = None
        self.counters.pulls += 1
        self._schedule(pull)
        return self._settle(pull, now_s) if not keys else self._send_next(pull, now_s)

    def abort(self, transfer: wire.TransferId) -> list[Action]:
        """Give a pull up; harmless when it has finished."""
        pull = self._pulls.get(transfer)
        return self._fail(pull, Reason.ABORTED, "") if pull and pull.state is State.PULLING else []

    def reset(self, namespace: Namespace) -> list[Action]:
        """This side's rows belong to another namespace from here on: every pull ends, every peer is greeted anew."""
        self.identity = replace(self.identity, namespace=namespace)
        actions = [a for p in list(self._pulls.values()) for a in self._fail(p, Reason.RESET, "")]
        self._peers.clear()
        self._unsaid.clear()
        return actions

    def close(self) -> list[Action]:
        """End every pull and say goodbye."""
        actions = [a for p in list(self._pulls.values()) for a in self._fail(p, Reason.ABORTED, "closed")]
        bye = wire.Bye(self.identity.boot_id)
        return actions + [Send(peer, bye) for peer, known in self._peers.items() if known.boot_id]

    def installed(self, outcomes: Iterable[tuple[Install, bool]], now_s: float) -> list[Action]:
        """Each record is in place, or (``False``) its block has another owner now and it was dropped."""
        settled: dict[wire.TransferId, Pulling] = {}
        for install, ok in outcomes:
            pull = self._pulls.get(install.transfer)
            if pull is None or pull.installing.pop((install.part, install.index), None) is None:
                continue
            settled[pull.id] = pull
            if ok:
                self.counters.records_installed += 1
                pull.installed += 1
            else:
                self.counters.records_stale += 1
                pull.missing.append(Missing(install.part, install.index, Reason.STALE))
        return [action for pull in settled.values() for action in self._settled(pull, now_s)]

    def postponed(self, install: Install) -> None:
        """The record could not be placed now (its block is in motion): it is asked for again with the next epoch."""
        pull, place = self._pulls.get(install.transfer), (install.part, install.index)
        if pull is not None and (key := pull.installing.pop(place, None)) is not None:
            pull.outstanding[place] = key
            self.counters.postponed_records += 1

    # ---------------------------------------------------------------- the link's side

    def receive(
        self, peer: Peer, message: wire.ToPulls | wire.Bye, bulk: Sequence[memoryview], now_s: float
    ) -> list[Action]:
        """What to do about a message. ``bulk`` is kept by nothing but the :class:`Install` actions answered.

        :class:`RemoteProtocolError`, and nothing was changed, for bulk that is not that of the message.
        """
        match message:
            case wire.Bye():
                return self._on_bye(peer, message)
            case wire.Welcome() | wire.Refuse():
                known = self._peers.get(peer)
                if known is None or message.to != self.identity.boot_id:
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
        """Ask again, renew leases, give up: whatever is due."""
        actions: list[Action] = []
        for peer in [peer for peer in self._unsaid if self._peers[peer].again_s <= now_s]:
            actions += self._say_again(peer, now_s)
        due: list[Pulling] = []
        while self._due and self._due[0][0] <= now_s:
            wake_s, transfer = heapq.heappop(self._due)
            if (late := self._pulls.get(transfer)) and late.wake_s == wake_s:
                late.wake_s = math.inf  # there may be another entry of this time
                due.append(late)
        for late in due:
            if late.due_s <= now_s:
                actions += self._retry(late, now_s)
            elif self._silent(late, now_s):
                actions += self._send_next(late, now_s)
            self._schedule(late)
        return actions

    def next_due_s(self) -> float | None:
        """When :meth:`tick` has something to do, at the earliest."""
        due = [self._peers[peer].again_s for peer in self._unsaid]
        return min([*due, *(due_s for due_s, _ in self._due[:1])], default=None)

    def unsent(self, send: Send, now_s: float) -> None:
        """The link refused ``send``, which is said before anything else; it is tried again when the peer is found, or
        after a pause that grows.
        """
        self.counters.sends_refused += 1
        message, known = send.message, self._peers.get(send.peer)
        if known is None:
            return
        if isinstance(message, wire.Hello):
            known.hello_s = None
            known.unsaid.update(known.pulls)
        elif isinstance(message, (wire.Pull, wire.Ack, wire.Credit)) and (
            pull := self._pulls.get(wire.TransferId(message.transfer))
        ):
            pull.asked = pull.asked and isinstance(message, wire.Credit)
            known.unsaid[pull.id] = None
        if known.unsaid:
            known.refused(now_s, self.limits)
            self._unsaid[send.peer] = None

    def peer_found(self, peer: Peer, now_s: float) -> list[Action]:
        """The link can reach ``peer``: what it refused is said now."""
        return self._say_again(peer, now_s)

    def peer_lost(self, peer: Peer) -> None:
        """The link lost ``peer``: it is greeted again, and what is missing asked for again, when that is due."""
        if known := self._peers.get(peer):
            known.boot_id = None

    def _on_welcome(self, known: Greeting, welcome: wire.Welcome, now_s: float) -> list[Action]:
        if known.boot_id == welcome.boot_id:
            return []
        try:
            check_peer(self.identity, welcome.namespace, welcome.parts)
        except IncompatiblePeerError as error:
            return self._refused(known, str(error))
        known.boot_id, known.pause_s = welcome.boot_id, 0.0
        known.renew_s = max(welcome.lease_ms / 1000 / RENEWALS_A_LEASE, RENEW_S_MIN)
        actions: list[Action] = []
        for transfer in list(known.pulls):
            self._pulls[transfer].asked = False
            actions += self._send_next(self._pulls[transfer], now_s)
            self._schedule(self._pulls[transfer])
        return actions

    def _on_refuse(self, peer: Peer, known: Greeting, refuse: wire.Refuse, now_s: float) -> list[Action]:
        if refuse.field != "hello":
            return self._refused(known, f"{refuse.field}: wanted {refuse.wanted}, got {refuse.got}")
        if known.boot_id is None:
            return []  # a hello is on its way
        known.boot_id = known.hello_s = None
        return self._greet(peer, known, now_s) if known.pulls else []

    def _refused(self, known: Greeting, detail: str) -> list[Action]:
        self.counters.refusals += 1
        known.boot_id = None
        pulls = [self._pulls[transfer] for transfer in known.pulls]
        return [a for p in pulls for a in self._fail(p, Reason.REFUSED, detail)]

    def _on_bye(self, peer: Peer, bye: wire.Bye) -> list[Action]:
        known = self._peers.get(peer)
        if known is None or known.boot_id != bye.boot_id:
            self.counters.stale_messages += 1
            return []
        known.boot_id = None
        pulls = [self._pulls[transfer] for transfer in known.pulls]
        return [a for p in pulls for a in self._fail(p, Reason.GONE, "bye")]

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
            case wire.Later():
                if message.epoch != pull.epoch or pull.state is State.ACKING:
                    self.counters.stale_messages += 1
                    return []
                self.counters.told_later += 1
                pull.retries = 0
                return []
            case wire.Absent():
                if message.epoch != pull.epoch:
                    self.counters.stale_messages += 1
                    return []
                settled = pull.give_up(message)
                self.counters.records_absent += settled
                return self._settled(pull, now_s) if settled else []
            case wire.Records():
                return self._on_records(pull, message, payloads, now_s)

    def _on_records(
        self, pull: Pulling, records: wire.Records, payloads: Sequence[memoryview], now_s: float
    ) -> list[Action]:
        actions: list[Action] = [*pull.take(records, payloads, self.identity.parts, self.counters)]
        if records.epoch != pull.epoch:
            self.counters.stale_messages += 1
        elif credit := pull.credit(self.identity.boot_id, self.limits.credit_nbytes, now_s):
            actions.append(Send(pull.peer, credit))
        return actions

    def _settled(self, pull: Pulling, now_s: float) -> list[Action]:
        """Something was settled: the last of it makes the ack."""
        pull.apply(Event.ARRIVED)
        pull.retries = 0
        pull.due_s = now_s + self.limits.retry_s
        return [] if pull.unsettled else self._settle(pull, now_s)

    def _settle(self, pull: Pulling, now_s: float) -> list[Action]:
        """Everything is settled: the engine is told now, prefill until it says that it heard."""
        pull.apply(Event.ALL_SETTLED)
        pull.asked = False
        self._acking += 1
        return [self._finished(pull), *self._send_next(pull, now_s)]

    def _retry(self, pull: Pulling, now_s: float) -> list[Action]:
        if pull.retries >= self.limits.retries_max or now_s >= pull.give_up_s:
            why = f"{pull.retries} retries" if now_s < pull.give_up_s else f"lease_max_s = {self.limits.lease_max_s}"
            return self._fail(pull, Reason.TIMEOUT, why)
        pull.apply(Event.RETRY)
        self.counters.retries += 1
        pull.retries += 1
        pull.due_s = now_s + self.limits.retry_s
        pull.asked = False
        return self._send_next(pull, now_s)

    def _send_next(self, pull: Pulling, now_s: float) -> list[Action]:
        """The message that the pull's state asks for: a hello before all, a renewal where all was said."""
        known = self._peers[pull.peer]
        if known.boot_id is None:
            return self._greet(pull.peer, known, now_s)
        message = pull.next_message(self.identity.boot_id, self.limits.credit_nbytes, now_s)
        self.counters.attempts += isinstance(message, wire.Pull)
        return [Send(pull.peer, message)]

    def _greet(self, peer: Peer, known: Greeting, now_s: float) -> list[Action]:
        if not known.says_hello(now_s, self.limits.retry_s):
            return []  # one is on its way
        own = self.identity
        hello = wire.Hello(own.boot_id, own.space, list(own.parts), wire.MINOR, self.limits.frame_nbytes_max)
        return [Send(peer, hello)]

    def _silent(self, pull: Pulling, now_s: float) -> bool:
        known = self._peers[pull.peer]
        return known.boot_id is not None and now_s >= pull.spoken_s + known.renew_s

    def _say_again(self, peer: Peer, now_s: float) -> list[Action]:
        """What the link refused for ``peer``."""
        if peer not in self._unsaid:
            return []
        del self._unsaid[peer]
        known = self._peers[peer]
        unsaid, known.unsaid = known.unsaid, {}
        return [a for t in unsaid if (pull := self._pulls.get(t)) for a in self._send_next(pull, now_s)]

    def _schedule(self, pull: Pulling) -> None:
        """Wake for the pull when it has something to do: earlier than planned, if needed."""
        known = self._peers[pull.peer]
        wake_s = pull.due_s if known.boot_id is None else min(pull.due_s, pull.spoken_s + known.renew_s)
        if pull.id in self._pulls and wake_s < pull.wake_s:
            pull.wake_s = wake_s
            heapq.heappush(self._due, (wake_s, pull.id))

    def _make_room(self, peer: Peer) -> bool:
        """Whether ``peer`` can be remembered; forgets one that nothing is pulled from."""
        if peer in self._peers:
            return True
        if len(self._peers) >= self.limits.peers_max:
            idle = next((p for p, known in self._peers.items() if not known.pulls), None)
            if idle is None:
                return False
            del self._peers[idle]
            self._unsaid.pop(idle, None)
            self.counters.forgotten_peers += 1
        self._peers[peer] = Greeting()
        return True

    def _fail(self, pull: Pulling, reason: Reason, detail: str) -> list[Action]:
        """The pull is over before its end; prefill is told unless it knows. Where all was in place, it is done."""
        if pull.state is State.ACKING:
            self._close(pull, Event.GIVE_UP)
            return []
        places = [*pull.outstanding, *pull.installing]
        pull.missing += [Missing(part, index, reason) for part, index in places]
        known = self._peers[pull.peer]
        told: list[Action] = []
        if known.boot_id is not None and reason is not Reason.GONE:
            told.append(Send(pull.peer, wire.Abort(self.identity.boot_id, pull.id, reason.value)))
        self._close(pull, Event.FAIL)
        return [*told, self._finished(pull, reason, detail)]

    def _finished(self, pull: Pulling, reason: Reason | None = None, detail: str = "") -> Finished:
        if reason is None:
            self.counters.done += 1
        else:
            self.counters.failed += 1
        return Finished(pull.id, PullResult(pull.installed, tuple(pull.missing), reason, detail))

    def _close(self, pull: Pulling, event: Event) -> None:
        """Nothing more is said about this pull."""
        self._acking -= pull.state is State.ACKING
        pull.apply(event)
        del self._pulls[pull.id]
        self._peers[pull.peer].pulls.pop(pull.id)
        self._peers[pull.peer].unsaid.pop(pull.id, None)
        self._ended[pull.id] = None
        while len(self._ended) > self.limits.remembered_max:
            self._ended.popitem(last=False)

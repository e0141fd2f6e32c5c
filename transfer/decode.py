"""The decode side of transfers: asks for records, checks them, has them installed once, says so.

A record is handed out for installation at most once, after its header, key, size and sum were found right. The life of
a pull is in ``pull.py``.

An *epoch* is one attempt: when nothing has come for ``retry_s``, or the other side has lost sight of this one, decode
asks anew for what is still missing. A record of an older epoch is as good as any, but moves no credit.

Sans-IO: no clock, thread, socket or randomness. Times are monotonic seconds of the caller's clock, ids come in.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from cache_manager.errors import ConfigError
from cache_manager.record import Buffer
from transfer.actions import DecodeAction, Finished, Install, Missing, Reason, Send, WantedBlock
from transfer.errors import IncompatiblePeerError, LocalProtocolError, RemoteProtocolError
from transfer.frames import split
from transfer.identity import Identity, check_peer
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.messages import (
    MINOR,
    Abort,
    Absent,
    Ack,
    Bye,
    Gone,
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
from transfer.pull import DecodeCounters, Event, Greeting, Pulling, State, places_of

RENEWALS_A_LEASE: Final = 3
RENEW_S_MIN: Final = 0.02
"""However short a lease the other side claims to have."""


class DecodeSession:
    """All pulls of one decode process.

    A node calls :meth:`receive` for what arrives and :meth:`tick` when :meth:`next_due_s` has come (often is fine), and
    acts on what they answer, in order. Whatever a peer sends, no method raises because of it.
    :class:`LocalProtocolError` is for mistakes of this side.
    """

    def __init__(self, identity: Identity, limits: TransferLimits) -> None:
        if limits.credit_nbytes < 2 * identity.nbytes_max:  # so that what is left of it when none is due holds a record
            raise ConfigError("credit_nbytes", f"at least 2 records of {identity.nbytes_max}", limits.credit_nbytes)
        if limits.frame_nbytes_max < identity.nbytes_max:
            raise ConfigError("frame_nbytes_max", f"at least {identity.nbytes_max}, a record", limits.frame_nbytes_max)
        self.identity = identity
        self.limits = limits
        self.counters = DecodeCounters()  # its own: who keeps it copies it
        self._pulls: dict[TransferId, Pulling] = {}
        self._peers: dict[Peer, Greeting] = {}  # of pulls in flight, and a few more
        self._ended: OrderedDict[TransferId, None] = OrderedDict()
        self._due: list[tuple[float, TransferId]] = []  # a heap; of a pull's entries only that at wake_s counts
        self._unsaid: dict[TransferId, None] = {}  # pulls for which the link refused a message
        self._resend_s = 0.0

    # ---------------------------------------------------------------- the engine's side

    @property
    def in_flight(self) -> int:
        """Pulls that have not finished."""
        return len(self._pulls)

    def pull(
        self, peer: Peer, transfer: TransferId, wanted: Sequence[WantedBlock], now_s: float
    ) -> list[DecodeAction] | None:
        """Begin to pull what is ``wanted`` from ``peer``; ``None``: no room, nothing changed. Nothing wanted is fine:
        prefill then learns that it may let go.

        Raises :class:`LocalProtocolError` for an id that was pulled before, an index given twice or a part that is not.
        """
        if len(transfer) != 16 or transfer in self._pulls or transfer in self._ended:
            raise LocalProtocolError(f"transfer: wanted 16 bytes not pulled before, got {transfer.hex()}")
        keys = places_of(wanted, len(self.identity.parts))
        if len(self._pulls) >= self.limits.transfers_max or not self._make_room(peer):
            return None
        pull = Pulling(transfer, peer, keys, now_s + self.limits.retry_s, now_s)
        self._pulls[transfer] = pull
        self._peers[peer].pulls[transfer] = None
        self.counters.pulls += 1
        self._schedule(pull)
        if not keys:
            pull.apply(Event.ALL_SETTLED)
        return self._send_next(pull, now_s)

    def abort(self, transfer: TransferId) -> list[DecodeAction]:
        """Give a pull up; harmless when it has finished."""
        pull = self._pulls.get(transfer)
        return self._fail(pull, Reason.ABORTED, "") if pull else []

    def reset(self, namespace: bytes) -> list[DecodeAction]:
        """This side's rows belong to another namespace from here on: every pull ends, every peer is greeted anew."""
        self.identity = Identity(self.identity.boot_id, namespace, self.identity.parts)
        actions = [a for p in list(self._pulls.values()) for a in self._fail(p, Reason.RESET, "")]
        self._peers.clear()
        return actions

    def close(self) -> list[DecodeAction]:
        """End every pull and say goodbye."""
        actions = [a for p in list(self._pulls.values()) for a in self._fail(p, Reason.ABORTED, "closed")]
        bye = Bye(self.identity.boot_id)
        return actions + [Send(peer, bye) for peer, known in self._peers.items() if known.boot_id]

    def installed(self, outcomes: Iterable[tuple[Install, bool]], now_s: float) -> list[DecodeAction]:
        """Each record is in place, or (``False``) its block has another owner now and it was dropped."""
        settled: dict[TransferId, Pulling] = {}
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

    def receive(self, peer: Peer, control: Buffer, bulk: Sequence[memoryview], now_s: float) -> list[DecodeAction]:
        """What to do about a message. ``bulk`` is kept by nothing but the :class:`Install` actions answered."""
        try:
            message = decode(control)
            if isinstance(message, Records):
                bulk = self._payloads(message, bulk)
            elif bulk:
                raise RemoteProtocolError(f"{type(message).__name__}: got {len(bulk)} bulk frames")
        except RemoteProtocolError:
            self.counters.bad_messages += 1
            return []
        match message:
            case Records() | Absent() | Gone() | Released():
                pull = self._pulls.get(TransferId(message.transfer))
                if pull is None:
                    self.counters.stale_messages += 1
                    return []
                if pull.peer != peer:
                    self.counters.foreign_messages += 1
                    return []
                return self._on_pull_message(pull, message, bulk, now_s)
            case Welcome() | Refuse():
                known = self._peers.get(peer)
                if known is None or message.to != self.identity.boot_id:
                    self.counters.stale_messages += 1
                    return []
                if isinstance(message, Welcome):
                    return self._on_welcome(known, message, now_s)
                return self._on_refuse(peer, known, message, now_s)
            case Bye():
                return self._on_bye(peer, message)
            case _:
                self.counters.bad_messages += 1
                return []

    def tick(self, now_s: float) -> list[DecodeAction]:
        """Ask again, renew leases, give up: whatever is due."""
        actions: list[DecodeAction] = []
        if self._unsaid and now_s >= self._resend_s:
            again = [pull for transfer in self._unsaid if (pull := self._pulls.get(transfer))]
            self._unsaid.clear()
            for pull in again:
                actions += self._send_next(pull, now_s)
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
        first = [due_s for due_s, _ in self._due[:1]]
        return min([*first, self._resend_s] if self._unsaid else first, default=None)

    def unsent(self, send: Send, now_s: float) -> None:
        """The link refused ``send``, which is said before anything else; it is tried again soon."""
        self.counters.sends_refused += 1
        message = send.message
        if isinstance(message, Hello):
            if known := self._peers.get(send.peer):
                known.hello_s = None
                self._unsaid.update(known.pulls)
        elif isinstance(message, (Pull, Ack, Renew)) and (pull := self._pulls.get(TransferId(message.transfer))):
            pull.asked = pull.asked and isinstance(message, Renew)
            self._unsaid[pull.id] = None
        self._resend_s = now_s + self.limits.resend_s

    def peer_lost(self, peer: Peer) -> None:
        """The link lost ``peer``: it is greeted again, and what is missing asked for again, when that is due."""
        if known := self._peers.get(peer):
            known.boot_id = None

    # ---------------------------------------------------------------- messages

    def _on_welcome(self, known: Greeting, welcome: Welcome, now_s: float) -> list[DecodeAction]:
        if known.boot_id == welcome.boot_id:
            return []
        try:
            check_peer(self.identity, welcome.namespace, welcome.parts)
        except IncompatiblePeerError as error:
            return self._refused(known, str(error))
        known.boot_id = welcome.boot_id
        known.renew_s = max(welcome.lease_ms / 1000 / RENEWALS_A_LEASE, RENEW_S_MIN)
        actions: list[DecodeAction] = []
        for transfer in list(known.pulls):
            self._pulls[transfer].asked = False
            actions += self._send_next(self._pulls[transfer], now_s)
            self._schedule(self._pulls[transfer])
        return actions

    def _on_refuse(self, peer: Peer, known: Greeting, refuse: Refuse, now_s: float) -> list[DecodeAction]:
        if refuse.field != "hello":
            return self._refused(known, f"{refuse.field}: wanted {refuse.wanted}, got {refuse.got}")
        if known.boot_id is None:
            return []  # a hello is on its way
        known.boot_id = known.hello_s = None
        return self._greet(peer, known, now_s) if known.pulls else []

    def _refused(self, known: Greeting, detail: str) -> list[DecodeAction]:
        self.counters.refusals += 1
        known.boot_id = None
        pulls = [self._pulls[transfer] for transfer in known.pulls]
        return [a for p in pulls for a in self._fail(p, Reason.REFUSED, detail)]

    def _on_bye(self, peer: Peer, bye: Bye) -> list[DecodeAction]:
        known = self._peers.get(peer)
        if known is None or known.boot_id != bye.boot_id:
            self.counters.stale_messages += 1
            return []
        known.boot_id = None
        pulls = [self._pulls[transfer] for transfer in known.pulls]
        return [a for p in pulls for a in self._fail(p, Reason.GONE, "bye")]

    def _on_pull_message(
        self, pull: Pulling, message: Records | Absent | Gone | Released, bulk: Sequence[memoryview], now_s: float
    ) -> list[DecodeAction]:
        match message:
            case Gone():
                return self._fail(pull, Reason.GONE, message.reason.value)
            case Released():
                if pull.state is State.ACKING and message.outcome is Outcome.ACKED:
                    return self._finish(pull, Event.HEARD)
                self.counters.stale_messages += 1
                return []
            case Absent():
                if message.epoch != pull.epoch:
                    self.counters.stale_messages += 1
                    return []
                settled = pull.give_up(message)
                self.counters.records_absent += settled
                return self._settled(pull, now_s) if settled else []
            case Records():
                return self._on_records(pull, message, bulk, now_s)

    def _payloads(self, records: Records, bulk: Sequence[memoryview]) -> Sequence[memoryview]:
        parts = self.identity.parts
        try:
            sizes = [parts[entry.part].nbytes for entry in records.entries]
        except IndexError as error:
            raise RemoteProtocolError(f"part: wanted one of {len(parts)}, got a later one") from error
        return split(bulk, sizes)

    def _on_records(
        self, pull: Pulling, records: Records, bulk: Sequence[memoryview], now_s: float
    ) -> list[DecodeAction]:
        actions: list[DecodeAction] = [*pull.take(records, bulk, self.identity.parts, self.counters)]
        if records.epoch != pull.epoch:
            self.counters.stale_messages += 1
        elif credit := pull.credit(self.identity.boot_id, self.limits.credit_nbytes, now_s):
            actions.append(Send(pull.peer, credit))
        return actions

    # ---------------------------------------------------------------- what is due

    def _settled(self, pull: Pulling, now_s: float) -> list[DecodeAction]:
        """Something was settled: the last of it makes the ack."""
        pull.apply(Event.ARRIVED)
        pull.retries = 0
        pull.due_s = now_s + self.limits.retry_s
        if pull.unsettled:
            return []
        pull.apply(Event.ALL_SETTLED)
        pull.asked = False
        return self._send_next(pull, now_s)

    def _retry(self, pull: Pulling, now_s: float) -> list[DecodeAction]:
        if pull.retries >= self.limits.retries_max:
            if pull.state is State.ACKING:
                return self._finish(pull, Event.GIVE_UP)
            return self._fail(pull, Reason.TIMEOUT, f"{pull.retries} retries")
        pull.apply(Event.RETRY)
        self.counters.retries += 1
        pull.retries += 1
        pull.due_s = now_s + self.limits.retry_s
        pull.asked = False
        return self._send_next(pull, now_s)

    def _send_next(self, pull: Pulling, now_s: float) -> list[DecodeAction]:
        """The message that the pull's state asks for: a hello before all, a renewal where all was said."""
        known = self._peers[pull.peer]
        if known.boot_id is None:
            return self._greet(pull.peer, known, now_s)
        message = pull.next_message(self.identity.boot_id, self.limits.credit_nbytes, now_s)
        self.counters.attempts += isinstance(message, Pull)
        return [Send(pull.peer, message)]

    def _greet(self, peer: Peer, known: Greeting, now_s: float) -> list[DecodeAction]:
        if not known.says_hello(now_s, self.limits.retry_s):
            return []  # one is on its way
        own = self.identity
        hello = Hello(own.boot_id, own.namespace, list(own.parts), MINOR, self.limits.frame_nbytes_max)
        return [Send(peer, hello)]

    def _silent(self, pull: Pulling, now_s: float) -> bool:
        known = self._peers[pull.peer]
        return known.boot_id is not None and now_s >= pull.spoken_s + known.renew_s

    def _schedule(self, pull: Pulling) -> None:
        """See to it that the pull is looked at when it has something to do, be that earlier than thought before."""
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
        self._peers[peer] = Greeting()
        return True

    def _fail(self, pull: Pulling, reason: Reason, detail: str) -> list[DecodeAction]:
        """The pull is over before its end; prefill is told unless it knows. Where all was in place, it is done."""
        if pull.state is State.ACKING:
            return self._finish(pull, Event.HEARD if reason is Reason.GONE and detail == "acked" else Event.GIVE_UP)
        places = [*pull.outstanding, *pull.installing]
        pull.missing += [Missing(part, index, reason) for part, index in places]
        known = self._peers[pull.peer]
        told: list[DecodeAction] = []
        if known.boot_id is not None and reason is not Reason.GONE:
            told.append(Send(pull.peer, Abort(self.identity.boot_id, pull.id, reason.value)))
        return told + self._finish(pull, Event.FAIL, reason, detail)

    def _finish(
        self, pull: Pulling, event: Event, reason: Reason | None = None, detail: str = ""
    ) -> list[DecodeAction]:
        pull.apply(event)
        if event is Event.FAIL:
            self.counters.failed += 1
        else:
            self.counters.done += 1
        del self._pulls[pull.id]
        self._peers[pull.peer].pulls.pop(pull.id)
        self._ended[pull.id] = None
        while len(self._ended) > self.limits.remembered_max:
            self._ended.popitem(last=False)
        return [Finished(pull.id, pull.result(event, reason, detail))]

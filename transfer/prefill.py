"""The prefill side of transfers: offers blocks, sends what decode asks for, says when they are free.

A transfer belongs to the run that pulled it first; nobody else gets a byte of it or ends it. What comes after the end
is answered and counted, and changes nothing. The life of a transfer is in ``offer.py``.

Sans-IO: no clock, thread, socket or randomness. Times are monotonic seconds of the caller's clock, ids come in.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from cache_manager.record import Buffer
from transfer.actions import OfferedBlock, PrefillAction, Release, Send
from transfer.errors import IncompatiblePeerError, LocalProtocolError, RemoteProtocolError
from transfer.frames import join
from transfer.identity import Identity, check_peer
from transfer.limits import TransferLimits
from transfer.link import Peer
from transfer.messages import (
    BLOCKS_MAX,
    CONTROL_NBYTES_MAX,
    MINOR,
    Abort,
    Absent,
    Ack,
    Bye,
    Credit,
    Entry,
    Gone,
    GoneReason,
    Hello,
    Outcome,
    Place,
    Pull,
    Records,
    Refuse,
    Released,
    Renew,
    TransferId,
    Welcome,
    decode,
)
from transfer.offer import PULLED, Ended, Event, Offer, PrefillCounters, State

ENTRY_NBYTES_MAX: Final = 64
"""Of an entry in a message beside its header, with a share of what is in the message once."""


class PrefillSession:
    """All transfers of one prefill process.

    A node calls :meth:`receive` for what arrives, :meth:`tick` when :meth:`next_due_s` has come (often is fine), acts
    on what they answer, and then sends what :meth:`next_records` has until there is no more. Whatever a peer sends, no
    method raises because of it. :class:`LocalProtocolError` is for mistakes of this side.
    """

    def __init__(self, identity: Identity, limits: TransferLimits) -> None:
        self.identity = identity
        self.limits = limits
        self._transfers: dict[TransferId, Offer] = {}  # every state but RELEASED
        self._ended: OrderedDict[TransferId, Ended] = OrderedDict()  # those in ENDING among them
        self._peers: OrderedDict[Peer, Hello] = OrderedDict()  # what they said first; the one heard last at the end
        self._owned: dict[Peer, int] = {}  # transfers by owner
        self._ending: dict[TransferId, None] = {}  # those in ENDING
        self._ready: OrderedDict[TransferId, None] = OrderedDict()  # with something to send and credit for it
        self._stalled: list[TransferId] = []  # those whose records the link refused, to be tried again
        self._resend_s = 0.0
        self._unsealed: deque[TransferId] = deque(maxlen=limits.transfers_max)
        self._expiries: list[tuple[float, TransferId]] = []  # a heap; a renewed transfer is pushed again when popped
        self._counts = {f.name: 0 for f in fields(PrefillCounters)}

    # ---------------------------------------------------------------- the engine's side

    @property
    def counters(self) -> PrefillCounters:
        return PrefillCounters(**self._counts)

    @property
    def bad_messages(self) -> int:
        """As in :attr:`counters`."""
        return self._counts["bad_messages"]

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
        self._check_blocks(blocks)
        if len(self._transfers) >= self.limits.transfers_max:
            return False
        lease_s = self.limits.lease_s if lease_s is None else lease_s
        end_s = now_s + self.limits.lease_max_s
        offered = Offer(transfer, {b.index: b for b in blocks}, min(now_s + lease_s, end_s), end_s)
        offered.unsummed = [
            (part, b.index) for b in reversed(blocks) for part, record in enumerate(b.records) if record is not None
        ]
        self._transfers[transfer] = offered
        if len(self._expiries) > 2 * self.limits.transfers_max:  # most are of transfers that ended early
            self._expiries = [entry for entry in self._expiries if entry[1] in self._transfers]
            heapq.heapify(self._expiries)
        heapq.heappush(self._expiries, (offered.expires_s, transfer))
        self._unsealed.append(transfer)  # of too many the oldest are sealed when they are sent
        self._count("offered")
        return True

    def abort(self, transfer: TransferId) -> list[PrefillAction]:
        """Give a transfer up; harmless when it has ended."""
        found = self._live(transfer)
        return self._end(found, Outcome.ABORTED) if found else []

    def reset(self, namespace: bytes) -> list[PrefillAction]:
        """This side's rows belong to another namespace from here on: every transfer ends, every peer must say hello."""
        self.identity = Identity(self.identity.boot_id, namespace, self.identity.parts)
        actions = self._end_all(Outcome.RESET)
        self._peers.clear()
        return actions

    def close(self) -> list[PrefillAction]:
        """End every transfer and say goodbye. Close the link after this, and tell what it lets go of."""
        byes: list[PrefillAction] = [Send(peer, Bye(self.identity.boot_id)) for peer in self._peers]
        return self._end_all(Outcome.ABORTED) + byes

    def _check_blocks(self, blocks: Sequence[OfferedBlock]) -> None:
        parts = self.identity.parts
        if len(blocks) > BLOCKS_MAX or len({b.index for b in blocks}) != len(blocks):
            raise LocalProtocolError(f"blocks: wanted at most {BLOCKS_MAX}, each index once, got {len(blocks)}")
        for block in blocks:
            if not 0 <= block.index < BLOCKS_MAX or len(block.records) != len(parts):
                raise LocalProtocolError(f"block {block.index}: wanted {len(parts)} records, got {len(block.records)}")
            for part, record in zip(parts, block.records, strict=True):
                if record is None:
                    continue
                if record.fingerprint != part.fingerprint or record.nbytes != part.nbytes or record.key != block.key:
                    raise LocalProtocolError(
                        f"block {block.index}: wanted a {part.name} record of its key, got another"
                    )

    # ---------------------------------------------------------------- the link's side

    def receive(self, peer: Peer, control: Buffer, bulk: Sequence[memoryview], now_s: float) -> list[PrefillAction]:
        """What to do about a message; nothing of it is kept."""
        actions = self._expire(now_s)
        try:
            message = decode(control)
            if bulk:
                raise RemoteProtocolError(f"{type(message).__name__}: wanted no bulk, got {len(bulk)} frames")
        except RemoteProtocolError:
            self._count("bad_messages")
            return actions
        match message:
            case Hello():
                actions += self._on_hello(peer, message)
            case Pull() | Credit() | Renew() | Ack() | Abort():
                actions += self._on_transfer_message(peer, message, now_s)
            case Bye():
                actions += self._on_bye(peer, message)
            case _:
                self._count("bad_messages")
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
        expiry_s = self._expiries[0][0] if self._expiries else None
        if not self._stalled:
            return expiry_s
        return self._resend_s if expiry_s is None else min(expiry_s, self._resend_s)

    def next_records(self) -> Send | None:
        """The next records to send, transfers taking turns; ``None``: nothing, or no credit, or the link was full."""
        while self._ready:
            found = self._transfers[next(iter(self._ready))]
            if found.peer is None or self._boot_id_of(found.peer) != found.boot_id:
                del self._ready[found.id]  # lost: it will say hello and pull again
            elif send := self._batch(found, found.peer):
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
        self._count("sends_refused")
        message = send.message
        if not isinstance(message, Records):
            return
        found = self._transfers.get(TransferId(message.transfer))
        assert found is not None, "records of a transfer whose blocks are free"
        assert found.state in PULLED, "the link refuses at once: nothing can have come between"
        assert found.epoch == message.epoch, "the link refuses at once: nothing can have come between"
        found.apply(Event.TAKEN_BACK)
        found.wanted.extendleft((e.part, e.index) for e in reversed(message.entries))
        found.used_nbytes -= sum(self.identity.parts[e.part].nbytes for e in message.entries)
        found.in_link -= 1
        self._ready.pop(found.id, None)
        self._stalled.append(found.id)
        self._resend_s = now_s + self.limits.resend_s

    def let_go(self, send: Send) -> list[PrefillAction]:
        """The link no longer reads the buffers of ``send``."""
        assert isinstance(send.message, Records), "only records have buffers"
        found = self._transfers.get(TransferId(send.message.transfer))
        assert found is not None, "blocks were released under the link"
        assert found.in_link > 0, "let go of more than was sent"
        self._count("records_sent", len(send.message.entries))
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
        self._count("slow_peers", len(slow))
        return slow

    def peer_lost(self, peer: Peer) -> None:
        """The link lost ``peer``: it has to say hello again. Its transfers stay until their leases end."""
        self._peers.pop(peer, None)

    # ---------------------------------------------------------------- messages

    def _on_hello(self, peer: Peer, hello: Hello) -> list[PrefillAction]:
        own = self.identity
        try:
            check_peer(own, hello.namespace, hello.parts)
            if hello.frame_nbytes_max < own.nbytes_max:
                raise IncompatiblePeerError("frame_nbytes_max", f"at least {own.nbytes_max}", hello.frame_nbytes_max)
            if not self._make_room(peer):
                raise IncompatiblePeerError("peers", f"at most {self.limits.peers_max} with transfers", "one more")
        except IncompatiblePeerError as error:
            self._peers.pop(peer, None)
            self._count("refused_peers")
            return [Send(peer, Refuse(error.field[:256], str(error.wanted)[:256], str(error.got)[:256], hello.boot_id))]
        self._peers[peer] = hello
        self._peers.move_to_end(peer)
        welcome = Welcome(own.boot_id, own.namespace, list(own.parts), MINOR, self.limits.lease_ms, hello.boot_id)
        return [Send(peer, welcome)]

    def _boot_id_of(self, peer: Peer) -> bytes | None:
        """The run that ``peer`` said hello with, if it is remembered."""
        hello = self._peers.get(peer)
        return None if hello is None else hello.boot_id

    def _make_room(self, peer: Peer) -> bool:
        """Whether ``peer`` can be remembered; forgets the one that was silent longest and owns nothing."""
        if peer in self._peers or len(self._peers) < self.limits.peers_max:
            return True
        for known in self._peers:
            if not self._owned.get(known):
                del self._peers[known]
                return True
        return False

    def _on_transfer_message(
        self, peer: Peer, message: Pull | Credit | Renew | Ack | Abort, now_s: float
    ) -> list[PrefillAction]:
        if self._boot_id_of(peer) != message.boot_id:
            self._count("stranger_messages")
            return [Send(peer, Refuse("hello", "a hello of this run first", type(message).__name__, message.boot_id))]
        self._peers.move_to_end(peer)
        found = self._live(TransferId(message.transfer))
        if found is None:
            return self._on_late(peer, message)
        if found.peer is None:
            if not isinstance(message, (Pull, Abort)) and not (isinstance(message, Ack) and not message.installed):
                self._count("stale_messages")  # only a pull makes an owner
                return []
        elif (found.peer, found.boot_id) != (peer, message.boot_id):
            self._count("foreign_messages")
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
            self._count("stale_messages")
            return []
        if found.peer is None:
            found.peer, found.boot_id = peer, pull.boot_id
            self._owned[peer] = self._owned.get(peer, 0) + 1
            self._count("pulled")
        found.apply(Event.PULL)
        self._count("attempts")
        found.epoch, found.used_nbytes = pull.epoch, 0
        found.granted_nbytes = pull.credit_nbytes
        found.wanted.clear()
        absent: list[Place] = []
        for want in {w.index: w for w in pull.wanted}.values():  # who asks for a block twice gets it once
            block = found.blocks.get(want.index)
            if block is not None and block.key != want.key:
                self._count("key_mismatches")
                block = None
            for part in range(want.parts.bit_length()):
                if not want.parts >> part & 1:
                    continue
                if block is None or part >= len(block.records) or block.records[part] is None:
                    absent.append(Place(part, want.index))
                else:
                    found.wanted.append((part, want.index))
        if found.wanted:
            self._ready[found.id] = None
        else:
            self._ready.pop(found.id, None)
            found.apply(Event.ALL_SENT)
        self._count("records_absent", len(absent))
        return [Send(peer, Absent(found.id, found.epoch, absent))] if absent else []

    def _on_credit(self, found: Offer, credit: Credit) -> None:
        if credit.epoch != found.epoch:
            self._count("stale_messages")
            return
        found.granted_nbytes = max(found.granted_nbytes, credit.nbytes)
        if found.wanted:
            self._ready[found.id] = None

    def _on_ack(self, peer: Peer, found: Offer, ack: Ack) -> list[PrefillAction]:
        if ack.epoch < found.epoch:
            self._count("stale_messages")
            return []
        heard: list[PrefillAction] = [Send(peer, Released(found.id, Outcome.ACKED))]
        if found.peer is None:  # nothing was wanted; an ack again is then heard from this peer only
            found.peer, found.boot_id = peer, ack.boot_id
        return heard + self._end(found, Outcome.ACKED, tell=False)

    def _on_late(self, peer: Peer, message: Pull | Credit | Renew | Ack | Abort) -> list[PrefillAction]:
        ended = self._ended.get(TransferId(message.transfer))
        if ended is None:
            self._count("unknown_transfers")
            reason = GoneReason.UNKNOWN
        elif ended.peer is not None and (ended.peer, ended.boot_id) != (peer, message.boot_id):
            self._count("foreign_messages")
            reason = GoneReason.FOREIGN
        else:
            self._count("late_messages")
            if isinstance(message, Ack) and ended.outcome is Outcome.ACKED:
                return [Send(peer, Released(message.transfer, Outcome.ACKED))]
            reason = GoneReason(ended.outcome.value)
        return [] if isinstance(message, (Abort, Credit)) else [Send(peer, Gone(message.transfer, reason))]

    def _on_bye(self, peer: Peer, bye: Bye) -> list[PrefillAction]:
        if self._boot_id_of(peer) != bye.boot_id:
            self._count("stranger_messages")
            return []
        del self._peers[peer]
        own = [t for t in self._transfers.values() if (t.peer, t.boot_id) == (peer, bye.boot_id) and t.state in PULLED]
        return [a for t in own for a in self._end(t, Outcome.ABORTED, tell=False)]

    # ---------------------------------------------------------------- sending and ending

    def _batch(self, found: Offer, peer: Peer) -> Send | None:
        """Records that fit one message and the credit, with the link from now on; ``None`` if not one does."""
        parts, limits = self.identity.parts, self.limits
        free_nbytes = found.granted_nbytes - found.used_nbytes
        entries: list[Entry] = []
        bulk: list[Buffer] = []
        sizes: list[int] = []
        nbytes = control_nbytes = 0
        while found.wanted and len(entries) < limits.records_max:
            part, index = found.wanted[0]
            size = parts[part].nbytes
            if nbytes + size > free_nbytes or (entries and nbytes + size > limits.records_nbytes_max):
                break
            record = found.blocks[index].records[part]
            assert record is not None, "a record that is not there was queued"
            header = found.header(part, index)
            control_nbytes += len(header) + ENTRY_NBYTES_MAX
            if control_nbytes > CONTROL_NBYTES_MAX:
                break
            found.wanted.popleft()
            entries.append(Entry(part, index, header))
            bulk.append(record.payload)
            sizes.append(size)
            nbytes += size
        if found.wanted and entries:
            self._ready.move_to_end(found.id)
        else:
            del self._ready[found.id]  # all sent, or out of credit
        if not entries:
            return None
        if not found.wanted:
            found.apply(Event.ALL_SENT)
        found.used_nbytes += nbytes
        found.in_link += 1
        frames = join(bulk, sizes, limits.joined_nbytes_max, self._peers[peer].frame_nbytes_max)
        return Send(peer, Records(found.id, found.epoch, entries), frames)

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
        self._count(outcome.value)
        self._ended[found.id] = Ended(outcome, found.peer, found.boot_id)
        while len(self._ended) > self.limits.remembered_max:
            self._ended.popitem(last=False)
        self._ready.pop(found.id, None)
        found.wanted.clear()
        if found.state in PULLED:
            assert found.peer is not None
            self._owned[found.peer] -= 1
            if not self._owned[found.peer]:
                del self._owned[found.peer]
        told: list[PrefillAction] = []
        if tell and found.peer is not None and self._boot_id_of(found.peer) == found.boot_id:
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

    def _count(self, name: str, n: int = 1) -> None:
        self._counts[name] += n

"""The two sides of the simulated world of transfers: a session and a link each, and what the model expects of them."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import transfer.messages as wire
from cache_manager.errors import BlockBusyError
from cache_manager.keys import BlockKey, Namespace
from cache_manager.record import OfferedRecord, RecordHeader
from transfer.actions import Action, Finished, OfferedBlock, Release, Send, WantedBlock
from transfer.counters import Counters
from transfer.errors import LocalProtocolError, NodeFullError, RemoteProtocolError
from transfer.identity import Identity
from transfer.limits import TransferLimits
from transfer.link import Peer, PeerLost
from transfer.messages import BootId, Outcome, TransferId, decode, encode
from transfer.offers import Offers
from transfer.pulls import Pulls

if TYPE_CHECKING:
    from transfer_world import World

PARTS = (wire.Part("rows", b"layout-of-rows-1", 24, 4), wire.Part("kv", b"layout-of-kv-123", 32, 4))
LIMITS = TransferLimits(
    lease_s=6.0,
    lease_max_s=40.0,
    retry_s=1.5,
    early_s=1.0,
    resend_s=0.1,
    retries_max=3,
    transfers_max=4,
    remembered_max=6,
    records_nbytes_max=300,
)
HELD = "kv_lent_by_reference_is_held_until_acknowledged_or_expired"
ONCE = "installed_once_per_transfer"
PLACED = "every wanted record is in place or missing"
WRITTEN = "a_row_read_is_the_row_written_or_missing"


class ClaimError(AssertionError):
    """A claim of docs/invariants.md does not hold."""


def claim(name: str, holds: bool, what: object = "") -> None:
    if not holds:
        raise ClaimError(f"{name}: {what}")


@dataclass(frozen=True)
class Prompt:
    """What is lent: bytes that say whose they are."""

    number: int
    version: int

    def key(self, index: int) -> BlockKey:
        return BlockKey(_digest(32, self, index))

    def payload(self, part: int, index: int) -> bytes:
        return _digest(PARTS[part].nbytes, self, part, index)


@functools.lru_cache(1 << 16)
def _digest(nbytes: int, *what: object) -> bytes:
    return hashlib.shake_128(repr(what).encode()).digest(nbytes)


@dataclass(eq=False)
class Offered:
    """What the model knows of an offer."""

    id: TransferId
    prompt: Prompt
    there: set[tuple[int, int]]  # part, index
    blocks: int
    rest: list[OfferedBlock]  # that are still to be added
    memory: list[bytearray]  # lent by reference, used again after the end
    open: bool
    at_s: float = 0.0
    heard_s: float = 0.0
    owner: tuple[Peer, bytes] | None = None
    released: Outcome | None = None
    may_be: set[Outcome] = field(default_factory=set)  # how it may end, besides by time


class _Side:
    name: str
    session: Any
    kinds: Any  # of messages that are for this side

    def __init__(self, world: World) -> None:
        self.world, self.dice = world, world.dice
        self.start()

    def start(self) -> None:
        self.version = self.world.version
        self.link = self.world.network.endpoint(self.name)
        own = Identity(BootId(self.world.random_bytes(16)), Namespace("m", self.version), PARTS)
        self.session = (Offers if self.name == "P" else Pulls)(own, LIMITS, Counters())

    def crash(self) -> None:
        self.world.happened[f"crash {self.name}"] += 1
        self.world.network.crash(self.name)
        self.world.stay_down()
        self.start()

    def reset(self) -> None:
        self.version = self.world.version = max(self.world.version, self.version + 1)
        self.act(self.session.reset(Namespace("m", self.version)))
        self.world.happened[f"reset {self.name}"] += 1

    def pump(self, limit: int = 8) -> None:
        for item in self.link.poll(limit):
            if isinstance(item, PeerLost):
                self.lost(item.peer)
                continue
            try:
                message = decode(item.control)
                if not isinstance(message, self.kinds):
                    raise RemoteProtocolError("a message for the other side")
                self.receive(item.peer, message, item.bulk)
            except RemoteProtocolError:
                self.world.happened[f"{self.name} bad message"] += 1
            item.release()
        self.act(self.session.tick(self.world.now_s))

    def lost(self, peer: Peer) -> None:
        """Prefill learns nothing of it: decode asks again."""

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            self.do(action)
            if isinstance(action, Send) and not self.link.send(action.peer, encode(action.message), action.bulk):
                self.session.unsent(action, self.world.now_s)


class PrefillSide(_Side):
    name, kinds = "P", wire.ToOffers
    session: Offers

    def start(self) -> None:
        super().start()
        self.offers: dict[TransferId, Offered] = {}
        self.drawn: list[Offered] = []  # ids that decode may know, and that are still to be offered
        self.asked: set[tuple[bytes, tuple[Peer, bytes]]] = set()
        self.known: list[Offered] = getattr(self, "known", [])  # that the router may send to decode

    def offer(self) -> None:
        """A prompt of some blocks, of which a part may lack; its KV may be lent from where it lies."""
        dice, prompt = self.dice, Prompt(self.world.next(), self.version)
        count = dice.randint(1, 3)
        there = {(part, i) for part in (0, 1) for i in range(count) if dice.random() < 0.9}
        blocks, memory = [], []
        for i in range(count):
            records: list[OfferedRecord | None] = [None, None]
            for part in (0, 1):
                lent = bytearray(prompt.payload(part, i))
                memory += [lent] if part and self.world.by_reference else []
                if (part, i) in there:
                    fingerprint, valid = PARTS[part].fingerprint, b"\x0f" + bytes(7)
                    records[part] = OfferedRecord(prompt.key(i), fingerprint, 1, prompt.number, valid, memoryview(lent))
            blocks.append(OfferedBlock(i, prompt.key(i), tuple(records)))
        name = TransferId(self.world.random_bytes(16))
        offered = Offered(name, prompt, there, count, blocks, memory, dice.random() < 0.4)
        self.drawn.append(offered)
        if dice.random() < 0.3:  # decode is told of it first
            self.known = [*self.known[-7:], offered]
        else:
            self.lend(offered)

    def lend(self, offered: Offered) -> None:
        """Offer what was drawn, with all blocks or the first few."""
        self.drawn.remove(offered)
        now_s, lease_s = self.world.now_s, self.dice.choice((None, 3.0))
        first = self.dice.randint(0, len(offered.rest)) if offered.open else len(offered.rest)
        blocks, offered.rest = offered.rest[:first], offered.rest[first:]
        try:
            actions = self.session.offer(offered.id, blocks, now_s, is_open=offered.open, lease_s=lease_s)
        except NodeFullError:
            self.world.happened["P table full"] += 1
            return
        offered.at_s = now_s
        offered.heard_s = now_s - (LIMITS.lease_s - lease_s if lease_s else 0.0)
        self.offers[offered.id] = offered
        offered.owner = self.session._offers[offered.id].owner  # who pulled early
        claim(HELD, offered.owner is None or (offered.id, offered.owner) in self.asked, offered)
        if offered not in self.known:
            self.known = [*self.known[-7:], offered]
        self.act(actions)

    def grow(self) -> None:
        """A step filled another block, or the prompt is done."""
        live = [o for o in self.offers.values() if o.open and o.released is None]
        if self.drawn and self.dice.random() < 0.5:
            self.lend(self.drawn[0])
        elif live:
            offered = self.dice.choice(live)
            offered.heard_s = self.world.now_s
            if offered.rest:
                self.act(self.session.grow(offered.id, [offered.rest.pop(0)], self.world.now_s))
                self.world.happened["grown"] += 1
            else:
                offered.open = False
                self.act(self.session.seal(offered.id, self.world.now_s))
                self.world.happened["sealed"] += 1

    def abort(self) -> None:
        if live := [o for o in self.offers.values() if o.released is None]:
            chosen = self.dice.choice(live)
            chosen.may_be.add(Outcome.ABORTED)
            self.act(self.session.withdraw(chosen.id))

    def reset(self) -> None:
        for offered in self.offers.values():
            offered.may_be.add(Outcome.RESET)
        self.drawn.clear()
        super().reset()

    def pump(self, limit: int = 8) -> None:
        super().pump(limit)
        while (send := self.session.next_records()) is not None:
            self.act([send])

    def receive(self, peer: Peer, message: Any, _: object) -> None:
        who = peer, getattr(message, "boot_id", None)
        offered = self.offers.get(getattr(message, "transfer", b""))
        if isinstance(message, wire.Bye):
            for each in self.offers.values():
                each.may_be |= {Outcome.ABORTED} if each.owner == who else set()
        elif offered and offered.released is None and offered.owner in (None, who):  # what the session may conclude
            ends = {wire.Ack: Outcome.ACKED, wire.Abort: Outcome.ABORTED}
            offered.may_be |= {ends[type(message)]} if type(message) in ends else set()
        if isinstance(message, wire.Pull):
            self.asked.add((message.transfer, who))
        actions = self.session.receive(peer, message, self.world.now_s)
        said_no = any(isinstance(a, Send) and isinstance(a.message, wire.Refuse | wire.Gone) for a in actions)
        if offered and not said_no:
            if isinstance(message, wire.Pull) and offered.owner is None:
                offered.owner = who
            if offered.id in self.session._offers and offered.owner == who:
                offered.heard_s = self.world.now_s
        self.act(actions)

    def do(self, action: Action) -> None:
        if isinstance(action, Release):
            offered, now_s, outcome = self.offers[action.transfer], self.world.now_s, action.outcome
            claim("released once", offered.released is None, offered)
            late = max(now_s - offered.heard_s - LIMITS.lease_s, now_s - offered.at_s - LIMITS.lease_max_s) >= -1e-6
            claim(HELD, late if outcome is Outcome.EXPIRED else outcome in offered.may_be, f"{outcome} of {offered}")
            offered.released = outcome
            self.world.happened[f"released {outcome.value}"] += 1
            for lent in offered.memory:
                lent[:] = self.world.random_bytes(len(lent))


@dataclass(eq=False)
class Landing:
    """A pull, and where its records go."""

    side: DecodeSide
    offered: Offered
    prompt: Prompt
    wanted: set[tuple[int, int]]
    there: set[tuple[int, int]] = field(default_factory=set)
    taken: set[tuple[int, int]] = field(default_factory=set)  # into blocks that were given away, too
    finished: bool = False
    given_away: bool = False

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        place, world = (part, index), self.side.world
        claim(ONCE, place not in self.taken and place in self.wanted, place)
        claim("nothing is installed after the end", not self.finished, place)
        claim(WRITTEN, (header.key, payload) == (self.prompt.key(index), self.prompt.payload(part, index)), place)
        claim(WRITTEN, header.origin == self.prompt.number and place in self.offered.there, place)
        if world.dice.random() < 0.03:
            raise BlockBusyError("block", "one at rest", "one in motion")
        self.taken.add(place)
        self.there |= set() if self.given_away else {place}
        world.happened["stale" if self.given_away else "installed"] += 1
        return not self.given_away


class DecodeSide(_Side):
    name, kinds = "D", wire.ToPulls
    session: Pulls

    def start(self) -> None:
        super().start()
        self.peer = self.link.connect("loopback://P")
        self.pulls: dict[TransferId, Landing] = {}

    def admit(self) -> None:
        """A request whose prompt is known: sometimes a second time, another prompt, or with a prefix of its own."""
        dice, known = self.dice, self.world.prefill.known
        new = known if dice.random() < 0.1 else [o for o in known if o.id not in self.pulls]
        if not new:
            return
        offered = dice.choice(new)
        prompt = Prompt(-offered.prompt.number, self.version) if dice.random() < 0.05 else offered.prompt
        first = dice.choice((0, 0, 0, 0, 0, 1, 1, offered.blocks))
        wanted = [WantedBlock(i, prompt.key(i), (0, 1)) for i in range(first, offered.blocks)]
        landing = Landing(self, offered, prompt, {(part, block.index) for block in wanted for part in block.parts})
        try:
            actions = self.session.pull(self.peer, offered.id, wanted, landing, self.world.now_s)
        except LocalProtocolError:
            claim("a pull is refused only when it was pulled before", offered.id in self.pulls, offered)
        except NodeFullError:
            self.world.happened["D table full"] += 1
        else:
            self.pulls[offered.id] = landing
            self.act(actions)

    def lost(self, peer: Peer) -> None:
        self.session.peer_lost(peer)

    def finish(self) -> None:
        """A request ends; an engine may give the landing blocks away without a word."""
        if flying := [name for name, pull in self.pulls.items() if not pull.finished]:
            chosen = self.dice.choice(flying)
            if self.dice.random() < 0.5:
                self.pulls[chosen].given_away = True
            else:
                self.act(self.session.abort(chosen))

    def receive(self, peer: Peer, message: Any, bulk: Any) -> None:
        self.act(self.session.receive(peer, message, bulk, self.world.now_s))

    def do(self, action: Action) -> None:
        if isinstance(action, Send) and isinstance(action.message, wire.Ack):
            claim("the ack follows the last installation", self.pulls[action.message.transfer].finished, action)
        elif isinstance(action, Finished):
            pull = self.pulls[action.transfer]
            claim("finished once", not pull.finished, action)
            pull.finished = True
            missing = {(m.part, m.index) for m in action.missing}
            claim(PLACED, len(missing) == len(action.missing) and missing <= pull.wanted, action)
            claim(PLACED, action.installed == len(pull.there) and pull.wanted - missing == pull.there, action)
            self.world.happened[f"pull {action.reason.value if action.reason else 'done'}"] += 1
            self.world.happened["complete pull"] += action.complete and bool(pull.wanted)

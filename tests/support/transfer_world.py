"""A prefill and a decode engine with their pools, sessions and links, in one seeded run without threads or real time.

The oracle is a model that knows nothing of sessions: what each engine computed for which tokens (the position canary),
who pulled what, what was acknowledged, aborted and reset, and when the owner was last heard.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np
from canary import canary_row, canary_rows

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import KVRouteError
from cache_manager.keys import Namespace
from cache_manager.record import OfferedRecord
from cache_manager.records import Export
from cache_manager.spec import AuxBlockDataSpec
from transfer.actions import Finished, Install, OfferedBlock, PullResult, Release, Send, WantedBlock
from transfer.decode import DecodeSession
from transfer.errors import LocalProtocolError, RemoteProtocolError
from transfer.limits import TransferLimits
from transfer.link import Peer, PeerLost
from transfer.loopback import Faults, LoopbackLink, Network
from transfer.messages import (
    MAGIC,
    MAJOR,
    PREFIX,
    Abort,
    Ack,
    Bye,
    Hello,
    Outcome,
    Part,
    Pull,
    Refuse,
    Renew,
    Run,
    TransferId,
    decode,
    encode,
)
from transfer.party import Party
from transfer.prefill import PrefillSession

TOKENS = 4  # of a block
BLOCKS = 9
ROUTING = AuxBlockDataSpec("routing", (2, 2), "uint8", TOKENS)
VERSION = AuxBlockDataSpec("weights_version", (), "uint32", TOKENS)
SPECS = (ROUTING, VERSION)
KV = AuxBlockDataSpec("kv", (8,), "uint8", TOKENS)
KV_PART = Part("kv", b"kv-of-this-model", KV.block_nbytes, TOKENS)
ROWS, KV_INDEX = 0, 1
LIMITS = TransferLimits(
    lease_s=6.0,
    lease_max_s=40.0,
    retry_s=1.5,
    resend_s=0.1,
    retries_max=3,
    transfers_max=4,
    peers_max=3,
    remembered_max=6,
    credit_nbytes=260,
    records_max=3,
    records_nbytes_max=300,
)


@functools.lru_cache(maxsize=1 << 16)
def row_of(spec: AuxBlockDataSpec, author: str, tokens: tuple[int, ...], version: int) -> bytes:
    """The row that ``author`` computed for the last of ``tokens`` under the weights ``version``."""
    return canary_row(spec, author, tokens, version).tobytes()


@dataclass(eq=False)
class Request:
    """What one engine holds for one prompt."""

    owner: str
    tokens: tuple[int, ...]
    version: int
    blocks: list[int]
    keys: list[bytes]
    generations: list[int]
    prompt: int  # tokens
    own: set[int] = field(default_factory=set)  # positions that this engine has computed and committed
    computed: int = 0
    stepping: set[int] = field(default_factory=set)  # positions that a step in flight will write
    again: set[int] = field(default_factory=set)  # prompt positions that this engine computed though it had asked
    pull: TransferId | None = None
    wanted: dict[int, tuple[int, ...]] = field(default_factory=dict)  # index -> parts
    kv_from_prefill: set[int] = field(default_factory=set)
    rows_from_prefill: set[int] = field(default_factory=set)

    wrong_prompt: bool = False
    given_away: bool = False

    @property
    def rows_alone(self) -> set[int]:
        """Blocks whose rows have come, and whose KV has not."""
        return self.rows_from_prefill - self.kv_from_prefill


@dataclass(eq=False)
class Offered:
    """What the model knows of a transfer."""

    id: TransferId
    tokens: tuple[int, ...]
    version: int
    blocks: list[int]
    at_s: float
    whole: bool
    export: Export
    owner: tuple[Peer, bytes] | None = None
    heard_s: float = 0.0
    acked: bool = False
    aborted: bool = False
    reset: bool = False
    in_link: int = 0
    released: Outcome | None = None


class ClaimError(AssertionError):
    """A claim of docs/invariants.md does not hold."""


def claim(name: str, holds: bool, what: object = "") -> None:
    if not holds:
        raise ClaimError(f"{name}: {what}")


class Engine:
    """Blocks, rows and KV of one process; authors rows under its name."""

    def __init__(self, name: str, version: int) -> None:
        self.name = name
        self.aux = AuxBlocks(SPECS, device_blocks=BLOCKS, namespace=Namespace("m", version))
        self.kv = np.zeros((BLOCKS, KV.block_nbytes), np.uint8)
        self.version = version
        self.requests: list[Request] = []
        self.count = 0

    @property
    def parts(self) -> tuple[Part, ...]:
        layout = self.aux.layout
        return Part("rows", layout.fingerprint, layout.nbytes, TOKENS), KV_PART

    def keys(self, tokens: tuple[int, ...]) -> list[bytes]:
        keys, parent = [], None
        for at in range(0, len(tokens), TOKENS):
            parent = self.aux.keys.key(parent, tokens[at : at + TOKENS])
            keys.append(parent)
        return keys

    def admit(self, tokens: tuple[int, ...], room: int, dice: random.Random) -> Request | None:
        """Blocks for ``tokens`` and ``room`` more; ``None`` when the pool is full."""
        needed = -(-(len(tokens) + room) // TOKENS)
        unheld = [b for b, n in enumerate(self.aux.reference_counts(range(BLOCKS))) if not n]
        if len(unheld) < needed:
            return None
        self.count += 1
        blocks, owner = dice.sample(unheld, needed), f"req-{self.count}"
        self.aux.allocate(blocks, owner)
        lives = self.aux.generations(blocks)
        request = Request(owner, tokens, self.version, blocks, self.keys(tokens), lives, len(tokens))
        self.requests.append(request)
        return request

    def slots(self, request: Request, positions: Iterable[int]) -> list[int]:
        return [request.blocks[p // TOKENS] * TOKENS + p % TOKENS for p in positions]

    def compute(self, request: Request, start: int, stop: int) -> object:
        """Begin the step that computes [start, stop) of the request; the KV is there at once."""
        step = self.aux.begin_step(self.slots(request, range(start, stop)))
        identities = [(self.name, request.tokens[: p + 1], request.version) for p in range(start, stop)]
        for spec in SPECS:
            step.write(spec.name, canary_rows(spec, identities))
        for p in range(start, stop):
            row = row_of(KV, self.name, request.tokens[: p + 1], request.version)
            self.kv[request.blocks[p // TOKENS]].reshape(TOKENS, -1)[p % TOKENS] = np.frombuffer(row, np.uint8)
        return step

    def end(self, request: Request) -> None:
        self.aux.free(request.owner)
        if request in self.requests:
            self.requests.remove(request)

    def churn(self, dice: random.Random) -> None:
        """Somebody else uses unheld blocks, with rows and KV of their own, and is gone again."""
        for block in [b for b, n in enumerate(self.aux.reference_counts(range(BLOCKS))) if not n][: dice.randint(1, 3)]:
            self.aux.allocate([block], "churn")
            with self.aux.step(range(block * TOKENS, block * TOKENS + TOKENS)) as step:
                for spec in SPECS:
                    step.write(spec.name, canary_rows(spec, [("churn", self.count, i) for i in range(TOKENS)]))
            self.kv[block] = dice.randrange(256)
            self.count += 1
        self.aux.free("churn")


class World:
    """One run. ``step`` does one random thing; every claim is checked after it."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.seed = seed
        self.now_s = 100.0
        clean = dice.random() < 0.25  # runs in which nothing is damaged: then no record may arrive damaged
        often = dice.choice((0.0, 0.03, 0.15))
        self.damaging = not clean
        faults = Faults(
            drop=often,
            duplicate=often,
            delay=dice.choice((0.0, 0.3)),
            delay_s=dice.choice((0.5, 8.0)),
            truncate=0.0 if clean else often / 2,
            flip=0.0 if clean else often,
            full=dice.choice((0.0, 0.1)),
        )
        self.captured: list[bytes] = []
        self.network = Network(seed, faults, clock=lambda: self.now_s, queue_max=40, tap=self.on_wire)
        self.version = 1
        self.happened: Counter[str] = Counter()
        self.offers: dict[TransferId, Offered] = {}
        self.known: list[Offered] = []  # what the router may ask decode for
        self.steps: list[tuple[object, Request, int, int]] = []
        self.taken: set[tuple[int, bytes, int, int]] = set()  # pull number, transfer, part, index: installed
        self.pulls = 0
        self.finished: set[int] = set()
        self.eve: LoopbackLink = self.network.endpoint("E")
        self.start_prefill()
        self.start_decode()

    def random_bytes(self, n: int) -> bytes:
        return self.dice.getrandbits(8 * n).to_bytes(n, "little")

    def on_wire(self, sender: Peer, to: Peer, control: bytes) -> None:
        if sender != b"E":
            self.captured.append(control)
            del self.captured[:-60]

    # ---------------------------------------------------------------- processes

    def start_prefill(self) -> None:
        self.p = Engine("P", self.version)
        namespace = self.p.aux.namespace.fingerprint
        self.prefill = PrefillSession(Party(Run(self.random_bytes(16)), namespace, self.p.parts), LIMITS)
        self.p_link = self.network.endpoint("P")

    def start_decode(self) -> None:
        self.d = Engine("D", self.version)
        namespace = self.d.aux.namespace.fingerprint
        self.decode = DecodeSession(Party(Run(self.random_bytes(16)), namespace, self.d.parts), LIMITS)
        self.d_link = self.network.endpoint("D")
        self.peer = self.d_link.connect("loopback://P")
        self.pull_of: dict[TransferId, tuple[int, Request]] = {}

    def crash_prefill(self) -> None:
        self.happened["crash prefill"] += 1
        self.network.crash("P")
        self.stay_down()
        self.offers.clear()
        self.start_prefill()

    def crash_decode(self) -> None:
        self.happened["crash decode"] += 1
        self.network.crash("D")
        self.stay_down()
        self.steps.clear()
        self.start_decode()

    def stay_down(self) -> None:
        if self.dice.random() < 0.5:
            self.now_s += 1.0
            self.eve.poll(0.0)  # what was on its way there is lost

    # ---------------------------------------------------------------- prefill

    def offer(self) -> None:
        dice = self.dice
        tokens = tuple(dice.randrange(3) for _ in range(dice.randint(1, 3 * TOKENS - 1)))
        request = self.p.admit(tokens, dice.choice((0, 1)), dice)
        if request is None:
            self.happened["prefill pool full"] += 1
            return
        whole = dice.random() < 0.85
        hole = None if whole else dice.randrange(len(request.keys))
        step = self.p.compute(request, 0, len(tokens))
        keep = np.array([hole is None or p // TOKENS != hole for p in range(len(tokens))])
        step.commit(keep)
        transfer = TransferId(self.random_bytes(16))
        owner = f"transfer:{transfer.hex()}"
        prompt = request.blocks[: len(request.keys)]
        self.p.aux.share(prompt, owner)
        counts = [min(TOKENS, len(tokens) - i * TOKENS) for i in range(len(prompt))]
        further = dice.choice((None, "before", "after")) if len(request.blocks) * TOKENS > len(tokens) else None
        if further == "before":  # prefill has gone on in the partial block: those rows belong to another key
            self.p_goes_on(request)
        export = self.p.aux.export(dict(zip(request.keys, prompt, strict=True)), counts, owner=owner)
        origins, blocks = self.p.aux.origins(prompt), []
        for i, (key, block) in enumerate(zip(request.keys, prompt, strict=True)):
            memory = self.p.kv[block].data if counts[i] == TOKENS else bytes(self.p.kv[block])
            kv = OfferedRecord(key, KV_PART.fingerprint, 0, origins[i], b"\x0f" + bytes(7), memory)
            blocks.append(OfferedBlock(i, key, (export.records[i], kv if i != hole else None)))
        lease_s = dice.choice((None, 3.0))
        if further == "after":
            self.p_goes_on(request)
        if not self.prefill.offer(transfer, blocks, self.now_s, lease_s):
            self.happened["prefill table full"] += 1
            export.abort()
            self.p.aux.free(owner)
        else:
            offered = Offered(transfer, tokens, request.version, prompt, self.now_s, whole, export, heard_s=self.now_s)
            if lease_s:
                offered.heard_s -= LIMITS.lease_s - lease_s
            self.offers[transfer] = offered
            self.known = [*self.known[-7:], offered]
        if dice.random() < 0.8:
            self.p.end(request)

    def p_goes_on(self, request: Request) -> None:
        at = len(request.tokens)
        request.tokens += (7,)
        self.p.compute(request, at, at + 1).commit()

    def abort_prefill(self) -> None:
        live = [o for o in self.offers.values() if o.released is None]
        if live:
            chosen = self.dice.choice(live)
            chosen.aborted = True
            self.act_prefill(self.prefill.abort(chosen.id))

    def reset_prefill(self) -> None:
        self.version = max(self.version, self.p.version + 1)
        self.p.version = self.version
        self.p.aux.reset(weights_version=self.version)
        for offered in self.offers.values():
            offered.reset = True
        self.act_prefill(self.prefill.reset(self.p.aux.namespace.fingerprint))
        for request in list(self.p.requests):
            self.p.end(request)
        self.happened["reset prefill"] += 1

    def pump_prefill(self, limit: int = 8) -> None:
        for item in self.p_link.poll(0.0, limit):
            if isinstance(item, PeerLost):
                self.prefill.peer_lost(item.peer)
                continue
            before = self.heard(item.peer, item.control)
            actions = self.prefill.receive(item.peer, item.control, item.bulk, self.now_s)
            if before and not any(isinstance(a, Send) and isinstance(a.message, Refuse) for a in actions):
                self.believe(item.peer, before)
            self.act_prefill(actions)
            item.release()
        self.act_prefill(self.prefill.tick(self.now_s))
        while (send := self.prefill.next_records()) is not None:
            self.act_prefill([send])

    def heard(self, peer: Peer, control: bytes) -> object | None:
        try:
            message = decode(control)
        except RemoteProtocolError:
            return None
        if isinstance(message, (Ack, Abort)):  # what the session may conclude from it, if it is the owner's
            offered = self.offers.get(TransferId(message.transfer))
            if offered and offered.released is None and offered.owner in (None, (peer, message.run)):
                offered.acked |= isinstance(message, Ack)
                offered.aborted |= isinstance(message, Abort)
        if isinstance(message, Bye):
            for offered in self.offers.values():
                offered.aborted |= offered.owner == (peer, message.run)
        return message

    def believe(self, peer: Peer, message: object) -> None:
        offered = self.offers.get(getattr(message, "transfer", b""))
        if offered is None:
            return
        if isinstance(message, Pull) and offered.owner is None:
            offered.owner = peer, message.run
        over = self.prefill._live(offered.id) is None
        if not over and offered.owner == (peer, getattr(message, "run", None)):
            offered.heard_s = self.now_s

    def act_prefill(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, Release):
                self.release(action)
                continue
            assert isinstance(action, Send)
            offered = self.offers.get(getattr(action.message, "transfer", b""))
            on_sent = functools.partial(self.on_sent, self.prefill, offered, action) if action.bulk else None
            if self.p_link.send(action.peer, encode(action.message), action.bulk, on_sent):
                if action.bulk:
                    offered.in_link += 1
            else:
                self.prefill.unsent(action, self.now_s)

    def on_sent(self, session: PrefillSession, offered: Offered, send: Send) -> None:
        assert session is self.prefill, "a crashed process was told something"
        offered.in_link -= 1
        self.act_prefill(session.let_go(send))

    def release(self, action: Release) -> None:
        offered = self.offers[action.transfer]
        outcome, name = action.outcome, "prefill_releases_only_after_ack_or_lease_end"
        claim("released once", offered.released is None, offered)
        claim(name, offered.in_link == 0, f"the link holds buffers of {offered}")
        silent_s, age_s = self.now_s - offered.heard_s, self.now_s - offered.at_s
        legitimate = {
            Outcome.ACKED: offered.acked,
            Outcome.ABORTED: offered.aborted,
            Outcome.RESET: offered.reset,
            Outcome.EXPIRED: silent_s >= LIMITS.lease_s - 1e-6 or age_s >= LIMITS.lease_max_s - 1e-6,
        }
        claim(name, legitimate[outcome], f"{outcome} of {offered} at {self.now_s}")
        offered.released = outcome
        self.happened[f"released {outcome.value}"] += 1
        offered.export.commit()
        self.p.aux.free(f"transfer:{action.transfer.hex()}")

    # ---------------------------------------------------------------- decode

    def admit(self) -> None:
        dice = self.dice
        if not self.known:
            return
        new = [o for o in self.known if o.id not in self.pull_of]
        if dice.random() < 0.1:
            new = self.known  # again, or of a prefill that is gone
        if not new:
            return
        offered = dice.choice(new)
        tokens, wrong = offered.tokens, dice.random() < 0.05
        if wrong:  # another prompt under this transfer: its keys differ
            tokens = (5, *tokens[1:])
        request = self.d.admit(tokens, dice.randint(0, TOKENS), dice)
        if request is None:
            self.happened["decode pool full"] += 1
            return
        request.wrong_prompt = wrong
        prefix = dice.choice((0, 0, 0, 0, 0, 1, 1, len(request.keys)))
        own = min(prefix * TOKENS, len(tokens))
        if own:  # found in decode's own prefix cache: its rows win
            self.d.compute(request, 0, own).commit()
            request.own.update(range(own))
        request.computed = len(tokens)
        request.wanted = {i: (ROWS, KV_INDEX) for i in range(len(request.keys)) if i * TOKENS >= own}
        wanted = [WantedBlock(i, request.keys[i], parts) for i, parts in request.wanted.items()]
        try:
            actions = self.decode.pull(self.peer, offered.id, wanted, self.now_s)
        except LocalProtocolError:
            claim("a pull is refused only when it was pulled before", offered.id in self.pull_of, offered)
            self.happened["pulled before"] += 1
            self.d.end(request)
            return
        if actions is None:
            self.happened["decode table full"] += 1
            self.d.end(request)
            return
        request.pull = offered.id
        self.pulls += 1
        self.pull_of[offered.id] = self.pulls, request
        if request.blocks:
            self.d.aux.share(request.blocks[: len(request.keys)], f"pull:{offered.id.hex()}")
        self.act_decode(actions)

    def abort_decode(self) -> None:
        flying = [r for r in self.d.requests if r.pull]
        if flying:
            chosen = self.dice.choice(flying)
            self.act_decode(self.decode.abort(chosen.pull))

    def reset_decode(self) -> None:
        self.version = max(self.version, self.d.version + 1)
        self.d.version = self.version
        self.d.aux.reset(weights_version=self.version)
        for request in list(self.d.requests):
            request.given_away = True
        self.act_decode(self.decode.reset(self.d.aux.namespace.fingerprint))
        for request in list(self.d.requests):
            self.d.end(request)
        self.happened["reset decode"] += 1

    def decode_step(self) -> None:
        """Decoding goes on, also while rows are still on their way; steps may stay open for a while."""
        dice = self.dice
        if self.steps and dice.random() < 0.6:
            step, request, start, stop = self.steps.pop(0)
            request.stepping.difference_update(range(start, stop))
            if dice.random() < 0.8:
                step.commit()
                request.own.update(range(start, stop))
            else:
                step.abort()
            return
        asked = [r for r in self.d.requests if r.pull and r.kv_from_prefill and not r.stepping]
        if asked and dice.random() < 0.3:  # decode computes again what has come: its own wins
            request = dice.choice(asked)
            p = dice.choice([p for p in range(request.prompt) if p // TOKENS in request.kv_from_prefill])
            self.steps.append((self.d.compute(request, p, p + 1), request, p, p + 1))
            request.stepping.add(p)
            request.again.add(p)
            request.own.discard(p)
            self.happened["computed though asked for"] += 1
            return
        able = [r for r in self.d.requests if r.computed < len(r.blocks) * TOKENS]
        if able and len(self.steps) < 4:
            request = dice.choice(able)
            start = request.computed
            request.tokens = (*request.tokens[:start], dice.randrange(3))
            self.steps.append((self.d.compute(request, start, start + 1), request, start, start + 1))
            request.stepping.add(start)
            request.computed += 1
            self.happened["step during pull" if request.pull else "step"] += 1

    def finish_request(self) -> None:
        idle = [r for r in self.d.requests if not any(s[1] is r for s in self.steps)]
        if not idle:
            return
        request = self.dice.choice(idle)
        if request.pull and self.dice.random() < 0.5:  # an engine that does not keep its promise
            self.d.aux.free(f"pull:{request.pull.hex()}")
            self.happened["landing blocks given away"] += 1
            request.given_away = True
            self.d.end(request)
            self.admit()  # somebody else has them at once
            return
        elif request.pull:
            self.act_decode(self.decode.abort(request.pull))
        self.d.end(request)

    def pump_decode(self, limit: int = 8) -> None:
        for item in self.d_link.poll(0.0, limit):
            if isinstance(item, PeerLost):
                self.decode.peer_lost(item.peer)
                continue
            self.act_decode(self.decode.receive(item.peer, item.control, item.bulk, self.now_s))
            item.release()
        self.act_decode(self.decode.tick(self.now_s))

    def act_decode(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, Install):
                self.install(action)
            elif isinstance(action, Finished):
                self.on_finished(action.transfer, action.result)
            else:
                assert isinstance(action, Send)
                if isinstance(action.message, Ack):
                    self.on_ack(action.message)
                if not self.d_link.send(action.peer, encode(action.message), action.bulk):
                    self.decode.unsent(action, self.now_s)

    def install(self, install: Install) -> None:
        number, request = self.pull_of[install.transfer]
        once = number, install.transfer, install.part, install.index
        claim("installed_once_per_transfer", once not in self.taken, once)
        claim("nothing is installed after the end", number not in self.finished, once)
        if self.dice.random() < 0.03:
            self.decode.postponed(install)  # as when the block is in motion
            return
        self.taken.add(once)
        block = request.blocks[install.index]
        generation = request.generations[install.index]
        if install.part == ROWS:
            ok = self.d.aux.install(block, generation, install.header, install.payload) > 0
            if ok:
                request.rows_from_prefill.add(install.index)
        else:
            tokens = min(TOKENS, request.prompt - install.index * TOKENS)
            ok = self.d.aux.bind_origin(block, generation, install.header.origin, tokens)
            if ok:
                end = tokens * KV.row_nbytes
                self.d.kv[block][:end] = np.frombuffer(install.payload, np.uint8)[:end]
                request.kv_from_prefill.add(install.index)
        self.happened["installed" if ok else "stale"] += 1
        self.act_decode(self.decode.installed(install, ok, self.now_s))

    def on_ack(self, ack: Ack) -> None:
        number, request = self.pull_of[TransferId(ack.transfer)]
        settled = sum(1 for n, _, _, _ in self.taken if n == number)
        wanted = sum(len(parts) for parts in request.wanted.values())
        claim("the ack follows the last installation", ack.installed + ack.missing == wanted, ack)
        claim("the ack counts what was installed", ack.installed <= settled, ack)

    def on_finished(self, transfer: TransferId, result: PullResult) -> None:
        number, request = self.pull_of[transfer]
        claim("finished once", number not in self.finished, transfer)
        self.finished.add(number)
        missing = {(m.part, m.index) for m in result.missing}
        wanted = {(part, i) for i, parts in request.wanted.items() for part in parts}
        claim("every wanted record is in place or missing", missing <= wanted, result)
        claim("every wanted record is in place or missing", result.installed + len(missing) == len(wanted), result)
        if not request.given_away and request in self.d.requests:
            in_place = {i for part, i in wanted - missing if part == ROWS}
            claim("what is not reported missing is in place", in_place == request.rows_from_prefill, result)
            kv = {i for part, i in wanted - missing if part == KV_INDEX}
            claim("what is not reported missing is in place", kv == request.kv_from_prefill, result)
            readable = self.d.aux.read(ROUTING.name, request.blocks).valid[: request.prompt]
            readable[list(request.again)] = True
            there = all(readable[i * TOKENS : (i + 1) * TOKENS].all() for i in in_place)
            claim("what is not reported missing is in place", there, result)
        self.happened[f"pull {result.reason.value if result.reason else 'done'}"] += 1
        self.happened["complete pull"] += result.complete and bool(wanted)
        self.d.aux.free(f"pull:{transfer.hex()}")
        request.pull = None

    # ---------------------------------------------------------------- a third peer

    def mallory(self) -> None:
        """Replays, forgeries and garbage under a name of her own."""
        dice = self.dice
        to = dice.choice((self.p_link.name, self.d_link.name))
        kind = dice.random()
        if kind < 0.4 and self.known:  # she says that she is decode's run
            run, name, own = self.decode.party.run, dice.choice(self.known).id, self.prefill.party
            hello = Hello(run, own.namespace, list(own.parts), 0, 1 << 20)
            forged = dice.choice((Ack(run, name, 1 << 20, 3, 0), Abort(run, name, ""), Bye(run), Renew(run, name)))
            for message in (hello, forged):
                self.eve.send(self.p_link.name, encode(message), ())
            self.happened["forged"] += 1
            return
        kind = dice.random()
        if kind < 0.2 or not self.captured:
            frame = self.random_bytes(dice.randint(1, 60))
        elif kind < 0.3:
            frame = PREFIX.pack(MAGIC, MAJOR, dice.randint(1, 13), 0) + self.random_bytes(dice.randint(1, 40))
        else:
            frame = dice.choice(self.captured)
            message = decode(frame)
            if isinstance(message, (Ack, Abort, Bye)) and kind < 0.5 and hasattr(message, "transfer") and self.known:
                frame = encode(msgspec.structs.replace(message, transfer=dice.choice(self.known).id))
        if isinstance(self.quiet(frame), Hello):
            to = self.p_link.name
        self.eve.send(to, frame, ())
        self.happened["forged"] += 1
        self.eve.poll(0.0)

    @staticmethod
    def quiet(frame: bytes) -> object | None:
        try:
            return decode(frame)
        except RemoteProtocolError:
            return None

    # ---------------------------------------------------------------- claims

    def check(self, *, rows: bool) -> None:
        if rows:
            self.a_row_read_is_the_row_written_or_missing()
        prefill, decode = self.prefill, self.decode
        bounded = (
            len(prefill._transfers) <= LIMITS.transfers_max
            and len(prefill._ended) <= LIMITS.remembered_max
            and len(prefill._peers) <= LIMITS.peers_max
            and len(prefill._owned) <= LIMITS.transfers_max
            and len(prefill._ready) <= LIMITS.transfers_max
            and len(prefill._expiries) <= 2 * LIMITS.transfers_max + 1
            and len(decode._pulls) <= LIMITS.transfers_max
            and len(decode._ended) <= LIMITS.remembered_max
            and len(decode._peers) <= LIMITS.peers_max
            and len(decode._due) <= 40
            and len(decode._unsaid) <= 40
        )
        claim("tables are bounded", bounded)
        for offered in self.offers.values():
            held = all(self.p.aux.holds(f"transfer:{offered.id.hex()}", b) for b in offered.blocks)
            claim("prefill_releases_only_after_ack_or_lease_end", held == (offered.released is None), offered)
        for transfer, pull in decode._pulls.items():
            sending = prefill._transfers.get(transfer)
            if sending and (sending.run, sending.epoch) == (decode.party.run, pull.epoch):
                honest = sending.used_nbytes <= pull.granted_nbytes
                claim("no more is sent than was granted", honest or self.damaging, transfer)  # a flipped bit may grant
        if not self.damaging:
            claim("nothing is damaged by us", decode.counters.corrupt_records == 0, decode.counters)

    def a_row_read_is_the_row_written_or_missing(self) -> None:
        name = "a_row_read_is_the_row_written_or_missing"
        live = [request for request in self.d.requests if not request.given_away]
        if not live:
            return
        found = []
        for spec in SPECS:
            rows = self.d.aux.read(spec.name, range(BLOCKS))
            raw = rows.values.reshape(BLOCKS * TOKENS, -1).view(np.uint8).tobytes()
            found.append((spec, rows.valid.tolist(), raw, spec.row_nbytes))
        for request in live:
            tokens, version = request.tokens, request.version
            for p, slot in enumerate(self.d.slots(request, range(len(request.blocks) * TOKENS))):
                kv = self.d.kv[slot // TOKENS].tobytes()[slot % TOKENS * 8 : slot % TOKENS * 8 + 8]
                # rows_are_of_the_pass_that_made_the_kv: whose KV is there says whose row has to be.
                author = "P" if kv == row_of(KV, "P", tokens[: p + 1], version) else "D"
                if p < request.prompt and p not in request.own | request.again and p // TOKENS in request.rows_alone:
                    author = "P"  # its KV has not come, or never will: nothing of this position is used
                for spec, valid, raw, n in found:
                    if not valid[slot]:
                        continue
                    claim(name, p < request.computed and p not in request.stepping, f"row {p} of {request}")
                    expected = row_of(spec, author, tokens[: p + 1], version)
                    claim(name, raw[slot * n : slot * n + n] == expected, f"row {p} of {request}")
                if p < request.prompt and p // TOKENS in request.kv_from_prefill and p not in request.again:
                    claim(name, author == "P", f"KV {p} of {request}")

    def quiescent_means_nothing_in_flight(self) -> None:
        """Faults end, time passes, nobody asks for anything new: everything comes to its end."""
        self.network.faults = Faults()
        for _ in range(120):
            self.now_s += 0.9
            self.pump_prefill(1000)
            self.pump_decode(1000)
            self.eve.poll(0.0, 1000)
            if not (self.prefill.in_flight or self.decode.in_flight or self.network.flying()):
                break
        name = "quiescent_means_nothing_in_flight"
        claim(name, self.prefill.in_flight == 0, self.prefill._transfers)
        claim(name, self.decode.in_flight == 0, self.decode._pulls)
        claim(name, self.network.flying() == 0, "the network")
        for step, *_ in self.steps:
            step.abort()
        for engine in (self.p, self.d):
            for request in list(engine.requests):
                engine.end(request)
            unheld = [b for b, n in enumerate(engine.aux.reference_counts(range(BLOCKS))) if not n]
            claim("no block is lost", unheld == list(range(BLOCKS)), f"{engine.name}: {unheld}")
            claim(name, engine.aux.in_flight == 0, engine.name)
            engine.aux.assert_consistent()
        for offered in self.offers.values():
            claim(name, offered.released is not None and offered.in_link == 0, offered)

    # ---------------------------------------------------------------- one run

    ACTIONS = (
        ("pump_prefill", 32),
        ("pump_decode", 32),
        ("offer", 9),
        ("admit", 16),
        ("decode_step", 12),
        ("finish_request", 9),
        ("mallory", 6),
        ("churn", 6),
        ("abort_prefill", 1),
        ("abort_decode", 1),
        ("silence", 1),
        ("reset_prefill", 0.6),
        ("reset_decode", 0.6),
        ("crash_prefill", 0.6),
        ("crash_decode", 0.6),
        ("bye", 0.4),
    )
    RARE = ("silence", "reset_prefill", "reset_decode", "crash_prefill", "crash_decode", "bye")

    def churn(self) -> None:
        self.p.churn(self.dice)
        self.d.churn(self.dice)

    def silence(self) -> None:
        """One side stands still for longer than a lease."""
        self.now_s += LIMITS.lease_s * self.dice.choice((0.6, 1.1))

    def bye(self) -> None:
        """Decode says goodbye and starts again."""
        self.act_decode(self.decode.close())
        self.pump_decode()
        self.crash_decode()

    def run(self, steps: int) -> None:
        calm = self.dice.random() < 0.4  # runs in which nobody crashes, resets or sleeps
        names = [name for name, _ in self.ACTIONS]
        weights = [0.0 if calm and name in self.RARE else weight for name, weight in self.ACTIONS]
        try:
            for _ in range(steps):
                self.now_s += self.dice.random() * 0.4
                name = self.dice.choices(names, weights)[0]
                getattr(self, name)()
                self.check(rows=name not in ("pump_prefill", "offer", "mallory", "abort_prefill", "reset_prefill"))
            self.check(rows=True)
            self.quiescent_means_nothing_in_flight()
        except (AssertionError, KVRouteError, LookupError, ValueError) as error:
            error.add_note(f"replay with World({self.seed}).run({steps})")
            raise

"""A prefill and a decode engine with their pools, sessions and links, in one seeded run without threads or real time.

The oracle is a model that knows nothing of sessions: what each engine computed for which tokens (the position canary),
who pulled what, what was acknowledged, aborted and reset, and when the owner was last heard.
"""

from __future__ import annotations

import random
from collections import Counter
from operator import attrgetter

import msgspec
import numpy as np
from transfer_decode_side import DecodeSide
from transfer_engines import (
    BLOCKS,
    KV,
    LIMITS,
    SPECS,
    TOKENS,
    claim,
    row_of,
)
from transfer_prefill_side import PrefillSide

from cache_manager.errors import KVRouteError
from transfer.errors import RemoteProtocolError
from transfer.link import Peer
from transfer.messages import (
    MAGIC,
    MAJOR,
    PREFIX,
    Abort,
    Ack,
    Bye,
    Hello,
    Renew,
    decode,
    encode,
)
from transfer.testing.loopback import Faults, LoopbackLink, Network


class World:
    """One run. ``step`` does one random thing; every claim is checked after it."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.seed = seed
        self.now_s = 100.0
        clean = dice.random() < 0.25  # runs in which nothing is damaged: then no record may arrive damaged
        often = dice.choice((0.0, 0.03, 0.15))
        self.damaging = not clean
        self.by_reference = dice.random() < 0.5  # KV is lent from where it lies, and may change after the offer's end
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
        self.eve: LoopbackLink = self.network.endpoint("E")
        self.prefill, self.decode = PrefillSide(self), DecodeSide(self)

    def random_bytes(self, n: int) -> bytes:
        return self.dice.getrandbits(8 * n).to_bytes(n, "little")

    def on_wire(self, sender: Peer, to: Peer, control: bytes) -> None:
        if sender != b"E":
            self.captured.append(control)
            del self.captured[:-60]

    def stay_down(self) -> None:
        if self.dice.random() < 0.5:
            self.now_s += 1.0
            self.eve.poll(0.0)  # messages in flight to it are lost

    # ---------------------------------------------------------------- a third peer

    def mallory(self) -> None:
        """Replays, forgeries and garbage under a name of her own."""
        dice = self.dice
        to = dice.choice((self.prefill.link.name, self.decode.link.name))
        kind = dice.random()
        if kind < 0.4 and self.prefill.known:  # she says that she is decode's run
            run, own = self.decode.session.identity.boot_id, self.prefill.session.identity
            name = dice.choice(self.prefill.known).id
            hello = Hello(run, own.space, list(own.parts))
            forged = dice.choice((Ack(run, name), Abort(run, name, ""), Bye(run), Renew(run, name)))
            for message in (hello, forged):
                self.eve.send(self.prefill.link.name, encode(message), ())
            self.happened["forged"] += 1
            return
        kind = dice.random()
        if kind < 0.2 or not self.captured:
            frame = self.random_bytes(dice.randint(1, 60))
        elif kind < 0.3:
            frame = PREFIX.pack(MAGIC, MAJOR, dice.randint(1, 12), 0) + self.random_bytes(dice.randint(1, 40))
        else:
            frame = dice.choice(self.captured)
            message = decode(frame)
            if (
                isinstance(message, (Ack, Abort, Bye))
                and kind < 0.5
                and hasattr(message, "transfer")
                and self.prefill.known
            ):
                frame = encode(msgspec.structs.replace(message, transfer=dice.choice(self.prefill.known).id))
        if isinstance(self.quiet(frame), Hello):
            to = self.prefill.link.name
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
        prefill, decode = self.prefill.session, self.decode.session
        bounded = (
            prefill.in_flight <= LIMITS.transfers_max
            and len(prefill._early) <= LIMITS.transfers_max
            and len(prefill._ended) <= LIMITS.remembered_max
            and len(prefill._runs) <= LIMITS.peers_max
            and len(prefill._ready) <= LIMITS.transfers_max
            and len(decode._pulls) <= 2 * LIMITS.transfers_max
            and len(decode._ended) <= LIMITS.remembered_max
            and len(decode._peers) <= LIMITS.peers_max
        )
        claim("tables are bounded", bounded)
        for offered in self.prefill.offers.values():
            held = f"transfer:{offered.id.hex()}" in self.prefill.engine.held
            claim(
                "kv_lent_by_reference_is_held_until_acknowledged_or_expired",
                held == (offered.released is None),
                offered,
            )
        if not (self.damaging or self.by_reference):
            claim("nothing is damaged by us", decode.counters.corrupt_records == 0, decode.counters)

    def a_row_read_is_the_row_written_or_missing(self) -> None:
        name = "a_row_read_is_the_row_written_or_missing"
        live = [request for request in self.decode.engine.requests if not request.given_away]
        if not live:
            return
        found = []
        for spec in SPECS:
            rows = self.decode.engine.aux.read(spec.name, range(BLOCKS))
            raw = rows.values.reshape(BLOCKS * TOKENS, -1).view(np.uint8).tobytes()
            found.append((spec, rows.valid.tolist(), raw, spec.row_nbytes))
        for request in live:
            tokens, version = request.tokens, request.version
            for p, slot in enumerate(self.decode.engine.slots(request, range(len(request.blocks) * TOKENS))):
                kv = self.decode.engine.kv[slot // TOKENS].tobytes()[slot % TOKENS * 8 : slot % TOKENS * 8 + 8]
                # rows_are_of_the_pass_that_made_the_kv: the engine that made the KV has to be that of the row.
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
        """Faults end, time passes, no new requests come: everything comes to its end."""
        self.network.faults = Faults()
        for _ in range(120):
            self.now_s += 0.9
            self.prefill.pump(1000)
            self.decode.pump(1000)
            self.eve.poll(0.0, 1000)
            busy = self.prefill.session._offers or self.prefill.session._early or self.decode.session._pulls
            if not (busy or self.network.flying()):
                break
        name = "quiescent_means_nothing_in_flight"
        claim(name, self.prefill.session.in_flight == 0, self.prefill.session._offers)
        claim(name, not self.decode.session._pulls, self.decode.session._pulls)
        claim(name, self.network.flying() == 0, "the network")
        for step, *_ in self.decode.steps:
            step.abort()
        for drawn in self.prefill.drawn:
            self.prefill.engine.free(f"transfer:{drawn.id.hex()}")
        for engine in (self.prefill.engine, self.decode.engine):
            for request in list(engine.requests):
                engine.end(request)
            claim("no block is lost", not engine.held, f"{engine.name}: {engine.held}")
            claim(name, engine.aux.in_flight == 0, engine.name)
            engine.aux.assert_consistent()
        for offered in self.prefill.offers.values():
            claim(name, offered.released is not None, offered)

    # ---------------------------------------------------------------- one run

    ACTIONS = (
        ("prefill.pump", 32),
        ("decode.pump", 32),
        ("prefill.offer", 9),
        ("prefill.grow", 12),
        ("decode.admit", 16),
        ("decode.step", 12),
        ("decode.finish", 9),
        ("mallory", 6),
        ("churn", 6),
        ("prefill.abort", 1),
        ("decode.abort", 1),
        ("silence", 1),
        ("prefill.reset", 0.6),
        ("decode.reset", 0.6),
        ("prefill.crash", 0.6),
        ("decode.crash", 0.6),
        ("bye", 0.4),
    )
    RARE = ("silence", "prefill.reset", "decode.reset", "prefill.crash", "decode.crash", "bye")

    def churn(self) -> None:
        self.prefill.engine.churn(self.dice)
        self.decode.engine.churn(self.dice)

    def silence(self) -> None:
        """One side stands still for longer than a lease."""
        self.now_s += LIMITS.lease_s * self.dice.choice((0.6, 1.1))

    def bye(self) -> None:
        """Decode says goodbye and starts again."""
        self.decode.act(self.decode.session.close())
        self.decode.pump()
        self.decode.crash()

    def run(self, steps: int) -> None:
        calm = self.dice.random() < 0.4  # runs in which no side crashes, resets or sleeps
        names = [name for name, _ in self.ACTIONS]
        weights = [0.0 if calm and name in self.RARE else weight for name, weight in self.ACTIONS]
        try:
            for _ in range(steps):
                self.now_s += self.dice.random() * 0.4
                name = self.dice.choices(names, weights)[0]
                attrgetter(name)(self)()
                self.check(rows=name == "prefill.crash" or not name.startswith(("prefill.", "mallory")))
            self.check(rows=True)
            self.quiescent_means_nothing_in_flight()
        except (AssertionError, KVRouteError, LookupError, ValueError) as error:
            error.add_note(f"replay with World({self.seed}).run({steps})")
            raise

"""A prefill and a decode session and the links between them, in one seeded run without threads or real time.

The oracle is a model that knows nothing of sessions: which bytes are of which prompt, weights and block, who pulled
what, what was acknowledged, aborted and reset, and when the owner was last heard.
"""

from __future__ import annotations

import random
from collections import Counter
from operator import attrgetter

import msgspec
from transfer_sides import HELD, LIMITS, DecodeSide, PrefillSide, claim

import transfer.messages as wire
from cache_manager.errors import KVRouteError
from transfer.link import Peer
from transfer.messages import KINDS, MAGIC, MAJOR, PREFIX, decode, encode
from transfer.testing.loopback import Faults, LoopbackLink, Network


class World:
    """One run. Each step does one random thing; every claim is checked after it."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.seed = seed
        self.now_s = 100.0
        clean = dice.random() < 0.25  # runs in which nothing is damaged: then no record may arrive damaged
        often = dice.choice((0.0, 0.03, 0.15))
        self.damaging = not clean
        self.by_reference = dice.random() < 0.5  # KV is lent from where it lies, and changes after the offer's end
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
        self.version = self.number = 1
        self.happened: Counter[str] = Counter()
        self.eve: LoopbackLink = self.network.endpoint("E")
        self.prefill, self.decode = PrefillSide(self), DecodeSide(self)

    def random_bytes(self, n: int) -> bytes:
        return self.dice.getrandbits(8 * n).to_bytes(n, "little")

    def next(self) -> int:
        self.number += 1
        return self.number

    def on_wire(self, sender: Peer, to: Peer, control: bytes) -> None:
        if sender != b"E":
            self.captured.append(control)
            del self.captured[:-60]

    def stay_down(self) -> None:
        if self.dice.random() < 0.5:
            self.now_s += 1.0
            self.eve.poll()  # messages in flight to it are lost

    # ---------------------------------------------------------------- a third peer

    def mallory(self) -> None:
        """Replays, forgeries and garbage under a name of her own."""
        dice, known, kind = self.dice, self.prefill.known, self.dice.random()
        to = dice.choice((self.prefill.link.name, self.decode.link.name))
        self.happened["forged"] += 1
        if kind < 0.4 and known:  # she says that she is decode's run
            run = self.decode.session.identity.boot_id
            name = dice.choice(known).id
            forged = (wire.Ack(run, name), wire.Abort(run, name, ""), wire.Bye(run), wire.Renew(run, name))
            self.eve.send(self.prefill.link.name, encode(dice.choice(forged)), ())
            return
        kind = dice.random()
        if kind < 0.2 or not self.captured:
            frame = self.random_bytes(dice.randint(1, 60))
        elif kind < 0.3:
            frame = PREFIX.pack(MAGIC, MAJOR, dice.randint(1, len(KINDS)), 0) + self.random_bytes(dice.randint(1, 40))
        else:
            frame = dice.choice(self.captured)
            message = decode(frame)
            if isinstance(message, wire.Ack | wire.Abort) and kind < 0.5 and known:
                frame = encode(msgspec.structs.replace(message, transfer=dice.choice(known).id))
        self.eve.send(to, frame, ())
        self.eve.poll()

    # ---------------------------------------------------------------- claims

    def check(self) -> None:
        prefill, decode = self.prefill.session, self.decode.session
        bounded = (
            prefill.in_flight <= LIMITS.transfers_max
            and len(prefill._early) <= LIMITS.transfers_max
            and len(prefill._ended) <= LIMITS.remembered_max
            and len(prefill._stalled) <= LIMITS.transfers_max
            and len(prefill._ready) <= LIMITS.transfers_max
            and len(decode._pulls) <= 2 * LIMITS.transfers_max
            and len(decode._ended) <= LIMITS.remembered_max
        )
        claim("tables are bounded", bounded)
        live = {offered.id for offered in self.prefill.offers.values() if offered.released is None}
        claim(HELD, live == prefill._offers.keys(), live)
        if not (self.damaging or self.by_reference):
            claim("nothing is damaged by us", decode.counters.corrupt_records == 0, decode.counters)

    def quiescent_means_nothing_in_flight(self) -> None:
        """Faults end, time passes, no new requests come: everything comes to its end."""
        self.network.faults = Faults()
        for _ in range(120):
            self.now_s += 0.9
            self.prefill.pump(1000)
            self.decode.pump(1000)
            self.eve.poll(1000)
            busy = self.prefill.session._offers or self.prefill.session._early or self.decode.session._pulls
            if not (busy or self.network.flying()):
                break
        name = "quiescent_means_nothing_in_flight"
        claim(name, self.prefill.session.in_flight == 0, self.prefill.session._offers)
        claim(name, not self.decode.session._pulls, self.decode.session._pulls)
        claim(name, self.network.flying() == 0, "the network")
        claim(name, all(offered.released for offered in self.prefill.offers.values()), "an offer was not released")
        claim(name, all(pull.finished for pull in self.decode.pulls.values()), "a pull has not finished")

    # ---------------------------------------------------------------- one run

    ACTIONS = (
        ("prefill.pump", 32),
        ("decode.pump", 32),
        ("prefill.offer", 9),
        ("prefill.grow", 12),
        ("decode.admit", 16),
        ("decode.finish", 3),
        ("mallory", 6),
        ("prefill.abort", 1),
        ("silence", 1),
        ("prefill.reset", 0.6),
        ("decode.reset", 0.6),
        ("prefill.crash", 0.6),
        ("decode.crash", 0.6),
        ("bye", 0.4),
    )
    RARE = ("silence", "prefill.reset", "decode.reset", "prefill.crash", "decode.crash", "bye")

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
                attrgetter(self.dice.choices(names, weights)[0])(self)()
                self.check()
            self.quiescent_means_nothing_in_flight()
        except (AssertionError, KVRouteError, LookupError, ValueError) as error:
            error.add_note(f"replay with World({self.seed}).run({steps})")
            raise

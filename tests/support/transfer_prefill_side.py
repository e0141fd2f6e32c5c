"""The prefill side of the simulated world of transfers: an engine, a session and a link, and what the model expects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from transfer_engines import (
    KV_PART,
    LIMITS,
    TOKENS,
    Engine,
    Offered,
    Request,
    claim,
)

from cache_manager.record import OfferedRecord
from transfer.actions import Cut, OfferedBlock, Release, Send
from transfer.counters import Counters
from transfer.errors import NodeFullError, RemoteProtocolError
from transfer.identity import Identity
from transfer.link import Peer, PeerLost
from transfer.messages import (
    Abort,
    Ack,
    BootId,
    Bye,
    Gone,
    Outcome,
    Pull,
    Refuse,
    ToOffers,
    TransferId,
    decode,
    encode,
)
from transfer.offers import Offers

if TYPE_CHECKING:
    from transfer_world import World


class PrefillSide:
    def __init__(self, world: World) -> None:
        self.world, self.dice = world, world.dice
        self.offers: dict[TransferId, Offered] = {}
        self.known: list[Offered] = []  # requests that the router may send to decode
        self.start()

    def start(self) -> None:
        self.engine = Engine("P", self.world.version)
        namespace, boot_id = self.engine.aux.namespace, BootId(self.world.random_bytes(16))
        self.drawn: list[Offered] = []  # ids that decode may know, and that are still to be offered
        self.session = Offers(Identity(boot_id, namespace, self.engine.parts), LIMITS, Counters())
        self.link = self.world.network.endpoint("P")

    def crash(self) -> None:
        self.world.happened["crash prefill"] += 1
        self.world.network.crash("P")
        self.world.stay_down()
        self.offers.clear()
        self.start()

    def offer(self) -> None:
        dice = self.dice
        tokens = tuple(dice.randrange(3) for _ in range(dice.randint(1, 3 * TOKENS - 1)))
        request = self.engine.admit(tokens, dice.choice((0, 1)), dice)
        if request is None:
            self.world.happened["prefill pool full"] += 1
            return
        whole = dice.random() < 0.85
        hole = None if whole else dice.randrange(len(request.keys))
        step = self.engine.compute(request, 0, len(tokens))
        keep = np.array([hole is None or p // TOKENS != hole for p in range(len(tokens))])
        step.commit(keep)
        transfer = TransferId(self.world.random_bytes(16))
        owner = f"transfer:{transfer.hex()}"
        prompt = request.blocks[: len(request.keys)]
        self.engine.held[owner] = prompt
        counts = [min(TOKENS, len(tokens) - i * TOKENS) for i in range(len(prompt))]
        further = dice.choice((None, "before", "after")) if len(request.blocks) * TOKENS > len(tokens) else None
        if further == "before":  # prefill has gone on in the partial block: those rows belong to another key
            self.go_on(request)
        aux = self.engine.aux
        rows = aux.export(dict(zip(request.keys, prompt, strict=True)), aux.generations(prompt), counts)
        origins, blocks = self.engine.aux.origins(prompt), []
        for i, (key, block) in enumerate(zip(request.keys, prompt, strict=True)):
            by_reference = counts[i] == TOKENS and self.world.by_reference
            memory = self.engine.kv[block].data if by_reference else bytes(self.engine.kv[block])
            kv = OfferedRecord(key, KV_PART.fingerprint, 0, origins[i], b"\x0f" + bytes(7), memory)
            blocks.append(OfferedBlock(i, key, (rows[i], kv if i != hole else None)))
        if further == "after":
            self.go_on(request)
        offered = Offered(transfer, tokens, request.version, prompt, 0.0, whole)
        offered.rest, offered.open = blocks, dice.random() < 0.4
        self.drawn.append(offered)
        if dice.random() < 0.3:  # decode is told of it first
            self.known = [*self.known[-7:], offered]
        else:
            self.lend(offered)
        if dice.random() < 0.8:
            self.engine.end(request)

    def lend(self, offered: Offered) -> None:
        """Offer what was drawn, with all blocks or the first few."""
        self.drawn.remove(offered)
        now_s, lease_s = self.world.now_s, self.dice.choice((None, 3.0))
        first = self.dice.randint(0, len(offered.rest)) if offered.open else len(offered.rest)
        blocks, offered.rest = offered.rest[:first], offered.rest[first:]
        try:
            actions = self.session.offer(offered.id, blocks, now_s, is_open=offered.open, lease_s=lease_s)
        except NodeFullError:
            self.world.happened["prefill table full"] += 1
            self.engine.free(f"transfer:{offered.id.hex()}")
            return
        offered.at_s = offered.heard_s = now_s
        if lease_s:
            offered.heard_s -= LIMITS.lease_s - lease_s
        self.offers[offered.id] = offered
        if offered not in self.known:
            self.known = [*self.known[-7:], offered]
        self.act(actions)

    def grow(self) -> None:
        """A step filled another block, or the prompt is done."""
        if self.drawn and self.dice.random() < 0.5:
            self.lend(self.drawn[0])
            return
        live = [o for o in self.offers.values() if o.open and o.released is None]
        if not live:
            return
        offered = self.dice.choice(live)
        offered.heard_s = self.world.now_s
        if offered.rest:
            self.act(self.session.grow(offered.id, [offered.rest.pop(0)], self.world.now_s))
            self.world.happened["grown"] += 1
        else:
            offered.open = False
            self.act(self.session.seal(offered.id, self.world.now_s))

    def go_on(self, request: Request) -> None:
        at = len(request.tokens)
        request.tokens += (7,)
        self.engine.compute(request, at, at + 1).commit()

    def abort(self) -> None:
        live = [o for o in self.offers.values() if o.released is None]
        if live:
            chosen = self.dice.choice(live)
            chosen.aborted = True
            self.act(self.session.withdraw(chosen.id))

    def reset(self) -> None:
        self.world.version = max(self.world.version, self.engine.version + 1)
        self.engine.version = self.world.version
        self.engine.aux.reset(weights_version=self.world.version)
        for offered in self.offers.values():
            offered.reset = True
        while self.drawn:
            self.engine.free(f"transfer:{self.drawn.pop().id.hex()}")
        self.act(self.session.reset(self.engine.aux.namespace))
        for request in list(self.engine.requests):
            self.engine.end(request)
        self.world.happened["reset prefill"] += 1

    def pump(self, limit: int = 8) -> None:
        for item in self.link.poll(0.0, limit):
            if isinstance(item, PeerLost):
                self.session.peer_lost(item.peer)
                continue
            before = self.heard(item.peer, item.control)
            if not isinstance(before, ToOffers | Bye):
                self.world.happened["P bad message"] += 1
                continue
            actions = self.session.receive(item.peer, before, self.world.now_s)
            if not any(isinstance(a, Send) and isinstance(a.message, Refuse | Gone) for a in actions):
                self.believe(item.peer, before)
            self.act(actions)
            item.release()
        self.act(self.session.tick(self.world.now_s))
        while (send := self.session.next_records()) is not None:
            self.act([send])

    def heard(self, peer: Peer, control: bytes) -> object | None:
        try:
            message = decode(control)
        except RemoteProtocolError:
            return None
        if isinstance(message, (Ack, Abort)):  # what the session may conclude from it, if it is the owner's
            offered = self.offers.get(TransferId(message.transfer))
            if offered and offered.released is None and offered.owner in (None, (peer, message.boot_id)):
                offered.acked |= isinstance(message, Ack)
                offered.aborted |= isinstance(message, Abort)
        if isinstance(message, Bye):
            for offered in self.offers.values():
                offered.aborted |= offered.owner == (peer, message.boot_id)
        return message

    def believe(self, peer: Peer, message: object) -> None:
        offered = self.offers.get(getattr(message, "transfer", b""))
        if offered is None:
            return
        if isinstance(message, Pull) and offered.owner is None:
            offered.owner = peer, message.boot_id
        over = offered.id not in self.session._offers
        if not over and offered.owner == (peer, getattr(message, "boot_id", None)):
            offered.heard_s = self.world.now_s

    def act(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, Release):
                self.release(action)
            elif isinstance(action, Cut):
                self.link.cut(action.peer)
            else:
                assert isinstance(action, Send)
                if not self.link.send(action.peer, encode(action.message), action.bulk):
                    self.session.unsent(action, self.world.now_s)

    def release(self, action: Release) -> None:
        offered = self.offers[action.transfer]
        outcome, name = action.outcome, "kv_lent_by_reference_is_held_until_acknowledged_or_expired"
        claim("released once", offered.released is None, offered)
        silent_s, age_s = self.world.now_s - offered.heard_s, self.world.now_s - offered.at_s
        legitimate = {
            Outcome.ACKED: offered.acked,
            Outcome.ABORTED: offered.aborted,
            Outcome.RESET: offered.reset,
            Outcome.EXPIRED: silent_s >= LIMITS.lease_s - 1e-6 or age_s >= LIMITS.lease_max_s - 1e-6,
        }
        claim(name, legitimate[outcome], f"{outcome} of {offered} at {self.world.now_s}")
        offered.released = outcome
        self.world.happened[f"released {outcome.value}"] += 1
        self.engine.free(f"transfer:{action.transfer.hex()}")

"""The decode side of the simulated world of transfers: an engine, a session and a link, and what the model expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from transfer_engines import (
    KV,
    KV_INDEX,
    LIMITS,
    ROUTING,
    ROWS,
    TOKENS,
    Engine,
    Request,
    claim,
)

from cache_manager.errors import BlockBusyError
from cache_manager.record import RecordHeader
from transfer.actions import Finished, Send, WantedBlock
from transfer.counters import Counters
from transfer.errors import LocalProtocolError, NodeFullError, RemoteProtocolError
from transfer.identity import Identity
from transfer.link import PeerLost
from transfer.messages import (
    Ack,
    BootId,
    Bye,
    ToPulls,
    TransferId,
    decode,
    encode,
)
from transfer.pulls import Pulls

if TYPE_CHECKING:
    from transfer_world import World


@dataclass
class Landing:
    """Where the records of a pull go."""

    side: DecodeSide
    transfer: TransferId

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        return self.side.install(self.transfer, part, index, header, payload)


class DecodeSide:
    def __init__(self, world: World) -> None:
        self.world, self.dice = world, world.dice
        self.steps: list[tuple[object, Request, int, int]] = []
        self.taken: set[tuple[int, bytes, int, int]] = set()  # pull number, transfer, part, index: installed
        self.pulls = 0
        self.finished: set[int] = set()
        self.start()

    def start(self) -> None:
        self.engine = Engine("D", self.world.version)
        namespace, boot_id = self.engine.aux.namespace, BootId(self.world.random_bytes(16))
        self.session = Pulls(Identity(boot_id, namespace, self.engine.parts), LIMITS, Counters())
        self.link = self.world.network.endpoint("D")
        self.peer = self.link.connect("loopback://P")
        self.pull_of: dict[TransferId, tuple[int, Request]] = {}

    def crash(self) -> None:
        self.world.happened["crash decode"] += 1
        self.world.network.crash("D")
        self.world.stay_down()
        self.steps.clear()
        self.start()

    def admit(self) -> None:
        dice = self.dice
        if not self.world.prefill.known:
            return
        new = [o for o in self.world.prefill.known if o.id not in self.pull_of]
        if dice.random() < 0.1:
            new = self.world.prefill.known  # again, or of a prefill that is gone
        if not new:
            return
        offered = dice.choice(new)
        tokens, wrong = offered.tokens, dice.random() < 0.05
        if wrong:  # another prompt under this transfer: its keys differ
            tokens = (5, *tokens[1:])
        request = self.engine.admit(tokens, dice.randint(0, TOKENS), dice)
        if request is None:
            self.world.happened["decode pool full"] += 1
            return
        request.wrong_prompt = wrong
        prefix = dice.choice((0, 0, 0, 0, 0, 1, 1, len(request.keys)))
        own = min(prefix * TOKENS, len(tokens))
        if own:  # found in decode's own prefix cache: its rows win
            self.engine.compute(request, 0, own).commit()
            request.own.update(range(own))
        request.computed = len(tokens)
        request.wanted = {i: (ROWS, KV_INDEX) for i in range(len(request.keys)) if i * TOKENS >= own}
        wanted = [WantedBlock(i, request.keys[i], parts) for i, parts in request.wanted.items()]
        try:
            actions = self.session.pull(self.peer, offered.id, wanted, Landing(self, offered.id), self.world.now_s)
        except LocalProtocolError:
            claim("a pull is refused only when it was pulled before", offered.id in self.pull_of, offered)
            self.world.happened["pulled before"] += 1
            self.engine.end(request)
            return
        except NodeFullError:
            self.world.happened["decode table full"] += 1
            self.engine.end(request)
            return
        request.pull = offered.id
        self.pulls += 1
        self.pull_of[offered.id] = self.pulls, request
        if request.blocks:
            self.engine.held[f"pull:{offered.id.hex()}"] = request.blocks[: len(request.keys)]
        self.act(actions)

    def abort(self) -> None:
        flying = [r for r in self.engine.requests if r.pull]
        if flying:
            chosen = self.dice.choice(flying)
            self.act(self.session.abort(chosen.pull))

    def reset(self) -> None:
        self.world.version = max(self.world.version, self.engine.version + 1)
        self.engine.version = self.world.version
        self.engine.aux.reset(weights_version=self.world.version)
        for request in list(self.engine.requests):
            request.given_away = True
        self.act(self.session.reset(self.engine.aux.namespace))
        for request in list(self.engine.requests):
            self.engine.end(request)
        self.world.happened["reset decode"] += 1

    def step(self) -> None:
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
        asked = [r for r in self.engine.requests if r.pull and r.kv_from_prefill and not r.stepping]
        if asked and dice.random() < 0.3:  # decode computes again what has come: its own wins
            request = dice.choice(asked)
            p = dice.choice([p for p in range(request.prompt) if p // TOKENS in request.kv_from_prefill])
            self.steps.append((self.engine.compute(request, p, p + 1), request, p, p + 1))
            request.stepping.add(p)
            request.again.add(p)
            request.own.discard(p)
            self.world.happened["computed though asked for"] += 1
            return
        able = [r for r in self.engine.requests if r.computed < len(r.blocks) * TOKENS]
        if able and len(self.steps) < 4:
            request = dice.choice(able)
            start = request.computed
            request.tokens = (*request.tokens[:start], dice.randrange(3))
            self.steps.append((self.engine.compute(request, start, start + 1), request, start, start + 1))
            request.stepping.add(start)
            request.computed += 1
            self.world.happened["step during pull" if request.pull else "step"] += 1

    def finish(self) -> None:
        idle = [r for r in self.engine.requests if not any(s[1] is r for s in self.steps)]
        if not idle:
            return
        request = self.dice.choice(idle)
        if request.pull and self.dice.random() < 0.5:  # an engine that does not keep its promise
            self.engine.free(f"pull:{request.pull.hex()}")
            self.world.happened["landing blocks given away"] += 1
            request.given_away = True
            self.engine.end(request)
            self.admit()  # another request gets them at once
            return
        elif request.pull:
            self.act(self.session.abort(request.pull))
        self.engine.end(request)

    def pump(self, limit: int = 8) -> None:
        for item in self.link.poll(0.0, limit):
            if isinstance(item, PeerLost):
                self.session.peer_lost(item.peer)
                continue
            try:
                message = decode(item.control)
                if not isinstance(message, ToPulls | Bye):
                    raise RemoteProtocolError("a message for prefill")
                self.act(self.session.receive(item.peer, message, item.bulk, self.world.now_s))
            except RemoteProtocolError:
                self.world.happened["D bad message"] += 1
            item.release()
        self.act(self.session.tick(self.world.now_s))

    def act(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, Finished):
                self.on_finished(action)
            else:
                assert isinstance(action, Send)
                if isinstance(action.message, Ack):
                    self.on_ack(action.message)
                if not self.link.send(action.peer, encode(action.message), action.bulk):
                    self.session.unsent(action, self.world.now_s)

    def install(self, transfer: TransferId, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        number, request = self.pull_of[transfer]
        once = number, transfer, part, index
        claim("installed_once_per_transfer", once not in self.taken, once)
        claim("nothing is installed after the end", number not in self.finished, once)
        if self.dice.random() < 0.03:
            raise BlockBusyError("block", "one at rest", "one in motion")
        self.taken.add(once)
        block = request.blocks[index]
        generation = request.generations[index]
        if part == ROWS:
            ok = self.engine.aux.install(block, generation, header, payload) > 0
            if ok:
                request.rows_from_prefill.add(index)
        else:
            tokens = min(TOKENS, request.prompt - index * TOKENS)
            ok = self.engine.aux.bind_origin(block, generation, header.origin, tokens)
            if ok:
                end = tokens * KV.row_nbytes
                self.engine.kv[block][:end] = np.frombuffer(payload, np.uint8)[:end]
                request.kv_from_prefill.add(index)
        self.world.happened["installed" if ok else "stale"] += 1
        return ok

    def on_ack(self, ack: Ack) -> None:
        number, _ = self.pull_of[TransferId(ack.transfer)]
        claim("the ack follows the last installation", number in self.finished, ack)

    def on_finished(self, result: Finished) -> None:
        transfer = result.transfer
        number, request = self.pull_of[transfer]
        claim("finished once", number not in self.finished, transfer)
        self.finished.add(number)
        missing = {(m.part, m.index) for m in result.missing}
        wanted = {(part, i) for i, parts in request.wanted.items() for part in parts}
        claim("every wanted record is in place or missing", missing <= wanted, result)
        claim("every wanted record is in place or missing", result.installed + len(missing) == len(wanted), result)
        if not request.given_away and request in self.engine.requests:
            in_place = {i for part, i in wanted - missing if part == ROWS}
            claim("what is not reported missing is in place", in_place == request.rows_from_prefill, result)
            kv = {i for part, i in wanted - missing if part == KV_INDEX}
            claim("what is not reported missing is in place", kv == request.kv_from_prefill, result)
            readable = self.engine.aux.read(ROUTING.name, request.blocks).valid[: request.prompt]
            readable[list(request.again)] = True
            there = all(readable[i * TOKENS : (i + 1) * TOKENS].all() for i in in_place)
            claim("what is not reported missing is in place", there, result)
        self.world.happened[f"pull {result.reason.value if result.reason else 'done'}"] += 1
        self.world.happened["complete pull"] += result.complete and bool(wanted)
        self.engine.free(f"pull:{transfer.hex()}")
        request.pull = None

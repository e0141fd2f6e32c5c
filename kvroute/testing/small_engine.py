"""A small paged engine that drives both ends of a connector, for the contract in :mod:`kvroute.testing.connector`.

It runs several requests at once, a chunk of each in a step, over a pool of blocks with a prefix cache; it preempts the
youngest request when blocks are short, and loads KV that others have left outside. Its KV is a function of the tokens
and of the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from cache_manager.keys import Namespace
from kvroute.connector import Engine, Key, Limits, SchedulerRows, Settings, Tokens
from kvroute.connector.carriers import ByKey, Carrier, NoCarrier
from kvroute.connector.worker import WorkerRows
from kvroute.testing.connector import BLOCK_TOKENS, FIRST_VERSION, ROUTER_LAYERS, Routers, routers_spec

CHUNK: Final = 7
"""Tokens that a step computes of a request at most."""
ANSWER_S: Final = 60.0


@dataclass(slots=True, eq=False)
class SmallRequest:
    """A request, under the names that the connector asks for."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    new: int
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    loads: int = 0  # blocks behind those of a hit, whose KV its next step loads

    @property
    def block_hashes(self) -> list[bytes]:
        ends = range(BLOCK_TOKENS, len(self.all_token_ids) + 1, BLOCK_TOKENS)
        return [hashlib.sha256(bytes(self.all_token_ids[:end])).digest() for end in ends]


class SmallEngine:
    """See :class:`~kvroute.testing.connector.LoadingEngine`. If ``late``, what steps leave to the host is done on a
    thread behind them, as beside a device. If ``later``, KV from outside comes between steps, and not in one."""

    def __init__(
        self,
        routers: Routers,
        settings: Mapping[str, Any],
        outside: dict[bytes, Any] | None = None,
        *,
        blocks: int = 16,
        late: bool = False,
        later: bool = False,
    ) -> None:
        self._routers = routers
        self._outside = outside
        self._later = later
        self._spec = routers_spec()
        chosen = Settings.of({"strict": True, **settings})
        carrier: Carrier = NoCarrier()
        if chosen.store:
            carrier = ByKey("flagged" if chosen.witness == "flagged" else "missing")
        engine = Engine(
            chosen,
            self._spec,
            Namespace("small", weights_version=FIRST_VERSION),
            blocks=blocks,
            max_tokens=blocks * BLOCK_TOKENS,
            carrier=carrier,
            limits=Limits(question_s=ANSWER_S),
        )
        self._kv = {f"layers.{layer}": torch.zeros(blocks, 1, BLOCK_TOKENS, 8) for layer in range(ROUTER_LAYERS)}
        self._worker = WorkerRows(engine, self._kv, late=late)
        self._hooks = [self._worker.ids.hook(layer) for layer in range(ROUTER_LAYERS)]
        self._rows = SchedulerRows(engine)
        self._rows.attach(self._worker.handshake())
        self._rows.blocks_of = lambda name, first, last: self._requests[name].blocks[first:last]
        self._free = list(range(blocks))
        self._users = [0] * blocks
        self._cached = dict[bytes, int]()  # blocks by the hash of all tokens up to their end
        self._requests = dict[str, SmallRequest]()  # in the order in which they came
        self._answers = dict[str, tuple[SmallRequest, Future[dict[str, Any]] | None]]()
        self._fails = False

    # ---------------------------------------------------------------- requests

    def arrive(self, name: str, prompt: Sequence[int], new: int) -> None:
        self._rows.begins(Key(name))
        self._requests[name] = SmallRequest(name, list(prompt), len(prompt), new)

    def preempt(self, name: str) -> None:
        request = self._requests.get(name)
        if request is None or not request.blocks:
            return
        self._rows.preempted(request)  # while it still has its blocks
        self._let_go(request)
        request.num_computed_tokens = 0

    def abort(self, name: str) -> None:
        request = self._requests.get(name)
        if request is not None:
            self._rows.unanswered(self._rows.forget(name), Key(name))
            self._over(request)

    def _finish(self, request: SmallRequest) -> None:
        name, tokens = request.request_id, request.all_token_ids
        ended = self._rows.forget(name)
        bound_to = Tokens(list(tokens), request.num_prompt_tokens)
        data = self._rows.finished(Key(name), request.blocks, request.num_computed_tokens, bound_to, ended=ended)
        self._answers[name] = request, data
        self._over(request)

    def _over(self, request: SmallRequest) -> None:
        self._let_go(request)
        del self._requests[request.request_id]

    def answers(self) -> dict[str, Any]:
        answers, self._answers = self._answers, {}
        return {name: self._answer(request, data) for name, (request, data) in answers.items()}

    def _answer(
        self,
        request: SmallRequest,
        data: Future[dict[str, Any]] | None,
    ) -> dict[str, Any]:
        prompt = request.num_prompt_tokens
        choice = {
            "index": 0,
            "prompt_token_ids": request.all_token_ids[:prompt],
            "token_ids": request.all_token_ids[prompt:],
        }
        transfer = None if data is None else data.result(ANSWER_S)
        return {"id": request.request_id, "choices": [choice], "kv_transfer_params": transfer}

    # ---------------------------------------------------------------- blocks

    def _take(self, count: int) -> list[int] | None:
        """So many free blocks, whose content is forgotten; ``None``: there are fewer."""
        if count > len(self._free):
            return None
        blocks, self._free = self._free[:count], self._free[count:]
        self._cached = {digest: block for digest, block in self._cached.items() if block not in blocks}
        for block in blocks:
            self._users[block] = 1
        if blocks:
            self._rows.given(blocks)
        return blocks

    def _let_go(self, request: SmallRequest) -> None:
        for block in reversed(request.blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)
        request.blocks = []
        request.loads = 0

    def _admit(self, request: SmallRequest) -> bool:
        """Give the request its blocks: those of a hit, those of KV from outside, and new ones."""
        size = len(request.all_token_ids)
        hashes = request.block_hashes[: (size - 1) // BLOCK_TOKENS]  # the last token is always computed
        hits = _leading(hashes, self._cached)
        blocks = [self._cached[digest] for digest in hashes[:hits]]
        count = -(-size // BLOCK_TOKENS) - hits
        if count + sum(not self._users[block] for block in blocks) > len(self._free):
            return False
        local = hits * BLOCK_TOKENS
        outside = _leading(hashes[hits:], self._outside or {}) * BLOCK_TOKENS
        external = self._rows.matched(request, local, outside, later=self._later)
        for block in blocks:
            if not self._users[block]:
                self._free.remove(block)
            self._users[block] += 1
        request.blocks = blocks + (self._take(count) or [])
        self._rows.admitted(request, list(request.blocks), external)
        request.num_computed_tokens = local + external
        request.loads = external // BLOCK_TOKENS
        if request.loads and self._later:
            self._load_between_steps(request)
        return True

    def _load_between_steps(self, request: SmallRequest) -> None:
        """A step of no tokens begins the load; the request goes on when its KV and its rows have come."""
        name = request.request_id
        self._worker.begin(self._rows.step({}))
        failed = self._load([request])
        self._worker.fail(failed)
        self._worker.end()
        assert self._worker.failures() == failed
        assert self._worker.arrived({name}, {name} if failed else frozenset()) == {name}
        self._rows.loaded(name)
        self._rows.admitted(request, list(request.blocks), 0)
        self._go_back(request, failed)

    # ---------------------------------------------------------------- a step

    def step(self) -> bool:
        scheduled = dict[str, int]()
        for name, request in list(self._requests.items()):
            if not request.blocks and not self._admit(request):
                break  # in the order in which they came
            count = min(CHUNK, len(request.all_token_ids) - request.num_computed_tokens)
            lacking = -(-(request.num_computed_tokens + count) // BLOCK_TOKENS) - len(request.blocks)
            while (blocks := self._take(lacking)) is None:
                youngest = next(other for other in reversed(self._requests) if self._requests[other].blocks)
                scheduled.pop(youngest, None)
                self.preempt(youngest)
                if youngest == name:
                    break
            if blocks is not None:
                request.blocks += blocks
                scheduled[name] = count
        if scheduled:
            self._compute(scheduled)
        return bool(self._requests)

    def _compute(self, scheduled: Mapping[str, int]) -> None:
        self._worker.begin(self._rows.step(scheduled))
        failed = self._load([self._requests[name] for name in scheduled])
        slots = list[int]()
        ids = list[Any]()
        for name, count in scheduled.items():
            request = self._requests[name]
            start = request.num_computed_tokens
            for position in range(start, start + count):
                tokens = request.all_token_ids[: position + 1]
                block = request.blocks[position // BLOCK_TOKENS]
                for kv in self._kv.values():
                    kv[block, :, position % BLOCK_TOKENS] = hash((*tokens, self._routers.version)) % 4093 / 4093
                slots.append(block * BLOCK_TOKENS + position % BLOCK_TOKENS)
                ids.append(self._routers.ids(tokens))
        for layer, hook in enumerate(self._hooks):
            hook(torch.from_numpy(np.stack(ids)[:, layer].copy()))
        self._worker.slots = torch.tensor(slots)
        self._worker.fail(failed)
        self._worker.end()
        assert self._worker.failures() == failed
        for name, count in scheduled.items():
            self._computed(self._requests[name], count, failed)

    def _load(self, requests: Sequence[SmallRequest]) -> set[int]:
        """Load the KV of requests that join this step; the blocks whose KV did not come."""
        failed = set[int]()
        for request in requests:
            first = request.num_computed_tokens // BLOCK_TOKENS - request.loads
            for place in range(first, first + request.loads):
                if self._fails:
                    self._fails = False
                    failed.add(request.blocks[place])
                    continue
                assert self._outside is not None
                for layer, page in self._outside[request.block_hashes[place]].items():
                    self._kv[layer][request.blocks[place]] = page
            request.loads = 0
        return failed

    def _computed(self, request: SmallRequest, count: int, failed: set[int]) -> None:
        if self._go_back(request, failed):
            return
        request.num_computed_tokens += count
        for place, digest in enumerate(request.block_hashes[: request.num_computed_tokens // BLOCK_TOKENS]):
            block = request.blocks[place]
            self._cached.setdefault(digest, block)
            if self._outside is not None:
                self._outside.setdefault(digest, {layer: kv[block].clone() for layer, kv in self._kv.items()})
        if request.num_computed_tokens < len(request.all_token_ids):
            return
        request.all_token_ids.append(self._routers.next_token(request.all_token_ids))
        if len(request.all_token_ids) == request.num_prompt_tokens + request.new:
            self._finish(request)

    def _go_back(self, request: SmallRequest, failed: set[int]) -> bool:
        """From the first block whose KV did not come, tokens are computed again; whether there is one."""
        places = [place for place, block in enumerate(request.blocks) if block in failed]
        if places:
            request.num_computed_tokens = places[0] * BLOCK_TOKENS
        return bool(places)

    # ---------------------------------------------------------------- weights, KV, and the end

    def load_weights(self, version: int) -> None:
        self._rows.weights.changed(version)

    def pause(self) -> None:
        self._rows.weights.paused()

    def resume(self) -> None:
        self._rows.weights.resumed()

    def forget(self) -> None:
        self._worker.settle()
        for name in list(self._requests):
            self.preempt(name)
        self._cached.clear()
        self._rows.reset()

    def fail_next_load(self) -> None:
        self._fails = True

    def settle(self) -> None:
        self._worker.settle()
        jobs = self._worker.blocks.jobs
        while jobs:
            assert jobs.wait(ANSWER_S), "a store that answers"
            jobs.poll()

    def close(self) -> None:
        self._worker.settle()
        self._rows.close()
        self._worker.close()


def _leading(hashes: Sequence[bytes], present: Mapping[bytes, Any]) -> int:
    """How many of the first ``hashes`` are ``present``, without a gap."""
    return next((place for place, digest in enumerate(hashes) if digest not in present), len(hashes))


__all__ = ["SmallEngine", "SmallRequest"]

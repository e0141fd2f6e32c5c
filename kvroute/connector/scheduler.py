"""The scheduler's end: generations, keys, how much of a hit has rows, and the routes of requests that finish.

A step costs a look at each request of it, and more only for blocks that were given out, loaded or filled.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

import kvroute
from cache_manager.errors import KVRouteError, RowError
from cache_manager.keys import BlockKey, Namespace
from cache_manager.ports import StorageBackend
from kvroute.connector.answers import FIELD, START
from kvroute.connector.ends import End, Ends
from kvroute.connector.left import LeftRoutes, Tokens
from kvroute.connector.meter import Meter
from kvroute.connector.settings import Engine, Handshake, StepMeta
from kvroute.connector.tickets import Asked, Tickets
from kvroute.connector.versions import Versions
from kvroute.rollout import open_rollouts
from kvroute.witness import Run

logger = logging.getLogger(__name__)

SENT_MAX: Final = 4
"""Steps of a request that are remembered; more are not under way at once."""


class Request(Asked, Protocol):
    """A request as its scheduler has it, under vLLM's names; another engine's has properties of these names.

    Its tokens are asked for where rows are in the KV, or are lent or fetched.
    """

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Of its full blocks, in order; each stands for all tokens up to the end of its block."""
        ...


@dataclass(slots=True, eq=False)
class _State:
    """A request from when it is matched, and again when it was preempted."""

    request: Request
    first: int  # leading blocks that were hit here
    later: bool  # KV from outside comes beside steps
    kept: list[End]  # rows that were kept when it was preempted
    done: int = -1  # leading tokens, of whole blocks, whose rows were hit, are loaded or are stored; -1: not admitted
    load: Run | None = None  # KV from outside, until the worker knows all of it
    keys: list[BlockKey] = field(default_factory=list)  # of its full blocks, where there is a store
    sent: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=SENT_MAX))
    """The last steps to a late worker: number, start, tokens."""

    def steps(self) -> list[tuple[int, int]]:
        """The last steps to a late worker: the number of each, and the first position that it may write."""
        steps, rejected, after = list[tuple[int, int]](), 0, self.request.num_computed_tokens
        for number, start, n in reversed(self.sent):
            rejected += max(0, start + n - after)  # drafts, that was not known yet: it began so much earlier
            steps.append((number, start - rejected))
            after = start
        return [*steps[:-1], (steps[-1][0], 0)] if steps else []  # before the first one others may have written

    def come(self, size: int) -> Run:
        """What has come of a load: all of it, or what lies before the first block that could not be loaded."""
        assert self.load is not None
        load = self.load
        tokens = max(0, min(load.tokens, self.request.num_computed_tokens - load.start))
        return replace(load, blocks=load.blocks[: -(-tokens // size)], tokens=tokens, token_ids=load.token_ids[:tokens])


class Ended(NamedTuple):
    """What :meth:`SchedulerRows.finished` wants to know of a request that has ended."""

    tokens: int  # that have rows at most: nobody will ever compare rows with KV that has not come
    steps: Sequence[tuple[int, int]]  # that computed some, or joined it: number, and the first position it may write
    why: Mapping[int, str]  # of blocks whose rows were lent by another engine and did not all come
    kept: Sequence[End]  # rows that were kept when it was preempted


class SchedulerRows:
    """Says what becomes of blocks, and reads rows of requests that are done.

    The scheduler calls :meth:`given` for all blocks that its pool gives out, :meth:`matched` and :meth:`admitted` for a
    request that it admits, :meth:`step` for each step and :meth:`finished` while the request still has its blocks.
    ``blocks_of`` answers the blocks ``[first, last)`` of the request with an id.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.feed = kvroute.BlockFeed(engine.spares.stop)
        self.view: kvroute.RegionView | None = None
        self.keys = kvroute.KeyChain(engine.namespace, engine.layout)
        settings = engine.settings
        self.weights = Versions(engine.namespace, settings.weights_version, self._renamed, named=bool(settings.weights))
        self.blocks_of: Callable[[str, int, int], list[int]] = lambda *_: []
        self.meter = Meter(dict)  # of times; what is counted is counted by the worker
        self._late = False
        self._steps = 0  # that were sent
        self._reader: StorageBackend | None = None
        self._ends: Ends | None = None
        if settings.rollouts:
            self._ends = Ends(engine, LeftRoutes(open_rollouts(settings.rollouts)), self.feed)
        self._rooms: dict[str, Future[None]] = {}  # by request that has not been admitted
        self._requests: dict[str, _State] = {}
        # Since the last step was sent:
        self._given: dict[int, None] = {}
        self._joined: list[list[int]] = []
        self._loads: list[_State] = []
        self._landed: list[_State] = []
        self._tickets = Tickets(engine.tokens, lambda: self.feed.generations)
        self._unseen = np.zeros(engine.blocks, np.int64)  # lives of blocks whose rows went by their KV,
        self._front = np.zeros(engine.blocks, np.int64)  # and of how many of their tokens
        kvroute.preload()

    def attach(self, worker: Handshake) -> None:
        """This worker has the rows. Raises :class:`RegionMissingError` where its region cannot be reached."""
        assert worker.region is not None, "of the rank that has rows"
        self._late, self._tickets.address = worker.late, worker.address
        self.view = kvroute.RegionView(worker.region, namespace=self.keys.namespace.fingerprint)
        if self._ends is not None:
            self._ends.attach(self.view, late=worker.late)

    def given(self, blocks: Iterable[int]) -> None:
        """The pool has given these blocks out: whatever is in them is of an earlier life."""
        self._given.update(dict.fromkeys(blocks))

    # ---------------------------------------------------------------- admission

    def arrived(self, request_id: str, name: str, group: str | None = None) -> None:
        """A request has come that will be :meth:`finished` under this ``name``; before it can have an answer."""
        if self._ends is not None:
            self._rooms[request_id] = self._ends.make_room(name, group)

    def ready(self, request_id: str) -> bool:
        """Whether the request may be :meth:`matched`: what an earlier one has left under its name is gone."""
        if (room := self._rooms.get(request_id)) is not None and room.done():
            del self._rooms[request_id]
        return request_id not in self._rooms

    def matched(self, request: Request, local: int, found: int, *, later: bool) -> int:
        """How many of ``found`` tokens to take from outside, beyond ``local`` ones: as many as have rows."""
        size, before = self.engine.tokens, self._requests.get(request.request_id)
        self._requests[request.request_id] = _State(request, local // size, later, before.kept if before else [])
        if not found or not self.engine.gate or not self.engine.settings.store:
            return found
        keys = self._keys(request, local // size, (local + found) // size)
        there = [False] * len(keys) if self.weights.mixed else self._in_store(keys)
        return there.index(False) * size if False in there else found

    def _in_store(self, keys: Sequence[BlockKey]) -> list[bool]:
        try:
            if self._reader is None:
                self._reader = kvroute.open_store(self.engine.settings.reads)
            return self._reader.contains(keys)
        except KVRouteError as error:
            logger.warning("hits from outside are computed again, the store of rows cannot be asked: %s", error)
            return [False] * len(keys)

    def _keys(self, request: Request, first: int, last: int) -> list[BlockKey]:
        return [self.keys.adopt(bytes(each)) for each in request.block_hashes[first:last]]

    def admitted(
        self, request: Request, blocks: list[int], external: int, *, lends: bool = False, ticket: Any = None
    ) -> None:
        """The request has these blocks now; the KV of ``external`` tokens is loaded into some.

        ``lends``: another engine goes on from its prompt. ``ticket`` is what prefill's answer had, where that is us.
        """
        state, size = self._requests[request.request_id], self.engine.tokens
        self._joined.append(blocks)
        if state.done >= 0:  # the second call for a load that came later; what has not come by now does not come
            if state not in self._landed:
                state.load = None
            return
        first = state.first
        last = first + external // size
        state.done = last * size
        if self.engine.transfer:
            if lends:
                self._tickets.lend(request)
            if external or ticket is not None:
                self._tickets.fetch(request, ticket, first, external, blocks)
        elif external:  # a part of a block has no key: its rows come in pages or not at all
            partial, start = self.engine.pages and external % size > 0, first * size
            tokens = list(request.all_token_ids[start : start + external]) if self.engine.pages else []
            state.load = Run(
                blocks[first - 1] if first else -1, blocks[first : last + partial], external, start, tokens
            )
            if self.engine.settings.store and not self.weights.mixed:
                state.keys = self._keys(request, first, last)
            self._loads.append(state)

    def loaded(self, request_id: str) -> None:
        """The KV that was to come later has come, in all ranks; before the request's blocks are anybody else's."""
        state = self._requests.get(request_id)
        if state is not None and state.load is not None and state not in (*self._loads, *self._landed):
            self._landed.append(state)

    # ---------------------------------------------------------------- a step

    def step(self, scheduled: Mapping[str, int], inner: Any = None) -> StepMeta:
        """What the worker has to know of a step that computes so many tokens of each request."""
        mixed, store = self.weights.mixed, self.engine.settings.store
        if given := list(self._given):
            if self._ends is not None:
                self._ends.given(given, self._steps + 1)
            self.feed.renew(given)
            self._given.clear()
        loads, self._loads = self._still(self._loads), []
        for state in loads:
            if state.keys and state.load is not None:
                blocks = state.load.blocks
                self.feed.restore(dict(zip(state.keys, blocks, strict=False)))
                if self.engine.unseen:
                    self._unseen[blocks], self._front[blocks] = self.feed.generations[blocks], self.engine.tokens
        before = self.feed.take()
        if scheduled or loads:
            self.weights.computes()
        full = self._filled(scheduled) if store and not mixed else []
        joined, self._joined = self._joined, []
        self._steps += 1
        meta = StepMeta(inner, before, self.feed.take(), self._steps, sum(scheduled.values()), self.weights.version)
        meta.full = full
        if self.engine.pages:
            meta.namespace = b"" if mixed else self.keys.namespace.fingerprint
        if loads:
            meta.joined = joined
            for state in loads:
                if state.load is not None and not state.later:
                    meta.loads.append(state.load)
                    state.load = None
        if self._landed:
            landed, self._landed = self._still(self._landed), []
            meta.landed = [run for state in landed if (run := state.come(self.engine.tokens)).blocks]
            for state in landed:
                state.load = None
        if self.engine.transfer:
            meta.lends = self._tickets.fills(scheduled, self.blocks_of, mixed=mixed)
            meta.withdrawn, meta.fetches = self._tickets.withdrawn(), self._tickets.fetches()
        for name, tokens in scheduled.items() if self._late else ():
            if (running := self._requests.get(name)) is not None:
                running.sent.append((meta.number, running.request.num_computed_tokens, tokens))
        return meta

    def _still(self, states: Iterable[_State]) -> list[_State]:
        """Those that have not ended or begun again, and wait for KV."""
        return [each for each in states if each.load and self._requests.get(each.request.request_id) is each]

    def _filled(self, scheduled: Mapping[str, int]) -> list[Run]:
        """The blocks that this step completes; they are to be stored. Drafts that may fail have no hashes."""
        size, full, runs = self.engine.tokens, dict[BlockKey, int](), list[Run]()
        for name, tokens in scheduled.items():
            state = self._requests.get(name)
            # tokens are computed again after KV has failed to load; else nothing is done until a block is full
            if state is None or 0 <= (ahead := state.request.num_computed_tokens - state.done) < size - tokens:
                continue
            request, at = state.request, state.done + ahead
            if ahead < 0:  # it had been loaded, and is computed here now
                for i, block in enumerate(self.blocks_of(name, at // size, state.done // size)):
                    self._front[block] = min(self._front[block], 0 if i else at % size)
            first = min(state.done, at) // size
            last = min((at + tokens) // size, len(request.block_hashes))
            if last > first:
                held = self.blocks_of(name, max(0, first - 1), last)
                runs.append(run := Run(held[0], held[1:]) if first else Run(-1, held))
                full |= zip(self._keys(request, first, last), run.blocks, strict=True)
                state.done = last * size
        if full and self.engine.settings.writes:
            self.feed.persist(full)
        return runs

    def told(self, why: Mapping[str, Mapping[int, str]]) -> None:
        """The worker waits no more for what these requests fetch."""
        for name, blocks in why.items():
            if name in self._requests:
                self._tickets.came(name, blocks)

    # ---------------------------------------------------------------- the end

    def ticket(self, request: Request) -> dict[str, Any] | None:
        """What goes to decode beside the answer to a request that was lent; before :meth:`forget`."""
        prompt = request.all_token_ids[: request.num_prompt_tokens]
        return self._tickets.ticket(request.request_id, prompt, mixed=self.weights.mixed)

    def forget(self, request_id: str) -> Ended:
        """The request has ended, in whatever way; for :meth:`finished`."""
        self._rooms.pop(request_id, None)
        state, why = self._requests.pop(request_id, None), self._tickets.end(request_id)
        if state is None:
            return Ended(sys.maxsize, [], why, [])
        tokens = sys.maxsize if state.load is None else state.load.start
        return Ended(tokens, state.steps(), why, state.kept)

    def preempted(self, request: Request) -> None:
        """The request is about to lose its blocks, and begins again later: rows that tokens were sampled with are kept.

        The last token of a request was not read, and what is computed of a prompt without an answer is nothing yet.
        """
        name, said = request.request_id, len(request.all_token_ids) - request.num_prompt_tokens
        stop = min(len(request.all_token_ids) - 1, request.num_computed_tokens) if said > 0 else 0
        state = self._requests.get(name)
        if self._ends is None or state is None or stop <= max((each.stop for each in state.kept), default=0):
            return
        blocks = self.blocks_of(name, 0, -(-stop // self.engine.tokens))
        self._ends.keep(end := self._end(name, blocks, 0, stop, state.steps()))
        state.kept.append(end)

    def _end(self, name: str, blocks: Sequence[int], start: int, stop: int, steps: Sequence[tuple[int, int]]) -> End:
        """Rows of the positions ``[start, stop)``, of which steps that wrote none are not waited for."""
        ids, size = np.array(blocks, np.int64), self.engine.tokens
        lives = self.feed.generations[ids]
        stop = max(0, min(stop, len(ids) * size))
        wrote = [(number, first) for number, first in steps if first < stop] or [(self._steps, 0)]
        weights = self.weights
        end = End(name, ids, lives, min(start, stop), stop, wrote, weights.changes, weights.version, weights.mixed)
        if self.engine.unseen:
            by_kv = np.arange(size) < np.where(self._unseen[ids] == lives, self._front[ids], 0)[:, None]
            end.by_kv = by_kv.reshape(-1)[:stop]
        return end

    def finished(
        self,
        name: str,
        blocks: Sequence[int],
        tokens: int,
        of: Tokens | None = None,
        *,
        group: str | None = None,
        ended: Ended | None = None,
        start: Any = 0,
    ) -> Future[dict[str, Any]] | None:
        """What goes to the client beside the answer; ``blocks`` are still the request's, ``tokens`` were computed.

        It is there when the rows have been left, which a thread of ours does: nothing is waited for here.

        ``name`` is what the client calls it, and what a rollout store finds it by. ``of`` are its tokens: routes that
        are not bound to them are handed out with answers that have no token ids only. With what :meth:`forget` said no
        step is waited for that has written nothing of this. Each of a ``group`` of requests, the completions of one
        prompt, is told with all that are done, for engines that send on what comes with the last one only. Rows before
        ``start`` the client has already; an answer with another one than a position of its prompt has an error.
        """
        if self._ends is None:
            return None
        most = of.prompt if of else tokens
        if not isinstance(start, int) or isinstance(start, bool) or not 0 <= start <= most:
            error = RowError(f"{FIELD}.{START}", f"a position of the prompt, from 0 to {most}", repr(start))
            return self._ends.refused(name, error, group)
        ended = ended or Ended(sys.maxsize, [], {}, [])
        end = self._end(name, blocks, start, min(tokens, ended.tokens), ended.steps)
        end.group, end.of, end.why, end.kept = group, of, ended.why, ended.kept
        begun_s, answer = time.monotonic(), self._ends.begin(end)
        answer.add_done_callback(lambda _: self.meter.took("answer", time.monotonic() - begun_s))
        return answer

    def reset(self) -> None:
        """The pool has forgotten all blocks: nothing from before is readable, in no tier."""
        self.weights.forgotten()

    def _renamed(self, namespace: Namespace) -> None:
        """Rows are of this namespace from here on; there are none yet, or they are to be forgotten."""
        if self._ends is not None:
            self._ends.forgotten()
        self.keys = kvroute.KeyChain(namespace, self.engine.layout)
        self.feed.reset(namespace.weights_version)
        if self.view is not None:
            self.view.follow(namespace.fingerprint)

    def close(self) -> None:
        for each in (self._ends, self.view, self._reader):
            if each is not None:
                each.close()


__all__ = ["Ended", "Request", "SchedulerRows"]

"""The scheduler's end: generations, keys, how much of a hit has rows, and the routes of requests that finish.

A step costs a look at each of its requests, and more only for blocks that were given out, loaded or filled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvroute
from cache_manager.errors import ConfigError, KVRouteError, RowError
from cache_manager.keys import Namespace
from kvroute.connector.carriers.port import Admission, Moves, SchedulerParts
from kvroute.connector.computations import Computation
from kvroute.connector.cutting import Cutting
from kvroute.connector.end import End
from kvroute.connector.ends import Ends, NoEnds
from kvroute.connector.engine import Engine
from kvroute.connector.fields import ERROR, FIELD, GAPS, ROUTES, START
from kvroute.connector.fills import Request
from kvroute.connector.key import Key
from kvroute.connector.left import LeftRoutes, Tokens
from kvroute.connector.messages import Handshake, Loads, StepMeta
from kvroute.connector.meter import Meter
from kvroute.connector.mtp import mtp_rows
from kvroute.connector.settings import APART_SCHEME
from kvroute.connector.spares import SpareBlocks
from kvroute.connector.stages import NoView, RowsReader, RowsView, StageViews
from kvroute.connector.stream import RowStream
from kvroute.connector.takers import RolloutsHere, RolloutTaker
from kvroute.connector.tickets import UNNAMED
from kvroute.connector.unread import UnreadRows
from kvroute.connector.versions import Versions
from kvroute.witness import Run


@dataclass(slots=True, eq=False)
class _State:
    """A request from its match on, begun anew after a preemption."""

    request: Request
    first: int  # leading blocks that were hits here
    later: bool  # KV from outside comes between steps
    end: End  # what it leaves, with the rows that were kept when it was preempted
    admitted: bool = False
    load: Run | None = None  # KV from outside, until the worker knows all of it

    def arrived(self, size: int) -> Run:
        """The part of a load that has come: all of it, or the part before the first block that could not be loaded."""
        assert self.load is not None
        load = self.load
        tokens = max(0, min(load.tokens, self.request.num_computed_tokens - load.start))
        return replace(load, blocks=load.blocks[: -(-tokens // size)], tokens=tokens)


class SchedulerRows:
    """Tells the worker what becomes of blocks, and reads the rows of finished requests.

    The scheduler calls :meth:`given` for all blocks that its pool gives out, :meth:`matched` and :meth:`admitted` for a
    request that it admits, :meth:`step` for each step and :meth:`finished` while the request still has its blocks.
    ``blocks_of(id, first, last)`` returns the blocks ``[first, last)`` of a request.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.feed = kvroute.BlockFeed(engine.places.stop)
        self.view: RowsView | NoView = NoView()
        self._regions = list[str | None]()  # that it is of
        self.keys = kvroute.KeyChain(engine.namespace, engine.layout)
        settings = engine.settings
        self.weights = Versions(engine.namespace, settings.weights_version, self._renamed, named=bool(settings.weights))
        self.blocks_of: Callable[[str, int, int], list[int]] = lambda *_: []
        self.meter = Meter(self._counters, engine.limits)  # for times and rollouts; the worker has the other counts
        self.followed = False  # whether changes of weights reach this object; set by an engine whose core reports them
        self.blocks_followed = False  # whether its pool's blocks do
        self._late = False
        self._steps = 0  # sent so far
        # The last ones: number, tokens by request.
        self._sent: deque[tuple[int, dict[str, int]]] = deque(maxlen=engine.limits.steps_max)
        parts = SchedulerParts(
            settings,
            engine.limits,
            engine.spec,
            engine.blocks,
            self.feed,
            self.weights,
            lambda: self.keys,
            self._blocks_of,
            engine.hashes,
            engine.places,
        )
        self.carrier = engine.carrier.scheduler(parts)
        spares = SpareBlocks(self.feed, engine.spares)
        self._readers = list[RowsReader]()  # of rows whose blocks may be given out before they are read
        self._ends: Ends | NoEnds = NoEnds(names_mistakes=settings.field)
        if settings.rollouts:
            left, taker = _taker_of(engine)
            took = partial(self.meter.took, "answer")
            ends = Ends(engine.limits, left, UnreadRows(engine, spares), taker, took)
            self._ends = ends
            self._readers.append(ends)
        self._requests: dict[str, _State] = {}
        self._heard = False  # of any block
        # Since the last step was sent:
        self._given: dict[int, bool] = {}  # whether rows go with the block
        self._joined: list[tuple[Request, list[int]]] = []
        self._loads: list[_State] = []
        self._landed: list[_State] = []
        self.stream: RowStream | None = None
        """The rows of answers step by step, for an engine that returns them in a field of its own."""
        self.field: Any = None
        """An engine's own object for that field."""
        if settings.field:
            self.stream = RowStream(
                engine.spec,
                self.feed,
                spares,
                engine.clock,
                engine.limits,
                blocks_of=self._blocks_of,
                doubts=self._doubts,
                why=self.carrier.why,
            )
            self._readers.append(self.stream)
        kvroute.preload()

    def attach(self, *workers: Handshake) -> None:
        """These workers have the rows: one, or of each stage of a pipeline the one that has its layers'.

        An engine that wakes up says so again: regions that are viewed already keep their view, because a worker may
        learn of another namespace only with its next step. Raises :class:`RegionMissingError` if a region cannot be
        reached, and :class:`ConfigError` unless each layer is in one stage.
        """
        self._late = any(worker.late for worker in workers)
        for worker in workers:
            self.carrier.attach(worker.carrier)
        regions = [worker.region for worker in workers]
        if regions == self._regions:
            return
        view = self._view_of(workers)
        self.view = view
        self._regions = regions
        for reader in self._readers:
            reader.attach(view, late=self._late)

    def _view_of(self, workers: Sequence[Handshake]) -> RowsView:
        stages = [(worker.region, worker.layer_ids) for worker in workers if worker.region is not None]
        assert len(stages) == len(workers), "of ranks that have rows"
        namespace = self.keys.namespace.fingerprint
        if self.engine.stages > 1:
            return StageViews(self.engine.spec, stages, namespace=namespace)
        ((region, _),) = stages
        return kvroute.RegionView(region, namespace=namespace)

    def given(self, blocks: Iterable[int]) -> None:
        """The pool has given these blocks out: their content is of an earlier life."""
        self._given.update(dict.fromkeys(blocks, True))
        self._heard = True

    def given_elsewhere(self, blocks: Iterable[int]) -> None:
        """As :meth:`given`, to layers that rows do not go with: nothing is read there until the next life."""
        self._given.update(dict.fromkeys(blocks, False))
        self._heard = True

    # ---------------------------------------------------------------- admission

    def begins(self, key: Key) -> None:
        """A request has come that will be :meth:`finished` with this ``key``; only one of several completions has to
        say so."""
        self._ends.begins(key)

    def matched(
        self,
        request: Request,
        local: int,
        external: int,
        *,
        later: bool,
    ) -> int:
        """How many of the ``external`` tokens to load from outside, after ``local`` ones: as many as have rows."""
        first = local // self.engine.tokens
        before = self._requests.get(request.request_id)
        self._requests[request.request_id] = _State(request, first, later, before.end if before else End())
        return self.carrier.takes(request, first, external)

    def admitted(
        self,
        request: Request,
        blocks: list[int],
        external: int,
        *,
        lends: bool = False,
        ticket: Any = None,
        kv: Mapping[str, str] = UNNAMED,
    ) -> None:
        """The request has these blocks now; the KV of ``external`` tokens is loaded into some of them.

        ``lends``: another engine goes on from its prompt. ``ticket`` is that of prefill's answer, if this engine goes
        on from one, and ``kv`` names the KV that the inner connector brings with it.
        """
        state = self._requests[request.request_id]
        self._joined.append((request, blocks))
        if state.admitted:  # the second call for a load that came later; what has not come by now does not come
            if state not in self._landed:
                state.load = None
            return
        state.admitted = True
        state.load = self.carrier.admitted(Admission(request, blocks, state.first, external, lends, ticket, kv))
        if state.load is not None:
            self._loads.append(state)

    def loaded(self, request_id: str) -> None:
        """The later KV has come, in all ranks; call it before the request's blocks are given to another one."""
        state = self._requests.get(request_id)
        if state is not None and state.load is not None and state not in (*self._loads, *self._landed):
            self._landed.append(state)

    # ---------------------------------------------------------------- a step

    def step(
        self,
        scheduled: Mapping[str, int],
        inner: Any = None,
        copies: Iterable[tuple[int, int]] = (),
        moves: Moves | None = None,
    ) -> StepMeta:
        """What the worker has to know of a step that computes so many tokens of each request.

        Before it computes, the engine makes these ``copies`` of blocks, (source, target), of which a request that was
        admitted since the last step hits a part. Copies for others are none of ours. ``moves`` are those to its host
        and back.

        Raises :class:`ConfigError` for tokens before any block was :meth:`given`: rows of an earlier life would stay.
        """
        if scheduled and not self._heard:
            wanted = "every block that its pool gives out, before the step that fills it"
            raise ConfigError("the engine", wanted, "a step of tokens before any block")
        if moves is not None:
            self.carrier.leave(moves)
        if self._given:
            given = self._given
            blocks = list(given)
            self._given = {}
            for reader in self._readers:
                reader.given(blocks, self._steps + 1)
            own = [block for block, has_rows in given.items() if has_rows]
            elsewhere = [block for block, has_rows in given.items() if not has_rows]
            if elsewhere:  # first, because it frees memory
                self.feed.retire(elsewhere)
            if own:
                self.feed.renew(own)
        self._copy(copies)
        if moves is not None:
            self.carrier.enter(moves)
        loads = self._still(self._loads)
        self._loads = []
        if loads:
            self.carrier.load([(state.request.request_id, state.load) for state in loads if state.load is not None])
        before = self.feed.take()
        if scheduled or loads:
            self.weights.computes()
        self._steps += 1
        tokens = sum(scheduled.values())
        meta = StepMeta(inner, before, self._steps, tokens, self.weights.version, self._loads_of_step(loads))
        meta.carrier = self.carrier.step(scheduled)
        if self._late:
            self._sent.append((meta.number, dict(scheduled)))
        return meta

    def _copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """Rows go along with the KV of these copies, (source, target), up to the last token that was hit: the rows
        behind it are those of the source's own tokens."""
        sources = {target: source for source, target in copies}
        pairs = list[tuple[int, int]]()
        rows = list[int]()
        for request, blocks in self._joined if sources else ():
            place, part = divmod(request.num_computed_tokens, self.engine.tokens)
            source = sources.get(blocks[place]) if part else None
            if source is not None:
                pairs.append((source, blocks[place]))
                rows.append(part)
                self.carrier.copied(source, blocks[place], part)
        if pairs:
            self.feed.copy(pairs, rows)

    def _loads_of_step(self, loads: Sequence[_State]) -> Loads:
        """What the worker has to know of KV from outside; ``loads`` begin with this step."""
        joined = [blocks for _, blocks in self._joined]
        self._joined = []
        landed = self._still(self._landed)
        self._landed = []
        loading = [state for state in loads if not state.later]
        runs = [state.load for state in loading if state.load is not None]
        arrived = [state.arrived(self.engine.tokens) for state in landed]
        for state in (*loading, *landed):
            state.load = None
        return Loads(joined if loads else (), runs, [run for run in arrived if run.blocks])

    def _steps_of(self, request: Request) -> list[tuple[int, int]]:
        """The last steps sent to a late worker for this request: number, and the first position that each may write.

        Rejected drafts only make a step begin later than stated here.
        """
        steps = list[tuple[int, int]]()
        position = request.num_computed_tokens
        for number, tokens in reversed(self._sent):
            n = tokens.get(request.request_id, 0)
            if n > 0:
                position -= n
                steps.append((number, position))
        return [*steps[:-1], (steps[-1][0], 0)] if steps else []  # earlier steps may have written, too

    def _still(self, states: Iterable[_State]) -> list[_State]:
        """The states that wait for KV and have neither ended nor begun again."""
        return [state for state in states if state.load and self._requests.get(state.request.request_id) is state]

    def told(self, message: Any) -> None:
        """The worker's carrier has this message: :attr:`WorkerMeta.carrier`."""
        self.carrier.told(message)

    # ---------------------------------------------------------------- the end

    def ticket(
        self,
        request: Request,
        kv: Mapping[str, str] = UNNAMED,
    ) -> dict[str, Any] | None:
        """The ticket for decode beside a lent request's answer, whose KV has the names ``kv`` there; call it before
        :meth:`forget`."""
        return self.carrier.ticket(request, kv)

    def forget(self, request_id: str) -> End:
        """The request has ended, in whatever way; for :meth:`finished`, :meth:`refused` or :meth:`unanswered`."""
        why = self.carrier.ended(request_id)
        state = self._requests.pop(request_id, None)
        if state is None:
            return End(why=why)
        end = state.end
        end.why = why
        end.steps = self._steps_of(state.request)
        if state.load is not None:
            end.rows_stop = state.load.start
        return end

    def preempted(self, request: Request) -> None:
        """The request is about to lose its blocks, and begins again later: keep the rows that tokens were sampled with.

        The last token was not read by the model, and a prompt without an answer has no such rows yet.
        """
        sampled = len(request.all_token_ids) - request.num_prompt_tokens
        stop = min(len(request.all_token_ids) - 1, request.num_computed_tokens) if sampled > 0 else 0
        state = self._requests.get(request.request_id)
        if state is None or stop <= max((computation.stop for computation in state.end.kept), default=0):
            return
        blocks = self.blocks_of(request.request_id, 0, -(-stop // self.engine.tokens))
        self._ends.keep(state.end, self._computation(blocks, 0, stop, self._steps_of(request)))

    @property
    def steps(self) -> int:
        """The number of the last step that was sent."""
        return self._steps

    def _doubts(
        self,
        slots: NDArray[np.int64],
        lives: NDArray[np.int64],
    ) -> NDArray[np.bool_] | None:
        """Which of these rows ``[n]`` lack the proof of their last router's choice that the operator wants."""
        return None if self.engine.carrier.flagged else self.carrier.unproved(slots, lives)

    def _blocks_of(self, request_id: str, first: int, last: int) -> list[int]:
        """:attr:`blocks_of`, which an engine sets later."""
        return self.blocks_of(request_id, first, last)

    def _computation(
        self,
        blocks: Sequence[int],
        start: int,
        stop: int,
        steps: Sequence[tuple[int, int]],
    ) -> Computation:
        """The computation with rows of the positions ``[start, stop)``, without steps that wrote none of them."""
        size = self.engine.tokens
        stop = max(0, min(stop, len(blocks) * size))
        ids = np.array(blocks[: -(-stop // size)], np.int64)  # later blocks have no rows to keep
        lives = self.feed.generations[ids]
        wrote = [(number, first) for number, first in steps if first < stop] or [(self._steps, 0)]
        weights = self.weights
        computation = Computation(
            ids,
            lives,
            min(start, stop),
            stop,
            wrote,
            weights.changes,
            weights.version,
            weights.mixed,
        )
        if self.carrier.has_unproved:
            slots = (ids[:, None] * size + np.arange(size)).reshape(-1)[:stop]
            computation.by_kv = self.carrier.unproved(slots, lives.repeat(size)[:stop])
        return computation

    def finished(
        self,
        key: Key,
        blocks: Sequence[int],
        tokens: int,
        request_tokens: Tokens | None = None,
        *,
        ended: End | None = None,
        start: Any = 0,
    ) -> Future[dict[str, Any]] | None:
        """The client's data beside the answer; ``blocks`` are still the request's, ``tokens`` were computed.

        A thread of kvroute leaves the rows and then completes the future; this call does not wait.

        Under ``key`` its routes lie in a rollout store. ``request_tokens`` are its tokens: routes not bound to them are
        handed out only with answers that have no token ids. With ``ended``, the result of :meth:`forget`, the wait
        skips steps that wrote none of these rows. The last of a key's group of requests, the completions of one prompt,
        gets the data of all, for engines that send on only the last one's. The client has the rows before ``start``; if
        that is no position of the prompt, the answer has an error.
        """
        end = ended or End()
        end.key = key
        end.request_tokens = request_tokens
        most = request_tokens.prompt if request_tokens else tokens
        if not isinstance(start, int) or isinstance(start, bool) or not 0 <= start <= most:
            wanted = f"a position of the prompt, from 0 to {most}"
            return self._ends.refused(end, RowError(f"{FIELD}.{START}", wanted, repr(start)))
        end.start = start
        return self._ends.begin(end, self._computation(blocks, start, min(tokens, end.rows_stop), end.steps))

    def mtp_rows(
        self,
        key: Key,
        blocks: Sequence[int],
        tokens: int,
        request_tokens: Tokens,
        start: int = 0,
    ) -> dict[str, Any] | None:
        """The client's data of a done request's MTP rows, read at once; arguments as for :meth:`finished`. ``None``:
        the engine or the request has none."""
        spec = self.engine.mtp
        stop = min(tokens, len(blocks) * self.engine.tokens, len(request_tokens.ids) - 1)
        if spec is None or start >= stop:
            return None
        lives = self.feed.generations[np.array(blocks, np.int64)]
        try:
            routes, gaps = mtp_rows(self.view, spec, blocks, lives, request_tokens.ids, start, stop)
            counts = request_tokens.counts(routes.stop, routes.start, self.engine.limits.cuts_max)
            bound = routes.bind(np.asarray(request_tokens.ids), [count + 1 for count in counts])  # a row has two tokens
        except KVRouteError as error:
            return {str(key.choice): {ERROR: str(error)}}
        return {str(key.choice): {ROUTES: bound.to_json(), GAPS: [list(gap) for gap in gaps]}}

    def refused(
        self,
        key: Key,
        error: RowError,
        ended: End,
    ) -> Future[dict[str, Any]] | None:
        """The request of this ``key`` has ended; its answer has this ``error`` in place of rows."""
        ended.key = key
        return self._ends.refused(ended, error)

    def unanswered(self, ended: End, key: Key) -> None:
        """The request of this ``key`` has ended without an answer about its rows."""
        ended.key = key
        self._ends.unanswered(ended)

    def reset(self) -> None:
        """The pool has forgotten all blocks: no earlier row is readable, in any tier."""
        self.weights.forgotten()

    def _renamed(self, namespace: Namespace) -> None:
        """Rows are of this namespace from here on; earlier ones, if any, are forgotten."""
        for reader in self._readers:
            reader.forgotten()
        self.keys = kvroute.KeyChain(namespace, self.engine.layout)
        self.feed.reset(namespace.weights_version)
        self.view.follow(namespace.fingerprint)

    def _counters(self) -> dict[str, Any]:
        """The present counters of who leaves rollouts."""
        return dict(self._ends.counters)

    def close(self) -> None:
        self._ends.close()
        self.view.close()
        self.carrier.close()


def _taker_of(engine: Engine) -> tuple[LeftRoutes, RolloutTaker]:
    """Who makes the data of clients, and who leaves the rows of their requests, as the operator wants it."""
    if engine.settings.rollouts.startswith(APART_SCHEME):
        from kvroute.connector.rollouts_apart import RolloutsApart

        settings, flagged = engine.settings, engine.carrier.flagged
        return (
            LeftRoutes(limits=engine.limits),
            RolloutsApart(settings.rollouts, engine.spec, flagged=flagged, limits=engine.limits),
        )
    left = LeftRoutes.by(engine.settings.rollouts, engine.limits)
    return left, RolloutsHere(Cutting(engine.spec, engine.carrier.flagged), left, engine.limits.burst_max)


__all__ = ["SchedulerRows"]

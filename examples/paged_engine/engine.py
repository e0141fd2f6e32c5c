"""A small continuous-batching engine over a transformers Mixture-of-Experts model, with kvroute embedded.

Each :meth:`Engine.step` is one forward pass over a flat batch of tokens of several sequences. The rows that the pass
produces, expert ids and the weights version, are committed to the blocks of its keys and values, and follow these
through prefix reuse, copy-on-write, swapping and the store.

An engine belongs to one thread, and on a GPU to the stream that was current when it was made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import InvalidInputError
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.ports import KVBlocks, StorageBackend
from cache_manager.spec import align
from cache_manager.step import PADDING
from kvroute.capture.capture import RoutingCapture
from kvroute.journal import RequestJournal
from kvroute.routes import Routes
from kvroute.routing import routing_spec_from_hf, weights_version_spec
from paged_engine.attention import PagedBatch, PagedKV, kv_shape
from paged_engine.models import BATCH_MULTIPLE
from paged_engine.request import EngineConfig, FinishReason, Output, Request
from paged_engine.scheduler import Scheduler, Work
from paged_engine.sequence import Sequence, State
from paged_engine.shared_kv import SharedKV

if TYPE_CHECKING:
    from kvroute.capture.launched import LaunchedCapture

STORE_WAIT_S: Final = 0.05
Observer = Callable[[list[Work]], AbstractContextManager[object]]
"""Stands around every forward pass over its work (items back to back, then padding), and leaves before rows are
committed. It may call :meth:`Engine.abort`, and nothing else of the engine."""


class Engine:
    """Generates for requests over ``config.device_blocks`` KV blocks, and hands out routes with every sample.

    ``namespace`` must name the weights: with a ``store``, KV and rows that an earlier engine of the same namespace
    stored are reused; the caller closes the store. What ``around`` makes of the engine's KV is told of every move.

    Raises :class:`InvalidInputError` for a model without routers, and for one whose tokens depend on each other by more
    than paged attention (:func:`~paged_engine.attention.kv_shape`): recurrent state is in no block.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig,
        namespace: Namespace,
        *,
        store: StorageBackend | None = None,
        observer: Observer = nullcontext,
        around: Callable[[PagedKV], KVBlocks] = lambda kv: kv,
    ) -> None:
        self.config, self._model, self._observer = config, model, observer
        self.spec = routing_spec_from_hf(model.config, config.block_tokens)  # type: ignore[arg-type]
        self._positions_max: int = model.config.max_position_embeddings  # type: ignore[union-attr, assignment]
        device = next(model.parameters()).device
        if config.transfer_process and device.type != "cpu":
            raise InvalidInputError("transfer_process", "a model on a CPU", device.type)
        shape = kv_shape(model)
        self.kv = SharedKV(shape, config, namespace) if config.transfer_process else PagedKV(shape, config, device)
        self.aux = AuxBlocks(
            [self.spec, weights_version_spec(config.block_tokens)],
            blocks=config.device_blocks,
            host_blocks=config.host_blocks,
            namespace=namespace,
            store=store,
            kv=around(self.kv),
            memory="shared",
            jobs=config.jobs,
        )
        self._capture = self._capturing()
        self.manager = BlockManager(self.aux, caching=config.caching)
        self.scheduler = Scheduler(config, self.manager, self._losing)
        self._arrivals = self._idle_steps = 0
        self._done: list[Output] = []
        self.steps = self.computed_tokens = 0

    # ---------------------------------------------------------------- requests

    def add(self, request: Request) -> None:
        """Queue a request that passes :meth:`check`."""
        self.check(request)
        self.scheduler.add(Sequence(request, 0, self._arrivals, list(request.prompt)))
        self._arrivals += 1

    def check(self, request: Request) -> None:
        """Raise :class:`InvalidInputError` for a request too long to run even alone, or with an id that is in use."""
        if self.scheduler.of(request.id):
            raise InvalidInputError("request id", "one that is not in use", request.id)
        longest = len(request.prompt) + request.max_tokens
        room = min(self.config.device_blocks * self.config.block_tokens, self._positions_max)
        if longest > room:
            wanted = f"prompt and max_tokens of at most {room} tokens together ({self.config.device_blocks} blocks)"
            raise InvalidInputError(f"request {request.id}", wanted, longest)

    def abort(self, request_id: str) -> None:
        """End every sample of a request now, whatever it is doing, also during a forward pass; idempotent.

        The next :meth:`step` returns what was generated, with the routes of all computed tokens.
        """
        for sequence in self.scheduler.of(request_id):
            self._finish(sequence, FinishReason.ABORT)

    @property
    def busy(self) -> bool:
        """Whether :meth:`step` has anything left to do or to return."""
        return bool(self.scheduler.unfinished or self._done)

    @property
    def waits(self) -> bool:
        """Whether something outside the engine has to happen before everything can go on."""
        return False

    def run(self) -> list[Output]:
        """:meth:`step` until nothing is left."""
        outputs = []
        while self.busy:
            outputs += self.step()
        return outputs

    def step(self) -> list[Output]:
        """Run one forward pass, and return the samples that have ended since the last call.

        It waits for the store only when there is nothing to compute, ``STORE_WAIT_S`` at most.
        """
        if work := self._plan():
            self._compute(work)
            self.steps += 1
            self._idle_steps = 0
        elif self.scheduler.unfinished and not self.waits:
            self._idle_steps += 1  # a lone sequence that swapped itself out comes back in the next step
            if self.manager.in_flight:  # nothing to compute until the store has answered
                self.aux.jobs.wait(STORE_WAIT_S)
            elif self._idle_steps > 1:
                raise AssertionError(f"nothing can run: {self.scheduler.counts()}")
        done, self._done = self._done, []
        return done

    def reset(self, *, weights_version: int) -> None:
        """The model's weights have changed: unfinished sequences are computed again with them, and go on from there.

        Call it between steps. The rows that its tokens were sampled with are kept.
        """
        self.scheduler.drop_all()
        self.manager.reset(weights_version=weights_version)

    def drain(self) -> bool:
        """Wait until the store has everything to be stored, ``config.jobs.close_s`` at most; returns whether it has."""
        return self.manager.drain(self.config.jobs.close_s)

    def close(self) -> None:
        """Free the blocks and remove the model's hooks; unfinished requests are aborted, others stored.

        Raises :class:`BlockStateError` when the store's jobs do not end within ``config.jobs.close_s``: they still use
        the blocks then, and closing can be tried again.
        """
        for sequence in self.scheduler.unfinished:
            self.abort(sequence.request.id)
        self._capture.close()
        self.drain()
        self.aux.close()
        self.kv.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def traffic(self) -> dict[str, int]:
        """What became of blocks and rows so far."""
        blocks = self.manager.counters
        rows = self.aux.counters
        store = self.aux.store and self.aux.store.counters
        return {
            "steps": self.steps,
            "computed_tokens": self.computed_tokens,
            "prefix_hit_rows": blocks.prefix_hit_tokens,
            "restored_rows": blocks.restored_tokens,
            "swapped_out_rows": rows.swapped_out_rows,
            "swapped_in_rows": rows.swapped_in_rows,
            "cow_rows": rows.copied_rows,
            "evicted_blocks": blocks.evicted_blocks,
            "persisted_blocks": blocks.persisted_blocks,
            "preemptions": blocks.preemptions,
            "dropped_sequences": self.scheduler.dropped,
            "blocks_moved_by_process": self.kv.moved_blocks,
            "failed_moves": blocks.moves_failed,
            "store_failures": blocks.store_failures,
            "corrupt_records": store.corrupt if store else 0,
        }

    # ---------------------------------------------------------------- inside a step

    def _capturing(self) -> RoutingCapture | LaunchedCapture:
        """Hooks that bring rows to the host, or on a GPU one launch at the end of a pass."""
        device = next(self._model.parameters()).device
        if device.type != "cuda":
            return RoutingCapture(self._model, self.spec)
        from kvroute.capture.launched import LaunchedCapture  # needs Triton

        tokens_max, stream = align(self.config.step_tokens, BATCH_MULTIPLE), torch.cuda.current_stream(device)
        return LaunchedCapture(self._model, self.spec, self.aux.region("device"), tokens_max, stream=stream)

    def _plan(self) -> list[Work]:
        return self.scheduler.plan()

    def _compute(self, work: list[Work]) -> None:
        contexts = [self._context(w) for w in work]
        tokens = [t for w in work for t in w.sequence.tokens[w.start : w.stop]]
        slots = np.concatenate([context[w.start :] for w, context in zip(work, contexts, strict=True)])
        slots = np.pad(slots, (0, -len(slots) % BATCH_MULTIPLE), constant_values=PADDING)
        with self._capture.step(self.aux.begin_step, slots) as step:
            with self._observer(work), torch.inference_mode():
                logits = self._forward(work, contexts, tokens).cpu().numpy()
            step.write("weights_version", np.full(len(slots), self.aux.namespace.weights_version, np.uint32))
        self.computed_tokens += len(tokens)
        for item, row in zip(work, logits, strict=True):
            if item.sequence.state is State.RUNNING:  # it may have been aborted while the pass ran
                self._advance(item, row)

    def _context(self, item: Work) -> NDArray[np.int64]:
        """Device slots ``[stop]`` of all tokens that those of ``item`` attend to, themselves included."""
        self.manager.slots(item.sequence.owner, item.start, item.stop)  # refuses a block that others use
        blocks, size = np.asarray(self.manager.table(item.sequence.owner), np.int64), self.config.block_tokens
        return (blocks[:, None] * size + np.arange(size)).reshape(-1)[: item.stop]

    def _forward(self, work: list[Work], contexts: list[NDArray[np.int64]], tokens: list[int]) -> torch.Tensor:
        """Logits ``[chunks, vocabulary]`` at the last token of each chunk."""
        spans = [(w.start, torch.from_numpy(context)) for w, context in zip(work, contexts, strict=True)]
        batch = PagedBatch.of(self.kv, spans, multiple_of=BATCH_MULTIPLE)
        device, lasts = batch.positions.device, np.cumsum([w.stop - w.start for w in work]) - 1
        logits: torch.Tensor = self._model(
            input_ids=functional.pad(torch.tensor(tokens), (0, batch.padding))[None].to(device),
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=torch.from_numpy(lasts).to(device),
            paged=batch,
        ).logits[0]
        return logits

    def _advance(self, item: Work, logits: NDArray[Any]) -> None:
        """The sequence has KV and rows up to ``item.stop`` now; sample if this was its last token."""
        sequence = item.sequence
        sequence.computed = item.stop
        self.manager.publish(sequence.owner, sequence.tokens[: item.stop])
        if item.stop == len(sequence.tokens):
            others = 0 if sequence.sample or sequence.generated else sequence.request.n - 1
            for each in (sequence, *(self._fork(sequence, number) for number in range(1, 1 + others))):
                if (reason := each.sample_from(logits)) is not None:
                    self._finish(each, reason)

    def _fork(self, sequence: Sequence, number: int) -> Sequence:
        """Another sample of a request whose prompt has just been computed; it shares all of its blocks."""
        child = Sequence(sequence.request, number, sequence.arrival, list(sequence.tokens))
        self.manager.fork(sequence.owner, child.owner)
        child.become(State.RUNNING)
        child.computed = sequence.computed
        self.scheduler.add(child)
        return child

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Collect the routes while the blocks are still held, store blocks of finished samples, free the blocks."""
        routes = self._remember(sequence).routes() if sequence.journal else self._held(sequence).bind(sequence.tokens)
        if sequence.state is State.RUNNING and reason is not FinishReason.ABORT:
            self.manager.begin_persist(sequence.owner)
        self.scheduler.finish(sequence)
        done = Output(sequence.request, sequence.sample, sequence.generated, reason, routes, sequence.note)
        self._done.append(done)

    def _losing(self, sequence: Sequence) -> None:
        """The sequence is about to lose its blocks: keep the rows that its tokens were sampled with."""
        self._remember(sequence).discard_unsettled()

    def _remember(self, sequence: Sequence) -> RequestJournal:
        """Record the rows of the sequence's blocks in its journal, and which tokens were sampled with them."""
        journal = sequence.journal = sequence.journal or RequestJournal(self.spec)
        journal.record(self._held(sequence))
        if sequence.generated:
            journal.settle(sequence.tokens)
        return journal

    def _held(self, sequence: Sequence) -> Routes:
        """The rows in the sequence's blocks."""
        stop = min(sequence.computed, len(sequence.tokens) - 1)
        if not stop:
            return RequestJournal(self.spec).routes()
        rows = self.manager.read(self.spec.name, sequence.owner, 0, stop)
        versions = self.manager.read("weights_version", sequence.owner, 0, stop)
        return Routes.from_rows(self.spec, rows, weights_version=versions, checked=True)

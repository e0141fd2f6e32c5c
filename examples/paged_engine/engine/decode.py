"""The engine that goes on from prompts that others have computed: their KV and rows are put into its own blocks.

A sequence with a handover gets its blocks like any other, what its own prefix cache has included, and asks only for the
rest. As soon as all KV is in place it runs; rows may come until it ends, and it ends only when no more can come. What
did not come is computed here, if that can still be done, and reported missing otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from cache_manager.errors import InvalidInputError, KVRouteError
from cache_manager.record import RecordHeader
from kvroute.routes import Routes
from paged_engine.engine.engine import Engine
from paged_engine.engine.request import FinishReason, Gap, Request
from paged_engine.engine.scheduler import Work
from paged_engine.engine.sequence import Event, Handover, Sequence, State
from paged_engine.engine.transfer_blocks import KV, ROWS, TransferBlocks
from transfer.actions import Finished, PullResult, Release, WantedBlock
from transfer.messages import TransferId
from transfer.node import BlockSink


class Pulls(Protocol):
    """Who fetches blocks: a :class:`~transfer.node.Node`."""

    def pull(self, transfer: TransferId, address: str, wanted: Many[WantedBlock], sink: BlockSink) -> None: ...

    def abort(self, transfer: TransferId, reason: str) -> None: ...

    def poll(self) -> Many[Release | Finished]: ...


@dataclass(frozen=True, slots=True)
class DecodeCounters:
    """``prompt_rows`` of requests with a handover are those found here, ``transferred_rows`` or computed here.

    ``prefill_recomputed_tokens`` are prompt tokens that this engine computed, whatever the reason.
    """

    handovers: int = 0
    pulls: int = 0
    pulls_refused: int = 0
    pulls_finished: int = 0
    transferred_blocks: int = 0
    transferred_rows: int = 0
    stale_records: int = 0
    prompt_rows: int = 0
    prefill_recomputed_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Pull:
    """A pull in flight. The engine's thread owns it; ``kv`` and the counts are written by the other one."""

    sequence: Sequence
    handover: Handover
    transfer_blocks: TransferBlocks
    engine: DecodeEngine
    first: int
    blocks: list[int]
    generations: list[int]
    kv: set[int] = field(default_factory=set)
    rows: int = 0
    stale: int = 0

    @property
    def holder(self) -> str:
        return f"pull:{self.handover.transfer.hex()}"

    @property
    def has_all_kv(self) -> bool:
        return len(self.kv) == len(self.blocks)

    def tokens_in(self, index: int) -> int:
        """How many tokens of the prompt the request's block ``index`` has."""
        size = self.engine.config.block_tokens
        return min(size, len(self.sequence.request.prompt) - index * size)

    def install(self, part: int, index: int, header: RecordHeader, payload: memoryview) -> bool:
        at = index - self.first
        if not 0 <= at < len(self.blocks):
            raise AssertionError(f"block {index} was not asked for")
        block, tokens = self.blocks[at], self.tokens_in(index)
        if part == KV:
            placed = self.transfer_blocks.put_kv(block, self.generations[at], tokens, header, payload)
            if placed:
                self.kv.add(index)
        else:
            rows = self.transfer_blocks.put_rows(block, self.generations[at], tokens, header, payload)
            placed = rows > 0
            self.rows += rows
        self.stale += not placed
        return placed


class DecodeEngine(Engine):
    """An :class:`Engine` that takes prompts over. Call :meth:`attach` before the first step.

    Blocks that something may still be written to are held by ``pull:<hex>`` until the pull has finished.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.transfer_blocks = TransferBlocks(self.aux, self.memory)
        self._pulls: Pulls | None = None
        self._in_flight: dict[bytes, _Pull] = {}
        self._reasons: dict[str, dict[int, str]] = {}
        self._counts = dict.fromkeys(DecodeCounters.__dataclass_fields__, 0)

    def attach(self, pulls: Pulls) -> None:
        self._pulls = pulls

    def take_over(self, request: Request, handover: Handover) -> None:
        """:meth:`add` a request whose prompt another engine has computed."""
        if len(handover.first_tokens) != request.n:
            raise InvalidInputError("first_tokens", f"{request.n}, one a sample", len(handover.first_tokens))
        if handover.transfer in self._in_flight or any(
            s.handover is not None and s.handover.transfer == handover.transfer for s in self.scheduler.unfinished
        ):
            raise InvalidInputError("transfer", "one that is not in use", handover.transfer.hex())
        self.add(request)
        (sequence,) = self.scheduler.of(request.id)
        sequence.handover = handover
        self._counts["handovers"] += 1
        self._counts["prompt_rows"] += len(request.prompt)

    @property
    def pulls_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def decode_counters(self) -> DecodeCounters:
        now = dict(self._counts)
        for pull in list(self._in_flight.values()):
            _add(now, pull)
        return DecodeCounters(**now)

    @property
    def waits(self) -> bool:
        return bool(self._in_flight)

    # ---------------------------------------------------------------- inside a step

    def _plan(self) -> list[Work]:
        assert self._pulls is not None, "attach() comes first"
        for event in self._pulls.poll():
            assert isinstance(event, Finished), "a decode engine offers nothing"
            self._end_pull(event.transfer, event.result)
        for pull in list(self._in_flight.values()):
            # Samples share their blocks when they fork, and rows that come later would reach only one of them.
            if pull.sequence.state is State.LANDING and pull.has_all_kv and pull.sequence.request.n == 1:
                self._land(pull.sequence, len(pull.sequence.request.prompt))
        work = super()._plan()
        for sequence in self.scheduler.unfinished:
            if sequence.state is State.LANDING and not sequence.arriving:
                self._begin_pull(sequence)
        return work

    def _compute(self, work: list[Work]) -> None:
        for item in work:
            prompt = len(item.sequence.request.prompt)
            self._counts["prefill_recomputed_tokens"] += max(0, min(item.stop, prompt) - item.start)
        super()._compute(work)

    def _begin_pull(self, sequence: Sequence) -> None:
        handover, owner = sequence.handover, sequence.owner
        assert handover is not None, owner
        assert self._pulls is not None, "attach() comes first"
        first, prompt = sequence.computed // self.config.block_tokens, sequence.request.prompt
        keys, blocks = self.manager.keys(owner, prompt)[first:], self.manager.table(owner)[first:]
        generations = self.aux.generations(blocks).tolist()
        pull = _Pull(sequence, handover, self.transfer_blocks, self, first, blocks, generations)
        wanted = [WantedBlock(first + i, key, (ROWS, KV)) for i, key in enumerate(keys)]
        self.manager.hold(owner, pull.holder, first)
        try:
            self._pulls.pull(TransferId(handover.transfer), handover.address, wanted, pull)
        except KVRouteError as error:
            self.manager.free(pull.holder)
            self._counts["pulls_refused"] += 1
            self._reasons[sequence.request.id] = dict.fromkeys(range(first, first + len(blocks)), str(error))
            self._land(sequence, sequence.computed)
            return
        self._counts["pulls"] += 1
        self._in_flight[handover.transfer] = pull
        sequence.arriving = True

    def _end_pull(self, transfer: TransferId, result: PullResult) -> None:
        """Nothing of this pull is installed from here on: its blocks may go, and be moved."""
        pull = self._in_flight.pop(transfer, None)
        if pull is None:
            raise AssertionError(f"transfer {transfer.hex()} finished and was not in flight")
        sequence = pull.sequence
        sequence.arriving = False
        self.manager.free(pull.holder)
        _add(self._counts, pull)
        self._counts["pulls_finished"] += 1
        lost = {m.index: m.reason.value for m in result.missing if m.part == ROWS or m.index not in pull.kv}
        if sequence.state is not State.FINISHED and lost:
            detail = f": {result.detail}" if result.detail else ""
            self._reasons[sequence.request.id] = {index: reason + detail for index, reason in lost.items()}
        if sequence.state is State.LANDING:
            blocks = range(pull.first, pull.first + len(pull.blocks))
            stop = next((i for i in blocks if i not in pull.kv or i in lost), blocks.stop)
            prompt = len(sequence.request.prompt)
            self._land(sequence, min(prompt, stop * self.config.block_tokens))
        elif sequence.state is State.SETTLING:
            assert sequence.reason is not None, sequence.owner
            self._finish(sequence, sequence.reason)

    def _land(self, sequence: Sequence, computed: int) -> None:
        """The sequence runs, with the KV of its first ``computed`` tokens in place."""
        handover, request = sequence.handover, sequence.request
        assert handover is not None, sequence.owner
        sequence.on(Event.LAND)
        sequence.computed = computed
        self.manager.publish(sequence.owner, sequence.tokens[:computed])
        if computed < len(request.prompt):
            return  # the last prompt token is computed here, and sampled from
        for each, token in zip((sequence, *self._fork(sequence)), handover.first_tokens, strict=True):
            if (reason := each.accept(token)) is not None:
                self._finish(each, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.arriving and reason is not FinishReason.ABORT:
            sequence.on(Event.SETTLE)
            sequence.reason = reason
            return
        if sequence.arriving:
            assert self._pulls is not None, "attach() comes first"
            assert sequence.handover is not None, sequence.owner
            with suppress(KVRouteError):  # a pull that does not hear of it ends by itself
                self._pulls.abort(TransferId(sequence.handover.transfer), "the request was aborted")
        super()._finish(sequence, reason)
        request_id = sequence.request.id
        output = self._done[-1]
        self._done[-1] = replace(output, gaps=self._gaps(output.routes, self._reasons.get(request_id, {})))
        if not self.scheduler.of(request_id):
            self._reasons.pop(request_id, None)

    def _gaps(self, routes: Routes, reasons: dict[int, str]) -> tuple[Gap, ...]:
        """Why rows are missing: a gap for each block of a missing range, neighbours with one reason joined."""
        size, found = self.config.block_tokens, list[Gap]()
        for start, stop in routes.missing:
            for at in range(start // size, -(-stop // size)):
                reason = reasons.get(at, "not there any more")
                gap = Gap(max(start, at * size), min(stop, (at + 1) * size), reason)
                if found and found[-1].stop == gap.start and found[-1].reason == reason:
                    gap = replace(found.pop(), stop=gap.stop)
                found.append(gap)
        return tuple(found)


def _add(counts: dict[str, int], pull: _Pull) -> None:
    counts["transferred_blocks"] += len(pull.kv)
    counts["transferred_rows"] += pull.rows
    counts["stale_records"] += pull.stale


__all__ = ["DecodeCounters", "DecodeEngine", "Pulls"]

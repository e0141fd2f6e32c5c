"""Prefill and decode as two engines: prefill lends the blocks of a prompt as it fills them, decode fetches them.

A prompt is on offer from the moment it is queued. Decode allocates the sequence's blocks as usual, takes hits from its
own prefix cache, and fetches the rest while prefill computes: after the last chunk one block is left. Blocks that did
not come are computed here, from the first gap on, so that rows and KV are decode's own; so is the last token of the
prompt, whose logits give the first sampled token.

Rows and KV are lent from copies, so prefill keeps no block for it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from cache_manager.errors import InvalidInputError, KVRouteError
from kvroute.connector.crossing import Came, Crossing
from paged_engine.engine import Engine
from paged_engine.request import FinishReason, Request
from paged_engine.scheduler import Work
from paged_engine.sequence import Handover, Sequence, State
from transfer import Release, TransferId, TransferLimits, new_transfer
from transfer.link import Link


class PeerEngine(Engine):
    """An :class:`Engine` with one end of a crossing over ``link``, which it owns."""

    def __init__(self, *args: Any, link: Link, limits: TransferLimits | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        try:
            self.crossing = Crossing(self.aux, link, kv=self.kv, limits=limits)
        except BaseException:
            super().close()
            raise

    def reset(self, *, weights_version: int) -> None:
        super().reset(weights_version=weights_version)
        self.crossing.follow()

    def close(self) -> None:
        self.crossing.close()  # nothing is read or written for it from here on
        super().close()

    def _span(self, sequence: Sequence, first: int, stop: int) -> tuple[dict[Any, int], list[int]]:
        """The sequence's blocks ``[first, stop)`` by their keys, and their lives."""
        keys = self.manager.keys(sequence.owner, sequence.request.prompt)[first:stop]
        blocks = dict(zip(keys, self.manager.table(sequence.owner)[first:stop], strict=True))
        return blocks, self.aux.generations(list(blocks.values())).tolist()


class PrefillEngine(PeerEngine):
    """Computes prompts, and lends their blocks."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.lent: dict[bytes, str] = {}
        """Transfers that decode may still ask for, and their requests."""
        self.filling: dict[str, tuple[bytes, int]] = {}
        """Prompts that are not computed yet, by their request: transfer id, and how many blocks are lent so far."""

    def lend(self, request: Request) -> Handover:
        """Queue a prompt, and lend its blocks as they are computed; one token is generated, whatever its limits are.

        A request that is too long as a whole is refused: no decode could finish it. :class:`KVRouteError`, and nothing
        has changed, when the node takes no more transfers.
        """
        self.check(request)
        transfer = new_transfer()
        self.crossing.lender.lend(transfer, 0, {}, [], 0, last=False)
        self.add(replace(request, max_tokens=1, n=1, stop_tokens=frozenset()))
        self.lent[transfer], self.filling[request.id] = request.id, (transfer, 0)
        return Handover(transfer, self.crossing.address)

    def _plan(self) -> list[Work]:
        for ended in self.crossing.poll():
            if isinstance(ended, Release) and (request_id := self.lent.pop(ended.transfer, None)) is not None:
                self.abort(request_id)  # no longer wanted; most have ended before
        work = super()._plan()
        for item in work:
            self._fill(item.sequence, item.start)  # what the prefix cache has
        return work

    def _advance(self, item: Work, logits: Any) -> None:
        self._fill(item.sequence, item.stop)
        super()._advance(item, logits)

    def _fill(self, sequence: Sequence, computed: int) -> None:
        """Lend the new full blocks of the ``computed`` tokens, and the last block."""
        if sequence.request.id not in self.filling:
            return
        transfer, first = self.filling[sequence.request.id]
        size, last = self.config.block_tokens, computed >= len(sequence.request.prompt)
        stop = -(-computed // size) if last else max(first, computed // size)
        if stop == first and not last:
            return
        self.filling[sequence.request.id] = transfer, stop
        try:
            tokens = computed - first * size if last else (stop - first) * size
            self.crossing.lender.lend(transfer, first, *self._span(sequence, first, stop), tokens, last=last)
        except KVRouteError:  # the node takes nothing more, and has withdrawn the transfer: decode computes the rest
            del self.filling[sequence.request.id]

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        transfer, _ = self.filling.pop(sequence.request.id, (b"", 0))
        if reason is FinishReason.ABORT and transfer:
            with suppress(KVRouteError):  # the node is closed
                self.crossing.lender.withdraw(transfer, "the request was aborted")
        super()._finish(sequence, reason)


@dataclass(slots=True)
class Crossed:
    """Prompts that were handed over: how many, what came, and how many of their tokens were computed here as well.

    The last token of each is always computed here, and does not count.
    """

    handovers: int = 0
    transferred_blocks: int = 0
    transferred_rows: int = 0
    prefill_recomputed_tokens: int = 0


class DecodeEngine(PeerEngine):
    """Takes prompts over. Blocks that a fetch may still write are held under the transfer's id until it is over."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.crossed = Crossed()
        self._under_way: dict[bytes, tuple[Sequence, range]] = {}  # with the numbers of its blocks that are fetched

    def add(self, request: Request, handover: Handover | None = None) -> None:
        """Queue a request; with ``handover`` one whose prompt another engine computes, or has computed."""
        waiting = {s.handover.transfer for s in self.scheduler.unfinished if s.handover is not None}
        if handover is not None and handover.transfer in waiting | self._under_way.keys():
            raise InvalidInputError("transfer", "one that is not in use", handover.transfer.hex())
        super().add(request)
        (sequence,) = self.scheduler.of(request.id)
        sequence.handover = handover
        self.crossed.handovers += handover is not None

    @property
    def waits(self) -> bool:
        return bool(self._under_way)

    def _plan(self) -> list[Work]:
        for ended in self.crossing.poll():
            if isinstance(ended, Came):
                self._land(ended)
        work = super()._plan()
        for sequence in self.scheduler.unfinished:
            handover = sequence.handover
            if handover and sequence.state is State.LANDING and handover.transfer not in self._under_way:
                self._fetch(sequence, handover)
        for item in work:
            if item.sequence.handover is not None:
                twice = min(item.stop, len(item.sequence.request.prompt) - 1) - item.start
                self.crossed.prefill_recomputed_tokens += max(0, twice)
        return work

    def _fetch(self, sequence: Sequence, handover: Handover) -> None:
        size, tokens = self.config.block_tokens, len(sequence.request.prompt) - 1
        first, stop = sequence.computed // size, -(-tokens // size)
        blocks, lives = self._span(sequence, first, stop)
        self.manager.hold(sequence.owner, handover.transfer.hex(), first)
        self._under_way[handover.transfer] = sequence, range(first, stop)
        self.crossing.borrower.fetch(handover.transfer, handover.address, first, blocks, lives, tokens - first * size)

    def _land(self, came: Came) -> None:
        """The fetch is over: the sequence runs with what came, unless it has ended or was reset meanwhile."""
        sequence, fetched = self._under_way.pop(came.transfer)
        self.manager.release(came.transfer.hex())
        self.crossed.transferred_blocks += len(came.kv)
        self.crossed.transferred_rows = self.aux.counters.rows_installed
        if sequence.state is not State.LANDING:
            return
        gap = next((i for i in fetched if i in came.why or i not in came.kv), fetched.stop)
        first = gap * self.config.block_tokens
        sequence.become(State.RUNNING)
        sequence.computed = min(len(sequence.request.prompt) - 1, first)
        self.manager.publish(sequence.owner, sequence.request.prompt[: sequence.computed])
        if gap < fetched.stop:
            sequence.note = f"computed here from position {first} on: {came.why.get(gap, 'it did not come')}"

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        handover = sequence.handover
        if sequence.state is State.LANDING and handover and handover.transfer in self._under_way:
            with suppress(KVRouteError):  # the node is closed
                self.crossing.node.abort(TransferId(handover.transfer), "aborted")  # prefill need not go on
        super()._finish(sequence, reason)

"""One engine goes on where another has stopped: prefill lends the blocks of a prompt, decode fetches them.

Rows and KV are lent from copies, so prefill keeps no block for it. A sequence with a handover gets its blocks like any
other, what decode's own prefix cache has included, and fetches only the rest; it runs when the fetch is over. Whatever
did not come is computed here, from the first gap on, so that rows and KV are decode's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cache_manager.errors import InvalidInputError, KVRouteError
from kvroute.connector.crossing import Came, Crossing
from paged_engine.engine import Engine
from paged_engine.request import FinishReason, Request
from paged_engine.scheduler import Work
from paged_engine.sequence import Event, Handover, Sequence, State
from transfer import Release, TransferLimits, new_transfer
from transfer.link import Link


class PeerEngine(Engine):
    """An :class:`Engine` beside one end of a crossing over ``link``, which it owns."""

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


class PrefillEngine(PeerEngine):
    """Ends requests with the first token of each sample, and lends their blocks."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.lent: set[bytes] = set()
        """Transfers that decode may still ask for."""
        self._transfers: dict[str, bytes] = {}

    def add(self, request: Request) -> None:
        """Queue a prompt; whatever the request says about its end, one token a sample is generated.

        A request that is too long as a whole is refused all the same: no decode could finish it.
        """
        self.check_room(request)
        super().add(replace(request, max_tokens=1, stop_tokens=frozenset(), stop_sequences=()))

    def transfer_of(self, request_id: str) -> bytes | None:
        """What a finished request's blocks are lent as, asked once; ``None`` where they could not be."""
        return self._transfers.pop(request_id, None)

    def _plan(self) -> list[Work]:
        for ended in self.crossing.poll():
            if isinstance(ended, Release):
                self.lent.discard(ended.transfer)
                self._transfers = {name: mine for name, mine in self._transfers.items() if mine != ended.transfer}
        return super()._plan()

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if reason is not FinishReason.ABORT and sequence.sample == 0:
            prompt, transfer = sequence.request.prompt, new_transfer()
            table = self.manager.table(sequence.owner)
            blocks = dict(zip(self.manager.keys(sequence.owner, prompt), table, strict=False))
            lives = self.aux.generations(list(blocks.values())).tolist()
            try:
                self.crossing.lender.lend(transfer, 0, blocks, lives, len(prompt))
            except KVRouteError:
                pass  # the node takes nothing more: decode computes the prompt
            else:
                self.lent.add(transfer)
                self._transfers[sequence.request.id] = transfer
        super()._finish(sequence, reason)


@dataclass(frozen=True, slots=True)
class DecodeCounters:
    """Of prompts that were handed over: how many, what came, and how many of their tokens were computed here."""

    handovers: int = 0
    transferred_blocks: int = 0
    transferred_rows: int = 0
    prefill_recomputed_tokens: int = 0


class DecodeEngine(PeerEngine):
    """Takes prompts over. Blocks that a fetch may still write to are held by ``fetch:<hex>`` until it is over."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._under_way: dict[bytes, tuple[Sequence, int]] = {}  # with the first block that is fetched
        self._handovers = self._blocks = self._recomputed = 0

    def take_over(self, request: Request, handover: Handover) -> None:
        """:meth:`add` a request whose prompt another engine has computed."""
        if len(handover.first_tokens) != request.n:
            raise InvalidInputError("first_tokens", f"{request.n}, one a sample", len(handover.first_tokens))
        waiting = (s.handover for s in self.scheduler.unfinished if s.handover is not None)
        if handover.transfer in {*self._under_way, *(each.transfer for each in waiting)}:
            raise InvalidInputError("transfer", "one that is not in use", handover.transfer.hex())
        self.add(request)
        (sequence,) = self.scheduler.of(request.id)
        sequence.handover = handover
        self._handovers += 1

    @property
    def decode_counters(self) -> DecodeCounters:
        return DecodeCounters(self._handovers, self._blocks, self.aux.counters.rows_installed, self._recomputed)

    @property
    def waits(self) -> bool:
        return bool(self._under_way)

    def _plan(self) -> list[Work]:
        for ended in self.crossing.poll():
            if isinstance(ended, Came):
                self._land(ended)
        work = super()._plan()
        for sequence in self.scheduler.unfinished:
            if sequence.handover and sequence.state is State.LANDING and not self._fetched(sequence):
                self._fetch(sequence, sequence.handover)
        return work

    def _compute(self, work: list[Work]) -> None:
        taken_over = (item for item in work if item.sequence.handover is not None)
        self._recomputed += sum(max(0, min(w.stop, len(w.sequence.request.prompt)) - w.start) for w in taken_over)
        super()._compute(work)

    def _fetched(self, sequence: Sequence) -> bool:
        return any(mine is sequence for mine, _ in self._under_way.values())

    def _fetch(self, sequence: Sequence, handover: Handover) -> None:
        owner, prompt, size = sequence.owner, sequence.request.prompt, self.config.block_tokens
        first = sequence.computed // size
        blocks = dict(zip(self.manager.keys(owner, prompt)[first:], self.manager.table(owner)[first:], strict=True))
        lives = self.aux.generations(list(blocks.values())).tolist()
        self.manager.hold(owner, _holder(handover.transfer), first)
        self._under_way[handover.transfer] = sequence, first
        tokens = len(prompt) - first * size
        self.crossing.borrower.fetch(handover.transfer, handover.address, first, blocks, lives, tokens)

    def _land(self, came: Came) -> None:
        """Nothing more lands: the sequence runs with what is there, or has been told to end or to begin anew."""
        sequence, first = self._under_way.pop(came.transfer)
        self.manager.free(_holder(came.transfer))
        self._blocks += len(came.kv)
        handover, prompt, size = sequence.handover, sequence.request.prompt, self.config.block_tokens
        if sequence.state is not State.LANDING or handover is None:
            return
        places = range(first, -(-len(prompt) // size))
        gap = next((i for i in places if i in came.why or i not in came.kv), places.stop)
        sequence.on(Event.LAND)
        sequence.computed = min(len(prompt), gap * size)
        self.manager.publish(sequence.owner, prompt[: sequence.computed])
        if sequence.computed < len(prompt):  # the last prompt token is computed here, and sampled from
            sequence.note = f"computed here from position {gap * size} on: {came.why.get(gap, 'it did not come')}"
            return
        for each, token in zip((sequence, *self._fork(sequence)), handover.first_tokens, strict=True):
            if (reason := each.accept(token)) is not None:
                self._finish(each, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.state is State.LANDING and self._fetched(sequence):
            self.crossing.borrower.give_up(set(self.manager.table(sequence.owner)))
        super()._finish(sequence, reason)


def _holder(transfer: bytes) -> str:
    return f"fetch:{transfer.hex()}"


__all__ = ["DecodeCounters", "DecodeEngine", "PeerEngine", "PrefillEngine"]

"""Rows by transfer: an engine lends the blocks that its steps fill, and another one fetches them beside the KV.

The transfer binds rows to KV, so KV of other engines is not compared. See :mod:`kvroute.connector.tickets` for what a
request carries, and :mod:`kvroute.connector.crossing` for how rows cross.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from cache_manager.errors import KVRouteError
from cache_manager.keys import BlockKey
from kvroute.connector.carriers.port import (
    Admission,
    Carrier,
    SchedulerParts,
    SchedulerSide,
    WorkerParts,
    WorkerSide,
)
from kvroute.connector.crossing import Came, Crossing, link_of
from kvroute.connector.fills import Request
from kvroute.connector.tickets import Fetch, Lend, Tickets
from kvroute.witness import Run

if TYPE_CHECKING:
    from kvroute.connector.messages import StepMeta

logger = logging.getLogger(__name__)

TICKET_TAKEN: Final = "another request fetches the rows of this ticket"
LATE: Final = "they were not here {} s after their KV"


@dataclass(frozen=True, slots=True)
class ByTransfer(Carrier):
    """Rows of prompts are lent at ``settings.lend``, and fetched from where tickets say."""

    word: ClassVar[str] = "transfer"

    def scheduler(self, parts: SchedulerParts) -> SchedulerSide:
        return ByTransferScheduler(parts)

    def worker(self, parts: WorkerParts) -> WorkerSide:
        return ByTransferWorker(parts)


class TransferStep(NamedTuple):
    """The message with a step."""

    lends: Sequence[Lend]  # blocks that the step fills of prompts that other engines go on from
    withdrawn: Sequence[bytes]  # transfers that lend no more
    fetches: Sequence[Fetch]  # what other engines lend us


class ByTransferScheduler(SchedulerSide):
    """The scheduler's side: its :class:`~kvroute.connector.tickets.Tickets`."""

    def __init__(self, parts: SchedulerParts) -> None:
        self._weights = parts.weights
        self._blocks_of = parts.blocks_of
        self.tickets = Tickets(parts.spec.block_tokens, lambda: parts.feed.generations)
        self._admitted: set[str] = set()  # requests that have not ended

    def attach(self, greeting: str) -> None:
        self.tickets.address = greeting

    def admitted(self, admission: Admission) -> Run | None:
        request = admission.request
        first = admission.first
        external = admission.external
        self._admitted.add(request.request_id)
        if admission.lends:
            self.tickets.lend(request)
        if external or admission.ticket is not None:
            self.tickets.fetch(request, admission.ticket, first, external, admission.blocks, admission.kv)
        return None

    def step(self, scheduled: Mapping[str, int]) -> TransferStep:
        lends = self.tickets.fills(scheduled, self._blocks_of, mixed=self._weights.mixed)
        return TransferStep(lends, self.tickets.withdrawn(), self.tickets.fetches())

    def told(self, message: Mapping[str, Mapping[int, str]]) -> None:
        """By request that waits for its fetch no more: why rows of its blocks did not come."""
        for name in self._admitted & message.keys():
            self.tickets.came(name, message[name])

    def why(self, request_id: str) -> Mapping[int, str]:
        return self.tickets.why(request_id)

    def ticket(self, request: Request, kv: Mapping[str, str]) -> dict[str, Any] | None:
        prompt = request.all_token_ids[: request.num_prompt_tokens]
        return self.tickets.ticket(request.request_id, prompt, mixed=self._weights.mixed, kv=kv)

    def ended(self, request_id: str) -> Mapping[int, str]:
        self._admitted.discard(request_id)
        return self.tickets.end(request_id)


class ByTransferWorker(WorkerSide):
    """Lends and fetches rows as the scheduler says, and counts rows that do not come."""

    def __init__(self, parts: WorkerParts) -> None:
        settings = parts.settings
        link = link_of(settings.lend, settings.keys)
        self._limits = limits = parts.limits
        self.crossing = Crossing(
            parts.blocks,
            link,
            limits=limits.transfer,
            lease_s=limits.lease_s,
            lent_nbytes_max=settings.lent_nbytes_max,
        )
        self.not_lent = 0
        """Blocks whose rows could not be lent."""
        self._blocks = parts.blocks
        self._meter = parts.meter
        self._since_s: dict[bytes, float] = {}  # begin of each transfer under way
        self._under_way: dict[bytes, Fetch] = {}
        self._waiting: dict[str, float] = {}  # requests whose KV has come, with the end of their wait for rows
        self._why: dict[str, Mapping[int, str]] = {}  # not yet told to the scheduler

    @property
    def greeting(self) -> str:
        """Where rows are lent."""
        return self.crossing.address

    def begun(self, step: StepMeta) -> bool:
        """From now on its requests wait for its fetches. A transfer brings rows to one request."""
        transfers: TransferStep = step.carrier
        for fetch in transfers.fetches:
            if self._under_way.setdefault(fetch.transfer, fetch) is fetch:
                self._since_s[fetch.transfer] = time.monotonic()
            else:
                self._missed(fetch, dict.fromkeys(range(fetch.first, fetch.first + len(fetch.blocks)), TICKET_TAKEN))
        return bool(transfers.fetches or transfers.withdrawn)

    def fail(self, blocks: set[int]) -> None:
        self.crossing.borrower.give_up(blocks)

    def start(self, step: StepMeta) -> None:
        """Begin the step's fetches."""
        self.crossing.follow()
        transfers: TransferStep = step.carrier
        for transfer in transfers.withdrawn:
            self.crossing.lender.withdraw(transfer, "it is computed again")
        for fetch in transfers.fetches:
            if self._under_way.get(fetch.transfer) is not fetch:
                continue
            keys = self._keys(fetch)
            self.crossing.borrower.fetch(fetch.transfer, fetch.address, fetch.first, keys, fetch.lives, fetch.tokens)

    def filled(self, step: StepMeta, computed: Any) -> None:
        """Lend the step's blocks."""
        for lend in step.carrier.lends:
            try:
                keys = self._keys(lend)
                self.crossing.lender.lend(lend.transfer, lend.first, keys, lend.lives, lend.tokens, last=lend.last)
            except KVRouteError as error:
                if not self.not_lent:
                    logger.warning("rows of %d blocks are not lent: %s; others are counted", len(lend.blocks), error)
                self.not_lent += len(lend.blocks)

    def _keys(self, message: Lend | Fetch) -> dict[BlockKey, int]:
        """Names for a transfer's blocks, independent of tokens: the ticket has the tokens' hash."""
        places = range(message.first, message.first + len(message.blocks))
        names = [self._blocks.keys.adopt(message.transfer + place.to_bytes(4, "little")) for place in places]
        return dict(zip(names, message.blocks, strict=True))

    def arrived(self, requests: AbstractSet[str], failed: AbstractSet[str]) -> set[str]:
        """Which may go on, of ``requests``, whose KV has come or has ``failed`` to, and of those that waited."""
        for ended in self.crossing.poll():
            if isinstance(ended, Came) and (fetch := self._under_way.pop(ended.transfer, None)):
                self._meter.took("transfer", time.monotonic() - self._since_s.pop(ended.transfer))
                self._missed(fetch, ended.why)
        now_s = time.monotonic()
        under_way = {fetch.request: fetch for fetch in self._under_way.values()}
        self._waiting |= dict.fromkeys(requests, now_s + self._limits.fetch_s)
        go = {name for name, end_s in self._waiting.items() if name not in under_way or end_s < now_s or name in failed}
        for name in go:
            del self._waiting[name]
            fetch = under_way.get(name)
            if fetch is not None:
                reason = LATE.format(self._limits.fetch_s)
                self._why[name] = dict.fromkeys(range(fetch.first, fetch.first + len(fetch.blocks)), reason)
        return go

    def _missed(self, fetch: Fetch, why: Mapping[int, str]) -> None:
        """Rows of these blocks do not come: the scheduler is told, and they are counted."""
        self._why[fetch.request] = why
        for reason in why.values():
            self._meter.miss(reason, self._blocks.block_tokens)

    def told(self) -> Mapping[str, Mapping[int, str]] | None:
        """Reasons for rows that did not come, by request and block, each returned once."""
        why = self._why
        self._why = {}
        return why or None

    def counters(self) -> dict[str, Any]:
        return {"transfer": self.crossing.node.counters}

    def close(self) -> None:
        self.crossing.close()


__all__ = ["LATE", "TICKET_TAKEN", "ByTransfer", "ByTransferScheduler", "ByTransferWorker", "TransferStep"]

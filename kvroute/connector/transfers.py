"""The worker's part of the crossing: it lends the blocks that steps fill, and waits for fetches up to a limit."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import KVRouteError
from cache_manager.keys import BlockKey
from kvroute.connector.crossing import Came, Crossing, link_of
from kvroute.connector.meter import Meter
from kvroute.connector.settings import Settings, StepMeta
from kvroute.connector.tickets import Fetch, Lend

logger = logging.getLogger(__name__)

LATE_S: Final = 1.0
"""How long a request whose KV has come waits at most for its rows; later ones may land until the request ends."""
TAKEN: Final = "another request fetches the rows of this ticket"
LATE: Final = f"they were not here {LATE_S} s after their KV"


class Transfers:
    """Lends and fetches rows of ``blocks`` as a scheduler says, and counts rows that do not come.

    The thread that launches steps calls :meth:`expect` and :meth:`arrived`, the one that writes their rows
    :meth:`begin` and :meth:`lend`.
    """

    def __init__(self, blocks: AuxBlocks, settings: Settings, meter: Meter) -> None:
        link = link_of(settings.lend, settings.keys)
        self.crossing = Crossing(blocks, link, lent_nbytes_max=settings.lent_nbytes_max)
        self.not_lent = 0
        """Blocks whose rows could not be lent."""
        self._blocks, self._meter = blocks, meter
        self._since_s: dict[bytes, float] = {}  # begin of each transfer under way
        self._under_way: dict[bytes, Fetch] = {}
        self._waiting: dict[str, float] = {}  # requests whose KV has come, with the end of their wait for rows
        self._why: dict[str, Mapping[int, str]] = {}  # not yet told to the scheduler

    def expect(self, step: StepMeta) -> None:
        """A step begins: from now on its requests wait for its fetches. A transfer brings rows to one request."""
        for fetch in step.fetches:
            if self._under_way.setdefault(fetch.transfer, fetch) is fetch:
                self._since_s[fetch.transfer] = time.monotonic()
            else:
                self._missed(fetch, dict.fromkeys(range(fetch.first, fetch.first + len(fetch.blocks)), TAKEN))

    def begin(self, step: StepMeta) -> None:
        """Begin the step's fetches, when its blocks are in the lives that it means."""
        self.crossing.follow()
        for transfer in step.withdrawn:
            self.crossing.lender.withdraw(transfer, "it is computed again")
        for each in step.fetches:
            if self._under_way.get(each.transfer) is not each:
                continue
            keys = self._keys(each)
            self.crossing.borrower.fetch(each.transfer, each.address, each.first, keys, each.lives, each.tokens)

    def lend(self, step: StepMeta) -> None:
        """Lend the step's blocks, when their rows are written."""
        for each in step.lends:
            try:
                keys = self._keys(each)
                self.crossing.lender.lend(each.transfer, each.first, keys, each.lives, each.tokens, last=each.last)
            except KVRouteError as error:
                if not self.not_lent:
                    logger.warning("rows of %d blocks are not lent: %s; others are counted", len(each.blocks), error)
                self.not_lent += len(each.blocks)

    def _keys(self, of: Lend | Fetch) -> dict[BlockKey, int]:
        """Names for a transfer's blocks, independent of tokens: the ticket has the tokens' hash."""
        places = range(of.first, of.first + len(of.blocks))
        names = [self._blocks.keys.adopt(of.transfer + at.to_bytes(4, "little")) for at in places]
        return dict(zip(names, of.blocks, strict=True))

    def arrived(self, requests: AbstractSet[str], failed: AbstractSet[str]) -> set[str]:
        """Which may go on, of ``requests``, whose KV has come or has ``failed`` to, and of those that waited."""
        for each in self.crossing.poll():
            if isinstance(each, Came) and (fetch := self._under_way.pop(each.transfer, None)):
                self._meter.took("transfer", time.monotonic() - self._since_s.pop(each.transfer))
                self._missed(fetch, each.why)
        now_s, under_way = time.monotonic(), {fetch.request: fetch for fetch in self._under_way.values()}
        self._waiting |= dict.fromkeys(requests, now_s + LATE_S)
        go = {name for name, end_s in self._waiting.items() if name not in under_way or end_s < now_s or name in failed}
        for name in go:
            del self._waiting[name]
            if (fetch := under_way.get(name)) is not None:
                self._why[name] = dict.fromkeys(range(fetch.first, fetch.first + len(fetch.blocks)), LATE)
        return go

    def _missed(self, fetch: Fetch, why: Mapping[int, str]) -> None:
        """Rows of these blocks do not come: the scheduler is told, and they are counted."""
        self._why[fetch.request] = why
        for reason in why.values():
            self._meter.miss(reason, self._blocks.block_tokens)

    def told(self) -> dict[str, Mapping[int, str]]:
        """Reasons for rows that did not come, by request and block, each returned once."""
        told, self._why = self._why, {}
        return told


__all__ = ["Transfers"]

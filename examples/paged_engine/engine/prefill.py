"""The engine that computes prompts for others: it samples each one's first tokens and holds the blocks for them."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cache_manager.errors import KVRouteError
from paged_engine.engine.engine import Engine
from paged_engine.engine.request import FinishReason, Request
from paged_engine.engine.scheduler import Work
from paged_engine.engine.sequence import Sequence
from paged_engine.engine.transfer_blocks import TransferBlocks
from transfer.actions import OfferedBlock
from transfer.messages import TransferId
from transfer.node import new_transfer


class Ended(Protocol):
    """A transfer that is over: its blocks are free to go."""

    @property
    def transfer(self) -> TransferId: ...


class Offers(Protocol):
    """Where blocks are offered. An offered block's records are read until the transfer has ended."""

    def offer(self, transfer: TransferId, blocks: Many[OfferedBlock]) -> None: ...

    def withdraw(self, transfer: TransferId, why: str) -> None: ...

    def poll(self) -> Many[Ended]:
        """The transfers that have ended since the last call."""


@dataclass(frozen=True, slots=True)
class PrefillCounters:
    """``offers`` is the sum of ``transfers`` and ``offers_refused``."""

    offers: int = 0
    transfers: int = 0
    offers_refused: int = 0
    transfers_ended: int = 0


class PrefillEngine(Engine):
    """An :class:`Engine` whose requests end with the first token, their blocks on offer.

    Call :meth:`attach` before the first step. Blocks on offer are held by ``transfer:<hex>`` until the transfer ends;
    the engine waits for room if they leave none. What is on offer reads them: close the node first.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.transfer_blocks = TransferBlocks(self.aux, self.memory)
        self._offers: Offers | None = None
        self._leased: set[TransferId] = set()
        self._transfers: dict[str, TransferId | None] = {}
        self._counts = dict.fromkeys(PrefillCounters.__dataclass_fields__, 0)

    def attach(self, offers: Offers) -> None:
        self._offers = offers

    def add(self, request: Request) -> None:
        """Queue a prompt; whatever the request says about its end, one token a sample is generated.

        A request that is too long as a whole is refused all the same: no decode could finish it.
        """
        self.check_room(request)
        super().add(replace(request, max_tokens=1, stop_tokens=frozenset(), stop_sequences=()))

    def transfer_of(self, request_id: str) -> TransferId | None:
        """The transfer that has a finished request's blocks, asked once; ``None`` when they could not be offered."""
        return self._transfers.pop(request_id, None)

    @property
    def leased_transfers(self) -> int:
        """Transfers whose blocks are held."""
        return len(self._leased)

    @property
    def prefill_counters(self) -> PrefillCounters:
        return PrefillCounters(**self._counts)

    @property
    def waits(self) -> bool:
        return bool(self._leased)

    def _plan(self) -> list[Work]:
        assert self._offers is not None, "attach() comes first"
        for ended in self._offers.poll():
            self._leased.discard(ended.transfer)
            self.manager.free(_lessee(ended.transfer))
            self._counts["transfers_ended"] += 1
        return super()._plan()

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if reason is not FinishReason.ABORT and sequence.sample == 0:
            self._transfers[sequence.request.id] = self._offer(sequence)
        super()._finish(sequence, reason)

    def _offer(self, sequence: Sequence) -> TransferId | None:
        assert self._offers is not None, "attach() comes first"
        prompt, owner, size = sequence.request.prompt, sequence.owner, self.config.block_tokens
        keys = self.manager.keys(owner, prompt)
        table = self.manager.table(owner)
        tokens = [min(size, len(prompt) - i * size) for i in range(len(keys))]
        blocks = self.transfer_blocks.take(dict(zip(keys, table, strict=False)), tokens)
        self._counts["offers"] += 1
        try:
            transfer = new_transfer()
            self._offers.offer(transfer, blocks)
        except KVRouteError:
            self._counts["offers_refused"] += 1
            return None
        self.manager.hold(owner, _lessee(transfer))
        self._leased.add(transfer)
        self._counts["transfers"] += 1
        return transfer


def _lessee(transfer: TransferId) -> str:
    return f"transfer:{transfer.hex()}"


__all__ = ["Offers", "PrefillCounters", "PrefillEngine"]

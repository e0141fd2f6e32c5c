"""The small paged engine as prefill or decode: it hands requests over, or goes on with them beside KV from there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toy_engine import Toy
from toy_requests import TOKENS, Asked
from waiting import GIVE_UP_S

from kvroute.connector.carriers.by_transfer import TransferStep
from kvroute.connector.messages import StepMeta
from kvroute.connector.tickets import UNNAMED


class ToyCrossing(Toy):
    """Rows cross by transfer; of KV there is what the engine itself computes."""

    def __init__(self, **said: Any) -> None:
        super().__init__(carrier="transfer", **said)
        self.unbrought: set[int] = set()  # places in the request of blocks whose KV another engine was to bring
        self.waits = True  # until its rows have come, before that failure shows
        self.waiting: Callable[[], object] = lambda: None  # done while a request waits for rows
        self.lent = b""  # the transfer of the last blocks that were lent
        self.fetches: set[bytes] = set()  # transfers from which this engine fetches
        carrier: Any = self.worker.carrier
        self._poll = carrier.crossing.poll
        carrier.crossing.poll = self._ended

    def _ended(self) -> Any:
        ended = self._poll()
        self.fetches -= {fetch.transfer for fetch in ended}
        return ended

    def ask(
        self,
        name: str,
        tokens: Sequence[int],
        chunks: Sequence[int] = (64,),
        *,
        lends: bool = False,
        brought: int | None = None,
        ticket: Any = None,
        more: Sequence[int] = (),
        kv: Mapping[str, str] = UNNAMED,
    ) -> dict[str, Any]:
        """Compute ``tokens`` in steps of so many tokens; what goes to the client.

        ``lends``: another engine goes on from here, and the answer is for that. Here that brings KV of the first tokens
        that are not cached, up to ``brought``, and a ``ticket`` for their rows; ``more`` is said behind the prompt. The
        KV that goes over is called ``kv``.
        """
        self.request = request = Asked(name, tokens)
        local = self._local(request)
        found = 0 if brought is None else max(0, brought - local * TOKENS)
        taken = self.scheduler.matched(request, local * TOKENS, found, later=brought is not None)
        self._admit(request, local, taken, lends=lends, ticket=ticket, kv=kv)
        if brought is not None:
            self._land(request, min(local * TOKENS + taken, len(tokens) - 1))
            request.all_token_ids = request.tokens = [*tokens, *more]
            self.scheduler.given(self._give(len(request.tokens)))
        self._compute(request, chunks, range(0))
        left = self.scheduler.ticket(request, kv) if lends else None
        told = self._leave(request)
        return {"kv_transfer_params": {"kvroute": left} if lends else told and told.result(GIVE_UP_S)}

    def _land(self, request: Asked, computed: int) -> None:
        """The KV has come; rows are waited for as long as the worker says."""
        came = {request.request_id}
        self._step(request, 0, range(0))
        if self.unbrought:
            self.worker.settle()
            while self.waits and self.fetches:
                self.worker.arrived(set())
                time.sleep(0.001)
            self.worker.begin(self.scheduler.step({}))
            self.worker.fail({self.table[place] for place in self.unbrought if place < len(self.table)})
            self.worker.end()
            self.worker.failures()
            computed = min(computed, min(self.unbrought) * TOKENS)
        while not (go := self.worker.arrived(came, came if self.unbrought else frozenset())):
            came = set()
            self.waiting()
            self._step(request, 0, range(0))
            time.sleep(0.001)
        assert go == {request.request_id}
        self.hear()
        self.scheduler.loaded(request.request_id)
        self.scheduler.admitted(request, self.table, 0)
        request.num_computed_tokens, self.unbrought = computed, set()

    def hear(self) -> None:
        """The worker's report after a step."""
        if (told := self.worker.told()) is not None:
            self.scheduler.told(told.carrier)

    def _scheduled(self, request: Asked, n: int) -> StepMeta:
        meta = super()._scheduled(request, n)
        assert isinstance(meta.carrier, TransferStep)
        self.lent = next((lend.transfer for lend in meta.carrier.lends), self.lent)
        self.fetches |= {fetch.transfer for fetch in meta.carrier.fetches}
        return meta

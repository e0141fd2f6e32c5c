"""What a request leaves when it ends, and the future that its client's data waits in."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from kvroute.connector.computations import Computation
from kvroute.connector.key import Key
from kvroute.connector.left import Tokens

ClientData = dict[str, Any]
"""A client's data beside its answer."""


class PendingAnswer(Future[ClientData]):
    """The future of a client's data. All answers told together have a ``value`` before the first of them is done."""

    value: ClientData | None = None

    def tell(self) -> None:
        try:
            self.set_result(self.value)  # type: ignore[arg-type]
        except InvalidStateError:  # whoever waited has cancelled it
            self.set_running_or_notify_cancel()


@dataclass(slots=True, eq=False)
class End:
    """What a request leaves: its computations, what is known when it is forgotten, and what its client waits for."""

    kept: list[Computation] = field(default_factory=list)  # with which tokens were sampled before preemptions, in order
    # With SchedulerRows.forget:
    rows_stop: int = sys.maxsize  # no later positions have rows: those behind KV that has not come are never compared
    steps: Sequence[tuple[int, int]] = ()  # that computed or joined it: number, and the first position each may write
    why: Mapping[int, str] = field(default_factory=dict)  # by block whose rows another engine lent and did not all come
    # With SchedulerRows.finished:
    key: Key = field(default_factory=lambda: Key(""))
    last: Computation | None = None
    request_tokens: Tokens | None = None
    start: int = 0  # the first position whose row its client wants
    answer: PendingAnswer = field(default_factory=PendingAnswer)
    give_up_s: float = 0.0
    failure: str = ""  # why it is left before its rows are known to be written

    @property
    def computations(self) -> list[Computation]:
        """All of them, in order."""
        return self.kept if self.last is None else [*self.kept, self.last]


__all__ = ["ClientData", "End", "PendingAnswer"]

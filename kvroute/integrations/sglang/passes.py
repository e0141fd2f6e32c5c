"""The law of order: forward passes are numbered as they are launched, and end in that order, but late (overlap
scheduling). Whatever SGLang does with pages meanwhile happens to their rows **when all passes launched before are
over**, in SGLang's order. So a page's rows match its KV of that moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvroute.integrations.sglang.drafts import accepted

UNREPORTED: Final = "a pass whose end the engine did not report"
UNVERIFIED: Final = "drafts of which the engine did not report the accepted ones"

Ids = NDArray[np.int64]


@dataclass(eq=False)
class Launched:
    """A pass whose ids are not on the host yet; SGLang carries it to the pass's end."""

    number: int
    version: int | None
    slots: torch.Tensor
    ids: torch.Tensor | str  # or why it has none
    page: int  # tokens of a page
    over: Callable[[Launched], None]  # what is told of the pass's end
    slots_before_launch: torch.Tensor | None = None
    given: torch.Tensor | None = None  # what experts were given, where weights are wanted: see ``weights.py``
    of_drafts: torch.Tensor | str | None = None  # the ids of a pass that verifies drafts, until :meth:`accept`

    def accept(self, index: torch.Tensor, lengths: torch.Tensor) -> None:
        """SGLang has verified the drafts of this pass: see :func:`accepted`. The other tokens have no rows."""
        if self.of_drafts is None:
            return
        self.slots, tokens = accepted(self.slots, index, lengths)
        self.ids = self.of_drafts if isinstance(self.of_drafts, str) else self.of_drafts[tokens]
        self.of_drafts = None

    @cached_property
    def first_written_pages(self) -> Ids:
        """The pages that begin a life with this pass, for callers before its end."""
        slots = (self.slots if self.slots_before_launch is None else self.slots_before_launch).cpu().numpy()
        pages: Ids = slots[slots % self.page == 0] // self.page
        return pages

    def map_device_tensors(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.slots = copied(self.slots)
        if not isinstance(self.ids, str):
            self.ids = copied(self.ids)
        if self.given is not None:
            self.given = copied(self.given)

    def copy_to_cpu(self) -> None:
        """SGLang's older call, up to 0.5.12."""
        self.map_device_tensors(lambda tensor: tensor.to("cpu", non_blocking=True))

    def finalize(self) -> None:
        self.over(self)


class LaunchedPasses:
    """The passes that are under way, and the calls that wait for their ends. The scheduler's thread calls it."""

    def __init__(self) -> None:
        self.launched = self.ended = 0
        self._flight: deque[Launched] = deque()
        self._deferred: list[tuple[int, Callable[[], None]]] = []  # calls to do when so many passes are over

    def __iter__(self) -> Iterator[Launched]:
        """Those that are under way, the earliest first."""
        return iter(self._flight)

    def launch(
        self,
        version: int | None,
        slots: torch.Tensor,
        ids: torch.Tensor | str,
        page: int,
        over: Callable[[Launched], None],
        slots_before_launch: torch.Tensor | None = None,
    ) -> Launched:
        """The next one."""
        self.launched += 1
        launched = Launched(self.launched, version, slots, ids, page, over, slots_before_launch)
        self._flight.append(launched)
        return launched

    def ending(self, last: Launched) -> Iterator[Launched]:
        """Those that are over with the ``last`` one, the earliest first. The caller says when each is :attr:`ended`."""
        while self._flight and self._flight[0].number <= last.number:
            yield self._flight.popleft()

    def then(self, call: Callable[[], None], after: int | None = None) -> None:
        """Do this when ``after`` passes are over, by default all that were launched."""
        after = self.launched if after is None else after
        if after <= self.ended:
            call()
        else:
            self._deferred.append((after, call))

    def again(self, call: Callable[[], None]) -> None:
        """Do this with the next calls that waited."""
        self._deferred.append((self.ended, call))

    def go_on(self) -> None:
        """Do the calls that waited for passes that are over now, or for room.

        One that raises costs no other, because a page whose call was lost would keep the rows that it had before. The
        first error is raised behind the last call.
        """
        deferred, self._deferred = self._deferred, []
        errors: list[Exception] = []
        for after, call in deferred:
            try:
                self.then(call, after)
            except Exception as error:  # noqa: BLE001 - it is raised below
                errors.append(error)
        if errors:
            raise errors[0]

    def forget(self) -> None:
        """No call that waits is done."""
        self._deferred.clear()


__all__ = ["UNREPORTED", "UNVERIFIED", "Ids", "Launched", "LaunchedPasses"]

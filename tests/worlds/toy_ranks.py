"""The small paged engine with two ranks: each has one head of the KV, and the first has the rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from toy_engine import Toy
from waiting import GIVE_UP_S

from kvroute.connector.witness import KvFolder, OtherRank, witnessing


class Sum:
    """The sum over two ranks, each in a thread of its own."""

    def __init__(self) -> None:
        self._parts = [torch.zeros(0, dtype=torch.int64)] * 2
        self._met = threading.Barrier(2, timeout=GIVE_UP_S)

    def add(self, rank: int, part: torch.Tensor) -> None:
        self._parts[rank] = part.clone()
        self._met.wait()
        part.copy_(self._parts[0] + self._parts[1])
        self._met.wait()


class ToyRanks(Toy):
    """Both ranks begin and end each step; the KV of the second one counts in the witness alone."""

    heads = 2

    def __init__(self, **said: Any) -> None:
        self.folds = Sum()
        super().__init__(**said)
        folder = KvFolder(witnessing(self.part(1), self.layers), 1, partial(self.folds.add, 1))
        self.other_rank = OtherRank(folder)
        self.threads = ThreadPoolExecutor(1)

    def _joined(self) -> Callable[[torch.Tensor], None]:
        return partial(self.folds.add, 0)

    def _tell(self, call: str, *given: Any) -> None:
        other = self.threads.submit(getattr(self.other_rank, call), *given)
        super()._tell(call, *given)
        other.result(GIVE_UP_S)

    def close(self) -> None:
        super().close()
        self.threads.shutdown()

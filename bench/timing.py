"""How the benchmarks take time: interleaved, so that all contestants meet the same noise, and the best counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

COLD_NBYTES = 64 << 20


def nothing() -> None: ...


@dataclass(slots=True, eq=False)
class Timed:
    """A contestant: what is timed, what is done before it each time, and the seconds that it took so far.

    ``cpu_seconds`` are those of the calling thread, in which it was not waiting for a core that others had.
    """

    run: Callable[[], object]
    prepare: Callable[[], object] = nothing
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def microseconds(self, part: float) -> float:
        """A quantile of the thread's own time: 0 is the fastest, 0.5 the median."""
        return 1e6 * float(np.quantile(self.cpu_seconds, part))


def take_turns(rounds: int, contestants: Iterable[Timed], between: Callable[[], object] = nothing) -> None:
    """``rounds`` interleaved runs of each, every one after its ``prepare`` and ``between``, which are not timed."""
    racing = list(contestants)
    for _ in range(rounds):
        for each in racing:
            each.prepare()
            between()
            start, cpu_start = time.perf_counter(), time.thread_time()
            each.run()
            cpu_end, end = time.thread_time(), time.perf_counter()
            each.cpu_seconds.append(cpu_end - cpu_start)
            each.seconds.append(end - start)


def best_ms(rounds: int, timed: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of the fastest of ``rounds`` interleaved calls of each."""
    contestants = {name: Timed(call) for name, call in timed.items()}
    take_turns(rounds, contestants.values())
    return {name: 1000 * min(each.seconds) for name, each in contestants.items()}


def best_cpu_ms(rounds: int, timed: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """CPU milliseconds of this thread in the cheapest of ``rounds`` interleaved calls of each.

    For work that neither waits nor uses another thread: other processes on the cores disturb it less.
    """
    contestants = {name: Timed(call) for name, call in timed.items()}
    take_turns(rounds, contestants.values())
    return {name: 1000 * min(each.cpu_seconds) for name, each in contestants.items()}


class Sweep:
    """Writes ``COLD_NBYTES``, so that nothing of a contestant is left in a core's caches: passed as ``between``."""

    def __init__(self) -> None:
        self._memory = np.zeros(COLD_NBYTES // 8, np.int64)

    def __call__(self) -> None:
        self._memory += 1

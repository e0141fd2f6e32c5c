"""How the benchmarks take time: interleaved, so that all contestants meet the same noise, and the best counts."""

from __future__ import annotations

import time
from collections.abc import Callable


def best_ms(rounds: int, timed: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of the fastest of ``rounds`` interleaved calls of each."""
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(rounds):
        for name, call in timed.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], 1000 * (time.perf_counter() - start))
    return best

"""The file store's trials by the thousand: ``python -m tests.faults.attacks`` runs them all and prints what it
counted.

A store is judged by its outside, so that every store with a directory passes the same trials. CI runs a slice of each
(:mod:`tests.faults.test_attacks`). Every trial has a seed, so that one that fails can be run again.
By hand it needs ``PYTHONPATH=tests/worlds:tests/faults``; ``make nightly`` says so.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from disk_trials import cut, damage, faults
from process_trials import beside, forks, kills, openings, racing
from stores import MEMORY


def many(trial: Callable[[Path, int], object], count: int, first: int = 0) -> list[object]:
    answers = []
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory(dir=MEMORY) as scratch:
            try:
                answers.append(trial(Path(scratch), seed))
            except BaseException:
                print(f"{trial.__name__}: seed {seed} failed", flush=True)
                raise
    return answers


def count_faults(wanted: int, first: int = 0) -> Counter[str]:
    found: Counter[str] = Counter()
    while found.total() < wanted:
        (answer,) = many(faults, 1, first)
        assert isinstance(answer, Counter)
        found += answer
        first += 1
    return found


TRIALS: dict[str, Callable[[float], object]] = {
    "faults": lambda share: (found := count_faults(int(2800 * share))) and {**found, "in all": found.total()},
    "cuts": lambda share: len(many(cut, int(300 * share))),
    "damage": lambda share: Counter(many(damage, int(100 * share))),
    "kills": lambda share: sum(many(kills, round(6 * share) or 1)),
    "forks": lambda share: 10 * len(many(forks, int(30 * share) or 1)),
    "openings": lambda share: len(many(openings, int(120 * share) or 1)),
    "beside": lambda share: sum(many(beside, int(5 * share) or 1)),
    "racing": lambda share: sum(many(racing, int(25 * share) or 1)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the full counts")
    parser.add_argument("--only", choices=TRIALS, nargs="+", default=list(TRIALS))
    chosen = parser.parse_args()
    for name in chosen.only:
        started = time.monotonic()
        print(f"{name}: {TRIALS[name](chosen.share)} in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()

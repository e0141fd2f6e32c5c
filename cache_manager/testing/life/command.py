"""``kvroute prove MODULE:ADAPTER``: the life-cycle kit on a block manager, from the command line."""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TextIO

from cache_manager.errors import InvalidInputError
from cache_manager.testing.life import INVARIANTS, BlockManagerAdapter, InvariantBroken, prove
from cache_manager.testing.life.summary import summary, unexercised
from cache_manager.testing.life.world import check_adapter


def prove_adapter(where: str, *, examples: int, steps: int, seed: int) -> bool:
    """Play random lives, and print what came of it; whether every invariant held.

    Raises :class:`InvalidInputError` where ``where`` does not name an adapter that can be.
    """
    adapter = find_adapter(where)
    logging.disable(logging.ERROR)  # what the manager says of faults that are meant is not what the reader looks for
    out, start_s = sys.stdout, time.perf_counter()
    progress = Progress(sys.stderr, examples)
    try:
        counts = prove(adapter, examples=examples, steps=steps, seed=seed, progress=progress)
    except InvariantBroken as error:
        progress.end()
        out.write(f"{error}\n")
        return False
    finally:
        logging.disable(logging.NOTSET)
    progress.end()
    missing = unexercised(adapter, counts)
    out.write(f"{summary(adapter, counts)}\n  seed          {seed}, {time.perf_counter() - start_s:.1f} s\n")
    for what in missing:
        out.write(f"not proved: {what}\n")
    if not missing:
        out.write("every invariant held\n")
    return not missing


def main(adapter: str | None, *, invariants: bool, **budget: int) -> int:
    """``kvroute prove``; 1 where something is wrong or not proved."""
    if invariants:
        list_invariants()
        return 0
    if adapter is None:
        raise InvalidInputError("adapter", "MODULE:ADAPTER, or --invariants, which lists what is claimed", "none")
    return 0 if prove_adapter(adapter, **budget) else 1


def list_invariants() -> None:
    """Print every invariant with its claim."""
    for name, claim in INVARIANTS.items():
        sys.stdout.write(f"{name}\n  {claim}\n")


def find_adapter(where: str) -> type[BlockManagerAdapter]:
    """The class that ``module:class`` names; modules of the working directory are found too."""
    module, _, name = where.partition(":")
    wanted = "MODULE:ADAPTER, a module that can be imported and a subclass of BlockManagerAdapter in it"
    if not module or not name:
        raise InvalidInputError("adapter", wanted, where)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise InvalidInputError("adapter", wanted, f"no module {error.name}") from error
    if not isinstance(found, type) or not issubclass(found, BlockManagerAdapter):
        raise InvalidInputError("adapter", wanted, where)
    check_adapter(found)
    return found


class Progress:
    """Says how far the examples are: on a terminal in one line, elsewhere in a line every ten seconds."""

    def __init__(self, out: TextIO, examples: int) -> None:
        self.out, self.examples, self.operations = out, examples, 0
        self._every_s, self._line = (0.5, "\r{}\033[K") if out.isatty() else (10.0, "{}\n")
        self._start_s = self._told_s = time.monotonic()

    def __call__(self, counts: Counter[str]) -> None:
        self.operations, now_s = counts["operations"], time.monotonic()
        if now_s - self._told_s >= self._every_s:
            self._told_s = now_s
            done, pace = min(counts["examples"], self.examples), self.operations / (now_s - self._start_s)
            told = f"{done:,} of {self.examples:,} examples, {self.operations:,} operations, {pace:,.0f} a second"
            self.out.write(self._line.format(told))
            self.out.flush()

    def end(self) -> None:
        """Nothing more is said: the line gives way to what was found."""
        if self.out.isatty():
            self.out.write(self._line.format(""))
            self.out.flush()


__all__ = ["Progress", "find_adapter", "list_invariants", "main", "prove_adapter"]

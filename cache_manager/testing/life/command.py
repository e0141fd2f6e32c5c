"""``kvroute prove MODULE:ADAPTER``: the life-cycle kit on a block manager, from the command line."""

from __future__ import annotations

import importlib
import logging
import sys
import time
from pathlib import Path

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
    try:
        counts = prove(adapter, examples=examples, steps=steps, seed=seed)
    except InvariantBroken as error:
        out.write(f"{error}\n")
        return False
    finally:
        logging.disable(logging.NOTSET)
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


__all__ = ["find_adapter", "list_invariants", "main", "prove_adapter"]

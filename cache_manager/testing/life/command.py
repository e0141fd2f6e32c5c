"""``kvroute prove MODULE:ADAPTER``: the life-cycle kit on a block manager, from the command line."""

from __future__ import annotations

import importlib
import logging
import sys
from collections import Counter
from pathlib import Path

from cache_manager.errors import InvalidInputError
from cache_manager.progress import Progress
from cache_manager.testing.life import INVARIANTS, BlockManagerAdapter, InvariantBroken, prove
from cache_manager.testing.life.machine import unexercised
from cache_manager.testing.life.world import check_adapter


def main(adapter: str | None, *, invariants: bool, examples: int, steps: int, seed: int) -> int:
    """``kvroute prove``: play random lives, and print the result; 1 if an invariant is broken or not proved.

    Raises :class:`InvalidInputError` if ``adapter`` names no usable adapter.
    """
    if invariants:
        sys.stdout.writelines(f"{name}\n  {claim}\n" for name, claim in INVARIANTS.items())
        return 0
    if adapter is None:
        raise InvalidInputError("adapter", "MODULE:ADAPTER, or --invariants, which lists what is claimed", "none")
    found = find_adapter(adapter)
    logging.disable(logging.ERROR)  # the manager's logs about intended faults would hide the result
    with Progress() as progress:
        try:
            counts = prove(found, examples=examples, steps=steps, seed=seed, say=progress.say)
        except InvariantBroken as error:
            progress.print(f"{error}\n")
            return 1
        finally:
            logging.disable(logging.NOTSET)
        progress.print(f"{summary(found, counts)}\n  seed          {seed}, {progress.seconds:.1f} s\n")
        missing = unexercised(found, counts)
        lines = [f"not proved: {what}" for what in missing] or ["every invariant held"]
        progress.print("\n".join([*lines, ""]))
    return 1 if missing else 0


def find_adapter(where: str) -> type[BlockManagerAdapter]:
    """The class that ``module:class`` names; modules of the working directory are found too."""
    module, _, name = where.partition(":")
    wanted = "MODULE:ADAPTER, a module that can be imported and a subclass of BlockManagerAdapter in it"
    if not module or not name or module.startswith("."):
        raise InvalidInputError("adapter", wanted, repr(where))
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        there = vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise InvalidInputError("adapter", wanted, f"no module {error.name}") from error
    classes = {of: each for of, each in there.items() if isinstance(each, type)}
    adapters = {of: each for of, each in classes.items() if issubclass(each, BlockManagerAdapter)}
    if (found := adapters.get(name)) is None:
        others = ", ".join(sorted(of for of, each in adapters.items() if each is not BlockManagerAdapter))
        raise InvalidInputError("adapter", wanted, f"{where}; {module} has {others or 'none'}")
    check_adapter(found)
    return found


def summary(adapter: type[BlockManagerAdapter], counts: Counter[str]) -> str:
    """A few lines for people: the counts of operations and events, and what the adapter does not claim."""
    asked: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    for name, n in counts.items():
        if name.endswith(" operations"):
            asked[name.removesuffix(" operations")] = n
        elif n and name not in ("operations", "examples") and not name.startswith("unclaimed "):
            happened[name] = n
    lines = [f"{adapter.__name__}: {counts['operations']:,} operations in {counts['examples']:,} examples"]
    for what, some in (("asked for    ", asked), ("happened     ", happened)):
        lines.append(f"  {what} {', '.join(f'{name} {n:,}' for name, n in some.most_common())}")
    lines.append(f"  capabilities  {', '.join(adapter.capabilities) or 'none'}")
    for name, reason in adapter.unclaimed.items():
        lines.append(f"  not claimed   {name}, broken {counts[f'unclaimed {name}']:,} times: {reason}")
    return "\n".join(lines)

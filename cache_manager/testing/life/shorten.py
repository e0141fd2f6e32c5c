"""Operations that fail, made few: some are taken out while the same invariant breaks.

A list of operations without some of them is one too: an operation that makes no sense then does nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Final

from cache_manager.testing.life.adapter import BlockManagerAdapter
from cache_manager.testing.life.invariants import InvariantBroken, Operation
from cache_manager.testing.life.life import Life
from cache_manager.testing.life.story import told
from cache_manager.testing.life.world import World

ALL: Final = 14
"""A chunk that is large enough for any prompt of the kit's."""
PLAYED_MAX: Final = 60_000
"""How many operations are played at most to find a shorter list."""


def replay(adapter: type[BlockManagerAdapter], program: Sequence[Operation]) -> Counter[str]:
    """Play operations on a fresh manager: the regression test of a failure, whose ``program`` they were.

    What happened, by name. Raises :class:`InvariantBroken` with the story.
    """
    counts: Counter[str] = Counter()
    world = World(adapter, counts)
    life = Life(world)
    try:
        for operation in deepcopy(list(program)):
            life.play(operation)
    except InvariantBroken as error:
        raise told(world, error) from None
    finally:
        life.close()
    return counts


def shortest(adapter: type[BlockManagerAdapter], error: InvariantBroken) -> InvariantBroken:
    """The shortest story found that breaks the same invariant; ``error`` itself where it does not come again."""
    played = 0

    def breaks(program: list[Operation]) -> InvariantBroken | None:
        nonlocal played
        played += len(program)
        try:
            replay(adapter, program)
        except InvariantBroken as found:
            return found if found.name == error.name else None
        except Exception:  # noqa: BLE001 - another failure than the one that is made short
            return None
        return None

    best = breaks(error.program) or error
    better = True
    while better:
        better = False
        for candidate in _smaller(best.program):
            if played >= PLAYED_MAX:
                return best
            if (found := breaks(candidate)) is not None:
                best, better = found, True
                break
    return best


def _smaller(program: list[Operation]) -> Iterator[list[Operation]]:
    """The program without some operations, most of them first."""
    for n in (32, 16, 8, 4, 2, 1):
        for at in range(len(program) - n, -1, -1):
            yield program[:at] + program[at + n :]

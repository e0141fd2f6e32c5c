"""Operations that fail, made few: some are taken out, and arguments made simpler, while the same invariant breaks.

A list of operations without some of them is one too: an operation that makes no sense then does nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, Final

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
    """Programs that are one simplification away, those that save most first."""
    for n in (32, 16, 8, 4, 2, 1):
        for at in range(len(program) - n, -1, -1):
            yield program[:at] + program[at + n :]
    for at, operation in enumerate(program):
        for simpler in _simpler(operation):
            yield [*program[:at], simpler, *program[at + 1 :]]


def _simpler(operation: Operation) -> Iterator[Operation]:
    kind, *given = operation
    if kind in ("recompute", "abort", "lose"):
        yield ("free", given[0], False)
    if kind in ("abort", "lose", "draft"):
        yield ("step", given[0], given[1], ALL, True, False)
    if kind == "decode":
        yield from (("step", name, [given[1]], ALL, True, False) for name in given[0])
    for at, value in enumerate(given):
        for less in _less(value, simplest=_SIMPLEST.get((kind, at))):
            yield (kind, *given[:at], less, *given[at + 1 :])


_SIMPLEST: Final = {
    ("admit", 2): ALL,
    ("step", 2): ALL,
    ("recompute", 1): ALL,
    ("admit", 4): True,
    ("step", 3): True,
    ("decode", 2): True,
}
"""Everything in one chunk, and with rows: told in fewer words."""


def _less(value: Any, *, simplest: Any) -> Iterator[Any]:
    if simplest is not None:
        if value != simplest:
            yield simplest
    elif isinstance(value, bool):
        if value:
            yield False
    elif isinstance(value, int):
        if value:
            yield from range(value)
    elif isinstance(value, list):
        for n in (8, 4, 2, 1):
            if len(value) > n:
                yield value[:-n]
                yield value[n:]
        yield from (value[:at] + value[at + 1 :] for at in range(1, len(value) - 1))
        yield from ([*value[:at], 0, *value[at + 1 :]] for at in range(len(value)) if value[at] == 1)
    elif value in ("A", "B"):
        yield ""

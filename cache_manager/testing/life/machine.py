"""Random lives: a generator of a seed chooses the operations, :class:`Life` plays them, a failure is a short story.

.. code-block:: python

    class TestMine(BlockManagerMachine):
        adapter = MyAdapter
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from random import Random
from typing import ClassVar, Final

from cache_manager.errors import InvalidInputError
from cache_manager.testing.life.adapter import BlockManagerAdapter
from cache_manager.testing.life.invariants import InvariantBroken, Operation
from cache_manager.testing.life.life import Life
from cache_manager.testing.life.world import check_adapter

EXAMPLES: Final = 300
STEPS: Final = 50
LIVE_MAX: Final = 6
RESETS_APART: Final = 8
"""Least number of operations between two that forget everything; else examples would do little more."""
LONG_EVERY: Final = 10
"""One example in so many has four times the operations: some faults need long lives."""
LEFT_OUT: Final = 0.15
"""How likely an example leaves a kind of operation out, which makes the others more frequent."""
ALL: Final = 14
"""A chunk that is large enough for any prompt of the kit."""
PLAYED_MAX: Final = 60_000
"""How many operations are played at most to find a shorter story."""
EXAMPLES_MIN: Final = 50
"""With fewer examples much may be missing by chance: then a test does not fail for it."""

KINDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("admit", "admit_alike", "step", "decode", "free", "recompute"), ""),
    "draft": "drafts",
    "abort": "abort",
    "lose": "lost_step",
    "fork": "fork",
    "swap": "swap",
    "persist": "store",
    "settle": "background",
    "reset": "reset",
    "restart": "restart",
}
"""The kinds of operations, with the capability that each needs."""


class Chooser:
    """Chooses the operations of one example."""

    def __init__(self, random: Random, steps: int) -> None:
        self.random = random
        self.steps = steps
        self.names = 0

    def program(self, life: Life) -> Iterator[Operation]:
        self.life = life
        able = [kind for kind, what in KINDS.items() if not what or life.world.can(what)]
        self.kinds = [kind for kind in able if kind == "admit" or self.random.random() > LEFT_OUT]
        for _ in range(self.steps):
            yield from self._next()
        for name in list(self.life.world.live):
            yield "free", name, False
        yield ("finish",)

    def _next(self) -> Iterator[Operation]:
        """The next operation, or several of a kind."""
        life = self.life
        random = self.random
        kind = random.choice([kind for kind in self.kinds if self._possible(kind)] or ["admit"])
        name = random.choice([*life.world.live]) if life.world.live else ""
        rows = random.random() < 0.75
        fail = random.random() < 0.25
        match kind:
            case "admit" | "admit_alike":
                tokens = self._tokens(1, 10)
                if kind == "admit_alike":  # a prefix of a present or past sequence, and other tokens behind it
                    known = [*(sequence.tokens for sequence in life.world.live.values()), *life.world.past]
                    tokens = [*random.choice(known)[: random.randint(1, 10)], *self._tokens(0, 4)]
                salt = random.choice("AB") if random.random() < 0.3 else ""
                yield "admit", self._new_name(), tokens, self._chunk(), salt, rows, fail
            case "step":
                yield kind, name, self._tokens(0, 4), self._chunk(), rows, fail
            case "decode":  # all sequences, or all but one
                out = random.randint(0, 2 * LIVE_MAX)
                yield kind, [one for at, one in enumerate(life.world.live, 1) if at != out], int(fail), rows
            case "recompute":
                yield kind, name, self._chunk()
            case "draft":
                yield kind, name, self._tokens(1, 4), random.randint(0, 3)
            case "abort" | "lose":
                yield kind, name, self._tokens(1, 4)
            case "fork":
                yield kind, name, self._new_name()
            case "free" | "swap" | "persist":
                yield kind, name, fail
            case "settle":
                for _ in range(random.randint(1, 4)):
                    yield kind, fail
            case "reset":
                yield kind, rows
            case "restart":
                yield (kind,)

    def _possible(self, kind: str) -> bool:
        life = self.life
        live = len(self.life.world.live)
        match kind:
            case "admit":
                return live < LIVE_MAX
            case "admit_alike":
                return live < LIVE_MAX and bool(live or life.world.past)
            case "fork":
                return 0 < live < LIVE_MAX
            case "settle":
                return any(sequence.waiting for sequence in life.world.live.values())
            case "reset" | "restart":  # a restart without a store shows no more than a new example
                quiet = all(done[0] not in ("reset", "restart") for done in life.world.program[-RESETS_APART:])
                return quiet and (kind == "reset" or bool(life.world.kv.stored))
            case _:
                return live > 0

    def _tokens(self, least: int, most: int) -> list[int]:
        n = self.random.randint(least, most)
        how = self.random.random()
        if how < 0.15:
            return [at % 2 for at in range(n)]
        return [0 if how < 0.3 else self.random.randint(0, 1) for _ in range(n)]

    def _chunk(self) -> int:
        return ALL if self.random.random() < 0.125 else self.random.randint(1, 7)

    def _new_name(self) -> str:
        self.names += 1
        return f"s{self.names}"


def prove(
    adapter: type[BlockManagerAdapter],
    *,
    examples: int = EXAMPLES,
    steps: int = STEPS,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Counter[str]:
    """Play ``examples`` of ``steps`` operations or more on fresh managers; the same ``seed`` gives the same ones.
    ``say`` is told how far it is, before each example. Returns counts of what was exercised, by name. Raises
    :class:`InvariantBroken` with the shortest story found, and :class:`InvalidInputError` for an unusable adapter or
    number.
    """
    check_adapter(adapter)
    for what, number in (("examples", examples), ("steps", steps)):
        if number < 1:
            raise InvalidInputError(what, "1 or more", number)
    counts: Counter[str] = Counter()
    for example in range(examples):
        random = Random(f"{seed} {example}")  # noqa: S311 - no secret
        long = 4 if example % LONG_EVERY == LONG_EVERY - 1 else 1
        say(f"{example}/{examples} lives, {counts['operations']:,} operations")
        try:
            _play(adapter, counts, Chooser(random, long * steps).program)
        except InvariantBroken as error:
            say("broken; looking for the shortest story")
            found = _shortest(adapter, error)
            again = f"\n\nTo play it again: seed {seed}, examples {example + 1}, steps {steps}."
            raise InvariantBroken(found.name, found.what, found.program, f"{found}{again}") from None
    return counts


def replay(adapter: type[BlockManagerAdapter], program: Sequence[Operation]) -> Counter[str]:
    """Play operations on a fresh manager: the regression test of a failure, from its ``program``.

    Returns counts of what happened, by name. Raises :class:`InvariantBroken` with the story.
    """
    counts: Counter[str] = Counter()
    _play(adapter, counts, lambda _: deepcopy(list(program)))
    return counts


def _play(
    adapter: type[BlockManagerAdapter], counts: Counter[str], program: Callable[[Life], Iterable[Operation]]
) -> None:
    """One example, whose ``program`` may depend on what has happened so far."""
    life = Life(adapter, counts)
    try:
        for operation in program(life):
            counts[f"{operation[0]} operations"] += 1
            life.play(operation)
    except InvariantBroken as error:
        raise life.world.told(error) from None
    finally:
        life.close()


def _shortest(adapter: type[BlockManagerAdapter], error: InvariantBroken) -> InvariantBroken:
    """The shortest story found that breaks the same invariant; ``error`` itself if replaying does not break it.

    Any part of a program is a program: an operation that makes no sense then does nothing.
    """
    played = 0
    best = error
    candidates = iter([error.program])
    while played < PLAYED_MAX and (candidate := next(candidates, None)) is not None:
        played += len(candidate)
        try:
            replay(adapter, candidate)
        except InvariantBroken as found:
            if found.name == error.name:
                best = found
                candidates = _smaller(found.program)
        except Exception:  # noqa: BLE001, S110 - another failure than the one to shorten
            pass
    return best


def _smaller(program: list[Operation]) -> Iterator[list[Operation]]:
    """The program without some operations: first without many, then without few."""
    for n in (32, 16, 8, 4, 2, 1):
        for at in range(len(program) - n, -1, -1):
            yield program[:at] + program[at + n :]


def unexercised(adapter: type[BlockManagerAdapter], counts: Counter[str]) -> list[str]:
    """What is missing for a proof, in words; empty if nothing is. Each capability has a count of its name."""
    missing = [] if counts["tokens computed"] else ["nothing was exercised: no sequence was admitted and computed"]
    return missing + [
        f"{capability}: it was never exercised" for capability in adapter.capabilities if not counts[capability]
    ]


class BlockManagerMachine:
    """For pytest: a subclass whose name begins with ``Test``, with an ``adapter``.

    A run that never exercised a capability of the adapter fails too.
    """

    adapter: ClassVar[type[BlockManagerAdapter]]
    examples: ClassVar[int] = 100
    steps: ClassVar[int] = STEPS
    seed: ClassVar[int] = 0
    rare: ClassVar[Collection[str]] = ()
    """Capabilities that a short run may not reach; show them by a story of their own (:func:`replay`)."""

    def test_life_of_blocks(self) -> None:
        """Goal: the manager keeps every invariant. Method: random lives of sequences, with an oracle of its own."""
        counts = prove(self.adapter, examples=self.examples, steps=self.steps, seed=self.seed)
        missing = [what for what in unexercised(self.adapter, counts) if what.partition(":")[0] not in self.rare]
        enough = counts["examples"] >= EXAMPLES_MIN or not counts["tokens computed"]
        assert not (enough and missing), f"{self.adapter.__name__}: {'; '.join(missing)}"

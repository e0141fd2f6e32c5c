"""Random lives: a generator of a seed chooses the operations, :class:`Life` plays them, a failure is a short story.

.. code-block:: python

    class TestMine(BlockManagerMachine):
        adapter = MyAdapter
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from random import Random
from typing import ClassVar, Final

from cache_manager.errors import InvalidInputError
from cache_manager.testing.life.adapter import BlockManagerAdapter
from cache_manager.testing.life.invariants import InvariantBroken, Operation
from cache_manager.testing.life.life import Life
from cache_manager.testing.life.shorten import ALL, shortest
from cache_manager.testing.life.summary import check_exercised
from cache_manager.testing.life.world import World, check_adapter

EXAMPLES: Final = 300
STEPS: Final = 50
LIVE_MAX: Final = 6
RESETS_APART: Final = 8
"""Operations between two of those that forget everything, or it were all that happens."""
LONG_EVERY: Final = 10
"""One example in so many has four times the operations: some faults need long lives."""
LEFT_OUT: Final = 0.15
"""How likely an operation is not played in an example, which makes others more frequent there."""

KINDS: Final[Mapping[str, str]] = {
    "admit": "",
    "admit_alike": "",
    "step": "",
    "decode": "",
    "free": "",
    "recompute": "",
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
"""What may be chosen, with the capability that it takes."""


class Chooser:
    """Chooses the operations of one example."""

    def __init__(self, world: World, random: Random) -> None:
        self.world, self.random, self.names = world, random, 0
        able = [kind for kind, what in KINDS.items() if not what or world.can(what)]
        self.kinds = [kind for kind in able if kind == "admit" or random.random() > LEFT_OUT]

    def operations(self) -> Iterator[Operation]:
        """The next operation, or several of a kind."""
        world, random = self.world, self.random
        kind = random.choice([kind for kind in self.kinds if self._possible(kind)] or ["admit"])
        name = random.choice([*world.live]) if world.live else ""
        rows, fail = random.random() < 0.75, random.random() < 0.25
        match kind:
            case "admit" | "admit_alike":
                tokens = self._tokens(1, 10)
                if kind == "admit_alike":  # a prefix of what is or was there, and something else behind it
                    known = [*(sequence.tokens for sequence in world.live.values()), *world.past]
                    tokens = [*random.choice(known)[: random.randint(1, 10)], *self._tokens(0, 4)]
                salt = random.choice("AB") if random.random() < 0.3 else ""
                yield "admit", self._new_name(), tokens, self._chunk(), salt, rows, fail
            case "step":
                yield kind, name, self._tokens(0, 4), self._chunk(), rows, fail
            case "decode":  # all that are there, or all but one
                out = random.randint(0, 2 * LIVE_MAX)
                yield kind, [one for at, one in enumerate(world.live, 1) if at != out], int(fail), rows
            case "free":
                yield kind, name, fail
            case "recompute":
                yield kind, name, self._chunk()
            case "draft":
                yield kind, name, self._tokens(1, 4), random.randint(0, 3)
            case "abort" | "lose":
                yield kind, name, self._tokens(1, 4)
            case "fork":
                yield kind, name, self._new_name()
            case "swap" | "persist":
                yield kind, name, fail
            case "settle":
                for _ in range(random.randint(1, 4)):
                    yield kind, fail
            case "reset":
                yield kind, rows
            case "restart":
                yield (kind,)

    def _possible(self, kind: str) -> bool:
        world, live = self.world, len(self.world.live)
        match kind:
            case "admit":
                return live < LIVE_MAX
            case "admit_alike":
                return live < LIVE_MAX and bool(live or world.past)
            case "fork":
                return 0 < live < LIVE_MAX
            case "settle":
                return world.busy
            case "reset" | "restart":  # another restart without a store shows nothing that a new example does not
                quiet = all(done[0] not in ("reset", "restart") for done in world.program[-RESETS_APART:])
                return quiet and (kind == "reset" or bool(world.kv.stored))
            case _:
                return live > 0

    def _tokens(self, least: int, most: int) -> list[int]:
        n, how = self.random.randint(least, most), self.random.random()
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
) -> Counter[str]:
    """Play ``examples`` of ``steps`` operations on fresh managers, or of more; the same ``seed`` gives the same ones.

    What was exercised, by name. Raises :class:`InvariantBroken` with the shortest story found, and
    :class:`InvalidInputError` for an adapter or a number that cannot be.
    """
    check_adapter(adapter)
    for what, number in (("examples", examples), ("steps", steps)):
        if number < 1:
            raise InvalidInputError(what, "1 or more", number)
    counts: Counter[str] = Counter()
    for example in range(examples):
        try:
            long = 4 if example % LONG_EVERY == LONG_EVERY - 1 else 1
            _play(adapter, counts, Random(f"{seed} {example}"), long * steps)  # noqa: S311 - no secret
        except InvariantBroken as error:
            found = shortest(adapter, error)
            again = f"\n\nTo play it again: seed {seed}, examples {example + 1}, steps {steps}."
            raise InvariantBroken(found.name, found.what, found.program, f"{found}{again}") from None
    return counts


def _play(adapter: type[BlockManagerAdapter], counts: Counter[str], random: Random, steps: int) -> None:
    """One example."""
    world = World(adapter, counts)
    life, chooser = Life(world), Chooser(world, random)

    def play(operation: Operation) -> None:
        counts[f"{operation[0]} operations"] += 1
        life.play(operation)

    try:
        for _ in range(steps):
            for operation in chooser.operations():
                play(operation)
        for name in list(world.live):
            play(("free", name, False))
        play(("finish",))
    finally:
        life.close()


class BlockManagerMachine:
    """For pytest: a subclass whose name begins with ``Test``, with an ``adapter``.

    A run in which something that the adapter can do was never done fails too.
    """

    adapter: ClassVar[type[BlockManagerAdapter]]
    examples: ClassVar[int] = 100
    steps: ClassVar[int] = STEPS
    seed: ClassVar[int] = 0
    rare: ClassVar[Collection[str]] = ()
    """Capabilities that a short run may not come to; show them by a story of their own (:func:`replay`)."""

    def test_life_of_blocks(self) -> None:
        """Goal: the manager keeps every invariant. Method: random lives of sequences, with an oracle of its own."""
        counts = prove(self.adapter, examples=self.examples, steps=self.steps, seed=self.seed)
        check_exercised(self.adapter, counts, self.rare)

"""The state machine: Hypothesis chooses the operations, :class:`Life` plays them, a failure is told as a short story.

.. code-block:: python

    class TestMine(BlockManagerMachine):
        adapter = MyAdapter
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from cache_manager.testing.life.adapter import BlockManagerAdapter
from cache_manager.testing.life.life import Life
from cache_manager.testing.life.program import ALL, read, written
from cache_manager.testing.life.shorten import play, shortest
from cache_manager.testing.life.summary import check_exercised
from cache_manager.testing.life.world import InvariantBroken, World

LIVE_MAX = 6
RESETS_APART = 8
AGAIN_EVERY = 8
"""One example in so many is played again on a fresh manager."""

# Few draws, for they cost as much as the manager: a list of tokens is its length and its bits.
LENGTH = st.integers(1, 10)
MORE = st.integers(0, 4)
SOME = st.integers(1, 4)
BITS = st.sampled_from((0, 0, 0b0101010101, 0b1111111111, *range(32)))
PICK = st.integers(0, LIVE_MAX - 1)
CHUNK = st.sampled_from((ALL, *range(1, 8)))
LUCK = st.integers(0, 63)
"""Three things that happen one time in four each: see :func:`_luck`."""

Progress = Callable[[Counter[str]], None]


def _when(capability: str = "", *, some: bool = True, room: bool = False, since: int = 0) -> Callable[[Any], Any]:
    """A rule for managers of that capability, while some sequences are there, or there is room for one more.

    ``since``: only if so many operations have been played since everything was forgotten, or it were all that happens.
    """

    def possible(machine: _Machine) -> bool:
        world, live = machine.world, len(machine.world.live)
        if (capability and not world.can(capability)) or live < some or (room and live >= LIVE_MAX):
            return False
        return not since or all(operation[0] not in ("reset", "restart") for operation in world.program[-since:])

    return precondition(possible)


class _Machine(RuleBasedStateMachine):
    """One example. ``found`` keeps the first failure, whatever becomes of it on its way through Hypothesis."""

    adapter: ClassVar[type[BlockManagerAdapter]]
    counts: ClassVar[Counter[str]]
    found: ClassVar[list[InvariantBroken]]
    progress: ClassVar[list[Progress]]

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.adapter, self.counts)
        self.life = Life(self.world)
        self.names = 0
        self.ended = False

    def teardown(self) -> None:
        try:
            if not self.ended:
                for name in list(self.world.live):
                    self.play("free", name, False)
                self.play("finish")
                if self.counts["examples"] % AGAIN_EVERY == 1:
                    self.play("again")
        finally:
            self.life.close()
            for tell in self.progress:
                tell(self.counts)

    def play(self, kind: str, *arguments: Any) -> None:
        self.counts[f"{kind} operations"] += 1
        try:
            self.life.play((kind, *arguments))
        except BaseException as error:
            self.ended = True
            if isinstance(error, InvariantBroken):
                self.found.append(error)
            raise

    def chosen(self, pick: int) -> str:
        names = list(self.world.live)
        return names[pick % len(names)]

    def new_name(self) -> str:
        self.names += 1
        return f"s{self.names}"

    # ---------------------------------------------------------------- rules

    @_when(some=False, room=True)
    @rule(n=LENGTH, bits=BITS, chunk=CHUNK, luck=LUCK)
    def admit(self, n: int, bits: int, chunk: int, luck: int) -> None:
        salted, rows, fail = _luck(luck)
        self.play("admit", self.new_name(), _tokens(n, bits), chunk, "A" if salted else "", rows, fail)

    @precondition(lambda self: len(self.world.live) < LIVE_MAX and (self.world.live or self.world.past))
    @rule(pick=st.integers(0, 13), cut=LENGTH, n=MORE, bits=BITS, chunk=CHUNK, luck=LUCK)
    def admit_alike(self, pick: int, cut: int, n: int, bits: int, chunk: int, luck: int) -> None:
        """A prefix of what is or was there, and something else behind it."""
        known = [*(sequence.tokens for sequence in self.world.live.values()), *self.world.past]
        salted, rows, fail = _luck(luck)
        tokens = [*known[pick % len(known)][:cut], *_tokens(n, bits)]
        self.play("admit", self.new_name(), tokens, chunk, "A" if salted else "", rows, fail)

    @_when()
    @rule(pick=PICK, n=MORE, bits=BITS, chunk=CHUNK, luck=LUCK)
    def step(self, pick: int, n: int, bits: int, chunk: int, luck: int) -> None:
        _, rows, fail = _luck(luck)
        self.play("step", self.chosen(pick), _tokens(n, bits), chunk, rows, fail)

    @_when()
    @rule(out=st.integers(0, 2 * LIVE_MAX), luck=LUCK)
    def decode(self, out: int, luck: int) -> None:
        """All that are there, or all but one."""
        odd, rows, _ = _luck(luck)
        self.play("decode", [name for at, name in enumerate(self.world.live, 1) if at != out], int(odd), rows)

    @_when()
    @rule(pick=PICK, luck=LUCK)
    def free(self, pick: int, luck: int) -> None:
        self.play("free", self.chosen(pick), _luck(luck)[0])

    @_when()
    @rule(pick=PICK, chunk=CHUNK)
    def recompute(self, pick: int, chunk: int) -> None:
        self.play("recompute", self.chosen(pick), chunk)

    @_when("drafts")
    @rule(pick=PICK, n=SOME, bits=BITS, accepted=st.integers(0, 3))
    def draft(self, pick: int, n: int, bits: int, accepted: int) -> None:
        self.play("draft", self.chosen(pick), _tokens(n, bits), accepted)

    @_when("abort")
    @rule(pick=PICK, n=SOME, bits=BITS)
    def abort(self, pick: int, n: int, bits: int) -> None:
        self.play("abort", self.chosen(pick), _tokens(n, bits))

    @_when("lost_step")
    @rule(pick=PICK, n=SOME, bits=BITS)
    def lose(self, pick: int, n: int, bits: int) -> None:
        self.play("lose", self.chosen(pick), _tokens(n, bits))

    @_when("fork", room=True)
    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        self.play("fork", self.chosen(pick), self.new_name())

    @_when("swap")
    @rule(pick=PICK, luck=LUCK)
    def swap(self, pick: int, luck: int) -> None:
        self.play("swap", self.chosen(pick), _luck(luck)[2])

    @_when("store")
    @rule(pick=PICK, luck=LUCK)
    def persist(self, pick: int, luck: int) -> None:
        self.play("persist", self.chosen(pick), _luck(luck)[2])

    @precondition(lambda self: self.world.busy)
    @rule(times=SOME, luck=LUCK)
    def settle(self, times: int, luck: int) -> None:
        for _ in range(times):
            self.play("settle", _luck(luck)[2])

    @_when("reset", some=False, since=RESETS_APART)
    @rule(end_first=st.booleans())
    def reset(self, end_first: bool) -> None:
        self.play("reset", end_first)

    @precondition(lambda self: self.world.kv.stored)  # another restart shows nothing that a new example does not
    @_when("restart", some=False, since=RESETS_APART)
    @rule()
    def restart(self) -> None:
        self.play("restart")


def _tokens(n: int, bits: int) -> list[int]:
    return [bits >> at & 1 for at in range(n)]


def _luck(luck: int) -> tuple[bool, bool, bool]:
    """Whether something is odd, the step makes rows, and something fails: one, three and one time in four."""
    return luck % 4 == 3, luck // 4 % 4 != 3, luck // 16 == 3


def prove(
    adapter: type[BlockManagerAdapter],
    *,
    examples: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Counter[str]:
    """Play ``examples`` of up to ``steps`` operations each (as the Hypothesis profile says) on fresh managers.

    What was exercised, by name. ``progress`` is called with it after each example. Raises :class:`InvariantBroken` with
    the shortest story found, and :class:`InvalidInputError` for an adapter that cannot be. The same ``seed`` gives the
    same examples.
    """
    counts: Counter[str] = Counter()
    found: list[InvariantBroken] = []
    kind = type(f"{adapter.__name__}Machine", (_Machine,), {
        "adapter": adapter, "counts": counts, "found": found, "progress": [progress] if progress else [],
    })  # fmt: skip
    try:
        with contextlib.redirect_stdout(None):
            run_state_machine_as_test(
                seeded(seed)(kind) if seed is not None else kind, settings=_settings(examples, steps)
            )
    except Exception:  # Hypothesis raises what broke, or that it is flaky: what was found is told below, more shortly
        if not found:
            raise
    if not found:
        return counts
    error = shortest(adapter, found[0])
    line = written(error.program)
    told = f'{error}\n\nTo replay it: kvroute prove {adapter.__module__}:{adapter.__name__} --replay "{line}"'
    raise InvariantBroken(error.name, error.what, told, error.program) from None


def _settings(examples: int | None, steps: int | None) -> settings:
    """The profile's, but for what is asked; without shrinking, for :func:`shortest` is faster."""
    given = settings(
        phases=[Phase.generate],
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    if examples is not None:
        given = settings(given, max_examples=examples)
    return given if steps is None else settings(given, stateful_step_count=steps)


def replay(adapter: type[BlockManagerAdapter], line: str) -> None:
    """Play the program of a line: the regression test of a failure. Raises :class:`InvariantBroken` if it is one."""
    play(adapter, read(line))


class BlockManagerMachine:
    """For pytest: a subclass whose name begins with ``Test``, with an ``adapter``.

    ``examples`` and ``steps`` are the Hypothesis profile's unless they are given. A run in which something that the
    adapter can do was never done fails too.
    """

    adapter: ClassVar[type[BlockManagerAdapter]]
    examples: ClassVar[int | None] = None
    steps: ClassVar[int | None] = None
    rare: ClassVar[Collection[str]] = ()
    """Capabilities that a short run may not come to; show them by a story of their own (:func:`replay`)."""

    def test_life_of_blocks(self) -> None:
        """Goal: the manager keeps every invariant. Method: random lives of sequences, with an oracle of its own."""
        check_exercised(self.adapter, prove(self.adapter, examples=self.examples, steps=self.steps), self.rare)


__all__ = ["BlockManagerMachine", "prove", "replay"]

"""The contract of an engine that drives the two ends of a connector, as tests that its small version subclasses.

.. code-block:: python

    class TestMyEngine(ConnectorContract):
        def make_engine(self, routers, settings, outside=None):
            return MyEngine(routers, settings)

The routers of the engine under test choose what :class:`Routers` says, a function of the tokens and of the weights, and
its next tokens are those of :class:`Routers`, too. So every row of every answer is known.
:class:`~kvroute.testing.small_engine.SmallEngine` is one such engine: it shows each call of the two ends where it
belongs. :class:`LoadingContract` is for engines that load KV from outside.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from cache_manager.spec import AuxBlockDataSpec
from kvroute.connector import routes
from kvroute.routes import Routes
from kvroute.routing import routing_spec

BLOCK_TOKENS: Final = 4
EXPERTS: Final = 8
TOP_K: Final = 2
ROUTER_LAYERS: Final = 2
FIRST_VERSION: Final = 1
STEPS_MAX: Final = 10_000


def routers_spec() -> AuxBlockDataSpec:
    """The rows of :class:`Routers`: two layers, the best two of eight experts, blocks of four tokens."""
    return routing_spec(EXPERTS, TOP_K, range(ROUTER_LAYERS), num_layers=ROUTER_LAYERS, block_tokens=BLOCK_TOKENS)


def ids_of(tokens: Sequence[int], version: int) -> NDArray[np.int64]:
    """What routers of these weights choose for the last of ``tokens``: ``[layers, top_k]``."""
    return np.stack([_random(tokens, version, layer).permutation(EXPERTS)[:TOP_K] for layer in range(ROUTER_LAYERS)])


def _random(tokens: Sequence[int], *salt: int) -> np.random.Generator:
    digest = hashlib.blake2b(np.array([*salt, *tokens], "<i8").tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


class Routers:
    """The model of an engine under test: what its routers choose, and which token it samples."""

    def __init__(self) -> None:
        self.version = FIRST_VERSION
        """Of the present weights."""
        self.computed = 0
        """How many tokens were computed."""
        self.sampled = 0
        """How many tokens were sampled."""

    def ids(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """The engine computes the last of ``tokens``, which begin with the sequence's first: the experts that are
        chosen for it, ``[layers, top_k]``."""
        self.computed += 1
        return ids_of(tokens, self.version)

    def next_token(self, tokens: Sequence[int]) -> int:
        """The token behind ``tokens``, all of which have been computed."""
        self.sampled += 1
        return int(_random(tokens).integers(0, 2))


class DrivenEngine(Protocol):
    """An engine under test, with its scheduler and its worker in this process."""

    def arrive(self, name: str, prompt: Sequence[int], new: int) -> None:
        """A request comes. It is done when ``new`` tokens, one or more, have been sampled behind its prompt."""

    def step(self) -> bool:
        """Admit requests that there is room for, and compute some tokens of some; whether any request is left."""

    def preempt(self, name: str) -> None:
        """The request loses its blocks if it has any, and is computed again in later steps."""

    def abort(self, name: str) -> None:
        """The request ends before it is done; it is in no answer."""

    def load_weights(self, version: int) -> None:
        """The routers have the weights of this version from here on. The KV is kept."""

    def pause(self) -> None:
        """No step comes until :meth:`resume`; weights may change meanwhile without a word."""

    def resume(self) -> None:
        """Steps come again."""

    def forget(self) -> None:
        """All KV is forgotten, as for other weights: running requests are computed again. The worker is through with
        all steps before, or rows that it has still to write would be lost; and :meth:`load_weights` follows, because no
        version is known."""

    def answers(self) -> dict[str, Any]:
        """The answers of the requests that were done since the last call, by name: each as :func:`kvroute.routes` takes
        it, with the ids of its prompt and of its new tokens."""

    def close(self) -> None:
        """End the engine and both ends."""


class ConnectorContract(ABC):
    """What clients of an engine with a connector may rely on: subclass it, and say how to make the engine."""

    settings: ClassVar[Mapping[str, Any]] = {}
    """Of the connector, beside those that the tests need."""
    hits: ClassVar[bool] = True
    """Whether a request is to hit the blocks of an earlier one with the same prompt."""
    lives: ClassVar[int] = 6
    """How many random lives are played."""

    @abstractmethod
    def make_engine(
        self,
        routers: Routers,
        settings: Mapping[str, Any],
        outside: dict[bytes, Any] | None = None,
    ) -> DrivenEngine:
        """An engine with blocks of :data:`BLOCK_TOKENS` tokens, at least 12, and this connector (``Settings.of``).

        ``outside`` is KV that it shares with others: :class:`LoadingContract`.
        """

    @contextmanager
    def _engine(self, routers: Routers, **settings: Any) -> Iterator[DrivenEngine]:
        engine = self.make_engine(routers, {"weights_version": FIRST_VERSION, **self.settings, **settings})
        try:
            yield engine
        finally:
            engine.close()

    def routes_of(self, answer: Any, unnamed: int | None = None) -> Routes:
        """The routes of an answer: every row is one of its tokens and of the version that it has. Only with weights
        ``unnamed``, whose version no one has told, a row may have none."""
        (choice,) = answer["choices"]
        tokens = [*choice["prompt_token_ids"], *choice["token_ids"]]
        rows = routes(answer)
        assert (rows.start, rows.stop) == (0, len(tokens) - 1), "a row for each token that the model has read"
        versions = {i: version for start, stop, version in rows.weights_versions for i in range(start, stop)}
        for position in np.flatnonzero(rows.known.any(axis=1)).tolist():
            version = versions.get(position, unnamed)
            assert version is not None, f"the row of position {position} has no version"
            wanted = ids_of(tokens[: position + 1], version)
            right = (rows.ids[position] == wanted).all(axis=1)
            assert right[rows.known[position]].all(), f"a wrong row at position {position}"
        return rows

    def run(
        self,
        engine: DrivenEngine,
        unnamed: int | None = None,
    ) -> dict[str, Routes]:
        """Steps until no request is left: the routes of those that were done; see :meth:`routes_of`."""
        steps = 0
        while engine.step():
            steps += 1
            assert steps < STEPS_MAX, "requests that are never done"
        return {name: self.routes_of(answer, unnamed) for name, answer in engine.answers().items()}

    # ---------------------------------------------------------------- what is promised

    def test_every_token_that_was_read_has_its_row(self) -> None:
        """Goal: the scheduler says which blocks a request has, and the worker where its tokens are. Method: prompts of
        one token, of parts of a block and of whole ones, alone and together."""
        routers = Routers()
        with self._engine(routers) as engine:
            for length in range(1, 2 * BLOCK_TOKENS + 2):
                engine.arrive(f"alone-{length}", [length] * length, 3)
                assert self.run(engine)[f"alone-{length}"].complete
            for length in (3, BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1):
                engine.arrive(f"together-{length}", [length, 0] * length, 2)
            assert all(rows.complete for rows in self.run(engine).values())

    def test_a_hit_brings_the_rows_of_its_tokens(self) -> None:
        """Goal: :meth:`matched` and :meth:`admitted` name the blocks of a hit. Method: one prompt twice."""
        routers = Routers()
        prompt = list(range(2 * BLOCK_TOKENS + 1))
        with self._engine(routers) as engine:
            computed = list[int]()
            for name in ("first", "second"):
                before = routers.computed
                engine.arrive(name, prompt, 2)
                assert self.run(engine)[name].complete
                computed.append(routers.computed - before)
            assert not self.hits or computed[1] == computed[0] - 2 * BLOCK_TOKENS

    def test_blocks_that_are_given_out_again_have_no_earlier_rows(self) -> None:
        """Goal: :meth:`given` names every block. Method: many prompts, of which no two share a block, go through the
        pool, and none is computed by a step that says nothing of its rows."""
        routers = Routers()
        with self._engine(routers) as engine:
            for number in range(40):
                engine.arrive(f"r-{number}", [number, *[1] * (number % 7)], 1 + number % 3)
                assert self.run(engine)[f"r-{number}"].complete

    def test_a_preempted_request_keeps_the_rows_that_its_tokens_were_sampled_with(self) -> None:
        """Goal: :meth:`preempted` is called before blocks are lost. Method: other weights compute the request again."""
        routers = Routers()
        prompt = [5, 3, 1]
        with self._engine(routers) as engine:
            engine.arrive("r", prompt, 6)
            while routers.sampled < 3:
                assert engine.step()
            engine.preempt("r")
            routers.version = 2
            engine.load_weights(2)
            rows = self.run(engine)["r"]
            read = len(prompt) + 2  # the third new token had not been read
            assert rows.complete
            assert rows.weights_versions == ((0, read, 1), (read, len(prompt) + 5, 2))

    def test_an_aborted_request_leaves_nothing(self) -> None:
        """Goal: a request ends in any case. Method: abort requests before, in and behind their first steps; later ones
        get their blocks. One that had been preempted is aborted, and another one has its name."""
        routers = Routers()
        with self._engine(routers) as engine:
            for steps in range(4):
                for name in ("goes", "stays"):
                    engine.arrive(f"{name}-{steps}", [steps, 2, 4, 6, 8, *[7] * steps], 4)
                for _ in range(steps):
                    engine.step()
                engine.abort(f"goes-{steps}")
                answers = self.run(engine)
                assert set(answers) == {f"stays-{steps}"}
                assert answers[f"stays-{steps}"].complete
            before = routers.sampled
            engine.arrive("again", [9, 8, 7, 6, 5], 4)
            while routers.sampled < before + 2:
                assert engine.step()
            engine.preempt("again")
            engine.abort("again")
            engine.arrive("again", [1, 2], 4)
            assert self.run(engine)["again"].complete

    def test_rows_have_the_version_of_the_weights_that_computed_them(self) -> None:
        """Goal: a change of weights reaches the scheduler's end before the first step with the new ones. Method: change
        them amid a request, whose KV is kept."""
        routers = Routers()
        with self._engine(routers) as engine:
            engine.arrive("r", [1, 2, 3], 5)
            while routers.sampled < 2:
                assert engine.step()
            routers.version = 2
            engine.load_weights(2)
            rows = self.run(engine)["r"]
            assert rows.complete
            assert [version for _, _, version in rows.weights_versions] == [1, 2]

    def test_weights_that_may_have_changed_in_a_pause_have_no_version(self) -> None:
        """Goal: :meth:`paused` and :meth:`resumed` are called, so that no row has a version of other weights. Method:
        weights change in a pause amid a request, and nobody says so; then in a pause before the first step with weights
        whose version was told."""
        routers = Routers()
        with self._engine(routers) as engine:
            engine.arrive("r", [1, 2, 3], 5)
            while routers.sampled < 2:
                assert engine.step()
            engine.pause()
            routers.version = 2
            engine.resume()
            rows = self.run(engine, unnamed=2)["r"]
            assert rows.complete
            assert [version for _, _, version in rows.weights_versions] == [1]
            engine.load_weights(3)
            engine.pause()
            routers.version = 4
            engine.resume()
            engine.arrive("s", [7, 7], 2)
            rows = self.run(engine, unnamed=4)["s"]
            assert rows.complete
            assert not rows.weights_versions

    def test_what_was_forgotten_is_computed_again(self) -> None:
        """Goal: no row outlives its KV. Method: the same prompt before and after all KV is forgotten."""
        routers = Routers()
        prompt = list(range(2 * BLOCK_TOKENS + 1))
        with self._engine(routers) as engine:
            for name in ("before", "after"):
                first = routers.computed
                engine.arrive(name, prompt, 1)
                assert self.run(engine)[name].complete
                assert routers.computed - first == len(prompt)
                engine.forget()
                engine.load_weights(routers.version)

    def test_whatever_the_scheduler_does_no_row_is_wrong(self) -> None:
        """Goal: all of it together. Method: requests that share prompts come, are preempted and aborted while weights
        change and KV is forgotten, by seed."""
        for seed in range(self.lives):
            pick = random.Random(seed)  # noqa: S311 - no secret
            routers = Routers()
            with self._engine(routers) as engine:
                names = list[str]()
                for number in range(30):
                    action = pick.random()
                    if action < 0.4:
                        names.append(f"r-{number}")
                        prompt = pick.choice([[0, 1, 1, 0, 1, 0, 0, 1], [0, 1, 1, 0, 0], [1, 1]])
                        engine.arrive(names[-1], [*prompt, *pick.choices([0, 1], k=pick.randint(0, 5))], 4)
                    elif action < 0.5 and names:
                        engine.preempt(pick.choice(names))
                    elif action < 0.55 and names:
                        engine.abort(pick.choice(names))
                    elif action < 0.6:
                        routers.version += 1
                        engine.load_weights(routers.version)
                    elif action < 0.65:
                        engine.forget()
                        engine.load_weights(routers.version)
                    else:
                        engine.step()
                assert all(rows.complete for rows in self.run(engine).values()), f"seed {seed}"


class LoadingEngine(DrivenEngine, Protocol):
    """An engine under test that loads KV from outside, of whole blocks."""

    def fail_next_load(self) -> None:
        """The KV of the first block of the next load does not come: its tokens are computed."""

    def settle(self) -> None:
        """Wait until the store has the rows, and outside there is the KV, of all full blocks."""


class LoadingContract(ConnectorContract):
    """What clients may rely on if KV comes from outside and its rows from a store, by the blocks' keys.

    Engines that get the same ``outside`` share the KV in it; all hits behind those of their own are to be loaded.
    """

    @abstractmethod
    def make_engine(
        self,
        routers: Routers,
        settings: Mapping[str, Any],
        outside: dict[bytes, Any] | None = None,
    ) -> LoadingEngine: ...

    def _loaded(self, directory: Path, *, fails: bool) -> tuple[Routes, int]:
        """The routes of a request in a second engine, and how many tokens that computed."""
        outside = dict[bytes, Any]()
        prompt = list(range(5 * BLOCK_TOKENS + 1))
        store = f"file://{directory}/rows"
        said = {"weights_version": FIRST_VERSION, "witness": "flagged", **self.settings}
        first = self.make_engine(Routers(), {**said, "store": store}, outside)
        first.arrive("first", prompt, 2)
        assert self.run(first)["first"].complete
        first.settle()
        routers = Routers()
        second = self.make_engine(routers, {**said, "store": f"{store}?mode=read"}, outside)
        if fails:
            second.fail_next_load()
        second.arrive("second", prompt, 2)
        rows = self.run(second)["second"]
        for engine in (first, second):
            engine.close()
        return rows, routers.computed

    def test_kv_from_outside_comes_with_its_rows(self, tmp_path: Path) -> None:
        """Goal: :meth:`matched` says how much is loaded, and the step that loads it where. Method: a second engine."""
        rows, computed = self._loaded(tmp_path, fails=False)
        assert rows.complete
        assert computed == 2, "the last token of the prompt, and the new one that was read"

    def test_kv_that_does_not_come_is_computed(self, tmp_path: Path) -> None:
        """Goal: :meth:`fail` is called, and what was computed from such KV is computed again. Method: the first of the
        loaded blocks fails."""
        rows, computed = self._loaded(tmp_path, fails=True)
        assert rows.complete
        assert computed > 5 * BLOCK_TOKENS


__all__ = [
    "BLOCK_TOKENS",
    "ConnectorContract",
    "DrivenEngine",
    "LoadingContract",
    "LoadingEngine",
    "Routers",
    "ids_of",
    "routers_spec",
]

"""The sizes of each named scale, the user's options, and a task that is cheap to make and to judge: put symbols in the
order that the prompt asks for.

A prompt is ``BEGIN, order, symbol * length, ANSWER``; its answer is the same symbols in that order. All prompts have
one length, and all answers, so that batches have no padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


ORDERS = ASCENDING, DESCENDING, _REVERSED = range(3)
BEGIN, ANSWER, FIRST_SYMBOL = range(3, 6)
"""The tokens that are not symbols, and the first one that is."""


@dataclass(frozen=True, slots=True)
class Task:
    """``length`` symbols out of ``symbols`` different ones."""

    symbols: int
    length: int

    @property
    def vocab_size(self) -> int:
        return FIRST_SYMBOL + self.symbols

    @property
    def prompt_tokens(self) -> int:
        return self.length + 3

    @property
    def chance(self) -> float:
        """The reward of an answer of symbols drawn at random."""
        return 1 / self.symbols

    def prompts(self, count: int, draw: np.random.Generator) -> Tokens:
        """``count`` prompts ``[count, prompt_tokens]``."""
        prompts = np.empty((count, self.prompt_tokens), np.int64)
        prompts[:, 0] = BEGIN
        prompts[:, 1] = draw.choice(ORDERS, count)
        prompts[:, 2:-1] = draw.integers(FIRST_SYMBOL, self.vocab_size, (count, self.length))
        prompts[:, -1] = ANSWER
        return prompts

    def answers(self, prompts: Tokens) -> Tokens:
        """The right answers ``[count, length]``.

        >>> Task(symbols=9, length=3).answers(np.array([[3, 1, 6, 8, 7, 4], [3, 2, 6, 8, 7, 4]])).tolist()
        [[8, 7, 6], [7, 8, 6]]
        """
        given = prompts[:, 2:-1]
        ascending = np.sort(given, axis=1)
        order = prompts[:, 1:2]
        return np.select([order == ASCENDING, order == DESCENDING], [ascending, ascending[:, ::-1]], given[:, ::-1])

    def demonstrations(self, count: int, errors: float, draw: np.random.Generator) -> Tokens:
        """Prompts with answers ``[count, sequence]`` in which a share ``errors`` of the symbols is drawn anew.

        A policy that has learnt from them is right about as often as they are, and unsure of every symbol, so
        reinforcement can improve it.
        """
        prompts = self.prompts(count, draw)
        answers = self.answers(prompts)
        wrong = draw.random(answers.shape) < errors
        drawn = draw.integers(FIRST_SYMBOL, self.vocab_size, answers.shape)
        return np.concatenate([prompts, np.where(wrong, drawn, answers)], axis=1)

    def rewards(self, sequences: Tokens) -> NDArray[np.float64]:
        """The share of right symbols in each answer, ``[count]``, of ``sequences`` ``[count, sequence]``."""
        right = self.answers(sequences[:, : self.prompt_tokens])
        shares: NDArray[Any] = (sequences[:, self.prompt_tokens :] == right).mean(axis=1)
        return shares


@dataclass(frozen=True, slots=True)
class Learning:
    """Supervised learning before anything is measured: ``steps`` at most, ``batch`` demonstrations each."""

    steps: int
    batch: int
    learning_rate: float
    errors: float = 0.15
    """The share of wrong symbols in the demonstrations."""


@dataclass(frozen=True, slots=True)
class Reinforcement:
    """Policy gradient: ``steps`` at most, each ``prompts`` times ``samples`` rollouts and ``updates`` updates."""

    steps: int
    prompts: int
    samples: int
    updates: int
    learning_rate: float
    seeds: int = 3
    clip: float = 0.2


@dataclass(frozen=True, slots=True)
class Scale:
    """One size of the study. Each figure of the mismatch is a mean over ``draws`` batches of rollouts of ``measured``
    prompts. ``shape`` has the sizes of a ``Qwen3MoeConfig``, in which every layer is routed.
    """

    shape: Mapping[str, int]
    task: Task
    draws: int
    measured: int
    learning: Learning
    reinforcement: Reinforcement
    micro_batch: int


def _shape(layers: int, hidden: int, heads: int, experts: int, top_k: int) -> dict[str, int]:
    inner = {"intermediate_size": hidden // 2, "moe_intermediate_size": hidden // 2, "num_key_value_heads": heads // 2}
    outer = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return inner | outer | {"head_dim": hidden // heads, "num_experts": experts, "num_experts_per_tok": top_k}


_TINY: Final = Scale(
    _shape(layers=4, hidden=64, heads=4, experts=16, top_k=4),
    *(Task(symbols=8, length=4), 3, 16, Learning(60, 48, 6e-3)),
    reinforcement=Reinforcement(3, prompts=8, samples=8, updates=4, learning_rate=1e-4),
    micro_batch=16,
)
SCALES: Final[dict[str, Scale]] = {
    "quick": replace(_TINY, measured=4, reinforcement=replace(_TINY.reinforcement, steps=2, prompts=4, seeds=2)),
    "tiny": _TINY,
    "half-billion": Scale(
        _shape(layers=24, hidden=512, heads=8, experts=64, top_k=8),
        *(Task(symbols=32, length=16), 5, 32, Learning(4000, 256, 4e-4)),
        reinforcement=Reinforcement(100, prompts=32, samples=16, updates=4, learning_rate=2e-5),
        micro_batch=128,
    ),
}


@dataclass(frozen=True, slots=True)
class Options:
    """How to run ``scale``.

    With ``minutes`` learning gets a third of them at most, and policy gradient takes as many steps as fit into the
    rest.
    """

    scale: Scale
    device: str = "cpu"
    minutes: float | None = None
    seed: int = 0

"""A task that is cheap to make and to judge: put symbols in the order that the prompt asks for.

A prompt is ``BEGIN, order, symbol * length, ANSWER``; its answer is the same symbols in that order. All prompts have
one length, and all answers, so that batches have no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

"""The sizes of each named scale, the user's options, and a task with long answers that is cheap to make and to judge:
walk from symbol to symbol by the rule that the prompt names.

A prompt is ``BEGIN, rule, symbol, ...``: the beginning of a walk. Its answer goes on with it, in turns of one length.
A rule is a permutation of the symbols, the same in all prompts: a model has to keep ``rules * symbols`` facts in its
weights, and reads in its context which of them are asked for. All prompts have one length, and all answers, so that
batches have no padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

BEGIN: Final = 0
FIRST_SYMBOL: Final = 1
"""The token that is not a symbol or a rule, and the first symbol; rules follow the symbols."""


@dataclass(frozen=True, slots=True)
class Task:
    """``rules`` permutations of ``symbols`` symbols; answers of ``turns`` times ``turn_tokens`` tokens."""

    symbols: int
    rules: int
    prompt_tokens: int
    turns: int
    turn_tokens: int

    @property
    def vocab_size(self) -> int:
        return FIRST_SYMBOL + self.symbols + self.rules

    @property
    def answer_tokens(self) -> int:
        return self.turns * self.turn_tokens

    @property
    def sequence(self) -> int:
        """The tokens of a prompt and its answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def cached_tokens(self) -> int:
        """The tokens before the last turn: their KV, and so their rows, are not computed by it."""
        return self.sequence - self.turn_tokens

    @property
    def chance(self) -> float:
        """The reward of an answer of symbols drawn at random."""
        return 1 / self.symbols

    def facts(self) -> Tokens:
        """The symbol that follows each, ``[rules, symbols]``, counted from 0; the same for all seeds."""
        draw = np.random.default_rng(0)
        return np.stack([draw.permutation(self.symbols) for _ in range(self.rules)])

    def prompts(self, count: int, draw: np.random.Generator) -> Tokens:
        """``count`` prompts ``[count, prompt_tokens]``."""
        return self._walks(count, 0, 0.0, draw)

    def demonstrations(self, count: int, errors: float, draw: np.random.Generator) -> Tokens:
        """Prompts with answers ``[count, sequence]`` in which a share ``errors`` of the steps goes anywhere.

        A policy that has learnt from them is right about as often as they are, and unsure of every symbol, so
        reinforcement can improve it.
        """
        return self._walks(count, self.answer_tokens, errors, draw)

    def _walks(self, count: int, answer_tokens: int, errors: float, draw: np.random.Generator) -> Tokens:
        rules = draw.integers(0, self.rules, count)
        follows = self.facts()[rules]  # [count, symbols]
        sequence = self.prompt_tokens + answer_tokens
        lost = draw.random((count, sequence)) < errors
        lost[:, : self.prompt_tokens] = False
        drawn = draw.integers(0, self.symbols, (count, sequence))
        tokens = np.empty((count, sequence), np.int64)
        tokens[:, 0] = BEGIN
        tokens[:, 1] = FIRST_SYMBOL + self.symbols + rules
        at = drawn[:, 2]
        rows = np.arange(count)
        for position in range(2, sequence):
            if position > 2:
                at = np.where(lost[:, position], drawn[:, position], follows[rows, at])
            tokens[:, position] = FIRST_SYMBOL + at
        return tokens

    def right(self, sequences: Tokens) -> NDArray[np.bool_]:
        """Which tokens of the answers, ``[count, answer]``, follow the token before them by the rule.

        ``sequences`` ``[count, sequence]`` have one of this task's prompts; an answer may have any length. A wrong
        symbol spoils nothing that follows: the walk goes on from there.
        """
        rules = sequences[:, 1] - FIRST_SYMBOL - self.symbols
        before = sequences[:, self.prompt_tokens - 1 : -1] - FIRST_SYMBOL
        known = (before >= 0) & (before < self.symbols)
        wanted = self.facts()[rules[:, None], np.where(known, before, 0)] + FIRST_SYMBOL
        right: NDArray[np.bool_] = known & (sequences[:, self.prompt_tokens :] == wanted)
        return right

    def rewards(self, sequences: Tokens) -> NDArray[np.float64]:
        """The share of right tokens in each turn, ``[count, turns]``."""
        right = self.right(sequences)
        shares: NDArray[Any] = right.reshape(len(right), -1, self.turn_tokens).mean(axis=2)
        return shares


@dataclass(frozen=True, slots=True)
class Learning:
    """Supervised learning before anything is measured: ``steps`` at most, ``batch`` demonstrations each, of the short
    task. Every fourth step takes demonstrations of the long one, so many that they have as many tokens.
    """

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
    clip: float = 0.2


@dataclass(frozen=True, slots=True)
class Scale:
    """One size of the study.

    ``shapes`` has the sizes of each family's configuration. The mismatch is measured on ``measured`` prompts times
    ``samples`` answers of the ``long`` task; updates and policy gradient take answers of the ``short`` one.
    """

    shapes: Mapping[str, Mapping[str, int]]
    long: Task
    short: Task
    measured: int
    samples: int
    lags: tuple[int, ...]
    learning: Learning
    reinforcement: Reinforcement
    page_tokens: int
    micro_tokens: int
    """The tokens of a pass of the trainer; at least one sequence."""
    seeds: int = 3


QWEN: Final = "qwen3_moe"
DEEPSEEK: Final = "deepseek_v3"
FAMILIES: Final = (QWEN, DEEPSEEK)
MISMATCH: Final = "mismatch"
TRAINING: Final = "training"
PHASES: Final = (MISMATCH, TRAINING)
DENOMINATORS: Final = ("engine", "trainer")
"""Whose log-probabilities the ratio of policy gradient divides by: the engine's, or the trainer's before the updates,
with the same rows."""


def _shapes(layers: int, hidden: int, heads: int, experts: int, top_k: int, groups: int) -> dict[str, dict[str, int]]:
    """Both families' sizes: as many layers, heads, experts and choices."""
    inner = hidden // 2
    common = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    common |= {"moe_intermediate_size": inner, "num_experts_per_tok": top_k}
    head = hidden // heads
    latent = {"q_lora_rank": hidden // 2, "kv_lora_rank": hidden // 4, "v_head_dim": head}
    latent |= {"qk_nope_head_dim": head // 2, "qk_rope_head_dim": head // 2, "num_key_value_heads": heads}
    grouped = {"n_routed_experts": experts, "n_group": groups, "topk_group": groups // 2, "n_shared_experts": 1}
    return {
        QWEN: common
        | {"num_experts": experts, "head_dim": head, "num_key_value_heads": heads // 2, "intermediate_size": inner},
        DEEPSEEK: common | latent | grouped | {"first_k_dense_replace": 1, "intermediate_size": 2 * hidden},
    }


_TINY: Final = Scale(
    shapes=_shapes(layers=4, hidden=64, heads=4, experts=16, top_k=4, groups=4),
    long=Task(symbols=8, rules=3, prompt_tokens=8, turns=4, turn_tokens=16),
    short=Task(symbols=8, rules=3, prompt_tokens=8, turns=2, turn_tokens=16),
    measured=4,
    samples=4,
    lags=(0, 1, 4, 8),
    learning=Learning(60, 24, 6e-3),
    reinforcement=Reinforcement(12, prompts=8, samples=8, updates=4, learning_rate=3e-4),
    page_tokens=4,
    micro_tokens=1024,
)
_HALF: Final = Task(symbols=64, rules=16, prompt_tokens=64, turns=63, turn_tokens=64)
SCALES: Final[dict[str, Scale]] = {
    "quick": replace(
        _TINY,
        measured=2,
        lags=(0, 2),
        learning=Learning(12, 16, 6e-3),
        reinforcement=replace(_TINY.reinforcement, steps=1, prompts=2, samples=4, updates=2),
        seeds=2,
    ),
    "tiny": _TINY,
    "third-billion": Scale(
        shapes=_shapes(layers=12, hidden=512, heads=8, experts=64, top_k=8, groups=8),
        long=_HALF,
        short=replace(_HALF, turns=15),
        measured=8,
        samples=4,
        lags=(0, 1, 4, 8),
        learning=Learning(320, 16, 6e-4),
        reinforcement=Reinforcement(60, prompts=16, samples=8, updates=4, learning_rate=2e-5),
        page_tokens=16,
        micro_tokens=16 * 1024,
    ),
}


@dataclass(frozen=True, slots=True)
class Options:
    """How to run ``scale``: for which ``families``, with ``seeds`` counted from ``seed``, and which ``phases``.

    With ``minutes`` learning gets a fifth of them at most, and policy gradient takes as many steps as fit into what is
    left. Weights that were learnt are kept in the directory ``state``, if there is one, and found there again.
    Policy gradient is run for each of ``ratios``, one after the other.
    """

    scale: Scale
    device: str = "cpu"
    minutes: float | None = None
    seed: int = 0
    families: tuple[str, ...] = FAMILIES
    phases: tuple[str, ...] = PHASES
    state: str | None = None
    ratios: tuple[str, ...] = DENOMINATORS

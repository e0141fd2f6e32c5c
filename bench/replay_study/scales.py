"""The sizes of each named scale, and the user's options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from bench.replay_study.task import Task


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Qwen3-MoE made for the study; every layer is routed."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    experts: int
    top_k: int
    expert_hidden: int


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
    prompts.
    """

    shape: Shape
    task: Task
    draws: int
    measured: int
    learning: Learning
    reinforcement: Reinforcement
    micro_batch: int


_TINY: Final = Scale(
    Shape(layers=4, hidden=64, heads=4, kv_heads=2, experts=16, top_k=4, expert_hidden=32),
    *(Task(symbols=8, length=4), 3, 16, Learning(60, 48, 6e-3)),
    reinforcement=Reinforcement(3, prompts=8, samples=8, updates=4, learning_rate=1e-4),
    micro_batch=16,
)
SCALES: Final[dict[str, Scale]] = {
    "quick": replace(_TINY, measured=4, reinforcement=replace(_TINY.reinforcement, steps=2, prompts=4, seeds=2)),
    "tiny": _TINY,
    "half-billion": Scale(
        Shape(layers=24, hidden=512, heads=8, kv_heads=4, experts=64, top_k=8, expert_hidden=256),
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

"""The sizes of each named scale, and the user's options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from bench.replay_study.task import Task

PHASES: Final = ("learning", "mismatch", "policy-gradient")
TrainerDtype = Literal["float32", "bfloat16"]


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
    family: str = "qwen3_moe"
    modes: tuple[str, ...] = ("none", "r3")


@dataclass(frozen=True, slots=True)
class Scale:
    """One size of the study. With a ``shape`` the model has that shape, else models are those of ``kvroute demo``.

    Each figure of the mismatch is a mean over ``weights`` models, each learnt from its own seed, times ``draws``
    batches of rollouts of ``measured`` prompts.
    """

    families: tuple[str, ...]
    task: Task
    weights: int
    draws: int
    measured: int
    learning: Learning
    reinforcement: Reinforcement
    micro_batch: int
    shape: Shape | None = None


FAMILIES: Final = ("qwen3_moe", "deepseek_v3", "olmoe", "mixtral")
_SMALL: Final = Reinforcement(8, prompts=8, samples=8, updates=4, learning_rate=1e-4)
_QUICK: Final = replace(_SMALL, steps=2, prompts=4, updates=2, seeds=2)
SCALES: Final[dict[str, Scale]] = {
    "quick": Scale(FAMILIES[::3], Task(8, 4), 3, 1, 8, Learning(40, 32, 6e-3), _QUICK, 32),
    "small": Scale(
        *(FAMILIES, Task(8, 4), 4, 1, 32, Learning(100, 48, 6e-3)),
        reinforcement=replace(_SMALL, modes=("none", "r2", "r3")),
        micro_batch=64,
    ),
    "tiny": Scale(
        *(FAMILIES[:1], Task(8, 4), 1, 3, 16, Learning(60, 48, 6e-3), replace(_SMALL, steps=3)),
        micro_batch=16,
        shape=Shape(layers=4, hidden=64, heads=4, kv_heads=2, experts=16, top_k=4, expert_hidden=32),
    ),
    "half-billion": Scale(
        *(FAMILIES[:1], Task(symbols=32, length=16), 1, 5, 32, Learning(4000, 256, 4e-4)),
        reinforcement=Reinforcement(100, prompts=32, samples=16, updates=4, learning_rate=2e-5),
        micro_batch=128,
        shape=Shape(layers=24, hidden=512, heads=8, kv_heads=4, experts=64, top_k=8, expert_hidden=256),
    ),
}


@dataclass(frozen=True, slots=True)
class Options:
    """How to run ``scale``.

    With ``minutes`` learning gets a third of them at most, and policy gradient takes as many steps as fit into the
    rest. The first of ``phases`` is always needed.
    """

    scale: Scale
    device: str = "cpu"
    minutes: float | None = None
    seed: int = 0
    trainer_dtype: TrainerDtype = "float32"
    phases: tuple[str, ...] = PHASES

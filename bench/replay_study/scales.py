"""The sizes of each named scale, and the user's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from bench.replay_study.task import Task


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

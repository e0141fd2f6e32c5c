"""What the user may choose, and the sizes behind the name of a scale; checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from bench.replay_study.task import Task
from cache_manager.errors import ConfigError

MINUTES_MAX: Final = 24 * 60
PHASES: Final = ("learning", "mismatch", "policy-gradient")
TrainerDtype = Literal["float32", "bfloat16"]
TRAINER_DTYPES: Final[tuple[TrainerDtype, ...]] = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Qwen3-MoE that is made for the study; every layer is routed."""

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
    """One size of the study.

    Without a ``shape`` the models are those of ``kvroute demo``. With one, it is that model. Whole batches are rolled
    out over transformers' own cache.

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
_SMALL_TASK: Final = Task(symbols=8, length=4)

SCALES: Final[dict[str, Scale]] = {
    "quick": Scale(
        families=("qwen3_moe", "mixtral"),
        task=_SMALL_TASK,
        weights=3,
        draws=1,
        measured=8,
        learning=Learning(steps=40, batch=32, learning_rate=6e-3),
        reinforcement=Reinforcement(steps=2, prompts=4, samples=8, updates=2, learning_rate=1e-4, seeds=2),
        micro_batch=32,
    ),
    "small": Scale(
        families=FAMILIES,
        task=_SMALL_TASK,
        weights=4,
        draws=1,
        measured=32,
        learning=Learning(steps=100, batch=48, learning_rate=6e-3),
        reinforcement=Reinforcement(
            steps=8, prompts=8, samples=8, updates=4, learning_rate=1e-4, modes=("none", "r2", "r3")
        ),
        micro_batch=64,
    ),
    "tiny": Scale(
        families=("qwen3_moe",),
        task=_SMALL_TASK,
        weights=1,
        draws=3,
        measured=16,
        learning=Learning(steps=60, batch=48, learning_rate=6e-3),
        reinforcement=Reinforcement(steps=3, prompts=8, samples=8, updates=4, learning_rate=1e-4),
        micro_batch=16,
        shape=Shape(layers=4, hidden=64, heads=4, kv_heads=2, experts=16, top_k=4, expert_hidden=32),
    ),
    "half-billion": Scale(
        families=("qwen3_moe",),
        task=Task(symbols=32, length=16),
        weights=1,
        draws=5,
        measured=32,
        learning=Learning(steps=4000, batch=256, learning_rate=4e-4),
        reinforcement=Reinforcement(steps=100, prompts=32, samples=16, updates=4, learning_rate=2e-5),
        micro_batch=128,
        shape=Shape(layers=24, hidden=512, heads=8, kv_heads=4, experts=64, top_k=8, expert_hidden=256),
    ),
}


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """The flags of ``python -m bench.replay_study``.

    ``scale`` ``None`` means ``small`` on a CPU and ``half-billion`` on an accelerator. ``learning_rate`` is that of
    policy gradient; ``None`` leaves it to the scale. With ``minutes`` learning gets a
    third of them at most, and policy gradient takes as many steps as fit into what is left.

    Raises :class:`ConfigError` naming the flag.
    """

    device: str = "cpu"
    scale: str | None = None
    minutes: float | None = None
    seed: int = 0
    learning_rate: float | None = None
    trainer_dtype: TrainerDtype = "float32"
    phases: tuple[str, ...] = PHASES
    """What is done; without learning there is nothing to measure."""
    out: Path = Path("replay-study")

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError("--device", "cpu or cuda", self.device)
        if self.scale is not None and self.scale not in SCALES:
            raise ConfigError("--scale", "one of " + ", ".join(SCALES), self.scale)
        if self.minutes is not None and not 0 < self.minutes <= MINUTES_MAX:
            raise ConfigError("--minutes", f"more than 0, at most {MINUTES_MAX}", self.minutes)
        if not 0 <= self.seed < 1 << 31:
            raise ConfigError("--seed", "an integer in [0, 2**31)", self.seed)
        if self.learning_rate is not None and not 0 < self.learning_rate <= 1:
            raise ConfigError("--learning-rate", "more than 0, at most 1", self.learning_rate)
        if self.trainer_dtype not in TRAINER_DTYPES:
            raise ConfigError("--trainer-dtype", " or ".join(TRAINER_DTYPES), self.trainer_dtype)
        if "learning" not in self.phases or not set(self.phases) <= set(PHASES):
            raise ConfigError("--phases", "learning and some of " + ", ".join(PHASES[1:]), ",".join(self.phases))
        if self.device == "cuda" and self.sizes.shape is None:
            raise ConfigError("--scale", "tiny or half-billion: the others are for a CPU", self.scale_name)

    @property
    def scale_name(self) -> str:
        return self.scale or ("half-billion" if self.device == "cuda" else "small")

    @property
    def sizes(self) -> Scale:
        scale = SCALES[self.scale_name]
        if self.learning_rate is None:
            return scale
        return replace(scale, reinforcement=replace(scale.reinforcement, learning_rate=self.learning_rate))


__all__ = [
    "FAMILIES",
    "PHASES",
    "SCALES",
    "Learning",
    "Reinforcement",
    "Scale",
    "Shape",
    "StudyOptions",
    "TrainerDtype",
]

"""What a study found, as numbers. They are written whenever there is more: a run that is cut off keeps what it has."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from cache_manager.errors import InvalidInputError

FORMAT: Final = "kvroute replay-study 1"


@dataclass(frozen=True, slots=True)
class Learned:
    """Supervised learning of one model: mean rewards of rollouts before and after, and its last losses' mean."""

    family: str
    seed: int
    parameters: int
    steps: int
    seconds: float
    loss: float
    reward_before: float
    reward_after: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch of rollouts in one mode.

    ``when`` is "before" (trainer and engine have the same weights) or "after" (the trainer has been updated on these
    rollouts, and is compared with the engine that sampled them). ``figures`` are those of
    :class:`~bench.replay_study.mismatch.Mismatch`.
    """

    family: str
    seed: int
    draw: int
    when: str
    mode: str
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of policy gradient: rollouts, then an update.

    ``kl`` is the k3 estimate of the mismatch between engine and trainer before the update, ``moved`` that of the update
    itself, ``clip_fraction`` the share of tokens that the clip took out of it.
    """

    step: int
    reward: float
    loss: float
    clip_fraction: float
    kl: float
    moved: float
    gradient_norm: float
    tokens_differing: float
    seconds: float


@dataclass(slots=True)
class Run:
    """Policy gradient from one start in one mode."""

    family: str
    mode: str
    seed: int
    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True)
class Results:
    """Everything of one study. ``setting`` says where and with which sizes it ran; ``complete`` whether it ended."""

    setting: dict[str, Any]
    learned: list[Learned] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False

    def write(self, path: Path) -> None:
        """Replace ``path`` by these results, whole or not at all."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """What :meth:`write` wrote; :class:`InvalidInputError` for anything else."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                raise KeyError("format")
            found["learned"] = [Learned(**each) for each in found["learned"]]
            found["measured"] = [Measured(**each) for each in found["measured"]]
            found["runs"] = [Run(**{**run, "steps": [Step(**s) for s in run["steps"]]}) for run in found["runs"]]
            return cls(**found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInputError("results", f"a file of {FORMAT!r}", f"{path} ({error!r})") from error


__all__ = ["Learned", "Measured", "Results", "Run", "Step"]

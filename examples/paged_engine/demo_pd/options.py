"""What the user may choose, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cache_manager.errors import ConfigError
from paged_engine.demo.options import DemoOptions
from paged_engine.engine.request import EngineConfig

Network = Literal["auto", "loopback", "namespaces", "inside"]


@dataclass(frozen=True, slots=True)
class DemoPDOptions:
    """The flags of ``kvroute demo-pd``; the sizes of both engines follow from the workload as those of ``demo`` do.

    ``network``: ``namespaces`` gives each server a network namespace of its own, ``auto`` does so where the machine
    allows it; ``inside`` is for the process that already is in the one that connects them.
    """

    seed: int = 0
    requests: int = 16
    model: str = "qwen3_moe"
    network: Network = "auto"
    json: Path | None = None

    def __post_init__(self) -> None:
        _ = self.demo
        if self.json is not None and not self.json.parent.is_dir():
            raise ConfigError("--json", "a file in a directory that exists", str(self.json))

    @property
    def demo(self) -> DemoOptions:
        return DemoOptions(seed=self.seed, requests=self.requests, model=self.model)

    @property
    def engine(self) -> EngineConfig:
        """Of prefill and decode each: too small for all conversations at once."""
        return self.demo.engine

"""The user's options; the command line has checked each flag separately."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from cache_manager.errors import ConfigError
from paged_engine.request import EngineConfig
from paged_engine.workload import conversations, longest_tokens

SEQUENCES_MAX: Final = 8
BLOCK_TOKENS: Final = 16
MOONCAKE: Final = "mooncake"
"""In place of a store's URL: a Mooncake pool that the demo starts and ends."""


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of ``kvroute demo`` (``demo-pd`` has some of them); ``None`` means that the demo chooses.

    By default the device has room for a quarter of the conversations at their longest, but at least one and a quarter
    and at most three; the host has the same. That is less than the running sequences need. ``store`` is a URL or
    ``MOONCAKE``. Model and KV are on ``device``; on ``cuda`` one launch a pass captures the rows.

    Raises :class:`ConfigError` naming the flag.
    """

    seed: int = 0
    requests: int = 96
    device_blocks: int | None = None
    host_blocks: int | None = None
    model: str = "qwen3_moe"
    store: str | None = None
    device: str = "cpu"
    json: Path | None = None

    def __post_init__(self) -> None:
        if self.device == "cuda" and not torch.cuda.device_count():
            raise ConfigError("--device", "cpu, for torch sees no CUDA GPU here", self.device)
        if self._device < (longest := self.longest_blocks):
            raise ConfigError("--device-blocks", f"at least {longest}, for the longest sequence", self.device_blocks)

    @property
    def longest_blocks(self) -> int:
        return -(-longest_tokens(conversations(self.requests, self.seed)) // BLOCK_TOKENS)

    @property
    def _device(self) -> int:
        clients = len(conversations(self.requests, self.seed))
        room = round(self.longest_blocks * max(1.25, min(3.0, clients / 4)))
        return room if self.device_blocks is None else self.device_blocks

    @property
    def engine(self) -> EngineConfig:
        """The configuration of the engine under test."""
        host = self._device if self.host_blocks is None else self.host_blocks
        return EngineConfig(BLOCK_TOKENS, self._device, host, sequences_max=SEQUENCES_MAX, memory="shared")

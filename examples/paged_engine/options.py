"""What the user may choose, checked before anything starts."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from cache_manager.errors import ConfigError
from cache_manager.storage.url import StoreUrl
from paged_engine.models import MODELS
from paged_engine.request import EngineConfig
from paged_engine.workload import conversations, longest_tokens

REQUESTS_MAX: Final = 100_000
SEQUENCES_MAX: Final = 8
BLOCK_TOKENS: Final = 16
MOONCAKE: Final = "mooncake"
"""In place of a store's URL: a Mooncake pool that the demo starts and ends."""


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of ``kvroute demo``, of which ``demo-pd`` has some; ``None`` means that the demo chooses.

    By default the device holds a quarter of the conversations at their longest, but one and a quarter at least and
    three at most; the host holds as much. That is less than what runs at once needs. ``store`` is a URL or
    ``MOONCAKE``. Model and KV lie on ``device``; on ``cuda`` one launch a pass captures the rows.

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
    out: Path = Path("demo-output")

    def __post_init__(self) -> None:
        gpu = self.device == "cpu" or torch.cuda.device_count() > 0
        for flag, value, right, wanted in (
            ("--model", self.model, self.model in MODELS, "one of " + ", ".join(MODELS)),
            ("--requests", self.requests, 1 <= self.requests <= REQUESTS_MAX, f"1 to {REQUESTS_MAX}"),
            ("--seed", self.seed, 0 <= self.seed < 1 << 63, "an integer in [0, 2**63)"),
            ("--host-blocks", self.host_blocks, (self.host_blocks or 0) >= 0, "0 or more"),
            ("--device", self.device, self.device in ("cpu", "cuda"), "cpu or cuda"),
            ("--device", self.device, gpu, "cpu, for torch sees no CUDA GPU here"),
        ):
            if not right:
                raise ConfigError(flag, wanted, value)
        if self._device < (longest := self.longest_blocks):
            raise ConfigError("--device-blocks", f"at least {longest}, for the longest sequence", self.device_blocks)
        if self.store is not None and self.store != MOONCAKE:
            url = StoreUrl.parse(self.store)
            for tier in url.tiers or (url.text,):
                if tier.startswith("mooncake:") and "segment" in StoreUrl.parse(tier).parameters:
                    raise ConfigError("--store", "a pool without segment=: what the engine lends is lost with it", tier)

    def prepare(self) -> None:
        """Make the directories that are written to; :class:`ConfigError` names the flag of one that cannot be."""
        for flag, path in (("--out", self.out), ("--json", self.json and self.json.parent)):
            try:
                if path is not None:
                    path.mkdir(parents=True, exist_ok=True)
                    tempfile.TemporaryFile(dir=path).close()
            except OSError as error:
                raise ConfigError(flag, "a directory that can be written", f"{path} ({error.strerror})") from error
        if self.json is not None and self.json.is_dir():
            raise ConfigError("--json", "a file", f"{self.json}, a directory")

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
        """Of the engine under test."""
        host = self._device if self.host_blocks is None else self.host_blocks
        return EngineConfig(BLOCK_TOKENS, self._device, host, sequences_max=SEQUENCES_MAX, memory="shared")

    @property
    def plain_engine(self) -> EngineConfig:
        """Of the engine that it is compared with: room for everything, and neither reuse nor swap nor store."""
        room = 2 * SEQUENCES_MAX * self.longest_blocks
        return EngineConfig(BLOCK_TOKENS, room, 0, sequences_max=SEQUENCES_MAX, caching=False)

"""The flags of the demos, and the line that says what is about to run: nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cache_manager.errors import ConfigError
from paged_engine.request import EngineConfig
from paged_engine.workload import conversations, longest_tokens

MOONCAKE: Final = "mooncake"
"""In place of a store's URL: a Mooncake pool that the demo starts and ends."""


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of ``kvroute demo`` (``demo-pd`` has some of them); ``None`` means that the demo chooses.

    By default the device has room for a quarter of the conversations at their longest, but at least one and a quarter
    and at most three; the host has the same. That is less than the running sequences need. ``store`` is a URL or
    ``MOONCAKE``. Model and KV are on ``device``; on ``cuda`` one launch a pass captures the rows. With
    ``transfer_process`` the cache-transfer process copies KV.

    Raises :class:`ConfigError` naming the flag.
    """

    seed: int = 0
    requests: int = 96
    device_blocks: int | None = None
    host_blocks: int | None = None
    model: str = "qwen3_moe"
    store: str | None = None
    device: str = "cpu"
    transfer_process: bool = False
    json: Path | None = None

    def __post_init__(self) -> None:
        if self.device != "cpu" and self.transfer_process:
            raise ConfigError("--transfer-process", "--device cpu: it copies SharedMemory", self.device)
        if self.engine.device_blocks < (longest := self._longest_blocks):
            raise ConfigError("--device-blocks", f"at least {longest}, for the longest sequence", self.device_blocks)

    @property
    def _longest_blocks(self) -> int:
        return -(-longest_tokens(conversations(self.requests, self.seed)) // EngineConfig().block_tokens)

    @property
    def engine(self) -> EngineConfig:
        """The configuration of the engine under test."""
        clients = len(conversations(self.requests, self.seed))
        room = round(self._longest_blocks * max(1.25, min(3.0, clients / 4)))
        device = room if self.device_blocks is None else self.device_blocks
        host = device if self.host_blocks is None else self.host_blocks
        return EngineConfig(device_blocks=device, host_blocks=host, transfer_process=self.transfer_process)


def first_line(title: str, options: Options) -> str:
    """What is about to run."""
    blocks = options.engine
    return (
        f"{title}: {options.requests} requests in conversations, on {blocks.device_blocks} device and "
        f"{blocks.host_blocks} host blocks of {blocks.block_tokens} tokens; {options.model}, a small model with "
        f"weights of seed {options.seed}"
    )

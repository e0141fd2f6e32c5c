"""The engine's KV blocks keep the contract of those that are moved and stored with rows."""

from __future__ import annotations

import torch

from cache_manager.testing.kv import KVBlocksContract
from paged_engine.attention import KVShape, PagedKV
from paged_engine.request import EngineConfig


class TestPagedKV(KVBlocksContract):
    def kv(self) -> PagedKV:
        return PagedKV(KVShape(2, 2, 4, 3, torch.float32), EngineConfig(8, device_blocks=5, host_blocks=4))

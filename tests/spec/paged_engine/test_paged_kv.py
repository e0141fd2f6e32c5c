"""The engine's KV blocks keep the contract of those that are moved and stored with rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cache_manager.errors import InvalidInputError
from cache_manager.keys import Namespace
from cache_manager.testing.kv import KVBlocksContract
from paged_engine.attention import KVShape, PagedKV
from paged_engine.request import EngineConfig
from paged_engine.shared_kv import SharedKV

SHAPE, SIZES = KVShape(2, 2, 4, 3, torch.float32), EngineConfig(8, device_blocks=5, host_blocks=4)


class TestPagedKV(KVBlocksContract):
    def kv(self) -> PagedKV:
        return PagedKV(SHAPE, SIZES)


class TestSharedKV(KVBlocksContract):
    """Copied by the cache-transfer process."""

    @pytest.fixture(autouse=True)
    def closing(self) -> Iterator[None]:
        self.made: list[SharedKV] = []
        yield
        for kv in self.made:
            kv.close()

    def kv(self) -> SharedKV:
        kv = SharedKV(SHAPE, SIZES, Namespace("m", 1))
        self.made.append(kv)
        return kv


def test_blocks_that_a_region_would_pad_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="KV block: wanted 448 bytes, or more, got 392"):
        SharedKV(KVShape(1, 1, 4, 3, torch.float32), EngineConfig(14, device_blocks=2), Namespace("m", 1))

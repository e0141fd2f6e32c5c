"""Regions and store directories for the cache-transfer process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_parts import DEVICE_BLOCKS, HOST_BLOCKS, KV, NAMESPACE, ROWS, Memory

from cache_manager.regions import SharedRegion
from cache_manager.transfer_manager import SharedPart


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    regions, parts = [], []
    for name, layout in (("rows", ROWS), ("kv", KV)):
        device = SharedRegion.create(layout, DEVICE_BLOCKS, tier="device", namespace=NAMESPACE.fingerprint)
        host = SharedRegion.create(layout, HOST_BLOCKS, tier="host", namespace=NAMESPACE.fingerprint)
        regions += [device, host]
        url = f"file://{tmp_path}/{name}?quota=4MiB&segment=64KiB"
        parts.append(SharedPart(name, device, host, url))
    made = Memory(parts)
    made.fill()
    yield made
    for region in regions:
        region.close()

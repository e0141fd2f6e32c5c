"""Regions for the cache-transfer process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shared_parts import regions

from cache_manager.regions import SharedRegion


@pytest.fixture
def shared() -> Iterator[tuple[SharedRegion, SharedRegion]]:
    device, host = regions()
    yield device, host
    device.close()
    host.close()

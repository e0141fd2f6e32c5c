"""Shared regions for the cache-transfer process, filled with bytes that name tier and block."""

from __future__ import annotations

from cache_manager.keys import Namespace
from cache_manager.regions import SharedRegion
from cache_manager.spec import AuxBlockDataSpec, RecordLayout

DEVICE_BLOCKS, HOST_BLOCKS = 12, 8
NAMESPACE = Namespace("m", 1)
KV = RecordLayout((AuxBlockDataSpec("kv", row_shape=(2, 4), dtype="float32", block_tokens=16),))


def regions(layout: RecordLayout = KV) -> tuple[SharedRegion, SharedRegion]:
    """The device's and the host's; the caller closes them."""
    device = SharedRegion.create(layout, DEVICE_BLOCKS, tier="device", namespace=NAMESPACE.fingerprint)
    host = SharedRegion.create(layout, HOST_BLOCKS, tier="host", namespace=NAMESPACE.fingerprint)
    for region in (device, host):
        for block in range(region.blocks):
            region.rows[block] = 17 * block + (101 if region is host else 0)
    return device, host

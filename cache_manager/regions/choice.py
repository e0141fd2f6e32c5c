"""The memory that a set of blocks was told to use: this process's, shared, or regions that the embedder made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from cache_manager.errors import ConfigError, InvalidInputError
from cache_manager.keys import Namespace
from cache_manager.ports import Region, TierName
from cache_manager.regions.heap import HeapRegion
from cache_manager.regions.shared import SharedRegion
from cache_manager.spec import RecordLayout

Memory = Literal["heap", "shared"] | Mapping[TierName, Region]
"""Where rows lie: this process's memory, SharedMemory that others may attach, or regions that the embedder made."""


def region_in(memory: Memory, layout: RecordLayout, blocks: int, tier: TierName, namespace: Namespace) -> Region:
    """The region of a tier's ``blocks`` in ``memory``; :class:`ConfigError` where there is no such memory."""
    if isinstance(memory, Mapping):
        if tier not in memory:
            raise ConfigError("memory", f"a region for the {tier} tier", "none")
        check_region(memory[tier], layout, blocks)
        return memory[tier]
    if memory == "heap":
        return HeapRegion(layout, blocks)
    if memory == "shared":
        return SharedRegion.create(layout, blocks, tier=tier, namespace=namespace.fingerprint)
    raise ConfigError("memory", "'heap', 'shared' or regions by tier", repr(memory))


def check_region(region: Region, layout: RecordLayout, blocks: int | None = None) -> None:
    """Raise :class:`InvalidInputError` unless ``region`` can hold the records of ``layout`` (and of ``blocks`` blocks).

    Its arrays must have the shapes and dtypes of :class:`~cache_manager.ports.Region`, be writable, C-contiguous and
    aligned; their content does not matter, a table publishes every block before anybody reads.
    """
    if region.layout.fingerprint != layout.fingerprint:
        raise InvalidInputError("region layout", layout.fingerprint.hex(), region.layout.fingerprint.hex())
    if blocks is not None and region.blocks != blocks:
        raise InvalidInputError("region blocks", blocks, region.blocks)
    valid_shape = (region.blocks, len(layout.specs), layout.valid_words)
    for name, shape, dtype in (
        ("rows", (region.blocks, layout.nbytes), np.uint8),
        ("words", (region.blocks,), np.uint64),
        ("valid", valid_shape, np.uint64),
    ):
        array = getattr(region, name)
        if (array.shape, array.dtype) != (shape, np.dtype(dtype)):
            raise InvalidInputError(f"region {name}", f"{np.dtype(dtype)} {shape}", f"{array.dtype} {array.shape}")
        if not (array.flags.c_contiguous and array.flags.writeable and array.flags.aligned):
            raise InvalidInputError(f"region {name}", "a writable, aligned, C-contiguous array", repr(array.flags))

"""Six device blocks and three host blocks with rows that say whose they are."""

from __future__ import annotations

import numpy as np
from canary import canary_rows

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.ports import StorageBackend
from cache_manager.spec import AuxBlockDataSpec

SPEC = AuxBlockDataSpec("routing", (3, 2), "uint8", 4)


def new_aux(store: StorageBackend, memory: str) -> AuxBlocks:
    return AuxBlocks([SPEC], device_blocks=6, host_blocks=3, namespace=Namespace("m", 1), store=store, memory=memory)


def fill(aux: AuxBlocks, blocks: list[int], who: str, owner: str | None = None) -> np.ndarray:
    if owner:
        aux.allocate(blocks, owner)
    slots = np.concatenate([np.arange(b * 4, b * 4 + 4) for b in blocks])
    rows = canary_rows(SPEC, [(who, i) for i in range(len(slots))])
    with aux.step(slots) as step:
        step.write("routing", rows)
    return rows


def snapshot(aux: AuxBlocks) -> tuple[object, ...]:
    device, host = aux.read("routing", range(6)), aux.read("routing", range(3), tier="host")
    leases = [(o, b, t) for o in "ab" for t, n in (("device", 6), ("host", 3)) for b in range(n) if aux.holds(o, b, t)]
    return device.values.tobytes(), device.valid.tobytes(), host.values.tobytes(), host.valid.tobytes(), leases

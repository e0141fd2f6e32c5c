"""Mooncake's own batch calls from a client in this process, as the floor for the ``mooncake:`` store.

Sources and targets are registered, so nothing is copied on this side; nothing is checked either.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import packages_distributions, version
from typing import Any

import numpy as np

from bench.harness import serve_answers

SETTINGS = "127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", ""
STAMP_NBYTES = 16


def take(
    put: Callable[[int, int], object],
    get: Callable[[int, int], object],
    sources: Sequence[memoryview],
    buffers: Sequence[memoryview],
) -> dict[str, float]:
    """Seconds of all puts, and of all gets, in batches ``[start, stop)`` of the sources.

    The first and the last bytes of each record read are compared with its source within the timed part.
    """
    stamps = [(bytes(source[:STAMP_NBYTES]), bytes(source[-STAMP_NBYTES:])) for source in sources]
    batch = len(buffers)
    start = time.perf_counter()
    for i in range(0, len(stamps), batch):
        put(i, i + batch)
    put_s, start = time.perf_counter() - start, time.perf_counter()
    for i in range(0, len(stamps), batch):
        get(i, i + batch)
        for (head, tail), record in zip(stamps[i : i + batch], buffers, strict=False):
            assert (record[:STAMP_NBYTES], record[-STAMP_NBYTES:]) == (head, tail), "not the record that was put"
    return {"put_s": put_s, "get_s": time.perf_counter() - start}


def main(master: str) -> None:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    store, config = MooncakeDistributedStore(), ReplicateConfig()
    assert store.setup(*SETTINGS, master) == 0

    def answer(asked: Mapping[str, Any]) -> dict[str, float]:
        """``batch_put_from`` and ``batch_get_into``, from and into registered memory."""
        records, nbytes, batch = (asked[name] for name in ("records", "record_nbytes", "batch"))
        sources = np.random.default_rng(0).integers(0, 256, (records, nbytes), np.uint8)
        targets, sizes = np.ones((batch, nbytes), np.uint8), [nbytes] * batch
        names = [f"raw/{os.urandom(8).hex()}/{i:064x}" for i in range(records)]
        for memory in (sources, targets):
            assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
        places, into = ([each.ctypes.data for each in memory] for memory in (sources, targets))

        def put(start: int, stop: int) -> None:
            assert not any(store.batch_put_from(names[start:stop], places[start:stop], sizes, config))

        def get(start: int, stop: int) -> None:
            assert store.batch_get_into(names[start:stop], into, sizes) == sizes

        try:
            return take(put, get, [row.data for row in sources], [row.data for row in targets])
        finally:
            for memory in (sources, targets):
                assert store.unregister_buffer(memory.ctypes.data) == 0

    serve_answers(f"Mooncake {version(packages_distributions()['mooncake'][0])}", answer)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])

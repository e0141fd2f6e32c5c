"""One of several clients that ask a Mooncake master as fast as they can, for small objects: the master is the load."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import packages_distributions, version
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from bench.harness import serve_answers

OBJECT_NBYTES = 64


class Client:
    def __init__(self, master: str) -> None:
        self._store = MooncakeDistributedStore()
        assert self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
        self._memory = np.ones(1 << 16, np.uint8)
        assert self._store.register_buffer(self._memory.ctypes.data, self._memory.nbytes) == 0
        self._prefix = os.urandom(8).hex()
        self._number = 0

    def answer(self, asked: dict[str, Any]) -> dict[str, float]:
        """Calls of ``what`` with ``batch`` keys each, from ``begin_s`` on (monotonic) for ``seconds``."""
        batch = int(asked["batch"])
        call = self._calls(asked["what"], batch)
        time.sleep(max(asked["begin_s"] - time.monotonic(), 0))
        began_s, end_s, calls = time.monotonic(), asked["begin_s"] + asked["seconds"], 0
        while time.monotonic() < end_s:
            call()
            calls += 1
        return {"keys": calls * batch, "calls": calls, "seconds": time.monotonic() - began_s}

    def _calls(self, what: str, batch: int) -> Callable[[], None]:
        address, sizes = self._memory.ctypes.data, [OBJECT_NBYTES] * batch

        def names() -> list[str]:
            self._number += batch
            return [f"{self._prefix}/{self._number - i:064x}" for i in range(batch)]

        def put(wanted: list[str]) -> None:
            """As the store does it: begun, written, ended."""
            codes = set(self._store.batch_put_session_start(wanted, sizes, ReplicateConfig()))
            assert codes == {0}, codes
            ranges = [[OBJECT_NBYTES]] * batch
            self._store.batch_put_from_multi_buffer_ranges(wanted, [[address]] * batch, ranges, [[0]] * batch)
            codes = set(self._store.batch_put_session_end(wanted))
            assert codes == {0}, codes

        if what == "put":
            return lambda: put(names())
        there = names()
        put(there)
        targets = [address + OBJECT_NBYTES * (i % 1000) for i in range(batch)]

        def get() -> None:
            codes = set(self._store.batch_get_into(there, targets, sizes))
            assert codes == {OBJECT_NBYTES}, codes

        def exist() -> None:
            codes = set(self._store.batch_is_exist(there))
            assert codes == {1}, codes

        return get if what == "get" else exist


if __name__ == "__main__":
    name = f"Mooncake {version(packages_distributions()['mooncake'][0])}"
    serve_answers(name, Client(sys.argv[1]).answer)

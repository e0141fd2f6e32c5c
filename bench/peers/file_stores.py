"""A store in a directory, in a separate process: runs one step for each question of ``bench.scale``.

It imports nothing from this package, so that the kvroute of another checkout can be on its path.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from xxhash import xxh3_64_intdigest

from cache_manager.keys import BlockKey
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage import open_store
from cache_manager.storage.records import RecordStore

BATCH, COLD_NBYTES, ALONE, PAGE = 32, 64 << 20, 4096, 4096


@cache
def key(number: int) -> BlockKey:
    return BlockKey(b"bench..." + blake2b(number.to_bytes(8, "little"), digest_size=24).digest())


class Kvroute:
    def __init__(self, directory: Path, nbytes: int, quota_nbytes: int, reads: bool) -> None:
        layout = RecordLayout((AuxBlockDataSpec("rows", (nbytes // 64,), "uint8", 64),))
        self._store = RecordStore(
            open_store(f"file://{directory}?{'mode=read' if reads else f'quota={quota_nbytes}'}"), layout
        )

    def put(self, numbers: list[int], payloads: list[memoryview], replace: bool = False) -> None:
        many, origin = len(numbers), 1 + time.monotonic_ns() if replace else 1
        self._store.put(
            [key(n) for n in numbers], payloads, [b"\xff" * 8] * many, numbers, [origin] * many, replace=replace
        )

    def get(self, numbers: list[int], buffers: list[memoryview]) -> int:
        found = self._store.get_into([key(n) for n in numbers], buffers)
        return sum(hasattr(each, "origin") for each in found)

    def close(self) -> None:
        self._store.close()


class Lmdb:
    def __init__(self, directory: Path, nbytes: int, quota_nbytes: int, reads: bool) -> None:
        self._env = lmdb.open(str(directory), map_size=2 * quota_nbytes, sync=False, readonly=reads)
        self._room = int(0.8 * quota_nbytes) // (nbytes + 4096 & -4096)
        self._kept: dict[int, None] = {}

    def put(self, numbers: list[int], payloads: list[memoryview], replace: bool = False) -> None:  # noqa: ARG002
        with self._env.begin(write=True, buffers=True) as txn:
            for number, payload in zip(numbers, payloads, strict=True):
                txn.put(key(number), payload)
                self._kept[number] = None
            while len(self._kept) > self._room:
                txn.delete(key(oldest := next(iter(self._kept))))
                del self._kept[oldest]

    def get(self, numbers: list[int], buffers: list[memoryview]) -> int:
        with self._env.begin(buffers=True) as txn:
            for number, buffer in zip(numbers, buffers, strict=True):
                buffer[:] = txn.get(key(number))
        return len(numbers)

    def close(self) -> None:
        self._env.close()


class Raw:
    """One ``pwritev`` or ``preadv`` for each batch at its first number's place; no index, sums or eviction."""

    def __init__(self, directory: Path, nbytes: int, quota_nbytes: int, reads: bool) -> None:
        directory.mkdir(exist_ok=True)
        self._nbytes, self._room = nbytes, quota_nbytes // nbytes - BATCH
        self._fd = os.open(directory / "raw", os.O_RDWR | os.O_CREAT)
        if not reads:
            os.posix_fallocate(self._fd, 0, min(quota_nbytes, 8 << 30))

    def put(self, numbers: list[int], payloads: list[memoryview], replace: bool = False) -> None:  # noqa: ARG002 - a peer
        os.pwritev(self._fd, payloads, numbers[0] % self._room * self._nbytes)

    def get(self, numbers: list[int], buffers: list[memoryview]) -> int:
        return os.preadv(self._fd, buffers, numbers[0] % self._room * self._nbytes) // self._nbytes

    def close(self) -> None:
        os.close(self._fd)


class RawAndSums(Raw):
    """And an XXH3 of each payload, written or read."""

    def put(self, numbers: list[int], payloads: list[memoryview], replace: bool = False) -> None:
        self._sums = [*map(xxh3_64_intdigest, payloads)]
        super().put(numbers, payloads, replace)

    def get(self, numbers: list[int], buffers: list[memoryview]) -> int:
        hits = super().get(numbers, buffers)
        self._sums = [*map(xxh3_64_intdigest, buffers)]
        return hits


KINDS: dict[str, Any] = {"kvroute": Kvroute, "LMDB": Lmdb, "raw": Raw, "raw and sums": RawAndSums}


def answer(asked: dict[str, Any]) -> dict[str, float]:
    """Run one step; returns CPU seconds of this thread, seconds of a put on the wall, and counts."""
    nbytes, records = asked["nbytes"], asked["records"]
    memory = np.random.default_rng(0).integers(0, 256, (max(COLD_NBYTES // nbytes, BATCH), nbytes), np.uint8)
    sources = [row.data for row in memory]  # more than a core's caches hold
    room = np.ones(BATCH * nbytes + PAGE, np.uint8)
    begin = -room.ctypes.data % PAGE  # the kernel's copy to other addresses may take three times as long
    buffers = [row.data for row in room[begin : begin + BATCH * nbytes].reshape(BATCH, nbytes)]
    batches = [list(range(first, first + BATCH)) for first in range(0, records, BATCH)]
    if asked["what"] in ("put", "get"):  # keys are not made in the timed part
        for number in range(records):
            key(number)
    opens = lambda reads=False: KINDS[asked["store"]](Path(asked["directory"]), nbytes, asked["quota_nbytes"], reads)  # noqa: E731
    if asked["what"] in ("open", "beside"):
        KINDS[asked["store"]](Path(asked["directory"] + "-first"), nbytes, 1 << 20, False).close()
    rss, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    store = opens(asked["what"] == "beside")
    opened_s, held = time.thread_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss
    found: dict[str, float] = {"open_s": opened_s, "rss_nbytes": 1024.0 * held}
    if asked["what"] == "put":
        first = int(len(batches) * asked.get("from", 0.0))
        for i, numbers in enumerate(batches):
            if i == first:
                began, wall = time.thread_time(), time.perf_counter()
            at = numbers[0] % (len(sources) - BATCH + 1)
            store.put(numbers, sources[at : at + BATCH])
        many = (len(batches) - first) * BATCH
        found["put_s"], found["put_wall_s"] = (time.thread_time() - began) / many, (time.perf_counter() - wall) / many
    if asked["what"] == "get":
        order, hits = np.random.default_rng(1).permutation(len(batches)).tolist(), 0
        began = time.thread_time()
        for i in order:
            hits += store.get(batches[i], buffers)
        found["get_s"] = (time.thread_time() - began) / records
        assert hits == records
        alone, one = np.random.default_rng(2).permutation(records)[:ALONE].tolist(), buffers[:1]
        began = time.thread_time()
        hits = sum(store.get([number], one) for number in alone)
        found["get_one_s"] = (time.thread_time() - began) / len(alone)
        assert hits == len(alone)
    until_s = time.monotonic() + asked.get("lasts_s", 0.0)
    if asked["what"] == "replace":
        while time.monotonic() < until_s:
            for numbers in batches:
                store.put(numbers, buffers, replace=True)
                time.sleep(0.001)
    if asked["what"] == "beside":
        took, rng = [], np.random.default_rng(2)
        while time.monotonic() < until_s:
            numbers = batches[int(rng.integers(len(batches)))]
            began, cpu = time.perf_counter(), time.thread_time()
            store.get(numbers, buffers)
            took.append((time.perf_counter() - began, time.thread_time() - cpu))
        found["p99_s"], found["p99_cpu_s"] = np.quantile(np.array(took), 0.99, axis=0).tolist()
    store.close()
    return found


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"version": "file stores"}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)

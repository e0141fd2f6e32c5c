"""What does the block manager cost, and how much does it reuse, on a real request trace?

Replays a Mooncake trace (one JSON object a line: timestamp in ms, input_length, output_length, hash_ids of 512-token
blocks) through ``BlockManager``: every request is admitted with prefix matching, its prompt published, its output
appended token by token, and freed when ``--concurrency`` later ones have come. No KV is moved and no model run. With
``--rows`` every token also writes a one-byte row, so that hits pass the gate for missing rows; otherwise the policy is
``mask``.

Beside it stands a bare dictionary in least-recently-used order, with no owners, leases or rows: the same matching
and eviction once a request, and nothing for its output tokens. Its hit rate is the yardstick. Each line runs in a
process of its own, so that peak memory is that line's.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.table import Table
from cache_manager.aux_blocks import AuxBlocks
from cache_manager.keys import BlockKey, Namespace
from cache_manager.manager import BlockManager
from cache_manager.spec import AuxBlockDataSpec

BLOCK = 512
SPEC = AuxBlockDataSpec("row", row_shape=(), dtype="uint8", block_tokens=BLOCK)


class NoKV:
    """A mover for an engine whose KV is not there."""

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None: ...
    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None: ...
    def copy(self, pairs: Sequence[tuple[int, int]]) -> None: ...
    def persist(self, blocks: Mapping[BlockKey, int]) -> dict[BlockKey, bool]:
        return dict.fromkeys(blocks, False)

    restore = persist


def requests(path: Path, limit: int | None) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines()[:limit]
    return [json.loads(line) for line in lines]


def prompt(request: Mapping[str, Any]) -> np.ndarray:
    """Token ids that are equal exactly where the trace's block hashes are."""
    ids = np.asarray(request["hash_ids"], dtype=np.int64)[:, None] * BLOCK + np.arange(BLOCK)
    return ids.reshape(-1)[: request["input_length"]]


def replay(trace: list[dict[str, Any]], capacity: int, concurrency: int, rows: bool) -> dict[str, float]:
    aux = AuxBlocks([SPEC], device_blocks=capacity, namespace=Namespace("trace", 1))
    manager = BlockManager(aux, NoKV(), policy="gate" if rows else "mask")
    running: deque[str] = deque()
    row = np.zeros(1 << 20, np.uint8)
    operations = asked = hit = refused = 0

    def write(owner: str, start: int, stop: int) -> None:
        if rows:
            with aux.step(manager.slots(owner, start, stop)) as step:
                step.write("row", row[: stop - start])

    seconds, began = 0.0, time.perf_counter()
    for n, request in enumerate(trace):
        seconds += time.perf_counter() - began
        owner, tokens = f"req-{n}", prompt(request)
        output = np.arange(request["output_length"], dtype=np.int64) - (n + 1) * BLOCK * BLOCK
        everything = np.concatenate([tokens, output])
        began = time.perf_counter()  # making the tokens is not the manager's work
        if len(running) >= concurrency:
            manager.free(running.popleft())
            operations += 1
        while (admission := manager.allocate(owner, tokens)) is None and running:
            manager.free(running.popleft())
            operations += 2
        operations += 1
        asked += len(request["hash_ids"])
        if admission is None:
            refused += 1
            continue
        hit += admission.cached_tokens // BLOCK
        running.append(owner)
        write(owner, admission.cached_tokens, len(tokens))
        manager.publish(owner, tokens)
        operations += 1
        total = len(tokens)
        for length in range(total + 1, total + request["output_length"] + 1):
            while not manager.append(owner, length) and len(running) > 1:
                manager.free(running.popleft())
                operations += 2
            write(owner, length - 1, length)
            manager.publish(owner, everything[:length])
            operations += 2
    seconds += time.perf_counter() - began
    manager.assert_consistent()
    counters = manager.counters
    for owner in running:
        manager.free(owner)
    assert manager.free_device_blocks == capacity
    aux.close()
    return _result(seconds, operations, hit, asked, refused, counters.evicted_blocks)


def floor(trace: list[dict[str, Any]], capacity: int) -> dict[str, float]:
    """A dictionary from block hash to nothing, in order of last use."""
    cached: OrderedDict[int, None] = OrderedDict()
    operations = asked = hit = evicted = 0
    began = time.perf_counter()
    for request in trace:
        run, reusable = 0, request["hash_ids"][: (request["input_length"] - 1) // BLOCK]
        for key in reusable:
            if key not in cached:
                break
            run += 1
        for key in reversed(request["hash_ids"]):
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > capacity:
            cached.popitem(last=False)
            evicted += 1
        asked += len(request["hash_ids"])
        hit += run
        operations += 3
    return _result(time.perf_counter() - began, operations, hit, asked, 0, evicted)


def _result(seconds: float, operations: int, hit: int, asked: int, refused: int, evicted: int) -> dict[str, float]:
    return {
        "seconds": seconds,
        "operations": operations,
        "hit_rate": hit / asked,
        "refused": refused,
        "evicted": evicted,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a Mooncake trace, one JSON object a line")
    parser.add_argument("--capacities", default="1000,4000,16000", help="device blocks of 512 tokens, comma-separated")
    parser.add_argument("--concurrency", type=int, default=8, help="requests that hold their blocks at a time")
    parser.add_argument("--requests", type=int, default=None, help="only the first N")
    parser.add_argument("--rows", action="store_true", help="write a one-byte row for every token and gate hits on it")
    parser.add_argument("--json", type=Path, default=None, help="write the numbers here too")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.trace.is_file():
        parser.error(f"trace: wanted a file, got {args.trace}")
    trace = requests(args.trace, args.requests)
    if args.one:
        what, capacity = args.one.split(":")
        if what == "floor":
            print(json.dumps(floor(trace, int(capacity))))
        else:
            print(json.dumps(replay(trace, int(capacity), args.concurrency, args.rows)))
        return
    print(f"replaying {len(trace)} requests of {args.trace.name}, {args.concurrency} at a time", flush=True)
    columns = ["what", "blocks", "hit rate", "evicted", "refused", "ops/s", "us/op", "peak MiB", "hits vs LRU"]
    table = Table("block manager on a trace", columns)
    results: list[dict[str, Any]] = []
    for capacity in (int(c) for c in args.capacities.split(",")):
        reference = None
        for what in ("floor", "kvroute"):
            print(f"  {what}, {capacity} blocks ...", flush=True)
            again = [sys.executable, "-m", "bench.trace", *sys.argv[1:], "--one", f"{what}:{capacity}"]
            found = json.loads(subprocess.run(again, check=True, capture_output=True, text=True).stdout)  # noqa: S603
            results.append({"what": what, "capacity": capacity, **found})
            reference = reference or found
            table.row(
                "bare LRU dict" if what == "floor" else "BlockManager" + (", rows" if args.rows else ""),
                str(capacity),
                f"{found['hit_rate']:.4f}",
                f"{found['evicted']:.0f}",
                f"{found['refused']:.0f}",
                f"{found['operations'] / found['seconds']:,.0f}",
                f"{1e6 * found['seconds'] / found['operations']:.2f}",
                f"{found['peak_mib']:.0f}",
                f"{found['hit_rate'] / (reference['hit_rate'] or 1):.3f}",
            )
    table.print()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

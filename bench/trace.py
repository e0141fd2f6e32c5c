"""What does the block manager cost, and how much does it reuse, on a real request trace, beside vLLM's?

Replays a Mooncake trace through ``BlockManager`` and through vLLM's ``KVCacheManager``, both with blocks of 512 tokens,
as an engine with continuous batching does: up to 32 requests run together. Each is admitted with prefix matching when
there is room, and its prompt is published; a step appends and publishes a token of each; it is freed when its output is
complete. No KV is moved and no model runs. An operation is an admission, a publication, an appended token, or a
release, of one request, counted alike for both; making the tokens is not timed.

Every line has a separate process, so that its peak memory is its own; lines of one size take turns, ``--rounds`` times.
Times are the replaying thread's own, which other work on the machine disturbs less than wall time. ``make bench
TRACE=FILE`` makes vLLM's environment; without it a line at the end says so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.harness import QUIET_VLLM, VLLM, Peer, Racer, asked, print_ratios, race, serve_answers, write_json
from bench.traces import BLOCK, replay, requests
from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.manager import BlockManager
from cache_manager.spec import AuxBlockDataSpec

SPEC = AuxBlockDataSpec("row", row_shape=(), dtype="uint8", block_tokens=BLOCK)


class Replayed:
    """See :class:`bench.traces.Replayed`. A request is its name, its prompt, and its number once it runs."""

    def __init__(self, blocks: int) -> None:
        self.aux = AuxBlocks([SPEC], blocks=blocks, namespace=Namespace("trace", 1), required=())
        self.manager = BlockManager(self.aux)

    def request(self, number: int, prompt: NDArray[np.int64]) -> list[Any]:
        return [f"req-{number}", prompt, -1]

    def admit(self, request: list[Any]) -> int | None:
        owner, prompt, _ = request
        admission = self.manager.allocate(owner, prompt)
        if admission is None:
            return None
        request[2] = self.manager.sequence(owner)
        return admission.cached_tokens

    def publish_prompt(self, request: list[Any]) -> None:
        self.manager.publish(request[0], request[1])

    def append(self, running: list[list[Any]], _tokens: list[int]) -> list[bool]:
        room: list[bool] = (self.manager.append_batch(numbers(running)) >= 0).tolist()
        return room

    def publish(self, running: list[list[Any]], tokens: list[int]) -> None:
        self.manager.publish_batch(numbers(running), tokens)

    def free(self, request: list[Any]) -> None:
        self.manager.free(request[0])

    def close(self) -> None:
        self.manager.assert_consistent()
        assert self.manager.free_device_blocks == self.aux.device_blocks
        self.aux.close()


def numbers(running: list[list[Any]]) -> NDArray[np.int64]:
    return np.array([number for _, _, number in running], np.int64)


def answer(question: Mapping[str, Any]) -> dict[str, float]:
    """Run one replay, in a separate process."""
    manager = Replayed(question["blocks"])
    found = replay(requests(Path(question["trace"]), question["requests"]), manager)
    manager.close()
    return found


OURS = "BlockManager"
FIELDS: dict[str, tuple[str, Callable[[float], float]]] = {
    "us_per_operation": ("us/op", float),
    "hit_rate": ("hit %", lambda part: 100 * part),
    "peak_mib": ("peak MiB", float),
}


def raced(args: argparse.Namespace, blocks: int) -> list[Racer]:
    """The contestants after their rounds, kvroute's first."""
    question = {"trace": str(args.trace.resolve()), "requests": args.requests, "blocks": blocks}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-trace-")))
        racing = {OURS: Peer(Path(sys.executable), "bench.trace", logs / "kvroute", {}, "--answer")}
        if VLLM.exists():
            peer = Peer(VLLM, "bench.peers.vllm_trace", logs / "vllm", QUIET_VLLM)
            racing[f"{peer.version} KVCacheManager"] = peer
        for peer in racing.values():
            stack.callback(peer.close)
        racers = [Racer(name, partial(peer.ask, question)) for name, peer in racing.items()]
        race(racers, args.rounds)
    if failed := [f"{each.name}: {each.failed}" for each in racers if each.failed]:
        raise SystemExit("; ".join(failed))
    return racers


def main() -> None:
    if sys.argv[1:] == ["--answer"]:
        serve_answers("kvroute", answer)
        return
    args = asked(
        *(__doc__, 3),
        trace=(Path, "a Mooncake trace, one JSON object a line"),
        capacities=([1000, 4000, 16_000], "device blocks of 512 tokens"),
        requests=(int, "only the first N"),
    )
    if args.trace is None or not args.trace.is_file():
        raise SystemExit(f"--trace: wanted a file, got {args.trace}")
    results: list[dict[str, Any]] = []
    for blocks in args.capacities:
        racers = raced(args, blocks)
        print_ratios(f"block managers on {args.trace.name}, {blocks} blocks", racers, OURS, FIELDS)
        results += [{"what": racer.name, "blocks": blocks, **racer.found} for racer in racers]
    if not VLLM.exists():
        print("not installed: vLLM; `make bench TRACE=FILE` makes its environment")
    write_json(args.json, rows=results)


if __name__ == "__main__":
    main()

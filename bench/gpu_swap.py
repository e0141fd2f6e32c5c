"""KV blocks and their rows between a GPU and pinned host memory: right first, then how much of a swap a pass hides.

    PYTHONPATH=. python -m bench.gpu_swap [--blocks N ...] [--out DIR]

KV of the shape of Qwen3-30B-A3B, moved by the engine's own mover, rows by ``AuxBlocks``. Swapped blocks are written
again at once, as an engine does that has given them to somebody else. Needs a CUDA GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvroute
from bench.gpu_passes import DEVICE, HIDDEN, graph_of
from bench.harness import Table
from paged_engine.engine.kv import KVShape, PagedKV

SHAPE = KVShape(layers=48, heads=4, k_dim=128, v_dim=128, dtype=torch.bfloat16)
BLOCK_TOKENS, ROUNDS, LAYERS, TOP_K, EXPERTS = 64, 20, 48, 8, 128


class House:
    """KV and rows of ``2 * blocks`` device blocks; ``blocks`` of them can lie on the host."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.kv = PagedKV(SHAPE, block_tokens=BLOCK_TOKENS, device_blocks=2 * blocks, host_blocks=blocks, device=DEVICE)
        spec = kvroute.routing_spec(EXPERTS, TOP_K, range(LAYERS), LAYERS, BLOCK_TOKENS)
        self.aux = kvroute.AuxBlocks(
            [spec],
            blocks=2 * blocks,
            host_blocks=blocks,
            namespace=kvroute.Namespace("bench", weights_version=0),
            kv=self.kv,
            memory="shared",
        )

    def fill(self, rng: np.random.Generator) -> tuple[torch.Tensor, Any]:
        """Other KV and rows in the blocks, the first half of which is given out: copies of both."""
        self.aux.renew(range(2 * self.blocks))
        held = self.kv.device[: self.blocks]
        held.copy_(torch.randn(held.shape, device=DEVICE, dtype=held.dtype))
        slots = np.arange(self.blocks * BLOCK_TOKENS)
        rows = rng.random((len(slots), LAYERS, EXPERTS)).argpartition(TOP_K)[..., :TOP_K].astype(np.uint8)
        with self.aux.begin_step(slots) as step:
            step.write("routing", rows)
        return held.clone(), rows


def check(house: House, rng: np.random.Generator, rounds: int) -> int:
    """Out, written over at once, and back to other blocks: blocks whose KV and rows were right."""
    n, right = house.blocks, 0
    ids = np.arange(n)
    for _ in range(rounds):
        wanted, rows = house.fill(rng)
        hosts, back = rng.permutation(n), n + rng.permutation(n)
        house.aux.swap_out(np.stack([ids, hosts], 1))
        house.kv.device[:n].normal_()  # the next pass, whose blocks these are now
        house.aux.swap_in(np.stack([hosts, back], 1))
        same = [bool(torch.equal(house.kv.device[at], wanted[i])) for i, at in enumerate(back.tolist())]
        found = house.aux.read("routing", back.tolist(), 0, n * BLOCK_TOKENS)
        assert all(same), f"KV of {same.count(False)} blocks"
        assert found.valid.all()
        assert np.array_equal(found.values, rows), "rows"
        right += n
    return right


def wall_ms(call: Callable[[], None]) -> float:
    """The median of a call until the device is done."""
    taken = []
    for _ in range(ROUNDS + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken[3:])


def measure(house: House) -> dict[str, float]:
    """Milliseconds of a pass, a swap out of every block, and of both, by the mover and on the stream of the pass."""
    ids = np.arange(house.blocks)
    kv = house.kv
    x = torch.randn(4096, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(HIDDEN, HIDDEN, device=DEVICE, dtype=torch.bfloat16) / HIDDEN**0.5

    def work(times: int) -> None:
        y = x
        for _ in range(times):
            y = y @ w

    def behind() -> None:
        for i in range(house.blocks):
            kv.host[i].copy_(kv.device[i], non_blocking=True)

    def swap() -> None:
        kv.copy("device", "host", ids, ids)

    host_us = []

    def ours() -> None:
        start = time.perf_counter()
        swap()
        host_us.append(1e6 * (time.perf_counter() - start))
        graph.replay()

    swap_ms = wall_ms(swap)
    probe = graph_of(lambda: work(16))
    times = max(1, round(16 * swap_ms / wall_ms(probe.replay)))
    graph = graph_of(lambda: work(times))  # a pass as long as the swap

    def one_stream() -> None:
        behind()
        graph.replay()

    return {
        "swap": swap_ms,
        "plain copies": wall_ms(behind),
        "pass": wall_ms(graph.replay),
        "one stream": wall_ms(one_stream),
        "ours": wall_ms(ours),
        "host us": statistics.median(host_us),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="swaps of KV and rows on a GPU, beside passes")
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--out", type=Path, default=Path("bench-output"))
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("wanted a CUDA GPU, torch sees none here")
    about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(about, flush=True)
    columns = (
        "swap",
        "GB/s",
        "plain copies",
        "pass",
        "both, one stream",
        "both, ours",
        "of the shorter hidden",
        "host us",
    )
    table = Table("a swap out and a pass, ms until both are done (medians)", ("blocks, MB", *columns))
    said: list[dict[str, float]] = []
    for blocks in chosen.blocks:
        house = House(blocks)
        right = check(house, np.random.default_rng(0), 5)
        size = blocks * house.kv.spec.block_nbytes
        print(f"{right} blocks of {house.kv.spec.block_nbytes >> 10} KiB out and back: KV and rows right", flush=True)
        found = measure(house)
        house.aux.close()
        said.append({"blocks": blocks, "nbytes": size, "right": right, **found})
        hidden = (found["swap"] + found["pass"] - found["ours"]) / min(found["swap"], found["pass"])
        times = [found[name] for name in ("plain copies", "pass", "one stream", "ours")]
        cells = [found["swap"], size / found["swap"] / 1e6, *times]
        named = f"{blocks}, {size / 1e6:.0f}"
        table.row(named, *(f"{cell:.2f}" for cell in cells), f"{hidden:.0%}", f"{found['host us']:.0f}")
    table.print()
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "gpu-swap.json").write_text(json.dumps({"about": about, "found": said}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What does the witness of KV cost a step?

Folds over all of the last layer's K and V of the blocks that a step fills (bfloat16, 16 tokens a block), on the GPU if
there is one: 16 blocks are a decode step of 256 sequences, in which one in 16 fills its block; 512 are a prefill of
8192 tokens. Against reading the same blocks out of the pool (``index_select``, which the fold does too), in the same
run and in turns. ``host`` is what the calling thread spends until everything is launched; ``step`` is until the numbers
are on the host, which a step waits for only if it fills a block; ``chain`` is the hash that chains blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from bench.harness import Table, asked, machine, write_json
from kvroute.connector.witness import KvFolder
from kvroute.witness import ROOT, chained

SHAPES = {"Qwen3-235B, 4 KV heads of 128": (4, 16, 256), "DeepSeek-V3, latent 512 + 64": (1, 16, 576)}
POOL = 4096


def medians_us(rounds: int, calls: dict[str, Callable[[], object]], wait: Callable[[], None]) -> dict[str, float]:
    """Median microseconds of each call, in turns, the device being idle before and done after.

    On a CPU they are the thread's own, so that other work on the cores does not count.
    """
    clock = time.perf_counter if torch.cuda.is_available() else time.thread_time
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 5):
        for name, call in calls.items():
            wait()
            start = clock()
            call()
            if name != "host":
                wait()
            if i >= 5:
                spent[name].append(1e6 * (clock() - start))
    return {name: float(np.median(each)) for name, each in spent.items()}


def main() -> None:
    args = asked(__doc__, 200)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    name = torch.cuda.get_device_name() if device.type == "cuda" else machine()
    table = Table(
        f"witnesses of full blocks, microseconds, median of {args.rounds}; {name}, torch {torch.__version__}",
        ["KV of a layer", "blocks", "KiB", "read", "host", "step", "chain"],
    )
    for label, shape in SHAPES.items():
        kv = torch.randn(POOL, *shape, dtype=torch.bfloat16, device=device)
        folder = KvFolder([kv])
        for blocks in (1, 16, 64, 512):
            ids = np.random.default_rng(blocks).permutation(POOL)[:blocks].tolist()
            at = torch.tensor(ids).to(device)
            found = medians_us(
                args.rounds,
                {
                    "read": partial(kv.index_select, 0, at),
                    "host": partial(folder.folds, ids),
                    "step": partial(folder.folds, ids),  # and waits
                },
                wait,
            )
            folds = folder.folds(ids).numpy().view(np.uint64).tolist()
            start = time.thread_time()
            for _ in range(20):
                before = ROOT
                for fold in folds:
                    before = chained(before, fold)
            chain = 1e6 * (time.thread_time() - start) / 20
            cells = (f"{found[part]:.0f}" for part in ("read", "host", "step"))
            table.row(label, str(blocks), str(blocks * folder.block_nbytes // 1024), *cells, f"{chain:.0f}")
    table.print()
    write_json(args.json, rows=table.rows)


if __name__ == "__main__":
    main()

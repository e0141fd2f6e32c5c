"""How much does following a swap cost beside moving the bytes?

1000 scattered device blocks of 29,696 bytes (58 layers x top-8 uint8 x 64 tokens) go to scattered host blocks and come
back, through ``AuxBlocks.swap_out`` and ``swap_in``: lives, origins and validity included. Against it, in the same run
and interleaved: a bare loop of copies, one numpy assignment a block, over the very same blocks of the same memory,
which is the floor. It is what FastDeploy's swap of its routing buffer does, without any bookkeeping.

The best of ``--rounds`` rounds counts. Rows are compared at the end: a fast wrong swap is no swap.
"""

from __future__ import annotations

import argparse
from typing import Literal, get_args

import numpy as np

from bench.table import Table
from bench.timing import best_ms
from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.spec import AuxBlockDataSpec

SPEC = AuxBlockDataSpec("routing", row_shape=(58, 8), dtype="uint8", block_tokens=64)
Memory = Literal["heap", "shared"]
FLOOR = "a bare loop, a block at a time"


def measure(memory: Memory, blocks: int, rounds: int, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    pool = 4 * blocks
    device, host = rng.permutation(pool)[:blocks], rng.permutation(pool)[:blocks]
    out, back = np.stack([device, host], axis=1), np.stack([host, device], axis=1)
    pairs = out.tolist()
    rows = rng.integers(0, 256, (blocks * SPEC.block_tokens, *SPEC.row_shape), np.uint8)

    aux = AuxBlocks([SPEC], blocks=pool, host_blocks=pool, namespace=Namespace("bench", 1), memory=memory)
    aux.renew(device)
    slots = (device[:, None] * SPEC.block_tokens + np.arange(SPEC.block_tokens)).reshape(-1)
    aux.write_step(slots, {SPEC.name: rows})

    def one_by_one() -> None:
        kv_slots, swap_slots = aux.region("device").rows, aux.region("host").rows
        for s, t in pairs:
            swap_slots[t] = kv_slots[s]

    times = best_ms(
        rounds,
        {
            FLOOR: one_by_one,
            f"swap_out, {memory}": lambda: aux.swap_out(out),
            f"swap_in, {memory}": lambda: aux.swap_in(back),
        },
    )
    read = aux.read(SPEC.name, device)
    assert read.valid.all()
    assert np.array_equal(read.values, rows)
    aux.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    nbytes = args.blocks * SPEC.block_nbytes
    for memory in get_args(Memory):
        print(f"swapping {args.blocks} blocks of {SPEC.block_nbytes} bytes, {memory} regions ...", flush=True)
        times = measure(memory, args.blocks, args.rounds, args.seed)
        floor = times[FLOOR]
        table = Table(f"swap of {args.blocks} scattered blocks, {memory}", ["what", "ms", "GB/s", "x floor"])
        for name, ms in times.items():
            table.row(name, f"{ms:.2f}", f"{nbytes / ms / 1e6:.2f}", f"{ms / floor:.2f}")
        table.print()


if __name__ == "__main__":
    main()

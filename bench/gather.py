"""How much does collecting a request's rows cost beside moving the bytes?

The rows of a request of 32,768 tokens (512 scattered blocks of 58 layers x top-8 uint8 x 64 tokens) come out of
``AuxBlocks.read``: copied, checked against torn blocks, with their valid mask. Against it, in the same run and
interleaved:

* one ``memcpy`` of the same bytes, contiguous and prefaulted: the floor of the design's target (<= 1.3x);
* one fancy index with 32,768 token slots, which is what slot-indexed capturers do, without any check;
* ``memcpy`` into memory that was just allocated, because a result that the caller owns must be allocated.

The best of ``--rounds`` rounds counts. Rows are compared at the end.
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


def measure(memory: Memory, tokens: int, rounds: int, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    blocks = -(-tokens // SPEC.block_tokens)
    pool = 4 * blocks
    table = rng.permutation(pool)[:blocks]
    slots = (table[:, None] * SPEC.block_tokens + np.arange(SPEC.block_tokens)).reshape(-1)[:tokens]
    rows = rng.integers(0, 256, (tokens, *SPEC.row_shape), np.uint8)

    source, target = rows.reshape(-1).copy(), np.ones(rows.size, np.uint8)
    by_slot = np.ones((pool * SPEC.block_tokens, *SPEC.row_shape), np.uint8)

    aux = AuxBlocks([SPEC], blocks=pool, namespace=Namespace("bench", 1), memory=memory)
    ids = table.tolist()
    lives = aux.renew(table)
    aux.write_step(slots, {SPEC.name: rows})
    times = best_ms(
        rounds,
        {
            "one memcpy": lambda: np.copyto(target, source),
            "memcpy into new memory": source.copy,
            "fancy index, a token at a time": lambda: by_slot[slots],
            f"AuxBlocks.read, {memory}": lambda: aux.read(SPEC.name, ids, 0, tokens),
            f"AuxBlocks.read of generations, {memory}": lambda: aux.read(SPEC.name, ids, 0, tokens, generations=lives),
        },
    )
    read = aux.read(SPEC.name, ids, 0, tokens, generations=lives)
    assert read.valid.all()
    assert np.array_equal(read.values, rows)
    aux.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    nbytes = args.tokens * SPEC.row_nbytes
    for memory in get_args(Memory):
        print(f"collecting {args.tokens} tokens, {nbytes} bytes, {memory} region ...", flush=True)
        times = measure(memory, args.tokens, args.rounds, args.seed)
        floor = times["one memcpy"]
        table = Table(f"rows of a request of {args.tokens} tokens, {memory}", ["what", "ms", "GB/s", "x memcpy"])
        for name, ms in times.items():
            table.row(name, f"{ms:.2f}", f"{nbytes / ms / 1e6:.2f}", f"{ms / floor:.2f}")
        table.print()


if __name__ == "__main__":
    main()

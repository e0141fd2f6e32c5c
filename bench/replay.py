"""What does it cost to turn the rows of a request into the arrays of a trainer's rank?

One sequence of 32,768 tokens of 58 layers x top-8 of 256 experts (64 layers, the first 6 dense), step by step: rows out
of ``AuxBlocks`` into ``Routes``, with and without a second check of the ids; the whole array for one trainer; the shard
of one rank (tp 4 with sequence parallelism, cp 4 zigzag, pp 4), of one sequence and of a packed batch of eight. Each
step is interleaved with a numpy copy of the bytes that it produces, into memory of the same kind: new if the step makes
an array, the caller's if it fills one. The target for materialising and sharding is 1.5 times that copy.

Every result is compared with plain indexing. Times are CPU time of the one thread at work, the median of ``--rounds``
rounds. Before each call 64 MB are written, so a step and its copy both begin with cold caches and new pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

import kvroute
from bench.harness import Sweep, Table, Timed, asked, router_ids, take_turns, write_json
from kvroute.checks import check_ids
from kvroute.routes import Layout, Routes, shard_packed
from kvroute.routes.routes import checked_routes

BLOCK_TOKENS = 64
EXPERTS, TOP_K, DENSE_FIRST, LAYERS = 256, 8, 6, 64
SPEC = kvroute.routing_spec(EXPERTS, TOP_K, range(DENSE_FIRST, LAYERS), LAYERS, BLOCK_TOKENS)
PREFILL = 8192
RANK = kvroute.Split(tp=4, tp_rank=1, cp=4, cp_rank=2, sp=True, pp=4, pp_rank=1)


@dataclass(frozen=True)
class Step:
    """One line of the table: ``run`` makes ``result``; ``copy`` is a numpy copy of its bytes; the target, in words."""

    name: str
    run: Callable[[], object]
    copy: Callable[[], object]
    nbytes: int
    target: str = ""


def steps(tokens: int) -> list[Step]:
    ids = router_ids(tokens, LAYERS - DENSE_FIRST, TOP_K, EXPERTS)
    blocks = -(-tokens // BLOCK_TOKENS)
    table = np.random.default_rng(0).permutation(4 * blocks)[:blocks].tolist()
    aux = kvroute.AuxBlocks([SPEC], blocks=4 * blocks, namespace=kvroute.Namespace("bench", 1))
    aux.renew(table)
    slots = (np.array(table)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)[:tokens]
    with aux.begin_step(slots) as step:
        step.write(SPEC.name, ids)
    rows = aux.read(SPEC.name, table, 0, tokens)
    routes = Routes.from_rows(SPEC, rows, checked=True)
    routes = routes.bind(np.arange(tokens), counts=(tokens // 2, tokens))
    halves = routes.slice(0, tokens // 2), routes.slice(tokens // 2 - 64, tokens)
    encoded = routes.to_bytes()
    full = routes.materialize(tokens, "all", "int32")
    narrow = routes.materialize(tokens, "moe", "uint8")
    every_other = Layout(tuple(range(1, LAYERS, 2)), EXPERTS, LAYERS, TOP_K)
    apart = checked_routes(every_other, ids[:, : LAYERS // 2], np.ones(tokens, np.bool_))
    batch, lengths = [routes] * 8, [tokens + 1 - 100 * i for i in range(8)]
    one, eight = partial(shard_packed, [routes], [tokens + 1], RANK), partial(shard_packed, batch, lengths, RANK)
    shard, packed = one(), eight()
    prefill = ids[:PREFILL]

    expected = np.zeros((tokens, LAYERS, TOP_K), np.int32)
    expected[:, DENSE_FIRST:] = ids
    assert np.array_equal(full, expected)
    assert np.array_equal(narrow, ids)
    stage = slice(*(RANK.layers(LAYERS)[i] - DENSE_FIRST for i in (0, -1)))
    at = [(s.sequence, p) for s in RANK.packed(lengths) for p in range(s.start, s.stop)]
    real = [i for i, (sequence, p) in enumerate(at) if p < lengths[sequence] - 1]
    assert np.array_equal(packed[real], ids[[at[i][1] for i in real], stage.start : stage.stop + 1])
    assert Routes.from_bytes(encoded) == halves[0].merge(halves[1]) == routes

    def read_and_make(*, checked: bool) -> Callable[[], Routes]:
        return lambda: Routes.from_rows(SPEC, aux.read(SPEC.name, table, 0, tokens), checked=checked)

    n, check = ids.nbytes, partial(check_ids, prefill, EXPERTS, SPEC.attrs["layer_ids"])
    return [
        Step("check_ids, prefill of 8192, uint8", check, prefill.copy, prefill.nbytes, "3 ms"),
        Step("valid_rows of the same, uint8", lambda: kvroute.valid_rows(SPEC, prefill), prefill.copy, prefill.nbytes),
        Step("AuxBlocks.read alone", lambda: aux.read(SPEC.name, table, 0, tokens), ids.copy, n),
        Step("read + from_rows, checked=True", read_and_make(checked=True), ids.copy, n, "5 ms"),
        Step("read + from_rows", read_and_make(checked=False), ids.copy, n, "15 ms"),
        Step("merge, 64 rows sent again", lambda: halves[0].merge(halves[1]), ids.copy, n),
        Step("to_bytes", routes.to_bytes, ids.copy, n),
        Step("from_bytes", lambda: Routes.from_bytes(encoded), ids.copy, n),
        Step("materialize all, int32", lambda: routes.materialize(tokens), full.copy, full.nbytes, "1.5 x"),
        Step("the same, every other layer dense", lambda: apart.materialize(tokens), full.copy, full.nbytes),
        Step("materialize moe, uint8", lambda: routes.materialize(tokens, "moe", "uint8"), narrow.copy, n, "1.5 x"),
        Step("shard of one rank, int64", one, shard.copy, shard.nbytes, "1.5 x"),
        Step("the same of 8 sequences, packed", eight, packed.copy, packed.nbytes, "1.5 x"),
    ]


def main() -> None:
    args = asked(__doc__, 25, tokens=(32_768, "700 or more"))
    print(f"routes of {args.tokens} tokens, {args.tokens * SPEC.row_nbytes} bytes ...", flush=True)
    found = steps(args.tokens)
    timed: dict[str, Timed] = {}
    for step in found:
        timed |= {step.name: Timed(step.run), f"copy for {step.name}": Timed(step.copy)}
    take_turns(args.rounds, timed.values(), Sweep())
    times = {name: each.microseconds(0.5) / 1000 for name, each in timed.items()}
    columns = ["what", "CPU ms", "MB", "numpy copy, CPU ms", "x copy", "target"]
    table = Table(f"from rows to a trainer's rank, {args.tokens} tokens of 58 x 8", columns)
    for step in found:
        ms, copy = times[step.name], times[f"copy for {step.name}"]
        table.row(step.name, f"{ms:.2f}", f"{step.nbytes / 1e6:.1f}", f"{copy:.2f}", f"{ms / copy:.2f}", step.target)
    table.print()
    write_json(args.json, cpu_ms=times)


if __name__ == "__main__":
    main()

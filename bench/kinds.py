"""What does a row of each kind cost: bytes and time a token, from a step's arrays into blocks and out of them?

Rows of ``--tokens`` tokens are written by steps of 256 tokens into blocks of 64, and read, beside a copy of the same
bytes into new memory. Expert ids and weights are of 48 layers x 8 (Qwen3-30B); an indexer's choices are 2,048 positions
of a context of ``--context`` tokens in each of four layers, drawn evenly, which is the worst for gaps. They are packed,
too, beside zlib's fastest and zstd's, where a package has it: ratios and times of one run; and what a trainer keeps of
them is weighed, miles' own array beside packed rows. What an engine on a CPU adds for weights is a step's end and an
answer: both are timed as the connector does them. Sampling supports, which are in no block, have a bench of their own:
``bench.support``.
"""

from __future__ import annotations

import importlib.util
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.harness import Table, asked, router_ids, write_json
from cache_manager.publish import Rows
from kvroute import AuxBlocks, Namespace, Routes, RoutingWeights, routing_spec, routing_weights_spec
from kvroute.capture.step_ids import StepIds
from kvroute.capture.step_weights import StepWeights
from kvroute.indexer import indexer_spec, pack, unpack
from kvroute.replay.slime import miles_indexer_topk

LAYERS, TOP_K, EXPERTS, BLOCK, STEP = 48, 8, 128, 64, 256
CHOSEN, INDEXERS = 2048, 4
DEEPSEEK_LAYERS = 61
"""Layers of DeepSeek-V3.2 with an indexer."""


def timed(call: Callable[[], Any]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def choices(tokens: int, context: int) -> NDArray[np.int32]:
    """``[tokens, INDEXERS, CHOSEN]`` increasing positions of a context."""
    random = np.random.default_rng(0)
    rows = np.empty((tokens * INDEXERS, CHOSEN), np.int32)
    for row in rows:
        row[:] = np.sort(random.choice(context, CHOSEN, replace=False, shuffle=False))
    return rows.reshape(tokens, INDEXERS, CHOSEN)


def in_blocks(specs: list[Any], rows: dict[str, NDArray[Any]], rounds: int) -> tuple[float, float, float]:
    """Seconds to write all rows by steps, to read them, and to copy their bytes: the best of the rounds, in turns."""
    tokens = len(next(iter(rows.values())))
    count = -(-tokens // BLOCK)
    aux = AuxBlocks(specs, blocks=count, namespace=Namespace("m", weights_version=1))
    lives = aux.renew(range(count))
    blocks = list(range(count))
    parts = [(np.arange(a, min(a + STEP, tokens)), a) for a in range(0, tokens, STEP)]

    def write() -> None:
        for slots, a in parts:
            aux.write_step(slots, {name: values[a : a + len(slots)] for name, values in rows.items()})

    def read() -> None:
        for spec in specs:
            assert aux.read(spec.name, blocks, stop=tokens, generations=lives).valid.all()

    def copy() -> None:
        for values in rows.values():
            values.copy()

    seconds = [(timed(write), timed(read), timed(copy)) for _ in range(rounds)]
    aux.close()
    writes, reads, copies = (min(column) for column in zip(*seconds, strict=True))
    return writes, reads, copies


def at_a_steps_end(ids: Any, chosen: NDArray[Any], values: NDArray[Any], rounds: int) -> dict[str, float]:
    """Seconds a token of a step's end on a CPU, from each layer's own tensors to one array: ids, and weights."""
    layers = range(LAYERS)
    own_ids = [torch.from_numpy(chosen[:STEP, layer].astype(np.int32)) for layer in layers]
    own_weights = [torch.from_numpy(values[:STEP, layer].copy()) for layer in layers]
    steps: dict[str, tuple[Any, list[torch.Tensor]]] = {
        "ids": (StepIds(ids, STEP, torch.device("cpu")), own_ids),
        "weights": (StepWeights(ids), own_weights),
    }
    best = dict[str, float]()
    for _ in range(10 * rounds):
        for kind, (step, own) in steps.items():

            def end(step: Any = step, own: list[torch.Tensor] = own) -> None:
                step.begin()
                for layer, tensor in enumerate(own):
                    step.hook(layer)(tensor)
                assert isinstance(step.take(STEP), torch.Tensor)

            best[kind] = min(best.get(kind, 1.0), timed(end) / STEP)
    return best


def in_an_answer(
    ids: Any, chosen: NDArray[Any], values: NDArray[Any], rounds: int
) -> dict[str, tuple[int, float, float]]:
    """Of routes, and of the weights beside them: bytes in an answer's JSON, seconds to make and to read it."""
    there = np.ones(len(chosen), np.bool_)
    routes = Routes.from_rows(ids, Rows(chosen, there), checked=True)
    weights = RoutingWeights(routes, values)
    told = routes.to_json(), weights.to_json()
    calls: dict[str, tuple[dict[str, str], Callable[[], Any], Callable[[], Any]]] = {
        "expert ids": (told[0], routes.to_json, partial(Routes.from_json, told[0])),
        "weights beside them": (told[1], weights.to_json, partial(RoutingWeights.from_json, routes, told[1])),
    }
    found = dict[str, tuple[int, float, float]]()
    for kind, (text, make, read) in calls.items():
        makes, reads = (min(timed(call) for _ in range(rounds)) for call in (make, read))
        found[kind] = len(text["record"]), makes, reads
    return found


def codecs() -> dict[str, tuple[Callable[[NDArray[np.int32]], bytes], Callable[[bytes], Any]]]:
    """How to pack choices, and how to unpack them, by name."""
    found: dict[str, tuple[Callable[[NDArray[np.int32]], bytes], Callable[[bytes], Any]]] = {
        "kvroute.indexer": (pack, unpack),
        "zlib, level 1": (lambda rows: zlib.compress(rows.tobytes(), 1), zlib.decompress),
    }
    if importlib.util.find_spec("zstandard") is not None:
        import zstandard  # type: ignore[import-not-found, unused-ignore]

        found["zstd, level 1"] = zstandard.ZstdCompressor(1).compress, zstandard.ZstdDecompressor().decompress
    return found


def main() -> None:
    args = asked(__doc__, 5, tokens=(2048, "of expert ids and weights"), context=(32_768, "tokens of an indexer's"))
    ids = routing_spec(EXPERTS, TOP_K, range(LAYERS), LAYERS, block_tokens=BLOCK)
    weights, indexer = routing_weights_spec(ids), indexer_spec(CHOSEN, range(INDEXERS), BLOCK)
    chosen = router_ids(args.tokens, LAYERS, TOP_K, EXPERTS, seed=0).astype(ids.dtype)
    values = np.random.default_rng(1).random((args.tokens, LAYERS, TOP_K), np.float32)
    positions = choices(max(args.tokens // 16, 8), args.context)
    kinds: dict[str, tuple[list[Any], dict[str, NDArray[Any]]]] = {
        "expert ids": ([ids], {ids.name: chosen}),
        "expert ids and weights, one record": ([ids, weights], {ids.name: chosen, weights.name: values}),
        f"indexer top-k, {INDEXERS} layers": ([indexer], {indexer.name: positions}),
    }
    table = Table("rows in blocks", ["kind", "bytes a token", "write us a token", "read", "copies: write", "read"])
    results = dict[str, Any]()
    for kind, (specs, rows) in kinds.items():
        tokens = len(next(iter(rows.values())))
        writes, reads, copies = in_blocks(specs, rows, args.rounds)
        nbytes = sum(spec.row_nbytes for spec in specs)
        results[kind] = {"nbytes": nbytes, "write_s": writes, "read_s": reads, "copy_s": copies, "tokens": tokens}
        times = [f"{seconds / tokens * 1e6:.2f}" for seconds in (writes, reads)]
        table.row(kind, str(nbytes), *times, f"{writes / copies:.1f}", f"{reads / copies:.1f}")
    table.print()
    packed = Table(
        f"an indexer's choices outside memory, {CHOSEN} of {args.context} positions",
        ["codec", "times smaller", "pack GB/s", "unpack GB/s", "copies: pack", "unpack"],
    )
    rounds = list[dict[str, tuple[float, float, float, int]]]()
    for _ in range(args.rounds):
        turn = dict[str, tuple[float, float, float, int]]()
        for name, (put, take) in codecs().items():
            data = put(positions)
            turn[name] = timed(partial(put, positions)), timed(partial(take, data)), timed(positions.copy), len(data)
        rounds.append(turn)
    for name in rounds[0]:
        puts, takes, copies = (min(turn[name][i] for turn in rounds) for i in range(3))
        smaller = positions.nbytes / rounds[0][name][3]
        results[name] = {"smaller": smaller, "pack_s": puts, "unpack_s": takes, "copy_s": copies}
        speeds = [f"{positions.nbytes / seconds / 1e9:.2f}" for seconds in (puts, takes)]
        packed.row(name, f"{smaller:.2f}", *speeds, f"{puts / copies:.1f}", f"{takes / copies:.1f}")
    packed.print()
    ends = at_a_steps_end(ids, chosen, values, args.rounds)
    answers = in_an_answer(ids, chosen, values, args.rounds)
    told = Table(
        f"in an engine on a CPU: the end of a step of {STEP} tokens, and the answer",
        ["kind", "step's end us a token", "bytes a token in JSON", "make us a token", "read"],
    )
    for (kind, (nbytes, makes, reads)), taken in zip(answers.items(), ends.values(), strict=True):
        times = [f"{seconds / args.tokens * 1e6:.2f}" for seconds in (makes, reads)]
        told.row(kind, f"{taken * 1e6:.2f}", f"{nbytes / args.tokens:.0f}", *times)
        results[f"answer: {kind}"] = {"nbytes": nbytes, "make_s": makes, "read_s": reads, "step_s": taken}
    told.print()
    kept = Table(
        f"what a trainer keeps of an indexer's choices, {DEEPSEEK_LAYERS} layers",
        ["array", "bytes a token", "GB of a million tokens", "of miles'"],
    )
    tokens = len(positions)
    whole = miles_indexer_topk(Rows(positions, np.ones(tokens, np.bool_)), tokens + 1).nbytes
    for name, size in (("miles' rollout_indexer_topk, int32", whole), ("packed", len(pack(positions)))):
        nbytes = size / tokens / INDEXERS * DEEPSEEK_LAYERS
        kept.row(name, f"{nbytes:.0f}", f"{nbytes / 1e3:.1f}", f"{size / whole:.2f}")
        results[f"kept: {name}"] = {"nbytes": nbytes}
    kept.print()
    write_json(args.json, **results)


if __name__ == "__main__":
    main()

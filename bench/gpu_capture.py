"""What capture adds to a forward pass on a GPU, on the device and on the host, against three peers' ways and the bus.

    PYTHONPATH=. python -m bench.gpu_capture [--out DIR] [--check | --measure] [--soak-seconds N] [--no-work]

Correctness comes first: every shape and batch size against numpy, then a soak of random steps inside CUDA graphs with
resets, and a device that is late. Then one table, all contestants in one run. ``--check`` leaves the table out.
Needs a CUDA GPU, torch and Triton.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

import kvroute
from bench.gpu_checks import checked
from bench.gpu_passes import (
    BLOCK_TOKENS,
    BLOCKS,
    DEVICE,
    MODELS,
    SLOTS,
    TOKENS,
    TOP_K,
    Model,
    Pass,
    blocks_of,
    graph_of,
    keep_all,
    random_slots,
)
from bench.gpu_visible import visible_us
from bench.harness import Table
from kvroute.capture.layers import LayerCapture


@triton.jit
def put_layer(ids, slots, out, tokens, layer, ROW: tl.constexpr, K: tl.constexpr, B: tl.constexpr):  # noqa: N803
    """One layer's ids at ``slots`` of ``out [slots, layers, K]``: a launch a layer, as FastDeploy's and LightLLM's."""
    lane = tl.program_id(0) * B + tl.arange(0, B)
    used = lane < tokens * K
    slot = tl.load(slots + lane // K, mask=used, other=-1)
    value = tl.load(ids + lane, mask=used, other=0)
    tl.store(out + slot * ROW + layer * K + lane % K, value.to(out.dtype.element_ty), mask=used & (slot >= 0))


@dataclass
class Found:
    """Medians in microseconds: what each adds to a graph, and to the host; ``floor`` is one copy of the same bytes.

    All graphs have their matrices in the same memory: where they lie makes more of a difference than what is looked at.
    """

    model: str
    tokens: int
    pass_us: float
    floor_us: float
    ours_us: float
    copies_us: float
    launches_us: float
    pinned_us: float
    ours_host_us: float
    hooks_host_us: float
    copies_host_us: float
    launches_host_us: float


def added(base: Any, others: dict[str, Any], rounds: int) -> tuple[float, dict[str, float]]:
    """The base graph's time, and the median of what the others take more, replayed in turns, in any order."""
    times: dict[str, list[float]] = {name: [] for name in ("base", *others)}
    for number in range(rounds + 5):
        for name, graph in random.sample([("base", base), *others.items()], 1 + len(others)):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number >= 5:
                times[name].append(1000 * start.elapsed_time(end))
    more = {name: statistics.median(b - a for a, b in zip(times["base"], times[name], strict=True)) for name in others}
    return statistics.median(times["base"]), more


def wall_us(call: Callable[[], None], rounds: int) -> float:
    """The median of a call that the device has no part in, or waits for."""
    taken = []
    for number in range(rounds + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if number >= 3:
            taken.append(1e6 * (time.perf_counter() - start))
    return statistics.median(taken)


def measure(model: Model, tokens: int, aux: Any, capture: Any, rng: np.random.Generator) -> Found:
    batch, slots = Pass(model, tokens), random_slots(tokens, rng, apart=True)
    batch.slots.copy_(torch.from_numpy(slots))
    layers, row = model.layers, model.layers * TOP_K
    dtype = torch.uint8 if model.experts <= 256 else torch.uint16
    rounds = 300 if tokens <= 1024 else 100
    grid = (triton.cdiv(tokens * TOP_K, 512),)
    # (a) SGLang, vLLM: a copy a layer into int32 [tokens, layers, top_k]; then snapshot, copy, scatter on the host.
    wide = torch.zeros(tokens, layers, TOP_K, dtype=torch.int32, device=DEVICE)
    wide_host = torch.zeros(SLOTS, layers, TOP_K, dtype=torch.int32)
    wide_pin = torch.empty(wide.shape, dtype=torch.int32, pin_memory=True)
    # (b) FastDeploy: a launch a layer into a transient buffer of the narrow dtype; then copy and scatter.
    transient = torch.empty(tokens, layers, TOP_K, dtype=dtype, device=DEVICE)
    linear = torch.arange(tokens, device=DEVICE)
    narrow_pin = torch.empty(transient.shape, dtype=dtype, pin_memory=True)
    narrow_host = np.zeros((SLOTS, layers, TOP_K), narrow_pin.numpy().dtype)
    # (c) LightLLM: a launch a layer into pinned memory.
    pinned = torch.empty(SLOTS, layers, TOP_K, dtype=dtype, pin_memory=True)

    def copy_layer(layer: int) -> None:
        wide[:, layer, :] = batch.ids[layer]

    def to_transient(layer: int) -> None:
        put_layer[grid](batch.ids[layer], linear, transient, tokens, layer, row, TOP_K, 512)

    def to_pinned(layer: int) -> None:
        put_layer[grid](batch.ids[layer], batch.slots, pinned, tokens, layer, row, TOP_K, 512)

    def ours() -> None:
        keep_all(capture, batch)
        batch.work()
        capture.commit(batch.slots)

    ways: dict[str, Callable[[], object]] = {
        "ours": ours,
        "floor": lambda: (batch.work(), narrow_pin.copy_(transient, non_blocking=True)),
        "copies": lambda: batch.work(copy_layer),
        "launches": lambda: batch.work(to_transient),
        "pinned": lambda: batch.work(to_pinned),
    }
    pool = torch.cuda.graph_pool_handle()
    base, graphs = graph_of(batch.work, pool), {name: graph_of(way, pool) for name, way in ways.items()}
    capture.ready()
    pass_us, more = added(base, graphs, rounds)

    def our_step() -> None:
        step = aux.begin_step(slots, in_place=True)
        step.wrote("routing")
        step.commit(capture.verdict(tokens).keep)

    copy = batch.ids.clone()
    answers = ([batch.ids[layer] for layer in range(layers)], [copy[layer] for layer in range(layers)])
    hooks, turn = [capture.hook(layer) for layer in range(layers)], [0]

    def our_hooks() -> None:
        turn[0] ^= 1  # in other memory than before, so that the pointer table is sent each time
        for hook, ids in zip(hooks, answers[turn[0]], strict=True):
            hook(ids)
        capture.commit(batch.slots)

    def copies_host() -> None:
        snapshot, at = wide.clone(), batch.slots.clone()
        wide_pin.copy_(snapshot, non_blocking=True)
        at_host = at.to("cpu", non_blocking=True)
        torch.cuda.current_stream().synchronize()
        wide_host[at_host] = wide_pin

    def launches_host() -> None:
        narrow_pin.copy_(transient, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        narrow_host[slots] = narrow_pin.numpy()

    return Found(
        model.name,
        tokens,
        pass_us,
        more["floor"],
        more["ours"],
        more["copies"],
        more["launches"],
        more["pinned"],
        wall_us(our_step, rounds),
        wall_us(our_hooks, rounds),
        wall_us(copies_host, rounds),
        wall_us(launches_host, rounds),
    )


def table_of(found: list[Found]) -> Table:
    table = Table(
        "capture: microseconds added to a CUDA graph with matrix work | on the host, a step (medians)",
        (
            "rows, tokens",
            "pass",
            "bus",
            "ours",
            "ours/bus",
            "(a) copies",
            "(b) launches",
            "(c) pinned",
            "| ours",
            "+ eager",
            "(a)",
            "(b)",
            "(a)/ours device",
            "host",
        ),
    )
    for f in found:
        device = f"{f.pass_us:.1f}", f"{f.floor_us:.1f}", f"{f.ours_us:.1f}", f"{f.ours_us / f.floor_us:.2f}"
        others = f.copies_us, f.launches_us, f.pinned_us, f.ours_host_us, f.hooks_host_us
        others += f.copies_host_us, f.launches_host_us
        ratios = (f.copies_us / max(f.ours_us, 0.1), f.copies_host_us / f.ours_host_us)
        cells = *device, *(f"{c:.1f}" for c in others), *(f"{r:.1f}x" for r in ratios)
        table.row(f"{f.model}, {f.tokens}", *cells)
    return table


def visible() -> str:
    """From a step's end to its rows in another process."""
    model = MODELS[0]
    spec = kvroute.routing_spec(model.experts, TOP_K, range(model.layers), model.layers, BLOCK_TOKENS)
    namespace = kvroute.Namespace("bench", weights_version=0)
    with kvroute.AuxBlocks([spec], blocks=BLOCKS, namespace=namespace, memory="shared") as engine:
        engine.renew(range(BLOCKS), np.ones(BLOCKS, np.int64))
        with LayerCapture(engine.region("device"), max(TOKENS), DEVICE) as capture:
            done, committed = visible_us(model, engine, capture)
    return (
        f"rows of a decode step of 256 are seen by another process {done:.1f} us after the device is done, "
        f"{committed:.1f} us after commit"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="capture on a GPU: right first, then how fast")
    parser.add_argument("--out", type=Path, default=Path("bench-output"))
    parser.add_argument("--check", action="store_true", help="correctness alone, and a short soak")
    parser.add_argument("--no-work", action="store_true", help="no matrix work: cuBLAS's own fails under racecheck")
    parser.add_argument("--measure", action="store_true", help="the table alone")
    parser.add_argument("--soak-seconds", type=float, default=60.0)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("wanted a CUDA GPU, torch sees none here")
    Pass.works = not chosen.no_work
    chosen.out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[0]
    gpu = f"{torch.cuda.get_device_name()}, driver {driver}, torch {torch.__version__}, Triton {triton.__version__}"
    print(gpu, flush=True)
    found: list[Found] = []
    said: list[str] = []
    if not chosen.measure:
        said += checked(rng, 3.0 if chosen.check else chosen.soak_seconds)
    if not chosen.check:
        for model in MODELS:
            for tokens in TOKENS:
                with blocks_of(model) as (aux, capture):
                    found.append(measure(model, tokens, aux, capture, rng))
                    print(f"{model.name}, {tokens}: measured", flush=True)
                torch.cuda.empty_cache()
                text = json.dumps({"gpu": gpu, "checked": said, "found": [asdict(f) for f in found]}, indent=1)
                (chosen.out / "gpu-capture.json").write_text(text + "\n")
        table_of(found).print()
        print(visible())


if __name__ == "__main__":
    main()

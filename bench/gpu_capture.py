"""What capture adds to a forward pass on a GPU, on the device and on the host, compared with two peers and the bus.

All contestants run in one process: medians of graphs that are replayed in turns, and of the host's part. Run the tests
for correctness first: ``TRITON_INTERPRET=0 pytest tests/real/gpu``. Needs a CUDA GPU, torch and Triton.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

import kvroute
from bench.harness import Table, asked, want_gpu, write_json
from kvroute.capture.layers import LayerCapture

BLOCK_TOKENS, BLOCKS, HIDDEN, TOP_K = 64, 1024, 2048, 8
TOKENS = (1, 64, 256, 1024, 8192, 16384)
SLOTS = BLOCKS * BLOCK_TOKENS
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    experts: int


MODELS = (Model("58x8 of 256", 58, 256), Model("94x8 of 128", 94, 128), Model("60x8 of 384", 60, 384))


class Pass:
    """The ids of a model's routers for one batch size, and the matrix work of a pass."""

    def __init__(self, model: Model, tokens: int) -> None:
        self.model, self.tokens = model, tokens
        self.ids = torch.empty(model.layers, tokens, TOP_K, dtype=torch.int32, device=DEVICE)
        self.draw()
        self.slots = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
        self.x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        self.w = torch.randn(HIDDEN, HIDDEN, device=DEVICE, dtype=torch.bfloat16) / HIDDEN**0.5

    def draw(self) -> None:
        """Draw new ids, distinct in each row: a random start and distinct steps."""
        experts = self.model.experts
        start = torch.randint(0, experts, self.ids.shape[:2], device=DEVICE, dtype=torch.int32)
        steps = torch.randint(1, experts // TOP_K, self.ids.shape, device=DEVICE, dtype=torch.int32).cumsum(-1)
        self.ids.copy_((start[..., None] + steps) % experts)

    def work(self, each: Callable[[int], None] | None = None) -> None:
        y = self.x
        for layer in range(self.model.layers):
            y = y @ self.w
            if each is not None:
                each(layer)


@contextmanager
def blocks_of(model: Model) -> Iterator[tuple[Any, Any]]:
    """Blocks in shared memory, all given out, and a capture that writes into them."""
    spec = kvroute.routing_spec(model.experts, TOP_K, range(model.layers), model.layers, BLOCK_TOKENS)
    namespace = kvroute.Namespace("bench", weights_version=0)
    with kvroute.AuxBlocks([spec], blocks=BLOCKS, namespace=namespace, memory="shared") as aux:
        aux.renew(range(BLOCKS))
        with LayerCapture(aux.region("device"), max(TOKENS), DEVICE) as capture:
            yield aux, capture


def graph_of(launches: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of ``launches``. Graphs of one ``pool`` have their matrices in the same memory."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        launches()
    return graph


def slots_of(tokens: int, rng: np.random.Generator) -> Any:
    """Random slots: one a block for a decode, whole blocks for a prefill."""
    if tokens <= BLOCKS:
        return rng.permutation(BLOCKS)[:tokens] * BLOCK_TOKENS + rng.integers(0, BLOCK_TOKENS, tokens)
    return (rng.permutation(BLOCKS)[: tokens // BLOCK_TOKENS, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel()


def keep_all(capture: Any, batch: Pass) -> None:
    for layer in range(batch.model.layers):
        capture.hook(layer)(batch.ids[layer])


@triton.jit
def put_layer(ids, slots, out, tokens, layer, ROW: tl.constexpr, K: tl.constexpr, B: tl.constexpr):  # noqa: N803
    """Put one layer's ids into ``out [slots, layers, K]``: a launch a layer, as in FastDeploy and LightLLM."""
    lane = tl.program_id(0) * B + tl.arange(0, B)
    used = lane < tokens * K
    slot = tl.load(slots + lane // K, mask=used, other=-1)
    value = tl.load(ids + lane, mask=used, other=0)
    tl.store(out + slot * ROW + layer * K + lane % K, value.to(out.dtype.element_ty), mask=used & (slot >= 0))


def added(base: Any, others: dict[str, Any], rounds: int) -> tuple[float, dict[str, float]]:
    """The base graph's time, and the median extra time of each other graph, replayed in turns in random order."""
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
    """The median wall time of a call on the host, with any wait for the device."""
    taken = []
    for number in range(rounds + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if number >= 3:
            taken.append(1e6 * (time.perf_counter() - start))
    return statistics.median(taken)


def measure(model: Model, tokens: int, aux: Any, capture: Any, rng: np.random.Generator, rounds: int) -> dict[str, Any]:
    """Medians in microseconds that each way adds to a graph, and to the host; ``floor`` is one copy of the same bytes.

    All graphs have their matrices in the same memory: its place would change times more than the ways do.
    """
    batch, slots = Pass(model, tokens), slots_of(tokens, rng)
    batch.slots.copy_(torch.from_numpy(slots))
    layers, row = model.layers, model.layers * TOP_K
    dtype = torch.uint8 if model.experts <= 256 else torch.uint16
    rounds = rounds if tokens <= 1024 else max(1, rounds // 3)
    grid = (triton.cdiv(tokens * TOP_K, 512),)
    # (a) SGLang, vLLM: a copy a layer into int32 [tokens, layers, top_k]; then snapshot, copy, and scatter on the host.
    wide = torch.zeros(tokens, layers, TOP_K, dtype=torch.int32, device=DEVICE)
    wide_host = torch.zeros(SLOTS, layers, TOP_K, dtype=torch.int32)
    wide_pin = torch.empty(wide.shape, dtype=torch.int32, pin_memory=True)
    # (b) FastDeploy: a launch a layer into a transient buffer of the narrow dtype; then copy and scatter.
    transient = torch.empty(tokens, layers, TOP_K, dtype=dtype, device=DEVICE)
    linear = torch.arange(tokens, device=DEVICE)
    narrow_pin = torch.empty(transient.shape, dtype=dtype, pin_memory=True)
    narrow_host = np.zeros((SLOTS, layers, TOP_K), narrow_pin.numpy().dtype)

    def copy_layer(layer: int) -> None:
        wide[:, layer, :] = batch.ids[layer]

    def to_transient(layer: int) -> None:
        put_layer[grid](batch.ids[layer], linear, transient, tokens, layer, row, TOP_K, 512)

    def ours() -> None:
        keep_all(capture, batch)
        batch.work()
        capture.commit(batch.slots)

    ways: dict[str, Callable[[], object]] = {
        "ours": ours,
        "floor": lambda: (batch.work(), narrow_pin.copy_(transient, non_blocking=True)),
        "copies": lambda: batch.work(copy_layer),
        "launches": lambda: batch.work(to_transient),
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
        turn[0] ^= 1  # alternate the memory, so that the pointer table is sent each time
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

    host = {"ours": our_step, "hooks": our_hooks, "copies": copies_host, "launches": launches_host}
    found = {"model": model.name, "tokens": tokens, "pass_us": pass_us}
    found |= {f"{name}_us": each for name, each in more.items()}
    return found | {f"{name}_host_us": wall_us(each, rounds) for name, each in host.items()}


def table_of(found: list[dict[str, Any]]) -> Table:
    columns = "rows, tokens|pass|bus|ours|ours/bus|(a) copies|(b) launches|host: ours|+ eager|(a)|(b)"
    title = "capture: microseconds added to a CUDA graph with matrix work, and on the host, a step (medians)"
    table = Table(title, columns.split("|"))
    for f in found:
        device = [f"{f[name]:.1f}" for name in ("pass_us", "floor_us", "ours_us")] + [
            f"{f['ours_us'] / f['floor_us']:.2f}"
        ]
        others = "copies_us", "launches_us", "ours_host_us", "hooks_host_us", "copies_host_us", "launches_host_us"
        table.row(f"{f['model']}, {f['tokens']}", *device, *(f"{f[name]:.1f}" for name in others))
    return table


def main() -> None:
    args = asked(__doc__, 300, tokens=(list(TOKENS), "of a pass"))
    want_gpu()
    rng = np.random.default_rng(0)
    gpu = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    print(gpu, flush=True)
    found = list[dict[str, Any]]()
    for model in MODELS:
        for tokens in args.tokens:
            with blocks_of(model) as (aux, capture):
                found.append(measure(model, tokens, aux, capture, rng, args.rounds))
                print(f"{model.name}, {tokens}: measured", flush=True)
            torch.cuda.empty_cache()
    write_json(args.json, gpu=gpu, found=found)
    table_of(found).print()


if __name__ == "__main__":
    main()

"""What does it cost to hand the routes of rollouts over to a trainer?

``--sequences`` rollouts of ``--tokens`` tokens, 48 layers x top-8 of 128 experts, go from the engine's :class:`Routes`
to the ids that one rank of a trainer needs, one rollout after the other:

* nested JSON lists, as an OpenAI-style answer has them;
* base64 in a JSON answer: vLLM's ``.npy``, SGLang's int32, kvroute's own object with mask and checksum;
* pickle 5 with buffers out of band, which are copied to shared memory and read from there without a copy, as Ray's
  object store does it (measured here only: kvroute never pickles);
* keys only: the rows go to a rollout store, the answer has a handle, and a rank fetches its tokens and its layers (one
  of ``--pp`` pipeline stages x one of ``--cp`` context parallel ranks), from a directory and from a Mooncake pool.

Every way ends with the same array, ids of uint8 ``[tokens, layers, top_k]``: of the whole rollout for the first five,
because whoever takes an answer takes all of it, and of one rank for the last. Each way runs in a process of its own;
its peak memory is what the process had at most beside the rollouts themselves, and its CPU time does not count what
Mooncake's processes use. The rows are compared.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.table import Table
from bench.turns import ROOT
from kvroute.encodings import decode, encode
from kvroute.rollout import RolloutHandle, RolloutStore, fetch_shard, open_rollouts
from kvroute.routes import Layout, Routes, Split, shard_packed
from kvroute.routing import routing_spec

LAYERS, TOP_K, EXPERTS = 48, 8, 128
SPEC = routing_spec(EXPERTS, TOP_K, range(LAYERS), LAYERS, block_tokens=64)


@dataclass(frozen=True, slots=True)
class Load:
    """How many rollouts, how long, and which rank takes them."""

    sequences: int
    tokens: int
    pp: int
    cp: int

    @property
    def split(self) -> Split:
        """One rank in the middle."""
        return Split(pp=self.pp, pp_rank=self.pp // 2, cp=self.cp, cp_rank=self.cp // 2)

    def routes(self, number: int) -> Routes:
        """A rollout: ``tokens - 1`` rows of distinct ids, different for every number."""
        random = np.random.default_rng(number)
        first = random.integers(0, EXPERTS, (self.tokens - 1, LAYERS, 1), np.uint8)
        ids = (first + np.arange(0, 16 * TOP_K, 16, dtype=np.uint8)) % EXPERTS
        valid = np.ones(self.tokens - 1, np.bool_)
        return Routes.checked(Layout(tuple(range(LAYERS)), EXPERTS, LAYERS, TOP_K), ids, valid)


@dataclass(slots=True)
class Cost:
    """Of all rollouts together, but for the peak."""

    engine_s: float = 0.0
    answer_nbytes: int = 0
    stored_nbytes: int = 0
    rank_s: float = 0.0
    fetched_nbytes: int = 0
    cpu_s: float = 0.0
    peak_nbytes: int = 0


Tell = Callable[[int, Routes], Any]
Take = Callable[[Any], NDArray[Any]]


@contextmanager
def nested_lists(_: Load, __: Cost) -> Iterator[tuple[Tell, Take]]:
    def tell(_number: int, routes: Routes) -> str:
        return json.dumps({"routed_experts": routes.ids.tolist()})

    yield tell, lambda answer: np.array(json.loads(answer)["routed_experts"], np.uint8)


def in_base64(encoding: str) -> Callable[[Load, Cost], Any]:
    @contextmanager
    def way(_: Load, __: Cost) -> Iterator[tuple[Tell, Take]]:
        def tell(_number: int, routes: Routes) -> str:
            return json.dumps({"routed_experts": encode(routes, encoding)})

        yield tell, lambda answer: decode(json.loads(answer)["routed_experts"], SPEC, encoding).ids

    return way


@contextmanager
def pickled(load: Load, cost: Cost) -> Iterator[tuple[Tell, Take]]:
    """One segment stands for the object store; a rollout is read where it lies, and copied to be kept."""
    nbytes = load.routes(0).ids.nbytes
    segment = SharedMemory(create=True, size=nbytes)
    shared = segment.buf
    assert shared is not None

    def tell(_number: int, routes: Routes) -> bytes:
        buffers: list[pickle.PickleBuffer] = []
        answer = pickle.dumps(routes.ids, protocol=5, buffer_callback=buffers.append)
        shared[:nbytes] = buffers[0].raw()
        cost.stored_nbytes += nbytes
        return answer

    def take(answer: bytes) -> NDArray[Any]:
        view = shared[:nbytes].toreadonly()
        found = pickle.loads(answer, buffers=[view])  # noqa: S301 - our own, of this process
        return found.copy()  # type: ignore[no-any-return]

    try:
        yield tell, take
    finally:
        segment.close()
        segment.unlink()


def keys_only(load: Load, cost: Cost, store: RolloutStore) -> tuple[Tell, Take]:
    def tell(number: int, routes: Routes) -> str:
        handle = store.put(f"task:{number}:0:0", routes)
        cost.stored_nbytes += routes.ids.nbytes
        return json.dumps({"rollout": handle.to_json()})

    def take(answer: str) -> NDArray[Any]:
        handle = RolloutHandle.from_json(json.loads(answer)["rollout"])
        before = store.counters.get_nbytes
        found = fetch_shard(store, [handle], [load.tokens], load.split, "uint8")
        cost.fetched_nbytes += store.counters.get_nbytes - before
        return found

    return tell, take


@contextmanager
def by_directory(load: Load, cost: Cost) -> Iterator[tuple[Tell, Take]]:
    with tempfile.TemporaryDirectory() as directory:
        store = open_rollouts(f"file://{directory}")
        try:
            yield keys_only(load, cost, store)
        finally:
            store.close()


@contextmanager
def by_pool(load: Load, cost: Cost) -> Iterator[tuple[Tell, Take]]:
    sys.path.insert(0, str(ROOT / "tests" / "support"))  # the pool that the tests start
    from mooncake_pool import running_master, running_owner

    nbytes = load.sequences * load.routes(0).ids.nbytes
    with ExitStack() as stack:
        master = stack.enter_context(running_master())
        segment = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "segment"
        stack.enter_context(running_owner(master, segment, 2 * nbytes + (64 << 20)))
        store = open_rollouts(master.url("bench", timeout_ms=20_000))
        stack.callback(store.close)
        yield keys_only(load, cost, store)


WAYS: dict[str, tuple[str, Callable[[Load, Cost], Any]]] = {
    "lists": ("nested JSON lists", nested_lists),
    "sglang": ("base64, SGLang's int32", in_base64("sglang")),
    "vllm": ("base64, vLLM's .npy", in_base64("vllm")),
    "kvroute": ("base64, kvroute's, summed", in_base64("kvroute")),
    "pickle": ("pickle 5, out of band", pickled),
    "file": ("keys only, directory", by_directory),
    "mooncake": ("keys only, Mooncake pool", by_pool),
}


def run(way: str, load: Load) -> Cost:
    """Hand every rollout over, in this process; the rank keeps what it takes."""
    cost = Cost()
    rollouts = [load.routes(number) for number in range(load.sequences)]
    taken: list[NDArray[Any]] = []
    with WAYS[way][1](load, cost) as (tell, take):
        take(tell(load.sequences, load.routes(load.sequences)))  # what the first call of a process costs
        cost.fetched_nbytes = cost.stored_nbytes = 0
        before_nbytes, before_s = memory_nbytes("VmRSS"), time.process_time()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
        for number, routes in enumerate(rollouts):
            started_s = time.perf_counter()
            answer = tell(number, routes)
            told_s = time.perf_counter()
            taken.append(take(answer))
            cost.rank_s += time.perf_counter() - told_s
            cost.engine_s += told_s - started_s
            cost.answer_nbytes += len(answer)
        cost.cpu_s = time.process_time() - before_s
        cost.peak_nbytes = memory_nbytes("VmHWM") - before_nbytes
    sharded = way in ("file", "mooncake")
    cost.fetched_nbytes = cost.fetched_nbytes or sum(ids.nbytes for ids in taken)
    for routes, ids in zip(rollouts, taken, strict=True):
        wanted = shard_packed([routes], [load.tokens], load.split, dtype="uint8") if sharded else routes.ids
        assert np.array_equal(ids, wanted), way
    return cost


def memory_nbytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def measured(way: str, load: Load) -> Cost:
    """:func:`run` in a process of its own."""
    command = [sys.executable, "-m", "bench.handover", "--child", way, json.dumps(asdict(load))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)  # noqa: S603 - our own module
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr[-2000:]}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="4 sequences of 4096 tokens")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(asdict(run(args.child[0], Load(**json.loads(args.child[1]))))))
        return
    sequences, tokens = (4, 4096) if args.quick else (args.sequences, args.tokens)
    load = Load(sequences, tokens, args.pp, args.cp)
    title = f"{sequences} rollouts of {tokens} tokens, {LAYERS} x {TOP_K} of {EXPERTS}"
    title += (
        f": {load.routes(0).ids.nbytes} bytes each; a rank is 1 of {load.pp * load.cp} (pp={load.pp}, cp={load.cp})"
    )
    table = Table(title, ["way", "answer MB", "stored MB", "rank gets MB", "engine s", "rank s", "CPU s", "peak MiB"])
    for way in args.ways:
        print(f"{WAYS[way][0]} ...", flush=True)
        cost = measured(way, load)
        table.row(
            WAYS[way][0],
            *(f"{n / 1e6:,.2f}" for n in (cost.answer_nbytes, cost.stored_nbytes, cost.fetched_nbytes)),
            *(f"{s:.2f}" for s in (cost.engine_s, cost.rank_s, cost.cpu_s)),
            f"{cost.peak_nbytes / (1 << 20):,.0f}",
        )
    table.print()


if __name__ == "__main__":
    main()

"""What does it cost to hand the routes of rollouts over to a trainer?

``--sequences`` rollouts of ``--tokens`` tokens, 48 layers x top-8 of 128 experts, go from the engine's :class:`Routes`
to the ids that one rank of a trainer needs, one rollout after the other:

* nested JSON lists; base64 in JSON: kvroute's own object with mask and checksum;
* keys only: the rows go to a rollout store, the answer has a handle, and a rank fetches its tokens and its layers (one
  of ``--pp`` pipeline stages x one of ``--cp`` context parallel ranks), from a directory and from a Mooncake pool.

Every way ends with the same array, ids of uint8 ``[tokens, layers, top_k]``: of the whole rollout for the first two,
because whoever takes an answer takes all of it, and of one rank for the last. Each way runs in a process of its own;
its peak memory is what the process had at most beside the rollouts themselves, and its CPU time does not count what
Mooncake's processes use. The rows are compared.

``--ranks`` asks another question: a whole batch (``--sequences`` rollouts) goes to all ranks of a trainer, ``--dp`` x
``--pp`` x ``--cp``. Each reads its own part by handles, from a directory, a Mooncake pool and Ray (in an environment
that has it); beside that, one driver takes all answers and broadcasts all rows. Ranks take their turns in one process.
Lengths differ there, from half of ``--tokens`` to one and a half, so that nothing ends where parts end.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.harness import ROOT, Table, asked, write_json
from kvroute.encodings import decode, encode
from kvroute.rollout import RolloutHandle, RolloutStore, fetch_shard, open_rollouts
from kvroute.routes import Layout, Routes, Split, shard_packed
from kvroute.routes.split import places
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
    ragged: bool = False

    def count(self, number: int) -> int:
        """The tokens of a rollout."""
        return self.tokens // 2 + number * 7919 % (self.tokens + 1) if self.ragged else self.tokens

    @property
    def split(self) -> Split:
        """One rank in the middle."""
        return Split(pp=self.pp, pp_rank=self.pp // 2, cp=self.cp, cp_rank=self.cp // 2)

    def routes(self, number: int) -> Routes:
        """A rollout: a row less than tokens, of distinct ids, different for every number."""
        random, rows = np.random.default_rng(number), self.count(number) - 1
        first = random.integers(0, EXPERTS, (rows, LAYERS, 1), np.uint8)
        ids = (first + np.arange(0, 16 * TOP_K, 16, dtype=np.uint8)) % EXPERTS
        valid = np.ones(rows, np.bool_)
        return Routes.checked(Layout(tuple(range(LAYERS)), EXPERTS, LAYERS, TOP_K), ids, valid)

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return sum(self.count(number) - 1 for number in range(self.sequences)) * LAYERS * TOP_K


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


@contextmanager
def in_base64(_: Load, __: Cost) -> Iterator[tuple[Tell, Take]]:
    def tell(_number: int, routes: Routes) -> str:
        return json.dumps({"routed_experts": encode(routes)})

    yield tell, lambda answer: decode(json.loads(answer)["routed_experts"], SPEC).ids


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
def directory(_: Load) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        yield f"file://{name}"


@contextmanager
def pool(load: Load) -> Iterator[str]:
    """The URL of a Mooncake pool that has room for all rollouts."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))  # the pool that the tests start
    from mooncake_pool import running_master, running_owner

    with ExitStack() as stack:
        master = stack.enter_context(running_master())
        segment = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "segment"
        stack.enter_context(running_owner(master, segment, load.nbytes * 3 // 2 + (128 << 20)))
        yield master.url("bench", timeout_ms=20_000)


def in_store(home: Callable[[Load], Any]) -> Callable[[Load, Cost], Any]:
    @contextmanager
    def way(load: Load, cost: Cost) -> Iterator[tuple[Tell, Take]]:
        with home(load) as url, closing(open_rollouts(url)) as store:
            yield keys_only(load, cost, store)

    return way


WAYS: dict[str, tuple[str, Callable[[Load, Cost], Any]]] = {
    "lists": ("nested JSON lists", nested_lists),
    "base64": ("base64, kvroute's, summed", in_base64),
    "file": ("keys only, directory", in_store(directory)),
    "mooncake": ("keys only, Mooncake pool", in_store(pool)),
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


# ---------------------------------------------------------------- all ranks


@contextmanager
def cluster(load: Load) -> Iterator[str]:
    import ray

    with tempfile.TemporaryDirectory(prefix="ray") as name:
        options = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "_temp_dir": name}
        ray.init(object_store_memory=load.nbytes * 6 // 5 + (256 << 20), **options)
        try:
            yield "ray:bench"
        finally:
            ray.shutdown()


HOMES: dict[str, Callable[[Load], Any]] = {"file": directory, "mooncake": pool, "ray": cluster}


@dataclass(slots=True)
class Spread:
    """Of a whole batch: seconds of the engine, of the driver (CPU), of all ranks; bytes that all ranks read."""

    engine_s: float
    driver_s: float
    ranks_s: float
    read_nbytes: float


def ranks_of(load: Load, dp: int) -> list[tuple[list[int], Split]]:
    """Of each rank: the rollouts of its data-parallel group, and its place in that."""
    places = [(d, p, c) for d in range(dp) for p in range(load.pp) for c in range(load.cp)]
    numbers = range(load.sequences)
    return [(list(numbers[d::dp]), Split(pp=load.pp, pp_rank=p, cp=load.cp, cp_rank=c)) for d, p, c in places]


def _cut(ids: NDArray[Any], tokens: list[int], split: Split) -> Iterator[NDArray[Any]]:
    """What a rank has of each sequence of a packed batch."""
    ends = accumulate(places(split.packed([count])) for count in tokens)
    for first, last in pairwise([0, *ends]):
        yield ids[first:last]


def by_handles(home: str, load: Load, dp: int) -> Spread:
    """Each rank fetches its own part; what the first and the last one have is compared."""
    ranks, spread = ranks_of(load, dp), Spread(0, 0, 0, 0)
    with HOMES[home](load) as url, closing(open_rollouts(url)) as engine, closing(open_rollouts(url)) as store:
        answers = []
        for number in range(load.sequences):
            routes = load.routes(number)
            started_s = time.perf_counter()
            answers.append(engine.put(f"task:{number}:0:0", routes).to_json())
            spread.engine_s += time.perf_counter() - started_s
        started_s = time.process_time()
        told = [json.dumps([answers[number] for number in numbers]) for numbers, _ in ranks]
        spread.driver_s = time.process_time() - started_s
        for text, (numbers, split) in zip(told, ranks, strict=True):
            started_s = time.perf_counter()
            handles = [RolloutHandle.from_json(each) for each in json.loads(text)]
            tokens = [load.count(number) for number in numbers]
            mine = fetch_shard(store, handles, tokens, split, "uint8")
            spread.ranks_s += time.perf_counter() - started_s
            if (numbers, split) in (ranks[0], ranks[-1]):
                for whole, count, ids in zip(map(load.routes, numbers), tokens, _cut(mine, tokens, split), strict=True):
                    assert np.array_equal(ids, shard_packed([whole], [count], split, dtype="uint8"))
        spread.read_nbytes = store.counters.get_nbytes
    return spread


def broadcast(load: Load, dp: int, *, lists: bool) -> Spread:
    """One driver takes every answer and lays all rows into one segment, which every rank copies and cuts.

    Measured for one rollout and its share of the segment with one rank, and multiplied.
    """
    n, load = load.sequences, replace(load, ragged=False)
    routes, ranks = load.routes(0), ranks_of(load, dp)
    segment = np.zeros_like(routes.ids)
    started_s = time.perf_counter()
    answer = json.dumps(routes.ids.tolist()) if lists else pickle.dumps(routes.ids, protocol=5)
    told_s, told_cpu_s = time.perf_counter(), time.process_time()
    segment[:] = np.array(json.loads(answer), np.uint8) if lists else pickle.loads(answer)  # type: ignore[arg-type] # noqa: S301
    driver_s, taken_s = time.process_time() - told_cpu_s, time.perf_counter()
    copied = Routes.checked(routes.layout, segment.copy(), routes.valid)
    copied_s = time.perf_counter()
    shard_packed([copied], [load.tokens], ranks[0][1], dtype="uint8")
    cut_s = (time.perf_counter() - copied_s) / dp  # a rank copies every rollout and cuts those of its group
    all_s = (copied_s - taken_s + cut_s) * len(ranks)
    return Spread((told_s - started_s) * n, driver_s * n, all_s * n, float(routes.ids.nbytes * n * len(ranks)))


def print_ranks(load: Load, dp: int, homes: list[str]) -> None:
    needed_nbytes, count = load.nbytes, dp * load.pp * load.cp
    title = f"{load.sequences} rollouts of {load.count(0)} to {load.tokens * 3 // 2} tokens, {LAYERS} x {TOP_K}: "
    title += f"{needed_nbytes / 1e6:,.0f} MB to {count} ranks (dp={dp}, pp={load.pp}, cp={load.cp})"
    table = Table(title, ["way", "engine s", "driver CPU s", "a rank s", "ranks read MB", "read / needed"])
    names = {"arrays": "one broadcast of arrays (scaled)", "lists": "nested JSON lists, one broadcast (scaled)"}
    for way in [*homes, *names]:
        name = names.get(way, f"handles, {way}")
        print(f"{name} ...", flush=True)
        cost = broadcast(load, dp, lists=way == "lists") if way in names else by_handles(way, load, dp)
        seconds = (f"{cost.engine_s:.2f}", f"{cost.driver_s:.3f}", f"{cost.ranks_s / count:.3f}")
        table.row(name, *seconds, f"{cost.read_nbytes / 1e6:,.0f}", f"{cost.read_nbytes / needed_nbytes:.3f}")
    table.print()


def memory_nbytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def measured(way: str, load: Load) -> Cost:
    """:func:`run` in a process of its own."""
    command = [sys.executable, "-m", "bench.handover", "--child", json.dumps([way, asdict(load)])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)  # noqa: S603 - our own module
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr[-2000:]}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    args = asked(
        __doc__,
        1,
        "8 sequences of 4096 tokens",
        sequences=(64, "512 of 32,768 tokens are 16 M"),
        tokens=(32_768, "of a rollout"),
        pp=(4, "stages"),
        cp=(2, "context parallel ranks"),
        dp=(8, "of --ranks"),
        ways=(list(WAYS), "of " + ", ".join(WAYS)),
        ranks=(False, "a batch to all ranks"),
        homes=([home for home in HOMES if home != "ray" or find_spec("ray")], "of --ranks: " + ", ".join(HOMES)),
        child=(str, "of this bench's own: a way and a load, as JSON"),
    )
    if args.child:
        way, given = json.loads(args.child)
        print(json.dumps(asdict(run(way, Load(**given)))))
        return
    sequences, tokens = (8, 4096) if args.quick else (args.sequences, args.tokens)
    load = Load(sequences, tokens, args.pp, args.cp, ragged=args.ranks)
    if args.ranks:
        print_ranks(load, args.dp, args.homes)
        return
    title = f"{sequences} rollouts of {tokens} tokens, {LAYERS} x {TOP_K} of {EXPERTS}"
    title += (
        f": {load.routes(0).ids.nbytes} bytes each; a rank is 1 of {load.pp * load.cp} (pp={load.pp}, cp={load.cp})"
    )
    table = Table(title, ["way", "answer MB", "stored MB", "rank gets MB", "engine s", "rank s", "CPU s", "peak MiB"])
    costs: dict[str, Cost] = {}
    for way in args.ways:
        print(f"{WAYS[way][0]} ...", flush=True)
        cost = costs[way] = measured(way, load)
        table.row(
            WAYS[way][0],
            *(f"{n / 1e6:,.2f}" for n in (cost.answer_nbytes, cost.stored_nbytes, cost.fetched_nbytes)),
            *(f"{s:.2f}" for s in (cost.engine_s, cost.rank_s, cost.cpu_s)),
            f"{cost.peak_nbytes / (1 << 20):,.0f}",
        )
    table.print()
    write_json(args.json, ways={way: asdict(cost) for way, cost in costs.items()})


if __name__ == "__main__":
    main()

"""What does it cost to hand the routes of a batch of rollouts over to all ranks of a trainer?

``--sequences`` rollouts, 48 layers x top-8 of 128 experts, with 0.5 to 1.5 times ``--tokens`` tokens, so that they do
not end at the ends of parts. Each of ``--dp`` x ``--pp`` x ``--cp`` ranks reads the rows of its tokens and layers by
handles, from a directory, a Mooncake pool and Ray (if installed). For comparison, one driver takes all answers, as
arrays or as nested JSON lists, and broadcasts all rows. Ranks take turns in one process. The rows of the first and the
last rank are compared with the rollouts.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.harness import ROOT, Table, asked, router_ids, write_json
from kvroute.rollout import RolloutHandle, fetch_shard, open_rollouts
from kvroute.routes import Layout, Routes, Split, shard_packed
from kvroute.routes.routes import checked_routes
from kvroute.routes.split import count_places

LAYERS, TOP_K, EXPERTS = 48, 8, 128


@dataclass(frozen=True, slots=True)
class Load:
    """The number and length of rollouts, and the number of ranks."""

    sequences: int
    tokens: int
    pp: int
    cp: int

    def count(self, number: int) -> int:
        """The tokens of a rollout."""
        return self.tokens // 2 + number * 7919 % (self.tokens + 1)

    def routes(self, number: int) -> Routes:
        """A rollout: one row fewer than tokens, with distinct ids, different for every number."""
        ids = router_ids(self.count(number) - 1, LAYERS, TOP_K, EXPERTS, seed=number)
        layout = Layout(tuple(range(LAYERS)), EXPERTS, LAYERS, TOP_K)
        return checked_routes(layout, ids, np.ones(len(ids), np.bool_))

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return sum(self.count(number) - 1 for number in range(self.sequences)) * LAYERS * TOP_K


@contextmanager
def directory(_: Load) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        yield f"file://{name}"


@contextmanager
def pool(load: Load) -> Iterator[str]:
    """The URL of a Mooncake pool that has room for all rollouts."""
    sys.path.insert(0, str(ROOT / "tests" / "worlds"))  # the pool that the tests start
    from mooncake_pool import running_master, running_owner

    with ExitStack() as stack:
        master = stack.enter_context(running_master(60_000))  # a read after its lease is a miss
        segment = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "segment"
        stack.enter_context(running_owner(master, segment, load.nbytes * 3 // 2 + (128 << 20)))
        yield master.url("bench", timeout_ms=20_000)


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
    """For a whole batch: seconds of the engine, of the driver (CPU), of all ranks; bytes that all ranks read."""

    engine_s: float
    driver_s: float
    ranks_s: float
    read_nbytes: float


def ranks_of(load: Load, dp: int) -> list[tuple[list[int], Split]]:
    """For each rank: the rollouts of its data-parallel group, and its place in that."""
    places = [(d, p, c) for d in range(dp) for p in range(load.pp) for c in range(load.cp)]
    numbers = range(load.sequences)
    return [(list(numbers[d::dp]), Split(pp=load.pp, pp_rank=p, cp=load.cp, cp_rank=c)) for d, p, c in places]


def _cut(ids: NDArray[Any], tokens: list[int], split: Split) -> Iterator[NDArray[Any]]:
    """A rank's part of each sequence of a packed batch."""
    ends = accumulate(count_places(split.packed([count])) for count in tokens)
    for first, last in pairwise([0, *ends]):
        yield ids[first:last]


def by_handles(home: str, load: Load, dp: int) -> Spread:
    """Each rank fetches its own part; the parts of the first and the last one are compared."""
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
    """One driver takes every answer and puts all rows into one segment, which every rank copies and cuts.

    Measured for one rollout and its share of the segment with one rank, and multiplied.
    """
    routes, ranks = load.routes(0), ranks_of(load, dp)
    n = load.nbytes / routes.ids.nbytes
    segment = np.zeros_like(routes.ids)
    started_s = time.perf_counter()
    answer = json.dumps(routes.ids.tolist()).encode() if lists else routes.ids.tobytes()
    told_s, told_cpu_s = time.perf_counter(), time.process_time()
    taken = np.array(json.loads(answer), np.uint8) if lists else np.frombuffer(answer, np.uint8)
    segment[:] = taken.reshape(segment.shape)
    driver_s, taken_s = time.process_time() - told_cpu_s, time.perf_counter()
    copied = checked_routes(routes.layout, segment.copy(), routes.valid)
    copied_s = time.perf_counter()
    shard_packed([copied], [load.count(0)], ranks[0][1], dtype="uint8")
    cut_s = (time.perf_counter() - copied_s) / dp  # a rank copies every rollout and cuts those of its group
    all_s = (copied_s - taken_s + cut_s) * len(ranks)
    return Spread((told_s - started_s) * n, driver_s * n, all_s * n, float(routes.ids.nbytes * n * len(ranks)))


def main() -> None:
    here = [home for home in HOMES if home != "ray" or find_spec("ray")]
    args = asked(
        *(__doc__, 1),
        sequences=(64, "512 of 32,768 tokens are 16 M"),
        tokens=(32_768, "of a rollout, in the mean"),
        pp=(4, "stages"),
        cp=(2, "context parallel ranks"),
        dp=(8, "data parallel ranks"),
        homes=(here, ", ".join(HOMES)),
    )
    load, dp = Load(args.sequences, args.tokens, args.pp, args.cp), args.dp
    count = dp * load.pp * load.cp
    title = f"{load.sequences} rollouts of {load.count(0)} to {load.tokens * 3 // 2} tokens, {LAYERS} x {TOP_K}: "
    title += f"{load.nbytes / 1e6:,.0f} MB to {count} ranks (dp={dp}, pp={load.pp}, cp={load.cp})"
    table = Table(title, ["way", "engine s", "driver CPU s", "a rank s", "ranks read MB", "read / needed"])
    names = {"arrays": "one broadcast of arrays (scaled)", "lists": "nested JSON lists, one broadcast (scaled)"}
    costs: dict[str, Spread] = {}
    for way in [*args.homes, *names]:
        name = names.get(way, f"handles, {way}")
        print(f"{name} ...", flush=True)
        cost = broadcast(load, dp, lists=way == "lists") if way in names else by_handles(way, load, dp)
        seconds = (f"{cost.engine_s:.2f}", f"{cost.driver_s:.3f}", f"{cost.ranks_s / count:.3f}")
        table.row(name, *seconds, f"{cost.read_nbytes / 1e6:,.0f}", f"{cost.read_nbytes / load.nbytes:.3f}")
        costs[way] = cost
    table.print()
    write_json(args.json, ways={way: asdict(cost) for way, cost in costs.items()})


if __name__ == "__main__":
    main()

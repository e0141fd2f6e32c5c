"""Inside vLLM with ranks in parallel: is every row of every rank right, and how many tokens a second are lost?

``--what rows``, the default, starts a deployment for each of :data:`CASES` that fits the GPUs here, one after the
other. Each data-parallel rank is a process with a front end of its own, as in vLLM's example of offline data
parallelism; ranks are asked different prompts of different lengths, so that they have dummy batches in turn. Each rank
is asked: prompts with a common head; further turns; more requests than fit in its blocks, so that some are preempted;
the turns again, whose KV comes back from the host where the connector offloads; and all that again after another
embedding has replaced the first. Each row is judged by a float32 pass of transformers
with the weights that the row names. The table has the layouts of ids that the routers' hooks saw, too.

``--what speed`` measures DP 2 + EP without kvroute and with it, in turns, with a model of Qwen3-30B-A3B's shape with
random weights and ``--layers``. Why to distrust it: both deployments are in memory at once, each rank's front end is
one process, and all requests of a round begin together.

Without a GPU the cases with small models run on a CPU, eager and in float32, with the plugin of
:mod:`bench.peers.vllm_ranks`. Needs vLLM in the Python that runs it, with this checkout.
"""

from __future__ import annotations

import math
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bench.engines import PROMPT, Engine, Rates, in_turns
from bench.harness import PeerError, Table, asked, want_gpu, write_json
from bench.peers.vllm_ranks import layouts_seen
from bench.peers.vllm_weights import EMBEDDING
from bench.vllm_gpu import CLOSE, EAGER, FLOAT32, HOST, KVROUTE, OFFLOADING, V1, Starter, transfer
from bench.vllm_models import VOCABULARY, Judge, build, shape
from bench.vllm_peers import ON_CPU

ON_GPU = torch.cuda.is_available()
BEFORE, SHARDS = {"KVROUTE_GATHER": "before"}, {"KVROUTE_SHARDS": "yes"}


@dataclass(frozen=True, slots=True)
class Case:
    """A deployment whose rows are judged."""

    family: str = "qwen3"
    data: int = 1  # ranks, each with a front end of its own
    tensor: int = 1  # ranks of each of those
    stages: int = 1  # of a pipeline of those
    connector: str = OFFLOADING
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.stages

    @property
    def dtype(self) -> str:
        return str(self.options.get("dtype", "bfloat16" if ON_GPU else "float32"))


EP = {"enable_expert_parallel": True}
CASES = {
    "DP 2 + EP": Case(data=2, options=EP),
    "DP 2 + EP, latent attention": Case("deepseek", data=2, options=EP),
    "DP 2 + EP, float32": Case(data=2, options=EP | FLOAT32),
    "DP 2 + EP, eager": Case(data=2, options=EP | EAGER),
    "DP 2 + EP, V1 runner": Case(data=2, options=EP, environment=V1),
    "DP 2 + EP, gathered before the router": Case(data=2, options=EP, environment=BEFORE),
    "DP 2 + EP, gathered before the router, eager": Case(data=2, options=EP | EAGER, environment=BEFORE),
    "DP 2 + EP, gathered before the router, V1 runner": Case(data=2, options=EP, environment=BEFORE | V1),
    "DP 2, experts divided": Case(data=2),
    "TP 2 + EP": Case(tensor=2, options=EP),
    "TP 2 + EP, latent attention": Case("deepseek", tensor=2, options=EP),
    "TP 2 + EP, sequences divided": Case(tensor=2, options=EP, environment=SHARDS),
    "TP 2 + EP, sequences divided, eager": Case(tensor=2, options=EP | EAGER, environment=SHARDS),
    "TP 2 + EP, sequences divided, latent attention": Case("deepseek", tensor=2, options=EP, environment=SHARDS),
    "TP 2 + EP, sequences divided, gathered before the router": Case(tensor=2, options=EP, environment=SHARDS | BEFORE),
    "PP 2": Case(stages=2),
    "PP 2, latent attention": Case("deepseek", stages=2),
    "PP 2, eager": Case(stages=2, options=EAGER),
    "PP 2, V1 runner": Case(stages=2, environment=V1),
    "PP 2, no other connector": Case(stages=2, connector=KVROUTE),
    "TP 2 x PP 2 + EP": Case(tensor=2, stages=2, options=EP),
    "DP 2 x TP 2 + EP": Case(data=2, tensor=2, options=EP),
    "DP 2 x TP 2 + EP, latent attention": Case("deepseek", data=2, tensor=2, options=EP),
    "DP 2 x TP 2 + EP, gathered before the router": Case(data=2, tensor=2, options=EP, environment=BEFORE),
}
"""By name. vLLM divides sequences among tensor-parallel ranks where there are several of both kinds; the plugin makes
it do so with two GPUs."""
SMALL = {"max_model_len": 1024, "max_num_seqs": 16, "num_gpu_blocks_override": 200, "disable_log_stats": False}
GPU_OPTIONS = {"block_size": 16, "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 256 << 20}
CPU_OPTIONS = {"block_size": 32, "dtype": "float32", "enforce_eager": True, "num_gpu_blocks_override": 40}
WAVE = 24 if ON_GPU else 9
"""Prompts at once, more than there are blocks for."""
WEIGHTS = {"worker_extension_cls": "bench.peers.vllm_weights.Embedding"}
NAMED = {"weights": "bench", "weights_version": 0}
PLUGIN = "bench.peers.vllm_ranks:register"


class Deployment:
    """The front ends of one deployment, a process for each data-parallel rank."""

    def __init__(self, ranks: Sequence[Engine]) -> None:
        self.ranks, self.version = ranks, ranks[0].version

    def each(self, ask: Callable[[int, Engine], Any]) -> list[Any]:
        """What ``ask`` makes of each rank, all at once."""
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            return list(threads.map(ask, range(len(self.ranks)), self.ranks))

    def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """Ask each rank for its share of ``prompts`` and ``tokens``; the time of the slowest."""
        count = len(self.ranks)

        def share(rank: int, engine: Engine) -> dict[str, Any]:
            return engine.ask({**what, "prompts": what["prompts"][rank::count], "tokens": what["tokens"][rank::count]})

        answers = self.each(share)
        return {
            "seconds": max(answer["seconds"] for answer in answers),
            "cpu_s": sum(answer["cpu_s"] for answer in answers),
        }

    def close(self) -> None:
        for engine in self.ranks:
            engine.close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(
    starter: Starter, name: str, data: int, options: Mapping[str, Any], environment: Mapping[str, str]
) -> Deployment:
    """Start all ranks at once: they wait for each other."""
    port = str(free_port())
    engines: list[Engine | None] = [None] * data

    def start_rank(rank: int) -> None:
        place = {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), "VLLM_DP_SIZE": str(data)}
        place |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        more = (place if data > 1 else {}) | dict(environment) | ({} if ON_GPU else ON_CPU)
        engines[rank] = starter.start(f"{name} {rank}", options, more)

    with ThreadPoolExecutor(data) as threads:
        list(threads.map(start_rank, range(data)))
    return Deployment([engine for engine in engines if engine is not None])


# ------------------------------------------------------------------------------------------ rows


def checkpoints(home: Path, family: str, dtype: str) -> list[Path]:
    """Two checkpoints, by their versions: the second one is the first with another embedding."""
    first, second = home / f"{family}-{dtype}-0", home / f"{family}-{dtype}-1"
    if not first.exists():
        build(first, family, getattr(torch, dtype))
        shutil.copytree(first, second)
        weights = load_file(first / "model.safetensors")
        weights[EMBEDDING] = weights[EMBEDDING][torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))]
        save_file(weights, second / "model.safetensors", metadata={"format": "pt"})
    return [first, second]


def asked_of(rank: int, engine: Engine, homes: Sequence[Path], barrier: Callable[[], object]) -> list[dict[str, Any]]:
    """All answers of a rank; each has its prompt and the version of its weights. Ranks meet at each ``barrier``."""
    rng, answers = np.random.default_rng(rank), list[dict[str, Any]]()
    head = rng.integers(5, VOCABULARY, 140).tolist()

    def prompts(count: int, most: int) -> list[list[int]]:
        shared = [head[: rng.integers(40, 141)] for _ in range(count)]
        return [first + rng.integers(5, VOCABULARY, rng.integers(3, most)).tolist() for first in shared]

    def ask(version: int, wanted: Sequence[list[int]], tokens: int) -> list[list[int]]:
        got = engine.ask({"prompts": wanted, "tokens": tokens})["answers"]
        answers.extend(dict(answer, prompt=prompt, version=version) for prompt, answer in zip(wanted, got, strict=True))
        return [[*prompt, *answer["tokens"]] for prompt, answer in zip(wanted, got, strict=True)]

    for version in range(len(homes)):
        if version:
            barrier()
            engine.ask({"put": str(homes[version]), "version": str(version)})
            barrier()
        first = ask(version, prompts(3 + 5 * rank, 60), 12 + 20 * rank)
        turns = [[*tokens[:700], *rng.integers(5, VOCABULARY, 9).tolist()] for tokens in first]
        ask(version, turns, 16)
        ask(version, prompts(WAVE - 2 * (rank % 2), 300), 60)
        ask(version, turns[::2], 24)  # their blocks went to the host meanwhile, if the connector offloads
    return answers


def rows(starter: Starter, names: Sequence[str]) -> Table:
    """Start a deployment for each case, one after the other, and judge the answers of each rank."""
    table = Table(
        f"rows of ranks in parallel on {torch.cuda.get_device_name() if ON_GPU else 'a CPU'}",
        ["case", "rank", "answers", "hit", "preempted", "right", "missing", "wrong", "close", "other version"],
    )
    seen = Table("layouts of ids, by calls of hooks", ["case", "calls", "layout"])
    judges: dict[Path, Judge] = {}
    for name in names or CASES:
        case = CASES[name]
        if ON_GPU and case.gpus > torch.cuda.device_count():
            continue
        homes = checkpoints(starter.home, case.family, case.dtype)
        try:
            answers, preempted, layouts = run(starter, name, case, homes)
        except PeerError as error:  # the others go on
            table.row(name, "", *[""] * 7, str(error)[-200:])
            continue
        for home in homes:
            if home not in judges:
                judges[home] = Judge(home, CLOSE[case.dtype], "cuda" if ON_GPU else "cpu")
        for rank, (told, count) in enumerate(zip(answers, preempted, strict=True)):
            counts, others = np.zeros(4, np.int64), 0
            for answer in told:
                judge, rows = judges[homes[answer["version"]]], answer["rows"]
                counts += judge.judge([*answer["prompt"], *answer["tokens"]], rows)
                others += bool(rows) and set(rows.get("versions", ())) != {answer["version"]}
            hits = sum(answer["cached"] or 0 for answer in told)
            table.row(name, str(rank), *map(str, (len(told), hits, count, *counts.tolist(), others)))
        for layout, calls in sorted(layouts.items()):
            seen.row(name, str(calls), layout)
        print(table.text(), seen.text(), sep="\n", flush=True)
    table.print()
    seen.print()
    table.rows += [(f"layout: {name}", calls, layout, *[""] * 7) for name, calls, layout in seen.rows]
    return table


def run(
    starter: Starter, name: str, case: Case, homes: Sequence[Path]
) -> tuple[list[list[dict[str, Any]]], list[int], dict[str, int]]:
    """The answers of each rank, how often its requests were preempted, and the layouts of ids."""
    layouts = starter.home / f"layouts of {name}"
    layouts.mkdir()
    connector, extra = (case.connector, HOST) if ON_GPU else (KVROUTE, {})
    settings = {"strict": True, **NAMED}
    options = {"model": str(homes[0]), **SMALL, **(GPU_OPTIONS if ON_GPU else CPU_OPTIONS), **WEIGHTS}
    options |= {"tensor_parallel_size": case.tensor, "pipeline_parallel_size": case.stages}
    options |= {**transfer(connector, settings, extra), **case.options}
    deployment = start(starter, name, case.data, options, {**case.environment, "KVROUTE_LAYOUTS": str(layouts)})
    try:
        barrier = Barrier(case.data)
        answers = deployment.each(lambda rank, engine: asked_of(rank, engine, homes, barrier.wait))
        counted = deployment.each(lambda _, engine: engine.ask({"metric": "vllm:num_preemptions", "by": "engine"}))
    finally:
        deployment.close()
    return (
        answers,
        [int(sum(by for what, by in count.items() if what != "cpu_s")) for count in counted],
        layouts_seen(layouts),
    )


# ------------------------------------------------------------------------------------------ speed


def speed(starter: Starter, layers: int, batches: Sequence[int], rounds: int) -> dict[str, Rates]:
    """DP 2 + EP without kvroute and with it, in turns; both deployments in memory at once."""
    shape(model := starter.home / "model", layers)
    options = {"model": str(model), "load_format": "dummy", "max_model_len": 1024, "max_num_seqs": max(batches), **EP}
    options |= {"kv_cache_memory_bytes": 4 << 30, "gpu_memory_utilization": 0.05, "enable_prefix_caching": True}
    asked_for = {"off": options, "kvroute": options | transfer(KVROUTE, NAMED, {})}
    with ThreadPoolExecutor(len(asked_for)) as threads:
        started = threads.map(lambda name: start(starter, name, 2, asked_for[name], {}), asked_for)
        engines: dict[str, Any] = dict(zip(asked_for, started, strict=True))
    about = f"vLLM {engines['off'].version}, DP 2 + EP, {layers} layers, {PROMPT} + 128 tokens"
    return in_turns(about, engines, batches, 128, rounds, math.inf, words=150_000, ends=("together", "apart"))


def main() -> None:
    args = asked(
        *(__doc__, 6),
        what=("rows", "rows or speed"),
        layouts=(str, "of rows: names of cases, separated by '; '"),
        layers=(12, "of speed"),
        batches=([16, 128, 512], "of speed: sequences of both ranks"),
    )
    with ExitStack() as stack:
        starter = Starter(stack, ranks=PLUGIN)
        if args.what == "rows":
            judged = rows(starter, args.layouts.split("; ") if args.layouts else [])
            write_json(args.json, columns=judged.columns, rows=judged.rows)
        else:
            want_gpu()
            write_json(args.json, rates=speed(starter, args.layers, args.batches, args.rounds))


if __name__ == "__main__":
    main()

"""Inside vLLM on a GPU: is every row right, and how many tokens a second does that cost?

``--what rows``, the default, starts an engine for each configuration, small models in all of them, asks each for
three rounds of answers (prompts with a common head, then further turns), and judges each row by a float32 pass of
transformers on the same GPU. An engine in bfloat16 rounds: a row that differs where a choice was close is counted by
itself. With two GPUs, two tensor-parallel ranks too.

``--what speed`` starts engines of Qwen3-30B-A3B's shape with random weights, which take turns: no connector, one that
does nothing, kvroute with a store of rows and the witness of every full block (rows come back in the response, or are
left in a rollout store), kvroute with rows in a layer of the KV.
Tokens a second are medians over the rounds, as ratios to vLLM's own in the same round. ``--layers 48`` is the whole
model; two such engines fill an H200 (``--engines off store``).

``--what rounding`` needs neither vLLM nor a GPU: how far apart were choices that come out otherwise when the experts
multiply in TF32, as vLLM's do in a float32 engine?

Needs vLLM beside this checkout, in the Python that runs it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from bench.harness import ROOT, Peer, PeerError, Table, asked
from bench.vllm_models import VOCABULARY, Judge, build, shape
from bench.vllm_peers import MODULE, plugin

GRAPHS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
CLOSE = {"float32": 0.1, "bfloat16": 0.5}  # the logits of a router vary by about 5
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration whose rows are judged."""

    connector: str = "KvrouteConnector"
    family: str = "qwen3"
    settings: Callable[[Path], dict[str, Any]] = lambda _: {}
    extra: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1
    reset: bool = False  # the engine's own prefix cache is dropped between rounds: KV comes back from elsewhere

    @property
    def dtype(self) -> str:
        return str(self.options.get("dtype", "bfloat16"))


NAMED = {"weights": "bench", "weights_version": 0}  # after a reset rows are found by these


def stored(home: Path) -> dict[str, Any]:
    return {"store": f"file://{home}/rows", "witness": "flagged", **NAMED}


def in_pages(_: Path) -> dict[str, Any]:
    return {"carrier": "layer", **NAMED}


FLOAT32, EAGER, TWO = {"dtype": "float32"}, {"enforce_eager": True}, {"tensor_parallel_size": 2}
HOST = {"cpu_bytes_to_use": 1 << 30}
OFFLOADING = "KvrouteOffloadingConnector"
CASES = {
    "as it comes": Case(),
    "float32": Case(options=FLOAT32),
    "float32, V1 runner": Case(options=FLOAT32, environment=V1),
    "float32, eager": Case(options=FLOAT32 | EAGER),
    "float32, V1 runner, eager": Case(options=FLOAT32 | EAGER, environment=V1),
    "latent attention": Case(family="deepseek"),
    "offloading, a store": Case(OFFLOADING, settings=stored, extra=HOST, reset=True),
    "offloading, rows in the KV": Case(OFFLOADING, settings=in_pages, extra=HOST, reset=True),
    "offloading, float32": Case(OFFLOADING, settings=stored, extra=HOST, options=FLOAT32, reset=True),
    "offloading, latent attention": Case(OFFLOADING, "deepseek", stored, HOST, reset=True),
    "two ranks": Case(options=FLOAT32 | TWO, gpus=2),
    "two ranks, offloading, a store": Case(OFFLOADING, settings=stored, extra=HOST, options=TWO, gpus=2, reset=True),
    "two ranks, offloading, latent attention": Case(
        OFFLOADING, "deepseek", stored, HOST, options=TWO, gpus=2, reset=True
    ),
}


def transfer(connector: str, settings: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": connector,
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**extra, "kvroute": {"weights": "seeded", **settings}},
        }
    }


class Starter:
    """Starts engines; each has caches of its own, because several compile at once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-vllm-gpu-")))
        self._path = ":".join([str(plugin(self.home / "plugin")), *filter(None, sys.path), str(ROOT)])

    def start(self, name: str, options: Mapping[str, Any], environment: Mapping[str, str]) -> Peer:
        own = self.home / name.replace(" ", "-").replace(",", "")
        own.mkdir()
        caches = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        environment = {
            "PYTHONPATH": self._path,
            "OMP_NUM_THREADS": "2",
            "VLLM_LOGGING_LEVEL": "WARNING",
            **{cache: str(own / cache.lower()) for cache in caches},
            **environment,
        }
        common = {"skip_tokenizer_init": True, "compilation_config": {"cudagraph_capture_sizes": GRAPHS}}
        told = json.dumps(common | dict(options))
        peer = Peer(Path(sys.executable), "bench.peers.vllm_engine", own / "log", environment, told)
        self._stack.callback(_end, peer)
        return peer


def _end(engine: Peer) -> None:
    """End an engine and its processes, of which vLLM has several."""
    for process in psutil.Process(engine.pid).children(recursive=True):  # they have its standard output open
        with suppress(psutil.NoSuchProcess):
            process.kill()
    engine.close()


def rows(starter: Starter, names: Sequence[str]) -> None:
    """Start all engines at once, and judge what each answers."""
    cases = {name: CASES[name] for name in names or CASES if CASES[name].gpus <= torch.cuda.device_count()}
    models: dict[tuple[str, str], Path] = {}
    for case in cases.values():
        if (which := (case.family, case.dtype)) not in models:
            models[which] = starter.home / "-".join(which)
            build(models[which], case.family, getattr(torch, case.dtype))

    def run(name: str) -> tuple[list[dict[str, Any]], str]:
        case, home = cases[name], starter.home / f"of {name}"
        home.mkdir()
        config = transfer(case.connector, {"strict": True, **case.settings(home)}, case.extra)
        options = {"max_model_len": 1024, "max_num_seqs": 32, "gpu_memory_utilization": 0.05}
        options |= {"kv_cache_memory_bytes": 256 << 20, **config, **case.options}
        try:
            model = str(models[case.family, case.dtype])
            return answers_of(case, starter.start(name, options | {"model": model}, case.environment))
        except PeerError as error:  # the others go on
            return [], str(error)

    def answers_of(case: Case, engine: Peer) -> tuple[list[dict[str, Any]], str]:
        found, rng = list[dict[str, Any]](), np.random.default_rng(0)
        head = rng.integers(5, VOCABULARY, 130).tolist()
        lengths = rng.integers(3, 400, 40)
        first = [head[: rng.integers(131)] + rng.integers(5, VOCABULARY, n).tolist() for n in lengths]
        prompts = first
        for turn in range(3):
            answers = engine.ask({"prompts": prompts, "tokens": 20 + 15 * turn})["answers"]
            for prompt, answer in zip(prompts, answers, strict=True):
                found.append(dict(answer, prompt=prompt))
            more = [[*each["prompt"], *each["tokens"], *rng.integers(5, VOCABULARY, 9)] for each in found[-40::2]]
            prompts = [list(map(int, each[:900])) for each in more] + first[1::2]
            if case.reset:
                engine.ask({"reset": True})
        return found, engine.version

    with ThreadPoolExecutor(len(cases)) as threads:
        told = dict(zip(cases, threads.map(run, cases), strict=True))
    table = Table(
        f"rows in vLLM on {torch.cuda.get_device_name()}, each judged by transformers in float32",
        ["configuration", "vLLM", "answers", "tokens hit", "right", "missing", "wrong", "close"],
    )
    judges: dict[tuple[str, str], Judge] = {}
    for name, (answers, version) in told.items():
        case = cases[name]
        if (which := (case.family, case.dtype)) not in judges:
            judges[which] = Judge(models[which], CLOSE[case.dtype], "cuda")
        each = [judges[which].judge([*a["prompt"], *a["tokens"]], a["rows"]) for a in answers]
        counts = np.sum([np.zeros(4, np.int64), *each], axis=0).tolist()
        hits = sum(answer["cached"] or 0 for answer in answers)
        table.row(name, version[:60], str(len(answers)), *map(str, (hits, *counts)))
    table.print()


def left(home: Path) -> dict[str, Any]:
    return stored(home) | {"rollouts": f"file://{home}/rollouts"}


ENGINES = {
    "off": {},
    "nothing": transfer("KvrouteConnector", {}, {})["kv_transfer_config"]
    | {"kv_connector": "NothingConnector", "kv_connector_module_path": "bench.peers.vllm_connectors"},
    "store": stored,
    "left": left,
    "layer": in_pages,
}


def speed(starter: Starter, layers: int, names: Sequence[str], batches: Sequence[int], rounds: int) -> None:
    """Engines that take turns, all of them in memory at once."""
    shape(model := starter.home / "model", layers)
    prompt, new = 64, 128
    options = {"model": str(model), "load_format": "dummy", "max_model_len": 1024, "max_num_seqs": max(batches)}
    options |= {"kv_cache_memory_bytes": 4 << 30, "gpu_memory_utilization": 0.05, "enable_prefix_caching": True}

    def start(name: str) -> Peer:
        kind, home = ENGINES[name], starter.home / f"of {name}"
        home.mkdir()
        config: dict[str, Any] = {"kv_transfer_config": kind} if kind else {}
        if callable(kind):
            config = transfer("KvrouteConnector", kind(home), {})
        return starter.start(name, options | config, {})

    with ThreadPoolExecutor(len(names)) as threads:
        engines = dict(zip(names, threads.map(start, names), strict=True))
    rng, seconds = np.random.default_rng(3), defaultdict[tuple[str, int], list[float]](list)
    for turn in range(rounds + 1):
        for batch in batches:
            prompts = rng.integers(5, 150_000, (batch, prompt)).tolist()
            for name in rng.permutation(list(engines)).tolist():
                took = engines[name].ask({"prompts": prompts, "tokens": new, "rows": False})["seconds"]
                if turn:
                    seconds[name, batch].append(took)
    table = Table(
        f"tokens/s in vLLM {next(iter(engines.values())).version}, {layers} layers, {prompt} + {new} tokens,"
        f" {torch.cuda.get_device_name()}; ratios to no connector, median [worst .. best]",
        ["engine", "sequences", "tokens/s", "ms a step", "ratio"],
    )
    for batch in batches:
        own = np.array(seconds[names[0], batch])
        for name in names:
            took = np.array(seconds[name, batch])
            ratio = own / took
            shown = f"{np.median(ratio):.3f} [{ratio.min():.3f} .. {ratio.max():.3f}]"
            per_step = 1000 * float(np.median(took)) / new
            table.row(name, str(batch), f"{batch * new / np.median(took):.0f}", f"{per_step:.2f}", shown)
    table.print()


def rounding(home: Path) -> None:
    """Rows that differ between a float32 pass and one whose experts are cut to TF32, both by transformers on a CPU."""
    build(home, "qwen3", torch.float32)
    exact, cut = (Judge(home) for _ in range(2))
    cut.cut()
    rng, tokens, apart = np.random.default_rng(0), 0, list[float]()
    for n in rng.integers(100, 500, 60).tolist():
        tokens_of = rng.integers(5, VOCABULARY, n).tolist()
        (wanted, by), (other, _) = exact.choices(tokens_of), cut.choices(tokens_of)
        apart += by[(np.sort(wanted) != np.sort(other)).any((1, 2))].tolist()
        tokens += n
    beyond = [str(sum(each > limit for each in apart)) for limit in (0.01, 0.02, 0.05, 0.1)]
    columns = ["tokens", "rows that differ", "beyond 0.01", "0.02", "0.05", "0.1", "furthest"]
    table = Table("TF32 experts against float32: differences of logits where a choice came out otherwise", columns)
    table.row(str(tokens), str(len(apart)), *beyond, f"{max(apart):.3f}").print()


def main() -> None:
    args = asked(
        *(__doc__, 8),
        what=("rows", "rows, speed or rounding"),
        cases=(str, "of rows, divided by semicolons"),
        engines=(list(ENGINES), "of speed"),
        layers=(20, "of speed"),
        batches=([8, 64, 256], "of speed"),
    )
    with ExitStack() as stack:
        starter = Starter(stack)
        if args.what == "rounding":
            rounding(starter.home)
        elif args.what == "rows":
            rows(starter, args.cases.split("; ") if args.cases else [])
        else:
            speed(starter, args.layers, args.engines, args.batches, args.rounds)


if __name__ == "__main__":
    main()

"""Inside vLLM on a GPU: is every row right, and how many tokens a second are lost?

``--what rows``, the default, starts an engine with a small model for each configuration, asks each for three rounds of
answers (prompts with a common head, then further turns), and judges each row by a float32 pass of transformers on the
same GPU. An engine in bfloat16 rounds: a row that differs at a close choice is counted separately. With two GPUs, two
tensor-parallel ranks too. Cases of routing weights have a second judge: a recorder in the engine
(``peers/vllm_recorder``) that copies what each layer's kernel was given. A row is right if its ids and the bits of its
weights are, for all layers, those of a pass over the same tokens.

``--what speed`` starts engines of Qwen3-30B-A3B's shape with random weights, or that of another ``--family``
(hybrid: Qwen3-Next-80B-A3B, gpt-oss-20b), which take turns: no connector, one that does nothing, kvroute with a store
of rows and the witness of every full block (rows come back in the response, or go to a rollout store), vLLM's own flag
with kvroute and without. The answers of a round end together, which is the worst case, or apart. Ratios are to vLLM
without a connector in the same round. ``--layers 48`` is the whole Qwen3-30B-A3B; two such engines fill an H200
(``--engines off store``).

Needs vLLM in the Python that runs it, with this checkout.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.engines import PROMPT, Engine, Rates, in_turns
from bench.harness import ROOT, PeerError, Table, asked, want_gpu, write_json
from bench.peers.vllm_recorder import HASH_NBYTES, RECORD, hashes
from bench.vllm_drafts import BY_CHANCE, drafted
from bench.vllm_models import SHAPES, VOCABULARY, Judge, build, shape, unpacked
from bench.vllm_peers import CONNECTORS, ON_CPU, connector, plugin

GRAPHS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
CLOSE = {"float32": 0.1, "bfloat16": 0.5}  # the logits of a router vary by about 5
KVROUTE, OFFLOADING = "KvrouteConnector", "KvrouteOffloadingConnector"
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration whose rows are judged; without a ``connector`` they are stock vLLM's."""

    connector: str = KVROUTE
    family: str = "qwen3"
    settings: Callable[[Path], dict[str, Any]] = lambda _: {}
    extra: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1
    drafts: str = ""  # one of bench.vllm_drafts.KINDS
    weights: bool = False  # routing weights, judged bit by bit
    reset: bool = False  # drop the engine's own prefix cache between rounds: KV comes back from elsewhere

    @property
    def dtype(self) -> str:
        return str(self.options.get("dtype", "bfloat16"))


NAMED = {"weights": "bench", "weights_version": 0}  # after a reset rows are found by these


def stored(home: Path) -> dict[str, Any]:
    return {"store": f"file://{home}/rows", "witness": "flagged", **NAMED}


def named(_: Path) -> dict[str, Any]:
    return NAMED


FLAG = {"enable_return_routed_experts": True}
FLOAT32, EAGER, TWO = {"dtype": "float32"}, {"enforce_eager": True}, {"tensor_parallel_size": 2}
TRITON = {"gdn_prefill_backend": "triton"}  # of linear attention; FlashInfer may not be there
HOST = {"cpu_bytes_to_use": 1 << 30}
CHUNKS = {"block_size": 32}
FEW, FEWER = {"num_gpu_blocks_override": 300}, {"num_gpu_blocks_override": 40}  # KV is evicted, and comes from the host
CASES = {
    "defaults": Case(),
    "float32": Case(options=FLOAT32),
    "float32, V1 runner": Case(options=FLOAT32, environment=V1),
    "float32, eager": Case(options=FLOAT32 | EAGER),
    "float32, V1 runner, eager": Case(options=FLOAT32 | EAGER, environment=V1),
    "latent attention": Case(family="deepseek"),
    "offloading, a store": Case(OFFLOADING, settings=stored, extra=HOST, reset=True),
    "offloading, pairs": Case(OFFLOADING, settings=named, extra=HOST, options=FEW),
    "offloading, pairs, chunks of two": Case(OFFLOADING, settings=named, extra=HOST | CHUNKS, options=FEW),
    "offloading, pairs, V1 runner": Case(OFFLOADING, settings=named, extra=HOST, options=FEW, environment=V1),
    "offloading, pairs, float32": Case(OFFLOADING, settings=named, extra=HOST, options=FEW | FLOAT32),
    "offloading, pairs, latent attention": Case(OFFLOADING, "deepseek", named, HOST, FEW),
    "offloading, pairs, windows": Case(OFFLOADING, "gpt_oss", named, HOST, FEW),
    "offloading, pairs, linear attention": Case(OFFLOADING, "qwen3_next", named, HOST, TRITON | FEWER),
    "offloading, float32": Case(OFFLOADING, settings=stored, extra=HOST, options=FLOAT32, reset=True),
    "offloading, latent attention": Case(OFFLOADING, "deepseek", stored, HOST, reset=True),
    "stock flag": Case("", options=FLAG),
    "own field": Case(options=FLAG),
    "own field, offloading, a store": Case(OFFLOADING, settings=stored, extra=HOST, options=FLAG, reset=True),
    "own field, offloading, pairs": Case(OFFLOADING, settings=named, extra=HOST, options=FLAG | FEW),
    "linear attention, stock flag": Case("", family="qwen3_next", options=FLAG | TRITON),
    "linear attention": Case(family="qwen3_next", options=TRITON),
    "linear attention, own field": Case(family="qwen3_next", options=FLAG | TRITON),
    "windows, stock flag": Case("", family="gpt_oss", options=FLAG),
    "windows": Case(family="gpt_oss"),
    "windows, own field": Case(family="gpt_oss", options=FLAG),
    "drafts of a model": Case(options=FLOAT32, drafts="model"),
    "drafts of a model, eager": Case(options=FLOAT32 | EAGER, drafts="model"),
    "drafts of a model, V1 runner": Case(options=FLOAT32, environment=V1, drafts="model"),
    "drafts of a model, own field": Case(options=FLOAT32 | FLAG, drafts="model"),
    "drafts of a model, offloading, a store": Case(
        OFFLOADING, settings=stored, extra=HOST, options=FLOAT32, drafts="model", reset=True
    ),
    "MTP, latent attention": Case(family="deepseek", drafts="mtp"),
    "MTP, latent attention, V1 runner": Case(family="deepseek", environment=V1, drafts="mtp"),
    "MTP, latent attention, own field": Case(family="deepseek", options=FLAG, drafts="mtp"),
    "MTP, latent attention, offloading, a store": Case(OFFLOADING, "deepseek", stored, HOST, drafts="mtp", reset=True),
    "MTP, linear attention": Case(family="qwen3_next", options=TRITON, drafts="mtp"),
    "MTP, linear attention, V1 runner": Case(family="qwen3_next", options=TRITON, environment=V1, drafts="mtp"),
    "EAGLE-3": Case(options=FLOAT32, drafts="eagle3"),
    "EAGLE-3, V1 runner": Case(options=FLOAT32, environment=V1, drafts="eagle3"),
    "n-grams": Case(options=FLOAT32, drafts="ngram"),
    "routing weights": Case(weights=True),
    "routing weights, eager": Case(options=EAGER, weights=True),
    "routing weights, float32": Case(options=FLOAT32, weights=True),
    "routing weights, V1 runner": Case(environment=V1, weights=True),
    "routing weights, V1 runner, eager": Case(options=EAGER, environment=V1, weights=True),
    "routing weights, preemption": Case(options={"num_gpu_blocks_override": 120}, weights=True),
    "routing weights, latent attention": Case(family="deepseek", weights=True),
    "routing weights, windows": Case(family="gpt_oss", weights=True),
    "routing weights, linear attention": Case(family="qwen3_next", options=TRITON, weights=True),
    "routing weights, offloading, pairs": Case(OFFLOADING, settings=named, extra=HOST, options=FEW, weights=True),
    "routing weights, offloading, a store": Case(OFFLOADING, settings=stored, extra=HOST, weights=True, reset=True),
    "two ranks, routing weights": Case(options=TWO, gpus=2, weights=True),
    "two ranks": Case(options=FLOAT32 | TWO, gpus=2),
    "two ranks, offloading, a store": Case(OFFLOADING, settings=stored, extra=HOST, options=TWO, gpus=2, reset=True),
    "two ranks, offloading, pairs": Case(OFFLOADING, settings=named, extra=HOST, options=TWO | FEW, gpus=2),
    "two ranks, offloading, latent attention": Case(
        OFFLOADING, "deepseek", stored, HOST, options=TWO, gpus=2, reset=True
    ),
}


def transfer(name: str, settings: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    return {"kv_transfer_config": connector(name, **extra, kvroute={"weights": "seeded", **settings})}


class Starter:
    """Starts engines; each has separate caches, because several compile at once. Each has these ``plugins``, too."""

    def __init__(self, stack: ExitStack, **plugins: str) -> None:
        self._stack = stack
        self.home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-vllm-gpu-")))
        self._path = ":".join([str(plugin(self.home / "plugin", **plugins)), *filter(None, sys.path), str(ROOT)])

    def start(self, name: str, options: Mapping[str, Any], environment: Mapping[str, str]) -> Engine:
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
        common: dict[str, Any] = {"skip_tokenizer_init": True}
        if torch.cuda.is_available():
            common["compilation_config"] = {"cudagraph_capture_sizes": GRAPHS}
        peer = Path(sys.executable), "bench.peers.vllm_engine", own / "log", environment
        engine = Engine(*peer, options=common | dict(options), stops=False)
        self._stack.callback(engine.close)
        return engine


class Bits:
    """What a recorder in the engine wrote: by the hash of all tokens up to one, ids and bits that its kernels got."""

    def __init__(self, record: Path, row_nbytes: int) -> None:
        self._given = defaultdict[bytes, set[bytes]](set)
        content = record.read_bytes() if record.exists() else b""
        size = HASH_NBYTES + row_nbytes
        assert len(content) % size == 0, f"{record}: {len(content)} bytes, not records of {size}"
        for first in range(0, len(content), size):
            self._given[content[first : first + HASH_NBYTES]].add(content[first + HASH_NBYTES : first + size])

    def judge(self, tokens: list[int], rows: Mapping[str, Any], cached: int) -> NDArray[np.int64]:
        """How many rows are right, missing and wrong, ``[2, 3]``: of computed tokens, and of cached ones."""
        counts = np.zeros((2, 3), np.int64)
        ids, weights, valid = (unpacked(rows[name]) for name in ("ids", "weights", "valid"))
        for at, digest in enumerate(hashes(tokens, 0)[: len(tokens) - 1]):
            verdict = 1
            if at < len(valid) and valid[at]:
                row = ids[at].astype(np.int32).tobytes() + weights[at].tobytes()
                verdict = 0 if row in self._given[digest] else 2
            counts[int(at < cached), verdict] += 1
        return counts


def judge_bits(answers: Mapping[str, Sequence[dict[str, Any]]], home: Path) -> Table:
    """The verdicts of the recorders of these cases."""
    kinds = [f"{kind}: {verdict}" for kind in ("computed", "hit") for verdict in ("right", "missing", "wrong")]
    table = Table("ids and weights, each beside what the experts' kernel was given", ["configuration", *kinds])
    for name, told in answers.items():
        counts = np.zeros((2, 3), np.int64)
        if any(answer["rows"] is None or "weights" not in answer["rows"] for answer in told):
            table.row(name, *["no weights in an answer"] * 6)
            continue
        if told:
            bits = Bits(home / f"of {name}" / "record", 2 * 4 * int(np.prod(told[0]["rows"]["ids"]["shape"][1:])))
            for answer in told:
                tokens = [*answer["prompt"], *answer["tokens"]]
                counts += bits.judge(tokens, answer["rows"], answer["cached"] or 0)
        table.row(name, *map(str, counts.ravel().tolist()))
    table.print()
    return table


def rows(starter: Starter, names: Sequence[str], device: str = "cuda") -> list[Table]:
    """Start all engines at once, and judge the answers of each."""
    gpus = torch.cuda.device_count() if device == "cuda" else 1
    cases = {name: CASES[name] for name in names or CASES if CASES[name].gpus <= gpus}
    models: dict[tuple[str, str], Path] = {}
    for case in cases.values():
        if (which := (case.family, case.dtype)) not in models:
            models[which] = starter.home / "-".join(which)
            build(models[which], case.family, getattr(torch, case.dtype))

    def run(name: str) -> tuple[list[dict[str, Any]], str, str]:
        case, home = cases[name], starter.home / f"of {name}"
        home.mkdir()
        settings = {"strict": True, **case.settings(home)}
        environment = dict(case.environment)
        if case.weights:
            settings["routing_weights"] = True
            environment[RECORD] = str(home / "record")
        config = transfer(case.connector, settings, case.extra) if case.connector else {}
        options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 32, "gpu_memory_utilization": 0.05}
        options |= {"kv_cache_memory_bytes": 256 << 20, **config, **case.options}
        if device == "cpu":
            options = {key: value for key, value in options.items() if key not in ("gpu_memory_utilization", "dtype")}
            options |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
            environment = {**ON_CPU, **environment}
        try:
            model = models[case.family, case.dtype]
            if case.drafts:
                model, speculative = drafted(case.drafts, model, home / "draft")
                by_chance = BY_CHANCE if case.drafts in ("mtp", "eagle3") else {}
                options["speculative_config"] = speculative | by_chance
                options["disable_log_stats"] = False
            return answers_of(case, starter.start(name, options | {"model": str(model)}, environment))
        except PeerError as error:  # the others go on
            return [], "", str(error)

    def answers_of(case: Case, engine: Engine) -> tuple[list[dict[str, Any]], str, str]:
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
        return found, taken(engine) if case.drafts else "", engine.version

    def taken(engine: Engine) -> str:
        """Drafts that were accepted, of how many."""
        names = (f"vllm:spec_decode_num_{kind}_tokens" for kind in ("accepted", "draft"))
        counts = [engine.ask({"metric": name, "by": "engine"}) for name in names]
        return " of ".join(str(int(sum(by_engine.values()))) for by_engine in counts)

    with ThreadPoolExecutor(len(cases)) as threads:
        told = dict(zip(cases, threads.map(run, cases), strict=True))
    where = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    table = Table(
        f"rows in vLLM on {where}, each judged by transformers in float32",
        ["configuration", "vLLM", "answers", "tokens hit", "drafts taken", "right", "missing", "wrong", "close"],
    )
    judges: dict[tuple[str, str], Judge] = {}
    for name, (answers, drafts, version) in told.items():
        case = cases[name]
        if (which := (case.family, case.dtype)) not in judges:
            judges[which] = Judge(models[which], CLOSE[case.dtype], device)
        each = [judges[which].judge([*a["prompt"], *a["tokens"]], a["rows"]) for a in answers]
        counts = np.sum([np.zeros(4, np.int64), *each], axis=0).tolist()
        hits = sum(answer["cached"] or 0 for answer in answers)
        table.row(name, version[:60], str(len(answers)), str(hits), drafts, *map(str, counts))
    table.print()
    weighed = {name: answers for name, (answers, *_) in told.items() if cases[name].weights}
    return [table, judge_bits(weighed, starter.home)] if weighed else [table]


def left(home: Path) -> dict[str, Any]:
    return stored(home) | {"rollouts": f"file://{home}/rollouts"}


ENGINES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "off": lambda _: {},
    "nothing": lambda _: {"kv_transfer_config": connector("NothingConnector", CONNECTORS)},
    "store": lambda home: transfer(KVROUTE, stored(home), {}),
    "left": lambda home: transfer(KVROUTE, left(home), {}),
    "response": lambda _: transfer(KVROUTE, {}, {}),
    "weights": lambda _: transfer(KVROUTE, {"routing_weights": True}, {}),
    "field": lambda _: transfer(KVROUTE, {}, {}) | FLAG,
    "stock flag": lambda _: FLAG,
}


KV_GIB = {"qwen3_next": 12}
"""Of an engine whose shape keeps a state for each sequence, too; of others 4."""
MORE: Mapping[str, Mapping[str, Any]] = {"qwen3_next": TRITON}


def speed(
    starter: Starter, family: str, layers: int, names: Sequence[str], batches: Sequence[int], rounds: int
) -> dict[str, Rates]:
    """Measure engines that take turns, all of them in memory at once."""
    shape(model := starter.home / "model", layers, family)
    new = 128
    options = {"model": str(model), "load_format": "dummy", "max_model_len": 1024, "max_num_seqs": max(batches)}
    options |= {"kv_cache_memory_bytes": KV_GIB.get(family, 4) << 30, "gpu_memory_utilization": 0.05}
    options |= {"enable_prefix_caching": True, **MORE.get(family, {})}

    def start(name: str) -> Engine:
        home = starter.home / f"of {name}"
        home.mkdir()
        return starter.start(name, options | ENGINES[name](home), {})

    with ThreadPoolExecutor(len(names)) as threads:
        engines = dict(zip(names, threads.map(start, names), strict=True))
    version, gpu = engines[names[0]].version, torch.cuda.get_device_name()
    about = f"vLLM {version}, {family}, {layers} layers, {PROMPT} + {new} tokens, {gpu}"
    return in_turns(about, engines, batches, new, rounds, words=150_000, ends=("together", "apart"))


def main() -> None:
    args = asked(
        *(__doc__, 8),
        what=("rows", "rows or speed"),
        cases=(str, "of rows, separated by '; '"),
        device=("cuda", "of rows: or cpu, to try cases in float32 without graphs"),
        engines=(["off", "nothing", "store", "left", "field", "stock flag"], "of speed: " + ", ".join(ENGINES)),
        family=("qwen3", "of speed: " + ", ".join(SHAPES)),
        layers=(20, "of speed"),
        batches=([8, 64, 256], "of speed"),
    )
    if args.device == "cuda" or args.what == "speed":
        want_gpu()
    with ExitStack() as stack:
        starter = Starter(stack, recorder="bench.peers.vllm_recorder:record")
        if args.what == "rows":
            judged, *bits = rows(starter, args.cases.split("; ") if args.cases else [], args.device)
            beside = [{"columns": table.columns, "rows": table.rows} for table in bits]
            write_json(args.json, columns=judged.columns, rows=judged.rows, bits=beside)
        else:
            rates = speed(starter, args.family, args.layers, args.engines, args.batches, args.rounds)
            write_json(args.json, rates=rates)


if __name__ == "__main__":
    main()

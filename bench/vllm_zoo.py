"""Inside vLLM: of which families of Mixture-of-Experts is every row right?

A tiny checkpoint of each family of :mod:`bench.vllm_families` is asked prompts, one round in stock vLLM, then three
with kvroute. Prompts begin alike, are computed in chunks, and hit the prefix cache; the pool has fewer blocks than
the requests want, so that blocks are evicted and requests preempted.

Two judges see each row. ``kvroute.verify`` compares it with a pass of transformers: *close* are rows that differ where
a router's choice may have been decided by rounding. :class:`Record` compares it with what vLLM's kernels were given for
these tokens. Where vLLM computes otherwise than transformers, the second one says whether kvroute's row is right.

Each part of a family's run is a process with a limit of ``--seconds``, forked from one that has imported everything:
what ends there ends as a line of the table.

``--device cuda`` runs on a GPU in bfloat16, ``--together`` families at once, and stock vLLM with its own flag, whose
rows are judged by the same record. On a CPU stock refuses its flag; the first line of output quotes it.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from bench.harness import QUIET_VLLM, asked, write_json
from bench.vllm_families import FAMILIES, JUDGED, make
from bench.vllm_models import VOCABULARY
from bench.vllm_peers import ON_CPU, connector
from cache_manager.errors import KVRouteError

ENVIRONMENT = {"cpu": ON_CPU, "cuda": {**QUIET_VLLM, "VLLM_USE_V2_MODEL_RUNNER": "0", "OMP_NUM_THREADS": "1"}}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "async_scheduling": False,
    "block_size": 32,
    "max_model_len": 320,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 32,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
}
ON_CUDA: dict[str, Any] = {
    "dtype": "bfloat16",
    "block_size": None,  # what its kernels take
    "num_gpu_blocks_override": 64,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 256 << 20,
    "attention_config": None,
}
FLAG = {"enable_return_routed_experts": True}
PROMPTS, HEAD, NEW, TOKENS_MAX = 8, 100, 20, 290


def apart(part: Callable[..., Any], seconds: int, log: Path, *arguments: Any) -> dict[str, Any]:
    """What ``part`` returns in a process of its own, as ``value``; or ``error``, and the class ``by`` which it came."""
    context = multiprocessing.get_context("fork")
    receives, sends = context.Pipe(duplex=False)
    process = context.Process(target=_reported, args=(part, log, sends, *arguments))
    with FORKING:  # filelock, which transformers imports, refuses forks that meet
        process.start()
    sends.close()
    outcome: dict[str, Any] = {"error": f"no answer in {seconds} s", "by": ""}
    try:
        if receives.poll(seconds):
            outcome = receives.recv()
    except EOFError:
        process.join()
        outcome = {"error": f"ended with code {process.exitcode}: {_last_line(log)}", "by": ""}
    process.kill()
    process.join()
    return outcome


def _reported(part: Callable[..., Any], log: Path, sends: Any, *arguments: Any) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setsid()
    try:
        sends.send({"value": part(*arguments)})
    except Exception as error:  # noqa: BLE001 - every failure is a line of the table
        traceback.print_exc()
        by = "kvroute" if isinstance(error, KVRouteError) else "vLLM"
        said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        reason = NOT_INSPECTED[0] if NOT_INSPECTED else f"{type(error).__name__}: {said}"
        sends.send({"error": reason, "by": by})
    finally:
        os._exit(0)


FORKING = threading.Lock()


def inspected(inspects: Callable[[], Any]) -> Any:
    """What vLLM asks a model's class; it logs an error there and raises another one without its reason."""
    try:
        return inspects()
    except Exception as error:
        NOT_INSPECTED.append(f"{type(error).__name__}: {error}")
        raise


NOT_INSPECTED: list[str] = []
"""Why a model's class could not be asked, in this process."""


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "silent"


def answers_of(home: Path, options: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Ask an engine ``rounds`` times: its answers and what its scheduler did.

    An answer is its round, its prompt's length, its tokens, and the ids of its rows ``[tokens - 1, layers, top_k]``,
    -1 where one is missing; or why it has none.
    """
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.config import KVTransferConfig  # type: ignore[import-not-found]

    transfer = options.get("kv_transfer_config")
    more = {"kv_transfer_config": KVTransferConfig(**transfer)} if transfer else {}
    given = {name: value for name, value in {**options, **more}.items() if value is not None}
    llm = LLM(str(home), **given)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool, evicted = scheduler.kv_cache_manager.block_pool, list[int]()
    evict = pool._maybe_evict_cached_block

    def evicting(block: Any) -> bool:
        was_cached = bool(evict(block))
        evicted.append(int(was_cached))
        return was_cached

    pool._maybe_evict_cached_block = evicting
    record = Record(llm)
    rng = np.random.default_rng(0)
    head = rng.integers(5, VOCABULARY, HEAD).tolist()
    first = [[*head, *rng.integers(5, VOCABULARY, n).tolist()] for n in rng.integers(3, 150, PROMPTS)]
    prompts, answers, hits = first, list[dict[str, Any]](), 0
    used: NDArray[np.int64] = np.zeros(2, np.int64)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for number in range(rounds):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        for output in outputs:
            answers.append(answer_of(output, number))
            hits += output.num_cached_tokens or 0
            if "ids" in answers[-1]:
                used += record.used(answers[-1]["tokens"], answers[-1]["ids"])
        turns = [[*answer["tokens"], *rng.integers(5, VOCABULARY, 9).tolist()] for answer in answers[-PROMPTS::2]]
        prompts = [turn for turn in turns if len(turn) <= TOKENS_MAX] + first[1::2]
    preempted = sum(int(each.value) for each in llm.get_metrics() if each.name == "vllm:num_preemptions")
    groups = [_kinds(group.kv_cache_spec) for group in scheduler.kv_cache_config.kv_cache_groups]
    did = {"hits": hits, "evicted": sum(evicted), "preempted": preempted, "groups": groups}
    return did | {"answers": answers, "computed with": int(used[0]), "not computed with": int(used[1])}


class Record:
    """The ids that the kernels of an engine got: what each token was computed with, by the tokens up to it.

    It wraps what vLLM's routers return and looks at nothing of kvroute's. The same tokens computed twice, after an
    eviction for example, have two entries.
    """

    def __init__(self, llm: Any) -> None:
        core = llm.llm_engine.engine_core.engine_core
        layers = core.vllm_config.compilation_config.static_forward_context.values()
        self._routers = {each.layer_id: each.router for each in layers if hasattr(each, "router")}
        self._step = dict[int, Any]()
        self._seen = defaultdict[bytes, list[Any]](list)
        for layer, router in self._routers.items():
            router.select_experts = self._recorded(layer, router.select_experts)
        runner = core.model_executor.driver_worker.worker.model_runner
        self._execute, self._requests, self._runner = runner.execute_model, core.scheduler.requests, runner
        runner.execute_model = self._executed

    def _recorded(self, layer: int, select: Any) -> Any:
        def select_experts(*arguments: Any, **more: Any) -> Any:
            weights, ids = select(*arguments, **more)
            self._step[layer] = ids.clone()
            return weights, ids

        return select_experts

    def _executed(self, scheduled: Any, *arguments: Any) -> Any:
        """Run the model, and note what each scheduled token's layers chose."""
        first = {each.req_id: each.num_computed_tokens for each in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        first |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        done, at = self._execute(scheduled, *arguments), 0
        if scheduled.total_num_scheduled_tokens:
            layers = [self._step[layer].cpu().numpy() for layer in sorted(self._step)]
            chosen = np.stack(layers, axis=1)  # [T, layers, top_k]
            for name in self._runner.input_batch.req_ids:
                count, start = scheduled.num_scheduled_tokens[name], first[name]
                tokens = self._requests[name].all_token_ids[: start + count]
                for key, ids in zip(_prefixes(tokens)[start:], chosen[at : at + count], strict=True):
                    self._seen[key].append(np.sort(ids, axis=1))
                at += count
        return done

    def used(self, tokens: list[int], ids: NDArray[Any]) -> NDArray[np.int64]:
        """How many of these rows ``[tokens - 1, layers, top_k]`` a token was computed with, and how many not."""
        if ids.shape[1] > len(self._routers):
            ids = ids[:, sorted(self._routers)]
        for (
            router
        ) in self._routers.values():  # LongCat's kernels are given 0 in place of an expert that computes nothing
            if type(router).__name__ == "ZeroExpertRouter":
                ids = np.where(ids < router.num_logical_experts, ids, 0)
        rows = np.sort(ids, axis=2)
        keys = _prefixes(tokens[:-1])
        there = [(rows[at] >= 0).all() for at in range(len(keys))]
        same = [any(np.array_equal(rows[at], row) for row in self._seen[key]) for at, key in enumerate(keys)]
        return np.array([sum(same), sum(there) - sum(same)])


def _prefixes(tokens: list[int]) -> list[bytes]:
    """A name of the tokens up to each one."""
    running, names = xxhash.xxh3_128(), list[bytes]()
    for token in tokens:
        running.update(token.to_bytes(8, "little"))
        names.append(running.digest())
    return names


def answer_of(output: Any, number: int = 0) -> dict[str, Any]:
    """An answer of vLLM's, of round ``number``, with kvroute's rows if it has any."""
    from kvroute import RowError
    from kvroute.integrations.vllm import routes

    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    answer = {"round": number, "prompt": len(output.prompt_token_ids), "tokens": tokens}
    if output.outputs[0].routed_experts is not None:  # stock's flag: every layer, dense ones too
        return answer | {"ids": output.outputs[0].routed_experts.astype(np.int32)}
    if not output.kv_transfer_params:
        return answer
    try:
        rows = routes(output)
    except RowError as error:
        return answer | {"refused": str(error)}
    return answer | {"ids": rows.materialize(len(tokens) - 1, rows.layer_ids, missing="minus1")}


def _kinds(spec: Any) -> str:
    """A KV cache group in words."""
    specs = getattr(spec, "kv_cache_specs", None)
    kinds = dict.fromkeys(type(each).__name__.removesuffix("Spec") for each in (specs or {"": spec}).values())
    return " + ".join(kinds)


def judged(home: Path, answers: list[dict[str, Any]], dtype: str) -> dict[str, Any]:
    """The rows of these answers by verdict, and the first wrong one in words."""
    import torch

    from kvroute.routing import routing_spec_from_hf
    from kvroute.verify.asking import EngineAnswer
    from kvroute.verify.judging import judge
    from kvroute.verify.weights import NOISE, Weights

    home = home / JUDGED if (home / JUDGED).exists() else home
    spec = routing_spec_from_hf(home, block_tokens=1)
    weights = Weights(home, spec, NOISE[dtype], torch.float32)
    told = []
    for answer in answers:
        tokens = answer["tokens"]
        ids = answer.get("ids", np.full((len(tokens) - 1, *spec.row_shape), -1))
        ids = np.sort(ids.astype(np.int32), axis=2)
        told.append(
            EngineAnswer(f"round {answer['round']}", answer["prompt"], (*tokens,), ids, answer.get("refused", ""))
        )
    findings = judge(told, spec, weights)
    counts = {name: findings.of(verdict) for name, verdict in VERDICTS.items()}
    wrong = findings.shortest
    first = "" if wrong is None else f"{wrong.answer.kind}, position {wrong.position} of {wrong.answer.prompt} "
    first += "" if wrong is None else f"router {wrong.layer}: wanted {wrong.wanted}, got {wrong.got}: {wrong.fault}"
    return {**counts, "first wrong": first, "without rows": dict(findings.refused)}


DID = ("groups", "hits", "evicted", "preempted", "computed with", "not computed with")
SHORT = 170
"""Characters of an error in the table."""
VERDICTS = {"right": "right", "close": "unjudged", "missing": "missing", "wrong": "wrong"}


def run(name: str, home: Path, device: str, seconds: int, rounds: int) -> dict[str, Any]:
    """A family's line, as JSON."""
    log, family = home / "log", FAMILIES[name]
    sees = {"skip_tokenizer_init": True} if family.sees is None else {"language_model_only": True}
    options = OPTIONS | sees | dict(family.engine) | (ON_CUDA if device == "cuda" else {})
    home.mkdir()
    line: dict[str, Any] = {"family": name}
    made = apart(make, seconds, log, name, home)
    if "error" in made:
        return line | {"refused": _named(made, home), "by": "transformers"}
    stock: dict[str, Any] = {}
    if device == "cuda":
        stock = apart(answers_of, seconds, log, home, options | FLAG, rounds)
        if "value" in stock:
            line |= {f"stock's {what}": stock["value"][what] for what in ("computed with", "not computed with")}
        else:
            line["stock's flag"] = _named(stock, home)
    if "value" not in stock:
        stock = apart(answers_of, seconds, log, home, options, 1)
    if "error" in stock:
        return line | {"refused": _named(stock, home), "by": "vLLM"}
    settings = {"strict": True, "weights": "zoo", "weights_version": 0}
    transfer = {"kv_transfer_config": connector("KvrouteConnector", kvroute=settings)}
    ours = apart(answers_of, seconds, log, home, options | transfer, rounds)
    if "error" in ours:
        return line | {"refused": _named(ours, home), "by": "kvroute"}
    ours, stock = ours["value"], stock["value"]
    line |= {what: ours[what] for what in DID}
    line |= {"stock's groups": stock["groups"]}
    same = [a["tokens"] == b["tokens"] for a, b in zip(ours["answers"], stock["answers"], strict=False)]
    line |= {"answers": len(ours["answers"]), "stock's answers": len(same), "equal to stock's": sum(same)}
    verdict = apart(judged, seconds, log, home, ours["answers"], options["dtype"])
    return line | (verdict["value"] if "value" in verdict else {"refused": _named(verdict, home), "by": "the judge"})


def _named(outcome: Mapping[str, Any], home: Path) -> str:
    """Why a part ended, without the place of its files."""
    return str(outcome["error"]).replace(str(home), home.name)


def of_machines(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A line for each family, from the lines of several machines by their names: the first one that judged it, else
    the last refusal."""
    best = dict[str, dict[str, Any]]()
    for machine, lines in results.items():
        for line in lines:
            kept = best.get(line["family"])
            if kept is None or "refused" in kept:
                best[line["family"]] = {**line, "machine": machine}
    return [best[family] for family in FAMILIES if family in best]


def markdown(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of ``docs/vllm.md``."""
    head = ["family", "on", "KV cache groups", "right", "close", "as vLLM's kernels", "missing", "wrong", "refused"]
    table = [head, ["---"] * len(head)]
    for line in lines:
        cells = [line["family"], line.get("machine", ""), "; ".join(line.get("groups", []))]
        if "refused" in line:
            by_record = ["", ""]
            if "computed with" in line:  # the pass of transformers failed
                by_record = [f"{line['computed with']:,}", f"{line['not computed with']:,}"]
            cells += ["", "", by_record[0], "", by_record[1], f"{line['by']}: {short(line['refused'])}"]
        else:
            wrong = line["not computed with"]
            judged = line["right"], line["close"], max(0, line["wrong"] - wrong), line["missing"], wrong
            cells += [*(f"{count:,}" for count in judged), ""]
        table.append(cells)
    return ["| " + " | ".join(cells) + " |" for cells in table]


def short(message: str) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in message.splitlines()]
    said = next((line for line in lines if line.startswith("Value error, ")), lines[0])
    said = said.removeprefix("Value error, ").partition(" [type=")[0].replace("|", "/").replace("`", "'")
    return said if len(said) <= SHORT else said[: SHORT - 3] + "..."


def own_flag(home: Path, seconds: int) -> str:
    """What stock vLLM says to its own flag here."""
    home.mkdir()
    apart(make, seconds, home / "log", "qwen3_moe", home)
    options = OPTIONS | FLAG
    return str(apart(answers_of, seconds, home / "log", home, options, 1).get("error", "taken"))


def main() -> None:
    args = asked(
        *(__doc__, 3),
        device=("cpu", "cpu or cuda"),
        together=(1, "families at once"),
        families=(str, "separated by commas, by default all; a file of --json keeps the lines of the others"),
        seconds=(180, "limit of each part of a family's run"),
    )
    os.environ.update(ENVIRONMENT[args.device], VLLM_ENABLE_V1_MULTIPROCESSING="0")
    import torch
    import transformers
    import vllm
    from vllm.model_executor.models import registry  # type: ignore[import-not-found]

    registry._run_in_subprocess = inspected  # each part is a process of its own already
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    gc.freeze()
    names = args.families.split(",") if args.families else list(FAMILIES)
    lines = _earlier(args.json)
    versions = {package.__name__: package.__version__ for package in (vllm, transformers, torch)}
    with tempfile.TemporaryDirectory(prefix="kvroute-zoo-") as place, ThreadPoolExecutor(args.together) as families:
        refusal = "" if args.device == "cuda" else own_flag(Path(place, "flag"), args.seconds)
        print(f"stock vLLM {vllm.__version__}, enable_return_routed_experts: {refusal}", flush=True)
        limits = args.device, args.seconds, args.rounds
        running = [families.submit(run, name, Path(place, name), *limits) for name in names]
        for ended in as_completed(running):
            line = ended.result()
            lines[line["family"]] = line
            print(json.dumps(line), flush=True)
            shutil.rmtree(Path(place, line["family"]))
            ordered = [lines[name] for name in FAMILIES if name in lines]
            write_json(args.json, versions=versions, own_flag=refusal, families=ordered)
    print("\n" + "\n".join(markdown(ordered)))


def _earlier(path: Path | None) -> dict[str, Any]:
    """The lines that a file of results has already, by family."""
    return (
        {} if path is None or not path.exists() else {x["family"]: x for x in json.loads(path.read_text())["families"]}
    )


if __name__ == "__main__":
    main()

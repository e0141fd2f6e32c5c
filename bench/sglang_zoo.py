"""Inside SGLang on a CPU: of which families of Mixture-of-Experts is every row right?

The tiny checkpoint of each family of :mod:`bench.vllm_families` is asked prompts in SGLang with kvroute. Prompts begin
alike, are computed in chunks, hit the prefix cache in the rounds after the first, and the pool is too small for all
requests. ``kvroute.verify`` judges each row of SGLang's own field by a pass of transformers: *close* are rows that
differ where a router's choice may have been decided by rounding. Where SGLang computes another model than transformers,
that judge says nothing of the rows: so the table has how many sampled tokens transformers would have said, too, and a
second judge, :func:`recording`, compares each row with what SGLang's own experts were given for that token at that
position; with ``KVROUTE_SGLANG='{"routing_weights": true}'`` the bits of weights, too. Where SGLang with kvroute does
not start, stock SGLang is asked to, and the table says whose refusal it is.

Each part of a family's run is a process with a limit of ``--seconds``, forked from one that has imported everything,
with the plugins of ``docs/sglang.md#on-a-cpu``.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import tempfile
from base64 import b64decode
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import asked, write_json
from bench.vllm_families import FAMILIES, make
from bench.vllm_models import VOCABULARY
from bench.vllm_zoo import HEAD, NEW, PROMPTS, TOKENS_MAX, VERDICTS, apart, judged, short

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "enable_return_routed_experts": True,
    "log_level": "error",
    "page_size": 16,
    "max_total_tokens": 1024,
    "max_running_requests": 8,
    "chunked_prefill_size": 128,
    "context_length": 320,
}


STATES = {
    "page_size": 1,
    "disable_overlap_schedule": True,
    "mamba_radix_cache_strategy": "no_buffer",
    "max_mamba_cache_size": 16,
}
"""With which SGLang keeps states where there is no GPU."""
OPTIONS_OF: dict[str, dict[str, Any]] = dict.fromkeys(
    ("granitemoehybrid", "kimi_linear", "lfm2_moe", "nemotron_h", "qwen3_5_moe_text", "qwen3_next"), STATES
)
"""Further options of a family."""

ALSO: dict[str, dict[str, Any]] = {
    "hunyuan_v1_moe": {"use_mixed_mlp_moe": True},
    "qwen3_next": {"full_attention_interval": 4},
}
"""What SGLang reads of a family's ``config.json``, and transformers does not write."""

RECORD = ("computed with", "not computed with")


def recording(path: Path) -> None:
    """From here on, passes of engines that this process forks write to ``path`` what their experts were given.

    Nothing of kvroute's is looked at, and nothing of it is between this and the kernel. A pass is its tokens, their
    positions, ids ``[tokens, layers, top_k]``, and the bits of their weights.
    """
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE  # type: ignore[import-not-found]
    from sglang.srt.model_executor.model_runner import ModelRunner  # type: ignore[import-not-found]

    layers, experts, forward = dict[int, Any](), FusedMoE.run_moe_core, ModelRunner.forward

    @wraps(experts)
    def given(self: Any, dispatch_output: Any, *more: Any, **named: Any) -> Any:
        choice = dispatch_output.topk_output
        weights = choice.topk_weights.float().cpu().numpy().view(np.int32)
        layers[self.layer_id] = np.stack([choice.topk_ids.cpu().numpy(), weights])
        return experts(self, dispatch_output, *more, **named)

    @wraps(forward)
    def passed(self: Any, batch: Any, *more: Any, **named: Any) -> Any:
        layers.clear()
        done = forward(self, batch, *more, **named)
        if layers:
            ids, weights = np.stack([layers[layer] for layer in sorted(layers)], axis=2)
            columns = batch.input_ids.tolist(), batch.positions.tolist(), ids.tolist(), weights.tolist()
            with path.open("a") as file:
                file.write(json.dumps([sorted(layers), *columns]) + "\n")
        return done

    FusedMoE.run_moe_core, ModelRunner.forward = given, passed


def row_bytes(ids: Any, weights: Any) -> bytes:
    """The ids ``[layers, top_k]`` of a row and the bits of their weights, or zeros, in the order of the ids."""
    order = np.argsort(ids, axis=1, kind="stable")
    both = [np.take_along_axis(np.asarray(part, np.int32), order, 1) for part in (ids, weights)]
    return np.stack(both).tobytes()


def computed_with(path: Path, answers: list[dict[str, Any]], routed: list[int]) -> tuple[int, int]:
    """How many rows, of the ``routed`` layers, are of ids that SGLang's experts were given for this token at this
    position, and how many are not; where answers have weights, of these ids with these weights."""
    seen = defaultdict[tuple[int, int], set[bytes]](set)
    with path.open() as file:
        for line in file:
            layers, *columns = json.loads(line)
            places = [layers.index(layer) for layer in routed]
            for token, position, row, bits in zip(*columns, strict=False):  # ids may be padded
                chosen = np.array(row, np.int32)[places]
                counted = np.array(bits, np.int32)[places] if "weights" in answers[0] else np.zeros_like(chosen)
                seen[token, position].add(row_bytes(chosen, counted))
    there = others = 0
    for answer in answers:
        counted = answer.get("weights", np.zeros_like(answer["ids"]))
        for position, row in enumerate(answer["ids"].astype(np.int32)):
            if (row < 0).any():
                continue
            is_there = row_bytes(row, counted[position]) in seen[answer["tokens"][position], position]
            there, others = there + is_there, others + (not is_there)
    return there, others


def answers_of(home: Path, plugins: str, rounds: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Ask an engine ``rounds`` times: its answers, as :func:`bench.vllm_zoo.judged` takes them, and its prefix hits."""
    os.environ["SGLANG_PLUGINS"] = plugins
    recording(home / "record")
    import sglang  # type: ignore[import-not-found]

    from kvroute.integrations.sglang import routing_weights
    from kvroute.routing import routing_spec_from_hf

    weighted = json.loads(os.environ["KVROUTE_SGLANG"]).get("routing_weights", False) and "kvroute" in plugins
    spec = routing_spec_from_hf(home, block_tokens=1)
    layers, routed = spec.attrs["num_layers"], list(spec.attrs["layer_ids"])
    rng = np.random.default_rng(0)
    head = rng.integers(5, VOCABULARY, HEAD).tolist()
    first = [[*head, *rng.integers(5, VOCABULARY, n).tolist()] for n in rng.integers(3, 150, PROMPTS)]
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    prompts, answers, hits = first, list[dict[str, Any]](), 0
    with sglang.Engine(model_path=str(home), **{**OPTIONS, **options}) as engine:
        for number in range(rounds):
            outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_routed_experts=True)
            for prompt, output in zip(prompts, outputs, strict=True):
                tokens, meta = [*prompt, *output["output_ids"]], output["meta_info"]
                field = np.frombuffer(b64decode(meta["routed_experts"]), np.int32).reshape(len(tokens) - 1, layers, -1)
                answers.append({"round": number, "prompt": len(prompt), "tokens": tokens, "ids": field[:, routed]})
                if weighted:
                    found = routing_weights(output)
                    ids = np.where(found.routes.known[:, :, None], found.routes.ids.astype(np.int32), -1)
                    answers[-1] |= {"ids": ids, "weights": found.weights.view(np.int32)}
                hits += meta["cached_tokens"] or 0
            turns = [[*answer["tokens"], *rng.integers(5, VOCABULARY, 9).tolist()] for answer in answers[-PROMPTS::2]]
            prompts = [turn for turn in turns if len(turn) <= TOKENS_MAX] + first[1::2]
    there, others = computed_with(home / "record", answers, routed)
    return {"hits": hits, "answers": answers, "computed with": there, "not computed with": others}


def said(home: Path, answers: list[dict[str, Any]]) -> int:
    """How many of the answers' sampled tokens transformers would have said at their places."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).eval()
    same = 0
    for answer in answers:
        tokens = torch.tensor([answer["tokens"]])
        with torch.no_grad():
            likely = model(tokens).logits[0, answer["prompt"] - 1 : -1].argmax(-1)
        same += int((likely == tokens[0, answer["prompt"] :]).sum())
    return same


def run(name: str, home: Path, seconds: int, rounds: int) -> dict[str, Any]:
    """A family's line, as JSON."""
    log = home / "log"
    line: dict[str, Any] = {"family": name}
    home.mkdir()
    made = apart(make, seconds, log, name, home)
    if "error" in made:
        return line | {"refused": made["error"], "by": "transformers"}
    configuration = home / "config.json"
    configuration.write_text(json.dumps({**json.loads(configuration.read_text()), **ALSO.get(name, {})}))
    options = OPTIONS_OF.get(name, {})
    ours = apart(answers_of, seconds, log, home, "kvroute,cpu", rounds, options)
    if "error" in ours:
        stock = apart(answers_of, seconds, log, home, "cpu", 1, options)
        return line | {"refused": reason(log, ours), "by": "SGLang" if "error" in stock else "kvroute"}
    answers = ours["value"]["answers"]
    line |= {"answers": len(answers), "hits": ours["value"]["hits"], "sampled": NEW * len(answers)}
    line |= {name: ours["value"][name] for name in RECORD}
    line["as transformers"] = apart(said, seconds, log, home, answers).get("value")
    verdict = apart(judged, seconds, log, home, answers, OPTIONS["dtype"])
    return line | (verdict["value"] if "value" in verdict else {"refused": verdict["error"], "by": "the judge"})


def reason(log: Path, outcome: Mapping[str, Any]) -> str:
    """The last error of a scheduler, which ends its engine and says no more to it."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "NotImplementedError"))]
    return errors[0].replace(str(log.parent), log.parent.name) if errors else str(outcome["error"])


def markdown(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["family", "answers", "tokens hit", "sampled", "as transformers", *VERDICTS, *RECORD, "refused"]
    table = [head, ["---"] * len(head)]
    for line in lines:
        names = ("answers", "hits", "sampled", "as transformers", *VERDICTS, *RECORD)
        counts = [f"{line[name]:,}" if line.get(name) is not None else "" for name in names]
        refused = f"{line['by']}: {short(line['refused'])}" if "refused" in line else ""
        table.append([line["family"], *counts, refused])
    return ["| " + " | ".join(cells) + " |" for cells in table]


def main() -> None:
    args = asked(
        *(__doc__, 3),
        families=(str, "separated by commas, by default all; a file of --json keeps the lines of the others"),
        seconds=(180, "limit of each part of a family's run"),
    )
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"
    os.environ.setdefault("KVROUTE_SGLANG", json.dumps({"strict": True}))
    import sglang
    import sglang.srt.entrypoints.engine  # type: ignore[import-not-found]
    import sglang.srt.managers.detokenizer_manager  # type: ignore[import-not-found]
    import sglang.srt.managers.scheduler  # type: ignore[import-not-found]
    import torch
    import transformers

    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang would spawn
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    gc.freeze()
    names = args.families.split(",") if args.families else list(FAMILIES)
    earlier = json.loads(args.json.read_text())["families"] if args.json is not None and args.json.exists() else []
    lines = {line["family"]: line for line in earlier}
    versions = {package.__name__: package.__version__ for package in (sglang, transformers, torch)}
    with tempfile.TemporaryDirectory(prefix="kvroute-zoo-") as place:
        for name in names:
            lines[name] = run(name, Path(place, name), args.seconds, args.rounds)
            print(json.dumps(lines[name]), flush=True)
            shutil.rmtree(Path(place, name))
            ordered = [lines[name] for name in FAMILIES if name in lines]
            write_json(args.json, versions=versions, families=ordered)
    print("\n" + "\n".join(markdown(ordered)))


if __name__ == "__main__":
    main()

"""Inside vLLM on a GPU: is every sampling support what the sampler drew from, and what do supports cost?

An engine with kvroute and ``return_sampling_mask`` answers scenarios: plain, prefix hits, several completions, min-p,
top-k of one, preemption, a second turn. Transformers' float32 logits of the same tokens on the same GPU judge each
support, and the log probability over it; routes that came with the answers are judged, too. A support is *close* where
float32 itself does not say which ids are in it.

``--what speed`` compares tokens a second, in turns: without supports, with vLLM's own, and with kvroute beside them. No
code of kvroute runs in the engine for supports, so the third is the second with routes.

Needs vLLM 0.30 or later in the Python that runs it, with this checkout.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.drawn_from import judged
from bench.harness import Table, asked, want_gpu, write_json
from bench.vllm_models import VOCABULARY, Judge, build, shape
from bench.vllm_peers import connector
from kvroute import Routes
from kvroute.integrations.vllm import routes, support

SAMPLING: Final[dict[str, Any]] = {"temperature": 0.5, "top_k": 12, "top_p": 0.6, "logprobs": 0}
NEW: Final = 12
LONG: Final = 48
CLOSE: Final = 0.1  # the logits of a router vary by about 5
Ask = Callable[[Sequence[Sequence[int]], int, dict[str, Any]], list[Any]]


def answers_of(output: Any, sampling: dict[str, Any]) -> list[dict[str, Any]]:
    """Each completion of vLLM's ``output`` as plain values: its tokens, supports and log probabilities; and a record
    with its routes and its supports, as hexadecimal digits."""
    found = []
    for completion in output.outputs:
        drawn = support(output, completion.index)
        chosen = zip(completion.token_ids, completion.logprobs, strict=True)
        found.append(
            {
                "prompt": list(output.prompt_token_ids),
                "tokens": list(completion.token_ids),
                "start": drawn.start,
                "counts": drawn.counts.tolist(),
                "ids": drawn.ids.tolist(),
                "logprobs": [by_token[token].logprob for token, by_token in chosen],
                "cached": output.num_cached_tokens,
                "sampling": sampling,
                "record": routes(output, completion.index).to_bytes(drawn).hex(),
            }
        )
    return found


def scenarios(ask: Ask, preemptions: Callable[[], int], vocabulary: int) -> dict[str, Any]:
    """Answers by scenario, and under ``preemptions`` how often a request lost its blocks amid one of them."""
    random = np.random.default_rng(3)
    found = dict[str, Any]()

    def prompts(*lengths: int) -> list[list[int]]:
        return [random.integers(5, vocabulary, n).tolist() for n in lengths]

    def run(scenario: str, given: Sequence[Sequence[int]], new: int = NEW, **more: Any) -> list[dict[str, Any]]:
        sampling = {**SAMPLING, "seed": len(found), **more}
        outputs = ask(given, new, sampling)
        answers = [answer for output in outputs for answer in answers_of(output, sampling)]
        found[scenario] = answers
        return answers

    first = prompts(40, 70, 33)
    run("plain", first)
    run("prefix hits", first)
    run("n = 2", first[:1], n=2)
    run("min-p", first[1:], top_p=1.0, min_p=0.3)
    run("top-k of one", first[1:], top_k=1)
    before = preemptions()
    run("preempted", prompts(60, 60, 60, 60), LONG)
    amid = preemptions() - before
    (turn,) = run("a first turn", prompts(50))
    run("a second turn", [[*turn["prompt"], *turn["tokens"], 7, 8, 9]])
    found["preemptions"] = amid
    return found


def engine(home: Path, **more: Any) -> Any:
    from vllm import LLM  # type: ignore[import-not-found]

    config = connector("KvrouteConnector", kvroute={"strict": True, "weights": "seeded"})
    options: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 32,
        "max_num_seqs": 4,
        "max_model_len": 256,
        "gpu_memory_utilization": 0.1,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "logprobs_mode": "processed_logprobs",
        "return_sampling_mask": True,
        "kv_transfer_config": config,
    }
    return LLM(str(home), **options | more)


def asking(llm: Any) -> Ask:
    from vllm import SamplingParams

    def ask(given: Sequence[Sequence[int]], new: int, sampling: dict[str, Any]) -> list[Any]:
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in given]
        parameters = SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False, **sampling)
        outputs: list[Any] = llm.generate(prompts, parameters, use_tqdm=False)
        return outputs

    return ask


def preempted(llm: Any) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def rows() -> Table:
    """Judge the answers of engines in graphs and without."""
    names = ["scenario", "tokens", "supports right", "wrong", "close", "error of log prob."]
    table = Table(
        f"sampling supports of vLLM on {torch.cuda.get_device_name()}, judged by transformers in float32",
        ["engine", *names, "rows right", "missing", "wrong", "close", "tokens hit"],
    )
    with tempfile.TemporaryDirectory(prefix="kvroute-support-") as folder:
        home = Path(folder, "model")
        build(home, "qwen3", torch.float32)
        judge = Judge(home, CLOSE, "cuda")
        model: Any = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32).to("cuda").eval()
        for name, more in {"graphs": {}, "eager": {"enforce_eager": True}}.items():
            llm = engine(home, num_gpu_blocks_override=11, **more)
            found = scenarios(asking(llm), partial(preempted, llm), VOCABULARY)
            print(name, "preemptions:", found.pop("preemptions"))
            del llm
            for scenario, answers in found.items():
                counts, worst = np.zeros(8, np.int64), 0.0
                for answer in answers:
                    right, wrong, error = judged(model, answer)
                    tokens = [*answer["prompt"], *answer["tokens"]]
                    own_routes = Routes.from_bytes(bytes.fromhex(answer["record"]))
                    drawn = len(answer["tokens"])
                    counts += [drawn, right, wrong, drawn - right - wrong, *of_rows(judge, tokens, own_routes)]
                    worst = max(worst, error)
                told = counts.tolist()
                hit = sum(answer["cached"] or 0 for answer in answers)
                table.row(name, scenario, *map(str, told[:4]), f"{worst:.1e}", *map(str, told[4:]), str(hit))
    table.print()
    return table


def of_rows(judge: Judge, tokens: list[int], own_routes: Routes) -> list[int]:
    """How many rows are right, missing, wrong, and different at a close choice."""
    wanted, apart = judge.chosen(tokens)
    rows = len(own_routes)
    same = (np.sort(own_routes.ids.astype(np.int64), -1) == wanted[:rows]).all((1, 2))
    others, close = own_routes.valid & ~same, apart[:rows] < CLOSE
    right = int((own_routes.valid & same).sum())
    return [
        right,
        len(tokens) - 1 - int(own_routes.valid.sum()),
        int((others & ~close).sum()),
        int((others & close).sum()),
    ]


def speed(batch: int, new: int, rounds: int) -> dict[str, list[float]]:
    """Tokens a second of engines that take turns."""
    kinds: dict[str, dict[str, Any]] = {
        "no supports": {"return_sampling_mask": False, "kv_transfer_config": None},
        "vLLM's supports": {"kv_transfer_config": None},
        "supports, and kvroute's routes": {},
    }
    random, found = np.random.default_rng(0), {name: list[float]() for name in kinds}
    with tempfile.TemporaryDirectory(prefix="kvroute-support-") as folder:
        shape(home := Path(folder, "model"), 20)
        more = {"dtype": "bfloat16", "load_format": "dummy", "max_num_seqs": batch, "max_model_len": 1024}
        more |= {"kv_cache_memory_bytes": 4 << 30}
        asks = {name: asking(engine(home, **more | options)) for name, options in kinds.items()}
        for turn in range(rounds + 1):
            prompts = [random.integers(5, VOCABULARY, 64).tolist() for _ in range(batch)]
            for name, ask in asks.items():
                begun_s = time.perf_counter()
                ask(prompts, new, {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": turn})
                if turn:  # the first warms up
                    found[name].append(batch * new / (time.perf_counter() - begun_s))
    table = Table(
        f"tokens a second, {batch} sequences of 64 + {new} tokens, 20 layers, {torch.cuda.get_device_name()}",
        ["engine", "tokens/s", "of no supports, median of rounds"],
    )
    base = np.array(found["no supports"])
    for name, rates in found.items():
        table.row(name, f"{np.median(rates):,.0f}", f"{np.median(np.array(rates) / base):.3f}")
    table.print()
    return found


def main() -> None:
    args = asked(
        *(__doc__, 5), what=("rows", "rows or speed"), batch=(64, "of speed: sequences"), new=(128, "of speed: tokens")
    )
    want_gpu()
    if args.what == "rows":
        judged = rows()
        write_json(args.json, columns=judged.columns, rows=judged.rows)
    else:
        write_json(args.json, rates=speed(args.batch, args.new, args.rounds))


if __name__ == "__main__":
    main()

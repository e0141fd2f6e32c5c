"""SGLang on a GPU, stock and with kvroute: which rows belong to the KV, and how many tokens a second?

``--what rows``, the default: a seeded Qwen3-MoE in bfloat16, and a pool that is too small, so that KV goes away and
comes back: in stock SGLang and with kvroute by pages on the host (HiCache), with kvroute's linker by its store. All
engines are asked the same, twice, in another order. There are two judges.

* The engine itself. The rows of tokens that it computes are recorded under the tokens up to there. A row of a token
  found in a cache is right if it is one of those recorded, byte for byte.
* Transformers, in float32. An engine in bfloat16 rounds; where a choice was close, it and those of the layers behind
  may differ. So the table says which part of the layers agree, in computed rows and in cached ones. Rows of other
  tokens agree in almost none.

``--what speed``: engines of Qwen3-30B-A3B's shape with random weights, stock and with kvroute, take turns on one GPU,
both with pages on the host. The answers of a round end together, or apart. Ratios are to stock SGLang in the same
round.
"""

from __future__ import annotations

import base64
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import vllm_models
from bench.engines import PROMPT, Engine, Rates, in_turns
from bench.harness import Table, asked, want_gpu, write_json
from bench.sglang_speed import CPU, OURS, POOL, STOCK, started
from bench.vllm_models import TOP_K, VOCABULARY, build_qwen3, shape

NEW = 16
LINKED = "with kvroute's linker"
GPU = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "moe_runner_backend": "triton",
    "dtype": "bfloat16",
    "mem_fraction_static": 0.85,  # engines that start at once count one another's memory; the pool is limited below
    "cuda_graph_max_bs_decode": 64,
    "disable_prefill_cuda_graph": True,
}
HOST = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 8.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_write_policy": "write_through",
}


def linker(store: Path) -> dict[str, Any]:
    """Options of an engine whose KV and rows go to a store of kvroute."""
    named = {"linker": "KvrouteLinker", "linker_module_path": "kvroute.integrations.sglang"}
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {**named, "linker_extra_config": {"store": f"file://{store}"}},
    }


class Judged:
    """An engine, and the verdicts on its rows."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.count = engine, Counter[str]()
        self._computed: defaultdict[bytes, set[bytes]] = defaultdict(set)  # by the hash of all tokens up to there
        self._answers: list[tuple[list[int], NDArray[np.int32], int]] = []  # tokens, rows, how many were cached

    def ask(self, prompts: list[list[int]]) -> None:
        """Ask for answers; the rows of tokens that were found in a cache are judged by those of computed ones."""
        cached = list[tuple[bytes, Any]]()
        answers = self.engine.ask({"prompts": prompts, "tokens": NEW, "rows": True})["answers"]
        for prompt, (said, field, hit, by_tier) in zip(prompts, answers, strict=True):
            tokens, hashed = [*prompt, *said][:-1], blake2b()
            rows = np.frombuffer(base64.b64decode(field), np.int32).reshape(len(tokens), -1, TOP_K)
            for at, (token, row) in enumerate(zip(tokens, rows, strict=True)):
                hashed.update(token.to_bytes(4, "little"))
                if at < hit:
                    cached.append((hashed.digest(), row))
                else:
                    self._computed[hashed.digest()].add(row.tobytes())
            self.count["computed"] += len(tokens) - hit
            self.count["loaded"] += sum(
                n for tier, n in (by_tier or {}).items() if tier != "device" and isinstance(n, int)
            )
            self._answers.append((tokens, rows, hit))
        for key, row in cached:
            right = row.tobytes() in self._computed[key]
            self.count["right" if right else "missing" if (row < 0).any() else "wrong"] += 1

    def judge(self, judge: vllm_models.Judge, every: int) -> None:
        """Compare every so many answers with transformers, layer by layer."""
        for tokens, rows, hit in self._answers[::every]:
            wanted, _ = judge.chosen(tokens)
            same: NDArray[np.bool_] = np.all(np.sort(rows, -1) == wanted, axis=-1)
            known: NDArray[np.bool_] = np.all(rows >= 0, axis=(1, 2))
            for kind, part in {"cached": slice(hit), "computed": slice(hit, None)}.items():
                told = same[part][known[part]]
                self.count[f"layers, {kind}"] += told.size
                self.count[f"layers as transformers, {kind}"] += int(told.sum())

    def agrees(self, kind: str) -> str:
        """Which part of the layers of these rows are transformers'."""
        return f"{self.count[f'layers as transformers, {kind}'] / max(1, self.count[f'layers, {kind}']):.3f}"


def prompts_of(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Prompts of 64 to 320 tokens, with a dozen common heads."""
    heads = [rng.integers(3, VOCABULARY, rng.integers(32, 160)).tolist() for _ in range(12)]
    tails = [rng.integers(3, VOCABULARY, rng.integers(32, 160)).tolist() for _ in range(count)]
    return [heads[at % len(heads)] + tail for at, tail in enumerate(tails)]


def rows(
    home: Path, stack: ExitStack, device: str, width: int, pool: int, count: int, every: int, *, linked: bool
) -> dict[str, Judged]:
    """Ask all engines twice for ``count`` answers, and judge the rows."""
    begun = time.monotonic()
    build_qwen3(model := home / "model", width=width, head_dim=64)  # SGLang's rotary kernel has no 32
    common = POOL | (GPU if device == "cuda" else CPU)
    common |= {"model_path": str(model), "max_total_tokens": pool}
    options = {STOCK: common | HOST, OURS: common | HOST}
    if linked:
        options[LINKED] = common | linker(home / "store")
    judged = {name: Judged(engine) for name, engine in started(stack, home, options).items()}
    print(f"all have started after {time.monotonic() - begun:.0f} s", flush=True)
    rng = np.random.default_rng(0)
    prompts = prompts_of(rng, count)
    for order in np.arange(count), rng.permutation(count):
        for at in range(0, count, 20):
            for each in judged.values():
                each.ask([prompts[i] for i in order[at : at + 20]])
    print(f"all have answered after {time.monotonic() - begun:.0f} s", flush=True)
    judge = vllm_models.Judge(model, device=device)
    columns = ["right", "wrong", "missing", "loaded", "as transformers", "computed", "as transformers"]
    table = Table("rows of cached tokens, and of computed ones", ["engine", *columns])
    for name, each in judged.items():
        each.judge(judge, every)
        cached = [str(each.count[kind]) for kind in ("right", "wrong", "missing", "loaded")]
        table.row(name, *cached, each.agrees("cached"), str(each.count["computed"]), each.agrees("computed"))
    table.print()
    return judged


def speed(
    home: Path, stack: ExitStack, layers: int, sequences: Sequence[int], new: int, rounds: int, until: float
) -> dict[str, Rates]:
    """Engines that take turns, both in memory at once."""
    shape(model := home / "model", layers)
    most, longest = max(sequences), PROMPT + new + new // 2
    common = POOL | HOST | GPU | {"model_path": str(model), "load_format": "dummy", "hicache_ratio": 2.0}
    common |= {"max_running_requests": most, "cuda_graph_max_bs_decode": most, "max_total_tokens": 2 * most * longest}
    engines = started(stack, home, dict.fromkeys((STOCK, OURS), common))
    print("both have started", flush=True)
    title = f"SGLang on a GPU, {layers} layers, {new} tokens"
    return in_turns(title, engines, sequences, new, rounds, until, words=150_000, ends=("together", "apart"))


def main() -> None:
    begun = time.monotonic()
    args = asked(
        *(__doc__, 8),
        what=("rows", "rows or speed"),
        device=("cuda", "cpu: rows alone, for tests of this bench"),
        prompts=(300, "of rows: asked for twice, in another order"),
        pool=(16384, "of rows: tokens on the device"),
        width=(8, "of rows: of the model; 420 M weights"),
        without_linker=(False, "of rows: no engine with kvroute's linker"),
        every=(4, "of rows: transformers judges one answer of so many"),
        layers=(20, "of speed: 12.6 B weights"),
        sequences=([16, 64, 256], "of speed: that run at once"),
        new=(128, "of speed: tokens of each"),
        seconds=(400, "of speed: no round begins so long after the start"),
    )
    if args.device == "cuda" or args.what == "speed":
        want_gpu()
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        home = Path(made)
        if args.what == "speed":
            until = begun + args.seconds
            rates = speed(home, stack, args.layers, args.sequences, args.new, args.rounds, until)
            write_json(args.json, rates=rates)
            return
        of_rows = args.device, args.width, args.pool, args.prompts, args.every
        judged = rows(home, stack, *of_rows, linked=not args.without_linker)
    write_json(args.json, rows={name: each.count for name, each in judged.items()})
    for name in judged.keys() - {STOCK}:
        assert judged[name].count["right"], f"{name}: no row was judged"
        assert not judged[name].count["wrong"], f"{name}: {judged[name].count['wrong']} rows are wrong"
    assert all(each.count["loaded"] for each in judged.values()), "nothing was evicted"


if __name__ == "__main__":
    main()

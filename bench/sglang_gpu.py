"""SGLang on a GPU, stock and with kvroute: which rows belong to the KV, and how many tokens a second?

A seeded Qwen3-MoE in bfloat16; KV that does not fit goes to pages on the host and comes back (HiCache). Both engines
live on one GPU and take turns.

Rows are judged by the engine itself: the rows of tokens that it computes are recorded under the tokens up to there. A
row of a token found in a cache is right if it is one of those recorded. Rows computed without a cache, one prompt at a
time, are compared with stock SGLang's.
"""

from __future__ import annotations

import base64
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.engines import Engine, in_turns, table_of
from bench.harness import Table, asked, write_json
from bench.sglang_speed import CPU, OURS, POOL, STOCK, started
from bench.vllm_models import TOP_K, VOCABULARY, build_qwen3

NEW = 16
GPU = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "moe_runner_backend": "triton",
    "dtype": "bfloat16",
    "mem_fraction_static": 0.2,
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


class Judge:
    """The judge of one engine's rows."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.count = engine, Counter[str]()
        self._computed: defaultdict[bytes, set[bytes]] = defaultdict(set)  # by the hash of all tokens up to there

    def ask(self, prompts: list[list[int]]) -> list[NDArray[np.int32]]:
        """The rows int32 ``[tokens, layers, top_k]`` of prompts and answers; rows from caches are judged."""
        found, cached = [], list[tuple[bytes, Any]]()
        answers = self.engine.ask({"prompts": prompts, "tokens": NEW, "rows": True})["answers"]
        for prompt, (said, field, hit, by_tier) in zip(prompts, answers, strict=True):
            tokens, hashed = [*prompt, *said][:-1], blake2b()
            found.append(np.frombuffer(base64.b64decode(field), np.int32).reshape(len(tokens), -1, TOP_K))
            for at, (token, row) in enumerate(zip(tokens, found[-1], strict=True)):
                hashed.update(token.to_bytes(4, "little"))
                if at < hit:
                    cached.append((hashed.digest(), row))
                else:
                    self._computed[hashed.digest()].add(row.tobytes())
            self.count["computed"] += len(tokens) - hit
            self.count["from the host"] += (by_tier or {}).get("host") or 0
        for key, row in cached:
            right = row.tobytes() in self._computed[key]
            self.count["right" if right else "missing" if (row < 0).any() else "wrong"] += 1
        return found


def prompts_of(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Prompts of 64 to 320 tokens, with a dozen common heads."""
    heads = [rng.integers(3, VOCABULARY, rng.integers(32, 160)).tolist() for _ in range(12)]
    tails = [rng.integers(3, VOCABULARY, rng.integers(32, 160)).tolist() for _ in range(count)]
    return [heads[at % len(heads)] + tail for at, tail in enumerate(tails)]


def main() -> None:
    args = asked(
        *(__doc__, 5),
        device=("cuda", "cpu: for tests of this bench"),
        prompts=(300, "that are asked for twice, in another order"),
        pool=(16384, "tokens on the device"),
        width=(8, "of the model: 420 M weights"),
        sequences=([16, 64], "that run at once while they are timed"),
        new=(128, "tokens of each, then"),
    )
    begun, options = time.monotonic(), POOL | HOST | (GPU if args.device == "cuda" else CPU)
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        build_qwen3(model := Path(home) / "model", width=args.width, head_dim=64)  # SGLang's rotary kernel has no 32
        engines = started(stack, Path(home), options | {"model_path": str(model), "max_total_tokens": args.pool})
        print(f"both have started after {time.monotonic() - begun:.0f} s", flush=True)
        rng = np.random.default_rng(0)
        judges, alone = {name: Judge(engine) for name, engine in engines.items()}, prompts_of(rng, 12)
        first = {name: [rows for each in alone for rows in judge.ask([each])] for name, judge in judges.items()}
        same = [(a[: len(p)] == b[: len(p)]).all((1, 2)) for p, a, b in zip(alone, *first.values(), strict=True)]
        print(f"computed alone: {sum(map(np.sum, same))} of {sum(map(len, same))} rows are stock SGLang's", flush=True)
        prompts = prompts_of(rng, args.prompts)
        for order in np.arange(len(prompts)), rng.permutation(len(prompts)):
            for at in range(0, len(prompts), 20):
                for judge in judges.values():
                    judge.ask([prompts[i] for i in order[at : at + 20]])
        columns = ["right", "wrong", "missing", "computed", "from the host"]
        table = Table("rows of tokens that were found in a cache", ["engine", *columns])
        for name, judge in judges.items():
            table.row(name, *(str(judge.count[column]) for column in columns))
        table.print()
        found = {count: in_turns(engines, count, args.new, args.rounds, begun + 140) for count in args.sequences}
    table_of(f"tokens/s on a GPU, {args.new} tokens", found).print()
    write_json(args.json, rows={name: judge.count for name, judge in judges.items()}, rates=found)
    assert judges[OURS].count["right"], "no row was judged"
    assert not judges[OURS].count["wrong"], f"{judges[OURS].count['wrong']} rows are wrong"
    assert judges[STOCK].count["from the host"], "nothing was evicted"


if __name__ == "__main__":
    main()

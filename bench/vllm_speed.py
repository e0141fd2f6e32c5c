"""What does each part of a step inside vLLM cost?

A small seeded Qwen3-MoE on a CPU decodes 8 and 64 sequences, or as many as asked. Two engines take turns while the
other is stopped: kvroute with a store of rows (files) and the witness of every full block, and kvroute without a
store. Costs of a step's parts in worker and scheduler are in the thread's own microseconds: medians over the
steps in which a part ran, and means over all steps.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bench.engines import PROMPT, Engine
from bench.harness import VLLM, Table, asked, write_json
from bench.vllm_models import build_qwen3
from bench.vllm_peers import CONNECTORS, ON_CPU, connector, plugin

NEW = 64
BATCHES = [8, 64]
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "disable_hybrid_kv_cache_manager": True,
    "disable_log_stats": False,
    "seed": 0,
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 4096,
    "max_model_len": 512,
}
STORE, ALONE = "kvroute, store and witness", "kvroute, no store"


def main() -> None:
    args = asked(*(__doc__, 7, "two rounds"), batches=(BATCHES, "numbers of sequences"))
    most = max(args.batches)
    if not VLLM.exists():
        raise SystemExit(f"no {VLLM}: `make bench-vllm` makes it")
    rng = np.random.default_rng(5)
    spent: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-vllm-")))
        build_qwen3(model := directory / "model")
        environment = ON_CPU | {"PYTHONPATH": str(plugin(directory / "plugin"))}
        engines, homes = dict[str, Engine](), {STORE: directory / "store", ALONE: directory / "alone"}
        times = dict[str, dict[str, TextIO]]()
        for kind, home in homes.items():
            home.mkdir()
            settings: dict[str, Any] = {"store": f"file://{home}/rows"} if kind == STORE else {}
            config = connector("TimedNothingConnector", CONNECTORS, times=str(home), kvroute=settings)
            options = OPTIONS | {"model": str(model), "kv_transfer_config": config, "max_num_seqs": most}
            options["num_gpu_blocks_override"] = 16 * most
            peer = VLLM, "bench.peers.vllm_engine", home / "log", environment
            engines[kind] = Engine(*peer, options=options, stops=True)
            stack.callback(engines[kind].close)
            sides = ("worker", "scheduler")
            times[kind] = {side: stack.enter_context((home / f"{side}.jsonl").open()) for side in sides}
        for turn in range((2 if args.quick else args.rounds) + 1):
            for batch in args.batches:
                for kind, engine in engines.items():
                    prompts = rng.integers(5, 500, (batch, PROMPT)).tolist()
                    engine.ask({"prompts": prompts, "tokens": NEW, "rows": False})
                    for side, lines in times[kind].items():
                        for part, each in (item for line in lines for item in json.loads(line).items()):
                            spent[kind, batch, f"{side}: {part}"] += each if turn else []  # the first warms up
    columns = ["part", "sequences", "median", "mean of all steps"]
    for kind in homes:
        table = Table(f"parts of a step: {kind}; the thread's own microseconds", columns)
        for batch in args.batches:
            parts = {part: np.array(each) for (of, n, part), each in spent.items() if (of, n) == (kind, batch)}
            steps = len(parts["worker: wait_for_save"])
            for part, each in parts.items():
                table.row(part, str(batch), f"{np.median(each) if each.size else 0:.1f}", f"{each.sum() / steps:.1f}")
            whole = sum(each.sum() for part, each in parts.items() if ":   " not in part) / steps
            table.row("all of these", str(batch), "", f"{whole:.1f}")
        table.print()
    write_json(args.json, parts={", ".join(map(str, key)): each for key, each in spent.items()})


if __name__ == "__main__":
    main()

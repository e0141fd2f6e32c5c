"""How many tokens a second does SGLang lose to kvroute, when both return routed experts?

A seeded Qwen3-MoE on a CPU, whose steps take as long as a real model's on a GPU, or longer. Two engines take turns,
round by round, while the other is stopped: stock SGLang, and SGLang with kvroute's plugin. Each round gives two ratios
to stock SGLang: tokens a second, and the CPU time of all of an engine's processes, which other load on the machine
changes less. ``--quick`` ends within three minutes on two quiet cores.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.engines import Engine, in_turns, installed
from bench.harness import ROOT, asked, write_json
from bench.vllm_models import build_qwen3

HERE = ROOT / "tests" / "real" / "sglang"
PLUGINS = {"kvroute": "kvroute.integrations.sglang:register", "cpu": "sglang_on_cpu:register"}
NEW = 32
QUICK_S = 90
CPU = {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "disable_cuda_graph": True}
POOL = {"max_total_tokens": 16384, "max_running_requests": 64, "page_size": 16, "context_length": 512}
STOCK, OURS = "SGLang", "with kvroute"


def start(home: Path, options: dict[str, Any], *, kvroute: bool) -> Engine:
    """Start an engine. On a CPU it is stopped except in its turns: SGLang's scheduler polls constantly."""
    stops = options.get("device") == "cpu"
    home.mkdir()
    plugins = installed(home / "plugins", "sglang.srt.plugins", **PLUGINS)
    paths = [ROOT, *([HERE / "cpu"] if stops else []), plugins, os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "SGLANG_PLUGINS": ",".join(["kvroute"] * kvroute + ["cpu"] * stops) or "none",
        "HF_HUB_OFFLINE": "1",
        **({"SGLANG_USE_CPU_ENGINE": "1"} if stops else {}),
    }
    own = HERE / ".venv" / "bin" / "python"
    python = own if own.exists() else Path(sys.executable)
    return Engine(python, "bench.peers.sglang_engine", home / "log", environment, options=options, stops=stops)


def started(stack: ExitStack, home: Path, options: dict[str, dict[str, Any]]) -> dict[str, Engine]:
    """Start engines of these options at once, all but ``STOCK`` with kvroute; they are closed with the stack."""

    def begin(name: str) -> Engine:
        engine = start(home / name, options[name], kvroute=name != STOCK)
        stack.callback(engine.close)
        return engine

    with ThreadPoolExecutor(len(options)) as pool:
        return dict(zip(options, pool.map(begin, options), strict=True))


def main() -> None:
    args = asked(
        *(__doc__, 12),
        quick=f"8 sequences, and no round begins {QUICK_S} s after both have started",
        width=(4, "of the model: 8 has 420 M weights"),
        sequences=([8, 32], "that run at once"),
    )
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        build_qwen3(model := Path(home) / "model", width=args.width)
        options = CPU | POOL | {"model_path": str(model)}
        engines = started(stack, Path(home), dict.fromkeys((STOCK, OURS), options))
        until = time.monotonic() + (QUICK_S if args.quick else 1200)
        rounds = 1000 if args.quick else args.rounds
        counts = [8] if args.quick else args.sequences
        title = f"SGLang on a CPU, width {args.width}, {NEW} tokens"
        found = in_turns(title, engines, counts, NEW, rounds, until)
    write_json(args.json, rates=found)


if __name__ == "__main__":
    main()

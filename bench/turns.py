"""One turn of a store in a benchmark, and how a store that lives in another process takes its turn.

A peer runs with the Python of its own environment: ``python -m bench.peers.NAME`` reads a :class:`Turn` a line from
its standard input, as JSON, and answers each with the seconds that it took. The parent decides whose turn it is, so
that all of them, in whatever process, meet the same noise.

Only the standard library and numpy are used here: every peer's environment has those.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

STAMP_NBYTES = 16
ROOT = Path(__file__).parents[1]

Buffer = bytes | bytearray | memoryview


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


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of all puts, of these and a flush, and of all gets."""

    put_s: float
    put_flush_s: float
    get_s: float


def take(
    contestant: Contestant,
    stamps: Sequence[tuple[bytes, bytes]],
    buffers: Sequence[memoryview],
    batch: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Took:
    """Put and get every record; each that is got is compared with its stamp within the timed loop."""
    records = len(stamps)
    start = clock()
    for i in range(0, records, batch):
        contestant.put(i, i + batch)
    put = clock() - start
    contestant.flush()
    put_flush = clock() - start
    start = clock()
    for i in range(0, records, batch):
        got = contestant.get(i, i + batch) or buffers
        for j in range(batch):
            head, tail = stamps[i + j]
            record = got[j]
            if record[:STAMP_NBYTES] != head or record[-STAMP_NBYTES:] != tail:
                raise AssertionError(f"record {i + j} is not the one that was put")
    return Took(put, put_flush, clock() - start)


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
            return asdict(take(contestant, records.stamps, records.buffers, turn.batch))
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


class PeerError(Exception):
    """A peer's process ended instead of answering."""


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

    def take(self, turn: Turn) -> Took:
        return Took(**self.ask(asdict(turn)))

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

"""What do answers that all end in one step cost the process that schedules?

``--answers`` requests of ``--tokens`` tokens, 48 layers x top-8 of 128 experts, end together: the connector's end in
the scheduler's process is told of each, and the clock runs until the last client has its data. Beside each other, in
turns: routes in the answers (``response:``), in a directory (``file:``), and in a directory that a process of its own
fills (``apart:file:``). The floor is what any of them does at least: names, tokens, blocks and lives packed, sent
through a socket pair, and a future done for each. CPU time is that of all threads of a process.

Why to distrust it: nothing else runs in the scheduler's process here, and the worker has written all rows before the
first request ends. The first and the last answer of each turn are compared with what was written.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import kvroute
from bench.harness import Racer, Table, asked, race, router_ids, write_json
from kvroute.connector import Engine, Handshake, Key, SchedulerRows, Settings, Tokens, routes
from kvroute.rollout import RolloutStore, open_rollouts

LAYERS, TOP_K, EXPERTS, BLOCK = 48, 8, 128, 16
FLOOR = "floor: packed, sent, told"


@dataclass(slots=True, eq=False)
class Request:
    """A request that is computed, under the names that the connector asks for."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)


class Scheduler:
    """A scheduler with ``answers`` running requests, and the memory of the worker's rows."""

    def __init__(self, url: str, answers: int, tokens: int) -> None:
        spec = kvroute.routing_spec(EXPERTS, TOP_K, range(LAYERS), num_layers=LAYERS, block_tokens=BLOCK)
        self._each = -(-tokens // BLOCK)
        self._tokens = tokens
        settings = Settings.of({"rollouts": url, "weights": "m", "weights_version": 1})
        namespace = kvroute.Namespace("m", weights_version=1)
        engine = Engine(settings, spec, namespace, blocks=answers * self._each, max_tokens=answers * tokens)
        specs = engine.layout.specs
        self._aux = kvroute.AuxBlocks(specs, blocks=engine.places.stop, namespace=namespace, memory="shared")
        self._rows = SchedulerRows(engine)
        region: Any = self._aux.region("device")
        self._rows.attach(Handshake(None, region.name))
        self._ids = router_ids(tokens, LAYERS, TOP_K, EXPERTS)
        self._answers = answers
        self._turns = 0
        self._running = list[tuple[Request, list[int]]]()

    def compute(self) -> None:
        """All requests are admitted, and all but their last tokens computed."""
        self._turns += 1
        self._running = []
        for number in range(self._answers):
            first = number * self._each
            tokens = [(7 * i + number) % 30_000 for i in range(self._tokens + 1)]
            request = Request(f"{self._turns}-{number}", tokens, self._tokens // 2)
            blocks = list(range(first, first + self._each))
            self._rows.matched(request, 0, 0, later=False)
            self._rows.given(blocks)
            self._rows.admitted(request, blocks, 0)
            self._running.append((request, blocks))
        meta = self._rows.step({request.request_id: self._tokens for request, _ in self._running})
        self._aux.apply(meta.before)
        versions = np.full(self._tokens, 1, np.uint32)
        for request, blocks in self._running:
            slots = (np.array(blocks)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)[: self._tokens]
            self._aux.write_step(slots, {"routing": self._ids, "weights_version": versions})
            request.num_computed_tokens = self._tokens

    def end(self) -> list[Future[dict[str, object]]]:
        """All requests end: the futures of their clients' data."""
        answers = []
        for request, blocks in self._running:
            ended = self._rows.forget(request.request_id)
            tokens = Tokens(list(request.all_token_ids), request.num_prompt_tokens)
            answer = self._rows.finished(Key(request.request_id, True), blocks, self._tokens, tokens, ended=ended)
            assert answer is not None
            answers.append(answer)
        return answers

    def check(self, answers: list[Future[dict[str, object]]], store: RolloutStore | None) -> None:
        """The first and the last answer have the rows that were written."""
        for answer in (answers[0], answers[-1]):
            found = routes({"kv_transfer_params": answer.result()}, rollouts=store)
            assert found.complete
            assert np.array_equal(found.ids, self._ids)

    def close(self) -> None:
        self._rows.close()
        self._aux.close()


def bare(answers: int, tokens: int) -> Callable[[], dict[str, float]]:
    """The floor: the least that hands so many requests over, and tells their clients."""
    blocks = np.arange(-(-tokens // BLOCK))
    ids = [(7 * i) % 30_000 for i in range(tokens + 1)]
    ours, theirs = socket.socketpair()
    threading.Thread(target=drained, args=(theirs,), daemon=True).start()

    def turn() -> dict[str, float]:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for first in range(0, answers, 32):
            parts = [
                (f"{number}", array("q", list(ids)).tobytes(), blocks.tobytes(), blocks.tobytes())
                for number in range(first, min(first + 32, answers))
            ]
            ours.sendall(msgspec.msgpack.encode(parts))
            for _ in parts:
                Future[None]().set_result(None)
        return spent(began_s, cpu_s) | {"scheduling": 1e3 * (time.process_time() - cpu_s)}

    return turn


def drained(end: socket.socket) -> None:
    while end.recv(1 << 20):
        pass


def spent(began_s: float, cpu_s: float) -> dict[str, float]:
    """Milliseconds since: of the clock, and of this process's CPU time."""
    return {"cpu": 1e3 * (time.process_time() - cpu_s), "wall": 1e3 * (time.perf_counter() - began_s)}


def children_cpu_s() -> float:
    """The CPU seconds so far of this process's children."""
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            for child in (task / "children").read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def racer(name: str, url: str, reads: str, answers: int, tokens: int) -> Iterator[Racer]:
    """Requests that all end at once, with their routes at ``url``; ``reads`` is where they are found."""
    store = open_rollouts(reads) if reads else None
    with closing(Scheduler(url, answers, tokens)) as scheduler:

        def turn() -> dict[str, float]:
            scheduler.compute()
            children_s, thread_s = children_cpu_s(), time.thread_time()
            began_s, cpu_s = time.perf_counter(), time.process_time()
            told = scheduler.end()
            scheduling = 1e3 * (time.thread_time() - thread_s)
            for answer in told:
                answer.result()
            numbers = spent(began_s, cpu_s) | {"scheduling": scheduling}
            numbers["process"] = 1e3 * (children_cpu_s() - children_s)
            scheduler.check(told, store)
            return numbers

        yield Racer(name, turn)
    if store is not None:
        store.close()


def main() -> None:
    args = asked(
        *(__doc__, 9),
        answers=(256, "requests that end at once"),
        tokens=(192, "of each, half of them the prompt"),
    )
    load = args.answers, args.tokens
    racers = [Racer(FLOOR, bare(*load))]
    with ExitStack() as stack:
        here, apart = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2))
        racers.append(stack.enter_context(racer("in the response", "response:", "", *load)))
        racers.append(stack.enter_context(racer("file:", f"file://{here}", f"file://{here}", *load)))
        racers.append(stack.enter_context(racer("apart:file:", f"apart:file://{apart}", f"file://{apart}", *load)))
        race(racers, args.rounds, warm=2)
    title = f"{args.answers} answers of {args.tokens} tokens, {LAYERS} x {TOP_K}, that end in one step; ms, medians"
    columns = ["way", "CPU of the scheduler's process", "quartiles", "x floor", "its scheduling thread"]
    table = Table(title, [*columns, "until the last answer", "CPU of the other process"])
    floor = float(np.median(racers[0].found["cpu"]))
    for each in racers:
        low, middle, high = np.quantile(each.found["cpu"], [0.25, 0.5, 0.75])
        others = (float(np.median(each.found.get(name, [0.0]))) for name in ("scheduling", "wall", "process"))
        first, *rest = (f"{value:.1f}" for value in others)
        table.row(each.name, f"{middle:.1f}", f"{low:.1f} .. {high:.1f}", f"{middle / floor:.1f}", first, *rest)
    table.print()
    write_json(args.json, ways={each.name: each.found for each in racers})


if __name__ == "__main__":
    main()

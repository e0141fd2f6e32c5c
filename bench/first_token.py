"""From the end of prefill's last forward pass to decode's first token, in the small engine over tcp on loopback.

Decode gets a request when prefill begins its prompt, and fetches the blocks that each chunk fills; or after prefill has
computed it. Two engines in threads of one process, small models with seeded weights: compare the two ways, not their
milliseconds.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch

from bench.harness import ROOT, Table, asked, write_json

sys.path.insert(0, str(ROOT / "examples"))  # if paged_engine is not installed

from cache_manager.keys import Namespace
from paged_engine.handover import DecodeEngine, PrefillEngine
from paged_engine.models import build_model
from paged_engine.processes import until
from paged_engine.request import EngineConfig, Output, Request
from paged_engine.sequence import Handover
from paged_engine.text import VOCAB_SIZE
from transfer import ZmqLink, ZmqSettings


class Passes:
    """An observer that notes when the last pass ended."""

    ended_s = 0.0

    @contextmanager
    def observe(self, _: object) -> Iterator[None]:
        yield
        self.ended_s = time.perf_counter()


class Driven:
    """An engine that steps in its own thread, where calls from ``asked`` run between steps."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.asked: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.tokens: dict[str, float] = {}
        """The time of each request's first token."""
        self.ended: dict[str, Output] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            while not self.asked.empty():
                self.asked.get()()
            steps = self.engine.steps
            self.ended |= {output.request.id: output for output in self.engine.step()}
            for sequence in self.engine.scheduler.unfinished:
                if sequence.generated:
                    self.tokens.setdefault(sequence.request.id, time.perf_counter())
            if self.engine.steps == steps:
                time.sleep(0.0005)

    def wait(self, request: Request) -> Output:
        until(lambda: request.id in self.ended, f"{request.id} has ended", 60.0)
        return self.ended[request.id]

    def close(self) -> None:
        self._closing.set()
        self._thread.join()


def first_token_ms(lends: Driven, fetches: Driven, passes: Passes, prompt: tuple[int, ...], *, early: bool) -> float:
    """Run one request through both engines."""
    request, lent = Request(f"r{random.random()}", prompt, 4), SimpleQueue[Handover]()  # noqa: S311
    lends.asked.put(lambda: lent.put(lends.engine.lend(request)))
    handover = lent.get(timeout=60.0)
    if not early:
        lends.wait(request)
    fetches.asked.put(lambda: fetches.engine.add(request, handover))
    output = fetches.wait(request)
    assert output.note == "", output.note
    assert output.routes.complete
    lends.wait(request)
    return 1000 * (fetches.tokens[request.id] - passes.ended_s)


def main() -> None:
    args = asked(*(__doc__, 7), tokens=([1000, 3000], "of the prompt"))
    torch.set_num_threads(1)
    model, config = build_model("qwen3_moe", seed=0, vocab_size=VOCAB_SIZE), EngineConfig(device_blocks=256)
    passes, namespace, found = Passes(), Namespace("bench", 0), dict[str, list[float]]()
    with (
        PrefillEngine(
            *(model, config, namespace), link=ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*")), observer=passes.observe
        ) as prefill,
        DecodeEngine(model, config, namespace, link=ZmqLink(ZmqSettings())) as decode,
    ):
        driven, columns = (Driven(prefill), Driven(decode)), ["tokens", "decode gets it", "median", "least", "most"]
        table = Table("end of prefill's last pass to decode's first token, ms", columns)
        for tokens in args.tokens:
            for _ in range(args.rounds + 1):
                for early in (False, True):
                    prompt = tuple(random.choices(range(8, VOCAB_SIZE), k=tokens))  # noqa: S311
                    name = f"{tokens} {'when prefill begins' if early else 'when prefill has ended'}"
                    found.setdefault(name, []).append(first_token_ms(*driven, passes, prompt, early=early))
        for name, ms in found.items():
            ms = sorted(ms[1:])  # the first is a warm-up
            table.row(*name.split(" ", 1), *(f"{each:.1f}" for each in (ms[len(ms) // 2], ms[0], ms[-1])))
        for each in driven:
            each.close()
    table.print()
    write_json(args.json, milliseconds=found)


if __name__ == "__main__":
    main()

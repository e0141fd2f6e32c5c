"""From the end of prefill's last forward pass to decode's first token, in the small engine over tcp on loopback.

Decode is told of a prompt when prefill begins it, and fetches what each chunk fills; or when prefill has computed it.
Two engines in threads of one process, small models with seeded weights: compare the two, not their milliseconds. Two
busy cores, two runs in turns with the code before (which offered nothing until the prompt was done, and was told of
the first token): 1,000 tokens 52 before, 17 and 27 now; 3,000 tokens 118 before, 20 and 22 now.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bench.harness import ROOT, Table, asked, write_json

sys.path.insert(0, str(ROOT / "examples"))  # where nothing is installed

from cache_manager.keys import Namespace
from paged_engine.handover import DecodeEngine, PrefillEngine
from paged_engine.loop import EngineThread
from paged_engine.models import build_model
from paged_engine.request import EngineConfig, Request
from paged_engine.sequence import Handover
from paged_engine.text import VOCAB_SIZE
from transfer import ZmqLink, ZmqSettings


@dataclass(slots=True)
class Passes:
    """An observer that notes when the last pass ended."""

    ended_s: float = 0.0
    begin: Any = field(default=lambda _spans: None)

    def end(self) -> None:
        self.ended_s = time.perf_counter()


def first_token_ms(engines: Any, passes: Passes, prompt: tuple[int, ...], *, early: bool) -> float:
    """One request through both."""
    (prefill, lends), (decode, fetches) = engines
    request, told, begun = Request(f"r{random.random()}", prompt, 4), list[bytes](), threading.Event()  # noqa: S311

    def tell(transfer: bytes) -> None:
        told.append(transfer)
        begun.set()

    computed = lends.submit(request.id, partial(prefill.lend, request, tell))
    begun.wait() if early else computed.result()
    came_s = list[float]()
    handover = Handover(told[0], prefill.crossing.address)
    took = fetches.submit(
        request.id, partial(decode.take_over, request, handover), lambda *_: came_s.append(time.perf_counter())
    )
    (output,) = took.result()
    assert output.note == "", output.note
    assert output.routes.complete
    computed.result()
    return 1000 * (next(iter(came_s)) - passes.ended_s)


def main() -> None:
    args = asked(*(__doc__, 7), tokens=([1000, 3000], "of the prompt"))
    torch.set_num_threads(1)
    model, config = build_model("qwen3_moe", seed=0, vocab_size=VOCAB_SIZE), EngineConfig(device_blocks=256)
    passes, namespace, found = Passes(), Namespace("bench", 0), dict[str, list[float]]()
    with (
        PrefillEngine(
            *(model, config, namespace), link=ZmqLink(ZmqSettings(bind="tcp://127.0.0.1:*")), observer=passes
        ) as prefill,
        DecodeEngine(model, config, namespace, link=ZmqLink(ZmqSettings())) as decode,
    ):
        threads = [EngineThread(engine, failed=lambda: None) for engine in (prefill, decode)]
        for thread in threads:
            thread.start()
        engines, table = (
            list(zip((prefill, decode), threads, strict=True)),
            Table(
                "end of prefill's last pass to decode's first token, ms",
                ["tokens", "decode is told", "median", "least", "most"],
            ),
        )
        for tokens in args.tokens:
            for _ in range(args.rounds + 1):
                for early in (False, True):
                    prompt = tuple(random.choices(range(8, VOCAB_SIZE), k=tokens))  # noqa: S311
                    name = f"{tokens} {'when prefill begins' if early else 'when prefill has ended'}"
                    found.setdefault(name, []).append(first_token_ms(engines, passes, prompt, early=early))
        for name, ms in found.items():
            ms = sorted(ms[1:])  # the first is a warm-up
            table.row(*name.split(" ", 1), *(f"{each:.1f}" for each in (ms[len(ms) // 2], ms[0], ms[-1])))
        for thread in threads:
            thread.close(10.0)
    table.print()
    write_json(args.json, milliseconds=found)


if __name__ == "__main__":
    main()

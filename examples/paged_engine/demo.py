"""``kvroute demo``: an engine under pressure, restarted from its store, and a judge of every row that it returned.

At the end the weights change while answers are being generated, as when training updates weights during a rollout.
Every unfinished sequence loses its KV and is computed again by the new weights, whose routers choose other experts for
the same tokens; then it goes on. The judge knows which row of each position was computed first.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TextIO

import torch
from torch import nn

from cache_manager.errors import StorageError
from cache_manager.keys import Namespace
from cache_manager.storage import open_store
from paged_engine import findings, text
from paged_engine.engine import Engine
from paged_engine.judge import Checker, SecondRun, Verdict
from paged_engine.models import build_model, weights_digest
from paged_engine.options import MOONCAKE, Options
from paged_engine.pool import running_pool
from paged_engine.request import FinishReason, Output, Request
from paged_engine.scheduler import Work
from paged_engine.workload import ABORT_AFTER_TOKENS, Conversation, conversations

UPDATED_MAX: Final = 6
"""Conversations during which the weights change."""
UPDATE_AFTER_TOKENS: Final = 8
"""The update comes when the first answer has this many tokens."""
SampleId = tuple[str, int]
"""Request id and the number of the sample."""
Outputs = Mapping[SampleId, Output]


class Driver:
    """Shared by both demos: models, an engine without reuse to compare with, the judgement, a line for each stage."""

    title = ""

    def __init__(self, options: Options, out: TextIO | None = None) -> None:
        torch.set_num_threads(1)  # more would wait for each other: the matrices are small
        self.options, self.checker, self._out = options, Checker(), out or sys.stdout
        self._started_s, blocks = time.perf_counter(), options.engine
        self.say(
            f"{self.title}: {options.model}, a small model with weights of seed {options.seed}: {options.requests} "
            f"requests in conversations of several turns, on {blocks.device_blocks} device and {blocks.host_blocks} "
            f"host blocks of {blocks.block_tokens} tokens"
        )

    def say(self, what: str) -> None:
        self._out.write(f"{time.perf_counter() - self._started_s:6.1f} s  {what}\n")
        self._out.flush()

    def build(self) -> Any:
        model: Any = build_model(self.options.model, seed=self.options.seed, vocab_size=text.VOCAB_SIZE)
        return model.to(self.options.device)

    def plainly(self, outputs: Outputs, *, watched: bool = False, draw: str = "") -> bool:
        """Repeat every request on an engine without reuse; returns whether its tokens are the same.

        ``watched``: the checker is attached. ``draw`` is what the requests' noise depended on.
        """
        self.say("repeating the requests on an engine without reuse")
        same, model = list[bool](), self.build()
        if watched:
            self.checker.attach(model)
        observer = self.checker if watched else None
        with Engine(model, self.options.plain_engine, Namespace("plain", 0), observer=observer) as engine:
            for request in {output.request.id: output.request for output in outputs.values()}.values():
                engine.add(replace(request, draw=draw))
            while engine.busy:
                for plain in engine.step():
                    output = outputs[plain.request.id, plain.sample]
                    if output.reason is FinishReason.ABORT:  # as far as it got
                        same.append(plain.tokens[: len(output.tokens)] == output.tokens)
                    else:
                        same.append((plain.tokens, plain.reason) == (output.tokens, output.reason))
        self.checker.detach()
        return all(same) and len(same) == len(outputs)

    def judge(self, outputs: Outputs, expected: Mapping[SampleId, int], *, owned: bool = False) -> Verdict:
        """Judge every row against the routers' recorded choices; ``owned`` as in :meth:`Checker.judge`."""
        self.say(f"judging the rows of {len(outputs)} samples")
        second_run, verdict = SecondRun(self.build()), Verdict()
        for name, output in outputs.items():
            verdict += self.checker.judge(output, expected.get(name), second_run(output.sequence), owned=owned)
        return verdict

    def conclude(self, outputs: Outputs, verdict: Verdict, more: Mapping[str, Any], *, gone: int = 0) -> int:
        """Print the findings, and write them; the exit status. ``gone`` requests of one sample got no answer."""
        options, aborted = self.options, sum(output.reason is FinishReason.ABORT for output in outputs.values())
        found = {
            "title": self.title,
            "model": options.model,
            "seed": options.seed,
            "requests": len({request for request, _ in outputs}) + gone,
            "samples": len(outputs) + gone,
            "aborted": aborted + gone,
            "tokens": sum(len(output.tokens) for output in outputs.values()),
            **asdict(verdict),
            "recompute_agreement": verdict.agreement,
            "device_blocks": options.engine.device_blocks,
            "host_blocks": options.engine.host_blocks,
            "seconds": round(time.perf_counter() - self._started_s, 2),
            **more,
        }
        right = findings.right(found)
        self._out.write(findings.table(found))
        if options.json is not None:
            options.json.write_text(json.dumps({**found, "ok": right}, indent=2) + "\n")
            self.say(f"numbers: {options.json}")
        self.say("every row is right" if right else "FAILED: see the table")
        return 0 if right else 1


@dataclass(slots=True)
class Clients:
    """The engine's observer, and its clients: what they are waiting for and what they got.

    The observer shows every pass to the checker, and plays the impatient clients: they disconnect while a pass computes
    for them, whose rows must not reach a block that has lost its owner meanwhile. ``expected`` says how many rows they
    should have got: those of the passes before.
    """

    conversations: list[Conversation]
    checker: Checker
    outputs: dict[SampleId, Output] = field(default_factory=dict)
    expected: dict[SampleId, int] = field(default_factory=dict)
    _asked: dict[str, tuple[Conversation, Request]] = field(default_factory=dict)
    _engine: Engine | None = None
    _work: list[Work] = field(default_factory=list)

    def serve(self, engine: Engine, turns: Callable[[Conversation], int]) -> None:
        """Run every conversation until it has had ``turns(conversation)`` turns, then return with the engine idle."""
        self._engine, asking = engine, self.conversations
        while asking or engine.busy:
            for conversation in asking:
                if conversation.turn < turns(conversation):
                    request = conversation.ask()
                    self._asked[request.id] = conversation, request
                    engine.add(request)
            asking = []
            for output in engine.step():
                request = output.request
                self.outputs[request.id, output.sample] = output
                if all((request.id, sample) in self.outputs for sample in range(request.n)):
                    conversation, _ = self._asked.pop(request.id)
                    conversation.hear(self.outputs[request.id, 0])
                    asking.append(conversation)
        self._engine = None

    def begin(self, work: list[Work]) -> None:
        self._work = work
        self.checker.begin(work)

    def end(self) -> None:
        self.checker.end()
        for sequence, start, stop in self._work:
            request = sequence.request
            conversation, _ = self._asked[request.id]
            impatient = conversation.gives_up and stop - len(request.prompt) >= ABORT_AFTER_TOKENS
            if impatient and self._engine is not None:
                self.expected[request.id, 0] = start
                self._engine.abort(request.id)


class Demo(Driver):
    """The verdict is the same for the same options; the traffic depends on when the store answers."""

    title = "kvroute demo"

    def run(self) -> int:
        """The exit status."""
        options, clients = self.options, conversations(self.options.requests, self.options.seed)
        self.clients = Clients(clients, self.checker)
        with ExitStack() as stack:
            url = options.store
            if url == MOONCAKE:
                pool = stack.enter_context(running_pool())
                url = pool.url
                where = f"master is process {pool.master_pid}, process {pool.owner_pid} lends the memory"
                self.say(f"Mooncake: {where}")
            elif url is None:
                url = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-store-"))).as_uri()
            traffic = Counter(self._serve(url, "before restart", lambda c: (len(c.questions) + 1) // 2))
            self.say("engine stopped; model, KV and rows dropped from memory; only the store is left")
            gc.collect()
            traffic.update(self._serve(url, "after restart", lambda c: len(c.questions)))
            found = {**traffic, "store": url, "tokens_match": self.plainly(self.clients.outputs)}
            verdict = self.judge(self.clients.outputs, self.clients.expected, owned=True)
            found |= self._across_update()
        return self.conclude(self.clients.outputs, verdict, found)

    def _serve(self, url: str, title: str, turns: Callable[[Conversation], int]) -> dict[str, int]:
        """One life of the engine: everything but the store and the checker is new, and is dropped at the end."""
        self.say(f"serving {title}")
        model, clients = self.build(), self.clients
        namespace = Namespace(f"{self.options.model}/{weights_digest(model)}", weights_version=0)
        store = open_store(url)
        try:
            self.checker.attach(model)
            with Engine(model, self.options.engine, namespace, store=store, observer=clients) as engine:
                clients.serve(engine, turns)
                engine.drain()
                return findings.traffic(engine)
        finally:
            self.checker.detach()
            with suppress(StorageError):  # a failed store costs only time, and is counted
                store.flush()
            store.close()

    def _across_update(self) -> dict[str, int]:
        """Let some clients ask once, change the routers meanwhile, and judge the answers."""
        options, model, checker, outputs = self.options, self.build(), Checker(), list[Output]()
        asking = conversations(options.requests, options.seed)[:UPDATED_MAX]
        self.say("changing the weights during answers")
        checker.attach(model)
        config = replace(options.plain_engine, caching=True)
        with Engine(model, config, Namespace("across an update", weights_version=0), observer=checker) as engine:
            for client in asking:
                engine.add(client.ask())
            while engine.busy:
                answers = [len(sequence.generated) for sequence in engine.scheduler.unfinished]
                if not engine.aux.namespace.weights_version and max(answers, default=0) >= UPDATE_AFTER_TOKENS:
                    move_routers(model, seed=1)
                    engine.reset(weights_version=1)
                    checker.weights_changed()
                outputs += engine.step()
        checker.detach()
        verdict = sum((checker.judge(output, owned=True) for output in outputs), Verdict())
        return {
            "update_samples": sum(len(output.routes.weights_versions) > 1 for output in outputs),
            "update_rows_expected": verdict.rows_expected,
            "update_rows_wrong": verdict.rows_wrong,
            "update_rows_missing": verdict.rows_missing,
            "update_rows_recomputed": checker.rows_computed_differently,
        }


def move_routers(model: nn.Module, seed: int) -> None:
    """Add noise of the weights' own deviation to every router, so that most tokens change experts."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for weight in module.parameters(recurse=False) if "Router" in type(module).__name__ else ():
                noise = torch.randn(weight.shape, generator=draw, dtype=weight.dtype).to(weight.device)
                weight.add_(weight.std() * noise)


def main(**flags: Any) -> int:
    """``kvroute demo``; the exit status."""
    return Demo(Options(**flags)).run()

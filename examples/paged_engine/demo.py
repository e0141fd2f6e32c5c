"""``kvroute demo``: serve, stop, start again, go on; then judge every row that came out."""

from __future__ import annotations

import gc
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cache_manager.errors import StorageError
from cache_manager.keys import Namespace
from cache_manager.storage import open_store
from paged_engine.driver import Driver, SampleId, Tell, rows_of, terminal
from paged_engine.engine import Engine, Span
from paged_engine.findings import Findings, Traffic
from paged_engine.heat_map import draw_load
from paged_engine.judge import Checker
from paged_engine.models import weights_digest
from paged_engine.options import MOONCAKE, Options
from paged_engine.pool import running_pool
from paged_engine.request import FinishReason, Output, Request
from paged_engine.sequence import State
from paged_engine.update import CONVERSATIONS_MAX, across_update
from paged_engine.workload import ABORT_AFTER_TOKENS, Conversation, conversations


@dataclass(slots=True)
class Clients:
    """The engine's observer and the ones who talk to it: what they are waiting for and what they got.

    The observer shows every pass to the checker, and plays the clients that do not wait: those go away while a pass
    computes for them, whose rows must not reach a block that has lost its owner meanwhile. ``expected`` says how many
    rows they should have got: those of the passes before.
    """

    conversations: list[Conversation]
    checker: Checker
    outputs: dict[SampleId, Output] = field(default_factory=dict)
    expected: dict[SampleId, int] = field(default_factory=dict)
    _asked: dict[str, tuple[Conversation, Request]] = field(default_factory=dict)
    _engine: Engine | None = None
    _spans: tuple[Span, ...] = ()

    def serve(self, engine: Engine, turns: Callable[[Conversation], int], tell: Tell) -> None:
        """Let every conversation go on until it has had ``turns`` of it, then return with the engine idle."""
        self._engine = engine
        for conversation in self.conversations:
            self._ask(engine, conversation, turns)
        while engine.busy:
            answered = 0
            for output in engine.step():
                self.outputs[output.request.id, output.sample] = output
                conversation, request = self._asked[output.request.id]
                if all((request.id, sample) in self.outputs for sample in range(request.n)):
                    answered += 1
                    del self._asked[request.id]
                    conversation.hear(self.outputs[request.id, 0])
                    self._ask(engine, conversation, turns)
            counts = engine.scheduler.counts()
            tell(answered, f"{counts[State.RUNNING]} running, {counts[State.SWAPPED]} swapped")
        self._engine = None

    def _ask(self, engine: Engine, conversation: Conversation, turns: Callable[[Conversation], int]) -> None:
        if conversation.turn < turns(conversation):
            request = conversation.ask()
            self._asked[request.id] = conversation, request
            engine.add(request)

    def begin(self, spans: Sequence[Span]) -> None:
        self._spans = tuple(spans)
        self.checker.begin(spans)

    def end(self) -> None:
        self.checker.end()
        for conversation, request in list(self._asked.values()):
            for span in self._spans if conversation.gives_up(request) else ():
                generated = len(span.tokens) - len(request.prompt)
                if span.owner == f"{request.id}#0" and generated >= ABORT_AFTER_TOKENS and self._engine is not None:
                    self.expected[request.id, 0] = span.start
                    self._engine.abort(request.id)

    def rows_expected(self, output: Output) -> int:
        if output.reason is FinishReason.ABORT:
            return self.expected[output.request.id, output.sample]
        return rows_of(output)


class Demo(Driver):
    """The verdict is the same for the same options; the traffic depends on when the store answers."""

    def __init__(self, options: Options, console: Console) -> None:
        super().__init__(options, console)
        self.clients = Clients(conversations(options.requests, options.seed), self.checker)

    def run(self) -> Findings:
        options, clients = self.options, self.clients
        with ExitStack() as stack:
            url = options.store
            if url == MOONCAKE:
                pool = stack.enter_context(running_pool())
                url = pool.url
                where = f"master is process {pool.master_pid}, process {pool.owner_pid} lends the memory"
                self.console.print(f"Mooncake: {where}")
            elif url is None:
                made = tempfile.TemporaryDirectory(prefix="store-", dir=options.out)
                url = Path(stack.enter_context(made)).absolute().as_uri()
            stack.enter_context(self.progress)
            traffic = self._serve(url, "before restart", lambda c: (len(c.questions) + 1) // 2)
            self.progress.console.print(
                "engine stopped; model, KV and rows dropped from memory; only the store is left"
            )
            gc.collect()
            traffic += self._serve(url, "after restart", lambda c: len(c.questions))
            tokens_match = self.plainly(clients.outputs)
            verdict = self.judge(clients.outputs, clients.rows_expected, owners=True)
            asking = conversations(options.requests, options.seed)[:CONVERSATIONS_MAX]
            tell, config = self.tell("weight update", sum(c.samples for c in asking)), options.plain_engine
            update = across_update(self.build(), replace(config, caching=True), asking, tell)
        return self.found(
            "kvroute demo", clients.outputs, verdict, traffic, store=url, tokens_match=tokens_match, update=update
        )

    def _serve(self, url: str, title: str, turns: Callable[[Conversation], int]) -> Traffic:
        """One life of the engine: everything but the store and the checker is new, and is dropped at the end."""
        model, clients = self.build(), self.clients
        namespace = Namespace(f"{self.options.model}/{weights_digest(model)}", weights_version=0)
        store = open_store(url)
        try:
            self.checker.attach(model)
            with Engine(model, self.options.engine, namespace, store=store, observer=clients) as engine:
                turn = sum(turns(c) - c.turn for c in clients.conversations)
                clients.serve(engine, turns, self.tell(title, turn))
                engine.drain()
                return Traffic.of(engine)
        finally:
            self.checker.detach()
            with suppress(StorageError):  # a store that is gone costs time, and the traffic counts it
                store.flush()
            store.close()


def demo(options: Options, console: Console) -> int:
    """Run the demo, print its summary, write the heat map and the JSON; the exit status."""
    options.prepare()
    config = options.engine
    console.print(
        f"{options.model}, a small model with weights of seed {options.seed}: {options.requests} requests in "
        f"conversations of several turns, on {config.device_blocks} device and {config.host_blocks} host blocks of "
        f"{config.block_tokens} tokens"
    )
    run = Demo(options, console)
    findings = run.run()
    console.print(findings.table())
    if importlib.util.find_spec("matplotlib") is not None:
        picture = options.out / "expert-load.png"
        draw_load([output.routes for output in run.clients.outputs.values()], picture, title=options.model)
        console.print(f"expert load: {picture}")
    else:
        console.print("expert load: no picture, matplotlib is not installed (pip install 'kvroute\\[plot]')")
    return concluded(findings, options, console)


def concluded(findings: Findings, options: Options, console: Console) -> int:
    """Write the JSON and say the verdict; the exit status."""
    if options.json is not None:
        findings.write_json(options.json)
        console.print(f"numbers: {options.json}")
    console.print("[green]every row is right[/]" if findings.ok else "[red]FAILED: see the table[/]")
    return 0 if findings.ok else 1


def main(**flags: Any) -> int:
    """``kvroute demo``."""
    return demo(Options(**flags), terminal())


__all__ = ["Clients", "Demo", "concluded", "demo", "main"]

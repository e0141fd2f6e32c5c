"""``kvroute demo``: an engine under pressure, restarted from its store, and a judge of every row that came out.

At the end the weights change while answers are being generated, as in a rollout that training overtakes. Every
unfinished sequence loses its KV and is computed again by the new weights, whose routers choose other experts for the
same tokens; then it goes on. The judge saw which row of each position came first.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from cache_manager.errors import StorageError
from cache_manager.keys import Namespace
from cache_manager.storage import open_store
from paged_engine import findings, text
from paged_engine.engine import Engine, Span
from paged_engine.heat_map import draw_load
from paged_engine.judge import Checker, SecondRun, Verdict
from paged_engine.models import build_model, weights_digest
from paged_engine.options import MOONCAKE, Options
from paged_engine.pool import running_pool
from paged_engine.request import FinishReason, Output, Request
from paged_engine.sequence import State
from paged_engine.workload import ABORT_AFTER_TOKENS, Conversation, conversations

UPDATED_MAX: Final = 6
"""Conversations that see the weights change."""
UPDATE_AFTER_TOKENS: Final = 8
"""The update comes when the first answer has this many tokens."""
SampleId = tuple[str, int]
"""Request id and the number of the sample."""
Outputs = Mapping[SampleId, Output]
Tell = Callable[..., None]
"""Hears how much more has been done, and how it stands: ``tell(done, status="")``."""


class Driver:
    """What both demos share: models, an engine without reuse to compare with, the judgement, a bar for each stage.

    ``console`` hears what is being done, ``checker`` sees what routers do.
    """

    def __init__(self, options: Options, console: Console) -> None:
        torch.set_num_threads(1)  # more would wait for each other: the matrices are small
        self.options, self.console, self.checker = options, console, Checker()
        self.started_s = time.perf_counter()
        status = TextColumn("{task.fields[status]}", style="dim")
        columns = TextColumn("{task.description}"), BarColumn(bar_width=10), MofNCompleteColumn(), TimeElapsedColumn()
        self.progress = Progress(*columns, status, console=console)

    def tell(self, title: str, total: int) -> Tell:
        """A bar of its own."""
        task = self.progress.add_task(title, total=total, status="")
        return lambda done, status="": self.progress.update(task, advance=done, status=status)

    def build(self) -> Any:
        model: Any = build_model(self.options.model, seed=self.options.seed, vocab_size=text.VOCAB_SIZE)
        return model.to(self.options.device)

    def plainly(self, outputs: Outputs, *, watched: bool = False, draw: str = "") -> bool:
        """Ask every request again of an engine without reuse; whether its tokens are the same.

        ``watched``: under the eyes of the checker. ``draw`` is what the requests' noise depended on.
        """
        tell, same, model = self.tell("plain engine", len(outputs)), [], self.build()
        if watched:
            self.checker.attach(model)
        observer = self.checker if watched else None
        with Engine(model, self.options.plain_engine, Namespace("plain", 0), observer=observer) as engine:
            for request in {output.request.id: output.request for output in outputs.values()}.values():
                engine.add(replace(request, draw=draw))
            while engine.busy:
                for plain in engine.step():
                    output = outputs[plain.request.id, plain.sample]
                    if output.reason is FinishReason.ABORT:  # as far as it goes
                        same.append(plain.tokens[: len(output.tokens)] == output.tokens)
                    else:
                        same.append((plain.tokens, plain.reason) == (output.tokens, output.reason))
                    tell(1)
        self.checker.detach()
        return all(same) and len(same) == len(outputs)

    def judge(self, outputs: Outputs, expected: Mapping[SampleId, int], *, owned: bool = False) -> Verdict:
        """Every row against what routers chose before these eyes; ``owned`` as the checker has it."""
        tell, second_run, verdict = self.tell("judging rows", len(outputs)), SecondRun(self.build()), Verdict()
        for name, output in outputs.items():
            verdict += self.checker.judge(output, expected.get(name), second_run(output.sequence), owned=owned)
            tell(1, f"{verdict.rows_expected} rows, {verdict.rows_wrong} wrong, {verdict.rows_missing} missing")
        return verdict

    def conclude(
        self, title: str, outputs: Outputs, verdict: Verdict, more: Mapping[str, Any], *, gone: int = 0
    ) -> int:
        """Show what the run came to, and write it; the exit status. ``gone`` requests of one sample got no answer."""
        options, aborted = self.options, sum(output.reason is FinishReason.ABORT for output in outputs.values())
        found = {
            "title": title,
            "model": options.model,
            "seed": options.seed,
            "requests": len({request for request, _ in outputs}) + gone,
            "samples": len(outputs) + gone,
            "aborted": aborted + gone,
            "tokens": sum(len(output.tokens) for output in outputs.values()),
            **asdict(verdict),
            "recompute_agreement": verdict.agreement,
            "prefixes_routed_differently": self.checker.prefixes_routed_differently,
            "device_blocks": options.engine.device_blocks,
            "host_blocks": options.engine.host_blocks,
            "seconds": round(time.perf_counter() - self.started_s, 2),
            **more,
        }
        self.console.print(findings.table(found))
        if options.json is not None:
            findings.write_json(found, options.json)
            self.console.print(f"numbers: {options.json}")
        right = findings.right(found)
        self.console.print("[green]every row is right[/]" if right else "[red]FAILED: see the table[/]")
        return 0 if right else 1


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
            counts = engine.scheduler.counts()
            tell(len(asking), f"{counts[State.RUNNING]} running, {counts[State.SWAPPED]} swapped")
        self._engine = None

    def begin(self, spans: Sequence[Span]) -> None:
        self._spans = tuple(spans)
        self.checker.begin(spans)

    def end(self) -> None:
        self.checker.end()
        for conversation, request in list(self._asked.values()):
            for span in self._spans if conversation.gives_up else ():
                generated = len(span.tokens) - len(request.prompt)
                if span.owner == f"{request.id}#0" and generated >= ABORT_AFTER_TOKENS and self._engine is not None:
                    self.expected[request.id, 0] = span.start
                    self._engine.abort(request.id)


class Demo(Driver):
    """The verdict is the same for the same options; the traffic depends on when the store answers."""

    def __init__(self, options: Options, console: Console) -> None:
        super().__init__(options, console)
        self.clients = Clients(conversations(options.requests, options.seed), self.checker)

    def run(self) -> int:
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
            traffic = Counter(self._serve(url, "before restart", lambda c: (len(c.questions) + 1) // 2))
            self.progress.console.print(
                "engine stopped; model, KV and rows dropped from memory; only the store is left"
            )
            gc.collect()
            traffic.update(self._serve(url, "after restart", lambda c: len(c.questions)))
            tokens_match = self.plainly(clients.outputs)
            verdict = self.judge(clients.outputs, clients.expected, owned=True)
            update = self._across_update()
        self._draw()
        return self.conclude(
            "kvroute demo", clients.outputs, verdict, {**traffic, **update, "store": url, "tokens_match": tokens_match}
        )

    def _serve(self, url: str, title: str, turns: Callable[[Conversation], int]) -> dict[str, int]:
        """One life of the engine: everything but the store and the checker is new, and is dropped at the end."""
        model, clients = self.build(), self.clients
        namespace = Namespace(f"{self.options.model}/{weights_digest(model)}", weights_version=0)
        store = open_store(url)
        try:
            self.checker.attach(model)
            with Engine(model, self.options.engine, namespace, store=store, observer=clients) as engine:
                total = sum(turns(c) - c.turn for c in clients.conversations)
                clients.serve(engine, turns, self.tell(title, total))
                engine.drain()
                return findings.traffic(engine)
        finally:
            self.checker.detach()
            with suppress(StorageError):  # a store that is gone costs time, and the traffic counts it
                store.flush()
            store.close()

    def _across_update(self) -> dict[str, int]:
        """Let some ask once, change the routers on the way, and judge what they get."""
        options, model, checker, outputs = self.options, self.build(), Checker(), list[Output]()
        asking = conversations(options.requests, options.seed)[:UPDATED_MAX]
        tell = self.tell("weight update", sum(each.samples for each in asking))
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
                outputs += (ended := engine.step())
                tell(len(ended))
        checker.detach()
        verdict = sum((checker.judge(output, owned=True) for output in outputs), Verdict())
        return {
            "update_samples": sum(len(output.routes.weights_versions) > 1 for output in outputs),
            "update_rows_expected": verdict.rows_expected,
            "update_rows_wrong": verdict.rows_wrong,
            "update_rows_missing": verdict.rows_missing,
            "update_rows_recomputed": checker.rows_computed_differently,
        }

    def _draw(self) -> None:
        options, picture = self.options, self.options.out / "expert-load.png"
        if importlib.util.find_spec("matplotlib") is not None:
            draw_load([output.routes for output in self.clients.outputs.values()], picture, title=options.model)
            self.console.print(f"expert load: {picture}")
        else:
            self.console.print("expert load: no picture, matplotlib is not installed (pip install 'kvroute\\[plot]')")


def move_routers(model: nn.Module, seed: int) -> None:
    """Change the weights of every router by as much as they vary, so that most tokens change experts."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for weight in module.parameters(recurse=False) if "Router" in type(module).__name__ else ():
                noise = torch.randn(weight.shape, generator=draw, dtype=weight.dtype).to(weight.device)
                weight.add_(weight.std() * noise)


def demo(options: Options, console: Console) -> int:
    """Run the demo, print its summary, write the heat map and the JSON; the exit status."""
    options.prepare()
    config = options.engine
    console.print(
        f"{options.model}, a small model with weights of seed {options.seed}: {options.requests} requests in "
        f"conversations of several turns, on {config.device_blocks} device and {config.host_blocks} host blocks of "
        f"{config.block_tokens} tokens"
    )
    return Demo(options, console).run()


def terminal() -> Console:
    """Where the command line says what is being done; as wide as a terminal, or 120."""
    return Console(width=None if sys.stdout.isatty() else 120)


def main(**flags: Any) -> int:
    """``kvroute demo``."""
    return demo(Options(**flags), terminal())

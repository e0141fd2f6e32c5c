"""The demo: serve, stop, start again, go on; then judge every row that came out."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cache_manager.errors import ConfigError
from cache_manager.keys import Namespace
from cache_manager.storage import open_store
from paged_engine.demo.checker import Checker, SecondRun, Verdict
from paged_engine.demo.options import MOONCAKE, DemoOptions
from paged_engine.demo.pool import running_pool
from paged_engine.demo.result import DemoResult, Traffic
from paged_engine.demo.serve import Clients, Watcher, same_tokens
from paged_engine.demo.update import CONVERSATIONS_MAX, UpdateResult, across_update
from paged_engine.demo.workload import Conversation, conversations
from paged_engine.engine.engine import Engine
from paged_engine.engine.memory import RemoteStore
from paged_engine.engine.models import build_model, weights_digest
from paged_engine.engine.request import FinishReason
from paged_engine.engine.text import VOCAB_SIZE


class Demo:
    """One run. ``console`` hears what is being done."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._checker = Checker()
        self._clients = Clients(conversations(options.requests, options.seed))
        self._watcher = Watcher(self._checker, self._clients)
        self._plain = Clients(conversations(options.requests, options.seed))

    def run(self) -> DemoResult:
        """Do it all. The verdict is the same for the same options; the traffic depends on when the store answers."""
        options, started = self._options, time.perf_counter()
        with ExitStack() as stack:
            url = options.store
            if url == MOONCAKE:
                pool = stack.enter_context(running_pool())
                url = pool.url
                self._console.print(
                    f"Mooncake: master is process {pool.master_pid}, process {pool.owner_pid} lends the memory"
                )
            elif url is None:
                made = tempfile.TemporaryDirectory(prefix="store-", dir=writable_directory(options.out, "--out"))
                url = Path(stack.enter_context(made)).absolute().as_uri()
            progress = stack.enter_context(self._progress())
            traffic = self._serve(url, progress, "before restart", lambda c: (len(c.questions) + 1) // 2)
            progress.console.print("engine stopped; model, KV and rows dropped from memory; only the store is left")
            gc.collect()
            traffic += self._serve(url, progress, "after restart", lambda c: len(c.questions))
            self._serve_plainly(progress)
            verdict = self._judge(progress)
            update = self._update(progress)
        outputs, plain = self._clients.outputs, self._plain.outputs
        matching = all(same_tokens(output, plain[key]) for key, output in outputs.items() if key in plain)
        return DemoResult(
            model=options.model,
            seed=options.seed,
            store=url,
            requests=len({request for request, _ in outputs}),
            samples=len(outputs),
            aborted=sum(output.reason is FinishReason.ABORT for output in outputs.values()),
            tokens=sum(len(output.tokens) for output in outputs.values()),
            rows_expected=verdict.expected,
            rows_wrong=verdict.wrong,
            rows_missing=verdict.missing,
            rows_judged_by_recompute=verdict.judged_by_recompute,
            prefixes_routed_differently=self._checker.prefixes_routed_differently,
            traffic=traffic,
            update=update,
            tokens_match=matching and outputs.keys() == plain.keys(),
            recompute_agreement=verdict.agreed / verdict.compared if verdict.compared else 1.0,
            device_blocks=options.engine.device_blocks,
            host_blocks=options.engine.host_blocks,
            seconds=round(time.perf_counter() - started, 2),
        )

    @property
    def clients(self) -> Clients:
        """The clients of the engine under test, with every sample that they got."""
        return self._clients

    def _serve(self, url: str, progress: Progress, title: str, turns: Callable[[Conversation], int]) -> Traffic:
        """One life of the engine: everything but the store and the checker is new, and is dropped at the end."""
        model = self._build()
        namespace = Namespace(f"{self._options.model}/{weights_digest(model)}", weights_version=0)
        store = RemoteStore(url) if self._options.transfer_process else open_store(url)
        try:
            self._checker.attach(model)
            with Engine(model, self._options.engine, namespace, store=store, observer=self._watcher) as engine:
                self._watcher.engine = engine
                before = sum(c.turn for c in self._clients.conversations)
                total = sum(turns(c) for c in self._clients.conversations) - before
                self._clients.serve(engine, turns, _teller(progress, title, total))
                self._watcher.engine = None
                engine.drain()
                return Traffic.of(engine)
        finally:
            self._checker.detach()
            if not isinstance(store, RemoteStore):
                store.flush()
                store.close()

    def _serve_plainly(self, progress: Progress) -> None:
        model = self._build()
        with Engine(model, self._options.plain_engine, Namespace("plain", weights_version=0)) as engine:
            tell = _teller(progress, "plain engine", self._options.requests)
            self._plain.serve(engine, lambda c: len(c.questions), tell)

    def _judge(self, progress: Progress) -> Verdict:
        second_run, verdict = SecondRun(self._build()), Verdict()
        tell = _teller(progress, "judging rows", len(self._clients.outputs))
        for output in self._clients.outputs.values():
            expected = self._watcher.rows_expected(output)
            again = second_run(output.sequence)
            owner, prompt = f"{output.request.id}#{output.sample}", len(output.request.prompt)
            verdict += self._checker.judge(output.sequence, output.routes, expected, again, owner=owner, prompt=prompt)
            tell(1, f"{verdict.expected} rows, {verdict.wrong} wrong, {verdict.missing} missing")
        return verdict

    def _update(self, progress: Progress) -> UpdateResult:
        clients = conversations(self._options.requests, self._options.seed)[:CONVERSATIONS_MAX]
        tell = _teller(progress, "weight update", sum(c.samples for c in clients))
        config = replace(self._options.plain_engine, caching=True)
        return across_update(self._build(), config, clients, lambda ended: tell(ended, ""))

    def _build(self) -> Any:
        model: Any = build_model(self._options.model, seed=self._options.seed, vocab_size=VOCAB_SIZE)
        if self._options.engine.graphs:
            model.set_experts_implementation("batched_mm")  # does not wait for the device
        return model.to(self._options.device)

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}", style="dim"),
            console=self._console,
        )


def _teller(progress: Progress, title: str, total: int) -> Callable[[int, str], None]:
    task = progress.add_task(title, total=total, status="")
    return lambda done, status: progress.update(task, advance=done, status=status)


def writable_directory(path: Path, flag: str) -> Path:
    """``path``, made if need be; :class:`ConfigError` naming ``flag`` when nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise ConfigError(flag, "a directory that can be written", f"{path} ({error.strerror})") from error


__all__ = ["Demo", "writable_directory"]

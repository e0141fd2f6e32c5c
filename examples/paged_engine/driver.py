"""What both demos share: models, an engine without reuse to compare with, the judgement, and a bar for each stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cache_manager.keys import Namespace
from paged_engine import text
from paged_engine.engine import Engine
from paged_engine.findings import Findings, Traffic
from paged_engine.judge import Checker, SecondRun, Verdict
from paged_engine.models import build_model
from paged_engine.options import Options
from paged_engine.request import FinishReason, Output

SampleId = tuple[str, int]
"""Request id and the number of the sample."""
Outputs = Mapping[SampleId, Output]


class Tell(Protocol):
    """Hears how much more has been done, and how it stands."""

    def __call__(self, done: int, status: str = "") -> None: ...


class Driver:
    """One run of a demo. ``console`` hears what is being done, ``checker`` sees what routers do."""

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

        def told(done: int, status: str = "") -> None:
            self.progress.update(task, advance=done, status=status)

        return told

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
        config, observer = self.options.plain_engine, self.checker if watched else None
        with Engine(model, config, Namespace("plain", weights_version=0), observer=observer) as engine:
            for request in {output.request.id: output.request for output in outputs.values()}.values():
                engine.add(replace(request, draw=draw))
            while engine.busy:
                for plain in engine.step():
                    same.append(same_tokens(outputs[plain.request.id, plain.sample], plain))
                    tell(1)
        self.checker.detach()
        return all(same) and len(same) == len(outputs)

    def judge(self, outputs: Outputs, expected: Callable[[Output], int], *, owners: bool = False) -> Verdict:
        """Every row against what routers chose before these eyes. ``owners``: the engine judged was the one watched."""
        tell, second_run, verdict = self.tell("judging rows", len(outputs)), SecondRun(self.build()), Verdict()
        for output in outputs.values():
            known = {"owner": f"{output.request.id}#{output.sample}", "prompt": len(output.request.prompt)}
            verdict += self.checker.judge(
                output.sequence,
                output.routes,
                expected(output),
                second_run(output.sequence),
                **(known if owners else {}),  # type: ignore[arg-type]
            )
            tell(1, f"{verdict.rows_expected} rows, {verdict.rows_wrong} wrong, {verdict.rows_missing} missing")
        return verdict

    def found(
        self, title: str, outputs: Outputs, verdict: Verdict, traffic: Traffic, *, gone: int = 0, **more: Any
    ) -> Findings:
        """What a run comes to. ``gone`` requests of one sample were not waited for; ``more`` are other fields."""
        options, aborted = self.options, sum(output.reason is FinishReason.ABORT for output in outputs.values())
        return Findings(
            title=title,
            model=options.model,
            seed=options.seed,
            requests=len({request for request, _ in outputs}) + gone,
            samples=len(outputs) + gone,
            aborted=aborted + gone,
            tokens=sum(len(output.tokens) for output in outputs.values()),
            verdict=verdict,
            prefixes_routed_differently=self.checker.prefixes_routed_differently,
            traffic=traffic,
            device_blocks=options.engine.device_blocks,
            host_blocks=options.engine.host_blocks,
            seconds=round(time.perf_counter() - self.started_s, 2),
            **more,
        )


def rows_of(output: Output) -> int:
    """How many rows a sample that ended by itself should come with: the last sampled token has none."""
    return len(output.sequence) - 1


def same_tokens(output: Output, plain: Output) -> bool:
    """Whether the plain engine generated the same; of an aborted answer, as far as it goes."""
    if output.reason is FinishReason.ABORT:
        return plain.tokens[: len(output.tokens)] == output.tokens
    return output.tokens == plain.tokens and output.reason is plain.reason


def terminal() -> Console:
    """Where the command line says what is being done; as wide as a terminal, or 120."""
    return Console(width=None if sys.stdout.isatty() else 120)


__all__ = ["Driver", "Outputs", "SampleId", "Tell", "rows_of", "same_tokens", "terminal"]

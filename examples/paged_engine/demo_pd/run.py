"""The demo through three processes: serve, end, then judge every row against a run that crossed nothing."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cache_manager.keys import Namespace
from paged_engine.demo.checker import Checker, SecondRun, Verdict
from paged_engine.demo.result import DemoResult, Traffic
from paged_engine.demo.serve import SampleId, same_tokens
from paged_engine.demo.workload import conversations
from paged_engine.demo_pd.clients import HttpClients
from paged_engine.demo_pd.network import Network
from paged_engine.demo_pd.options import DemoPDOptions
from paged_engine.demo_pd.servers import Servers
from paged_engine.engine.engine import Engine
from paged_engine.engine.models import build_model
from paged_engine.engine.request import Output
from paged_engine.engine.text import VOCAB_SIZE
from paged_engine.serving.bodies import DRAW


@dataclass(frozen=True, slots=True)
class Crossing:
    """What crossed from prefill to decode, and what the processes left behind.

    ``prefill_recomputed_tokens`` are prompt tokens that decode computed although prefill had, whatever the reason.
    """

    network: str = "loopback"
    handovers: int = 0
    transferred_blocks: int = 0
    transferred_rows: int = 0
    transfer_retries: int = 0
    late_messages: int = 0
    prefill_recomputed_tokens: int = 0
    disconnects: int = 0
    blocks_returned: bool = False
    exit_statuses: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DemoPDResult:
    """The findings of the demo, and what crossed."""

    demo: DemoResult
    crossing: Crossing

    @property
    def ok(self) -> bool:
        ended = self.crossing.blocks_returned and not any(self.crossing.exit_statuses)
        return self.demo.ok and ended and bool(self.crossing.transferred_rows)

    def write_json(self, path: Path) -> None:
        """One flat JSON object."""
        values = asdict(self.demo)
        values |= values.pop("traffic")
        path.write_text(json.dumps({**values, **asdict(self.crossing), "ok": self.ok}, indent=2) + "\n")


class DemoPD:
    """One run. ``console`` hears what is being done."""

    def __init__(self, options: DemoPDOptions, network: Network, console: Console) -> None:
        self._options = options
        self._network = network
        self._console = console
        self._checker = Checker()

    def run(self) -> DemoPDResult:
        options, started_s = self._options, time.perf_counter()
        with ExitStack() as stack:
            progress = stack.enter_context(_progress(self._console))
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-demo-pd-")))
            clients, traffic, crossing = self._serve(directory, progress)
            plain = self._plainly(clients.outputs, progress)
            verdict = self._judge(clients.outputs, progress)
        outputs = clients.outputs
        demo = DemoResult(
            model=options.model,
            store="none",
            seed=options.seed,
            requests=len({request for request, _ in outputs}) + len(clients.gone),
            samples=len(outputs) + len(clients.gone),
            aborted=len(clients.gone),
            tokens=sum(len(output.tokens) for output in outputs.values()),
            rows_expected=verdict.expected,
            rows_wrong=verdict.wrong,
            rows_missing=verdict.missing,
            rows_judged_by_recompute=verdict.judged_by_recompute,
            prefixes_routed_differently=self._checker.prefixes_routed_differently,
            traffic=traffic,
            tokens_match=all(same_tokens(output, plain[key]) for key, output in outputs.items()),
            recompute_agreement=verdict.agreed / verdict.compared if verdict.compared else 1.0,
            device_blocks=options.engine.device_blocks,
            host_blocks=options.engine.host_blocks,
            seconds=round(time.perf_counter() - started_s, 2),
        )
        return DemoPDResult(demo, crossing)

    def _serve(self, directory: Path, progress: Progress) -> tuple[HttpClients, Traffic, Crossing]:
        options = self._options
        with Servers(self._network, directory, options) as servers:
            task = progress.add_task("starting three processes", total=1)
            servers.wait_ready()
            progress.advance(task)
            task = progress.add_task("serving", total=options.requests)
            clients = HttpClients(servers.route.url, options.model, conversations(options.requests, options.seed))
            clients.run(lambda ended: progress.advance(task, ended))
            returned = servers.wait_quiet()
            prefill, decode, route = (s.metrics() for s in (servers.prefill, servers.decode, servers.route))
            statuses = servers.end()
        if bad := {name: status for name, status in statuses.items() if status}:
            progress.console.print(f"[red]exit statuses: {bad}[/]")
        crossing = Crossing(
            network=self._network.name,
            handovers=int(decode["decode_handovers_total"]),
            transferred_blocks=int(decode["decode_transferred_blocks_total"]),
            transferred_rows=int(decode["decode_transferred_rows_total"]),
            transfer_retries=int(decode["transfer_retries_total"]),
            late_messages=int(prefill["transfer_late_messages_total"]),
            prefill_recomputed_tokens=int(decode["decode_prefill_recomputed_tokens_total"]),
            disconnects=int(route["http_disconnects_total"]),
            blocks_returned=returned,
            exit_statuses=tuple(statuses.values()),
        )
        return clients, _traffic(prefill) + _traffic(decode), crossing

    def _plainly(self, outputs: Mapping[SampleId, Output], progress: Progress) -> dict[SampleId, Output]:
        """Every request again, in one process, by an engine without reuse; the checker looks at its routers."""
        task = progress.add_task("plain engine", total=len(outputs))
        found = {}
        model = self._build()
        self._checker.attach(model)
        with Engine(
            model, self._options.demo.plain_engine, Namespace("plain", weights_version=0), observer=self._checker
        ) as engine:
            for request in {output.request.id: output.request for output in outputs.values()}.values():
                engine.add(replace(request, draw=DRAW))
            while engine.busy:
                for output in engine.step():
                    found[output.request.id, output.sample] = output
                    progress.advance(task)
        self._checker.detach()
        return found

    def _judge(self, outputs: Mapping[SampleId, Output], progress: Progress) -> Verdict:
        task = progress.add_task("judging rows", total=len(outputs))
        second_run, verdict = SecondRun(self._build()), Verdict()
        for output in outputs.values():
            again = second_run(output.sequence)
            verdict += self._checker.judge(output.sequence, output.routes, len(output.sequence) - 1, again)
            progress.advance(task)
        return verdict

    def _build(self) -> Any:
        return build_model(self._options.model, seed=self._options.seed, vocab_size=VOCAB_SIZE)


_TRAFFIC = {
    "steps": "engine_steps",
    "computed_tokens": "engine_computed_tokens",
    "prefix_hit_rows": "blocks_prefix_hit_tokens",
    "restored_rows": "blocks_restored_tokens",
    "swapped_out_rows": "rows_swapped_out_rows",
    "swapped_in_rows": "rows_swapped_in_rows",
    "cow_rows": "rows_copied_rows",
    "evicted_blocks": "blocks_evicted_blocks",
    "persisted_blocks": "blocks_persisted_blocks",
    "preemptions": "blocks_preemptions",
    "dropped_sequences": "engine_dropped_sequences",
    "store_failures": "blocks_store_failures",
}


def _traffic(metrics: Mapping[str, float]) -> Traffic:
    """What one engine did, from its metrics; there is no store."""
    known = {f.name for f in fields(Traffic)}
    assert known >= _TRAFFIC.keys(), "a counter of the demo has another name"
    return Traffic(**{name: int(metrics[f"{metric}_total"]) for name, metric in _TRAFFIC.items()})


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


__all__ = ["Crossing", "DemoPD", "DemoPDResult"]

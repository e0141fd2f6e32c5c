"""``kvroute demo-pd``: run it, say what was found."""

from __future__ import annotations

import sys

import torch
from rich.console import Console

from cache_manager.errors import ConfigError
from paged_engine.demo.command import THREADS, judgement
from paged_engine.demo_pd.network import Loopback, Namespaces, in_own_namespace, why_no_namespaces
from paged_engine.demo_pd.options import DemoPDOptions
from paged_engine.demo_pd.run import DemoPD, DemoPDResult


def demo_pd(options: DemoPDOptions, console: Console) -> int:
    """Run the demo, print its summary, write the JSON; the exit status."""
    if options.network in ("auto", "namespaces"):
        why_not = why_no_namespaces()
        if why_not is None:
            return in_own_namespace(_again(options))
        if options.network == "namespaces":
            raise ConfigError("--network", "a machine that allows network namespaces", why_not)
        console.print(f"no network namespaces here ({why_not}): all on loopback")
    torch.set_num_threads(THREADS)
    network = Namespaces() if options.network == "inside" else Loopback()
    where = "a network namespace each" if options.network == "inside" else "loopback"
    console.print(
        f"{options.model}, seeded with {options.seed}: {options.requests} requests through prefill, decode and route, "
        f"three processes ({where}), {options.engine.device_blocks} device blocks each"
    )
    result = DemoPD(options, network, console).run()
    table = judgement(result.demo, "kvroute demo-pd")
    table.add_section()
    for what, value in _crossed(result):
        table.add_row(what, value)
    console.print(table)
    if options.json is not None:
        result.write_json(options.json)
        console.print(f"numbers: {options.json}")
    console.print("[green]every row is right[/]" if result.ok else "[red]FAILED: see the table[/]")
    return 0 if result.ok else 1


def _crossed(result: DemoPDResult) -> tuple[tuple[str, str], ...]:
    crossing = result.crossing
    return (
        ("prompts handed over", f"{crossing.handovers:,}"),
        ("rows transferred (blocks)", f"{crossing.transferred_rows:,} ({crossing.transferred_blocks:,})"),
        ("transfers asked for again, late messages", f"{crossing.transfer_retries:,}, {crossing.late_messages:,}"),
        ("prompt tokens that decode computed again", f"{crossing.prefill_recomputed_tokens:,}"),
        ("clients that went away", f"{crossing.disconnects:,}"),
        ("every block has come back", "yes" if crossing.blocks_returned else "[red]NO[/]"),
        ("exit statuses", ", ".join(map(str, crossing.exit_statuses))),
    )


def _again(options: DemoPDOptions) -> tuple[str, ...]:
    """The command that runs these options where the bridge is."""
    chosen = ["--seed", str(options.seed), "--requests", str(options.requests), "--model", options.model]
    if options.json is not None:
        chosen += ["--json", str(options.json)]
    return (sys.executable, "-P", "-m", "kvroute.cli", "demo-pd", *chosen, "--network", "inside")


__all__ = ["demo_pd"]

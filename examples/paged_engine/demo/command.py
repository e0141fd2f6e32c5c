"""``kvroute demo``: run it, say what was found."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from cache_manager.errors import ConfigError
from paged_engine.demo.options import DemoOptions
from paged_engine.demo.result import DemoResult
from paged_engine.demo.run import Demo, writable_directory
from paged_engine.report import expert_load, heat_map

THREADS = 1
"""More would spend their time waiting for each other: the matrices are small."""


def demo(options: DemoOptions, console: Console) -> int:
    """Run the demo, print its summary, write the heat map and the JSON; the exit status."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "cpu, for torch sees no CUDA GPU here", options.device)
    torch.set_num_threads(THREADS)
    out, config = writable_directory(options.out, "--out"), options.engine
    if options.json is not None:
        writable_directory(options.json.parent, "--json")
        if options.json.is_dir():
            raise ConfigError("--json", "a file", f"{options.json}, a directory")
    console.print(
        f"{options.model}, seeded with {options.seed}: {options.requests} requests in conversations of several turns, "
        f"on {config.device_blocks} device and {config.host_blocks} host blocks of {config.block_tokens} tokens"
    )
    run = Demo(options, console)
    result = run.run()
    console.print(judgement(result))
    if (picture := _draw(run, options, out)) is not None:
        console.print(f"expert load: {picture}")
    else:
        console.print("expert load: no picture, matplotlib is not installed (pip install 'kvroute\\[plot]')")
    if options.json is not None:
        result.write_json(options.json)
        console.print(f"numbers: {options.json}")
    console.print("[green]every row is right[/]" if result.ok else "[red]FAILED: see the table[/]")
    return 0 if result.ok else 1


def _draw(run: Demo, options: DemoOptions, out: Path) -> Path | None:
    if importlib.util.find_spec("matplotlib") is None:
        return None
    routes = [output.routes for output in run.clients.outputs.values() if len(output.routes)]
    rows = sum(len(each) for each in routes)
    picture = out / "expert-load.png"
    title = f"Expert load: {options.model}, {rows:,} rows, top {routes[0].top_k} of {routes[0].num_experts}"
    even = 100 * routes[0].top_k / routes[0].num_experts
    heat_map(expert_load(routes), routes[0].layer_ids, picture, title=title, note=f"an even load would be {even:.0f} %")
    return picture


def judgement(result: DemoResult, title: str = "kvroute demo") -> Table:
    """The findings as a table for people."""
    table = Table(title=f"{title}: {result.model}", show_header=False)
    table.add_column("what")
    table.add_column("how much", justify="right")
    traffic, update = result.traffic, result.update
    sections: tuple[tuple[tuple[str, str], ...], ...] = (
        (
            ("requests (samples, of which aborted)", f"{result.requests:,} ({result.samples:,}, {result.aborted:,})"),
            ("tokens generated", f"{result.tokens:,}"),
            ("tokens computed in forward passes", f"{traffic.computed_tokens:,} in {traffic.steps:,}"),
        ),
        (
            ("rows found by prefix", f"{traffic.prefix_hit_rows:,}"),
            ("rows restored from the store", f"{traffic.restored_rows:,}"),
            ("rows swapped out, in", f"{traffic.swapped_out_rows:,}, {traffic.swapped_in_rows:,}"),
            ("sequences preempted, dropped to recompute", f"{traffic.preemptions:,}, {traffic.dropped_sequences:,}"),
            ("rows copied on write", f"{traffic.cow_rows:,}"),
            ("blocks evicted", f"{traffic.evicted_blocks:,}"),
            ("store failures, corrupt records", f"{traffic.store_failures:,}, {traffic.corrupt_records:,}"),
        ),
        (
            ("rows expected", f"{result.rows_expected:,}"),
            ("rows wrong", _bad(result.rows_wrong)),
            ("rows missing", _bad(result.rows_missing)),
            ("rows only a second run could judge", f"{result.rows_judged_by_recompute:,}"),
            ("tokens equal the plain engine's", "yes" if result.tokens_match else "[red]NO[/]"),
            ("top-k sets equal in a second run", f"{100 * result.recompute_agreement:.3f} %"),
        ),
    )
    if update is not None:
        sections += (
            (
                ("samples across a weight update, rows", f"{update.update_samples:,}, {update.update_rows_expected:,}"),
                ("rows computed again with other experts", f"{update.update_rows_recomputed:,}"),
                ("rows not those of sampling time", _bad(update.update_rows_wrong)),
                ("rows missing", _bad(update.update_rows_missing)),
            ),
        )
    for section in sections:
        for what, value in section:
            table.add_row(what, value)
        table.add_section()
    table.add_row("seconds", f"{result.seconds:.1f}")
    return table


def _bad(count: int) -> str:
    return f"[red]{count:,}[/]" if count else "0"

"""What a demo found: numbers by name, as one JSON object and as a table for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from paged_engine.engine import Engine

ROWS: Final[tuple[tuple[str, str], ...]] = (
    ("requests (samples, of which aborted)", "{requests:,} ({samples:,}, {aborted:,})"),
    ("tokens generated", "{tokens:,}"),
    ("tokens computed in forward passes", "{computed_tokens:,} in {steps:,}"),
    ("", "{requests}"),
    ("rows found by prefix", "{prefix_hit_rows:,}"),
    ("rows restored from the store", "{restored_rows:,}"),
    ("rows swapped out, in", "{swapped_out_rows:,}, {swapped_in_rows:,}"),
    ("sequences preempted, dropped to recompute", "{preemptions:,}, {dropped_sequences:,}"),
    ("rows copied on write", "{cow_rows:,}"),
    ("blocks evicted", "{evicted_blocks:,}"),
    ("store failures, corrupt records", "{store_failures:,}, {corrupt_records:,}"),
    ("", "{requests}"),
    ("rows expected", "{rows_expected:,}"),
    ("rows wrong", "{rows_wrong:,}"),
    ("rows missing", "{rows_missing:,}"),
    ("rows only a second run could judge", "{rows_judged_by_recompute:,}"),
    ("tokens equal the plain engine's", "{tokens_match}"),
    ("top-k sets equal in a second run", "{recompute_agreement:.3%}"),
    ("", "{update_samples}"),
    ("samples across a weight update, rows", "{update_samples:,}, {update_rows_expected:,}"),
    ("rows computed again with other experts", "{update_rows_recomputed:,}"),
    ("rows not those of sampling time", "{update_rows_wrong:,}"),
    ("rows missing", "{update_rows_missing:,}"),
    ("", "{handovers}"),
    ("prompts handed over", "{handovers:,}"),
    ("rows transferred (blocks)", "{transferred_rows:,} ({transferred_blocks:,})"),
    ("prompt tokens that decode computed again", "{prefill_recomputed_tokens:,}"),
    ("clients that went away", "{clients_left:,}"),
    ("every block has come back", "{blocks_returned}"),
    ("exit statuses", "{exit_statuses}"),
    ("", "{requests}"),
    ("seconds", "{seconds:.1f}"),
)
"""A demo's table: what, and the numbers that say it. A row of numbers that this demo has not is left out."""
NONE: Final = ("rows_wrong", "rows_missing", "update_rows_wrong", "update_rows_missing")
TRUE: Final = ("tokens_match", "blocks_returned", "transferred_rows")


def traffic(engine: Engine) -> dict[str, int]:
    """What an engine did with its blocks and rows."""
    blocks, rows, store = engine.manager.counters, engine.aux.counters, engine.aux.store_counters
    return {
        "steps": engine.steps,
        "computed_tokens": engine.computed_tokens,
        "prefix_hit_rows": blocks.prefix_hit_tokens,
        "restored_rows": blocks.restored_tokens,
        "swapped_out_rows": rows.swapped_out_rows,
        "swapped_in_rows": rows.swapped_in_rows,
        "cow_rows": rows.copied_rows,
        "evicted_blocks": blocks.evicted_blocks,
        "persisted_blocks": blocks.persisted_blocks,
        "preemptions": blocks.preemptions,
        "dropped_sequences": engine.scheduler.dropped,
        "store_failures": blocks.store_failures,
        "corrupt_records": store.corrupt if store else 0,
    }


def right(found: Mapping[str, Any]) -> bool:
    """The verdict: no row is wrong or missing, every token is right, and nothing was left behind."""
    ended = not any(found.get("exit_statuses", ()))
    return ended and not any(found.get(name) for name in NONE) and all(found.get(name, True) for name in TRUE)


def write_json(found: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps({**found, "ok": right(found)}, indent=2) + "\n")


def table(found: Mapping[str, Any]) -> Table:
    shown = Table(title=f"{found['title']}: {found['model']}", show_header=False)
    shown.add_column("what")
    shown.add_column("how much", justify="right")
    for what, numbers in ROWS:
        names = [part.partition("}")[0].partition(":")[0] for part in numbers.split("{")[1:]]
        if not what and names[0] in found:
            shown.add_section()
        elif found.keys() >= set(names):
            bad = any((name in NONE and found[name]) or (name in TRUE and not found[name]) for name in names)
            text = numbers.format(**found).replace("True", "yes").replace("False", "NO")
            shown.add_row(what, f"[red]{text}[/]" if bad else text)
    return shown

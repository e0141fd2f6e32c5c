"""What a demo found: numbers by name, as one JSON object and as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paged_engine.engine import Engine

ROWS: Final = """
requests (samples, of which aborted)       | {requests:,} ({samples:,}, {aborted:,})
tokens generated                           | {tokens:,}
rows found by prefix                       | {prefix_hit_rows:,}
rows restored from the store               | {restored_rows:,}
rows swapped out, in                       | {swapped_out_rows:,}, {swapped_in_rows:,}
rows copied on write                       | {cow_rows:,}
blocks evicted                             | {evicted_blocks:,}
rows expected                              | {rows_expected:,}
rows wrong                                 | {rows_wrong:,}
rows missing                               | {rows_missing:,}
rows only a second run could judge         | {rows_judged_by_recompute:,}
tokens equal the plain engine's            | {tokens_match}
top-k sets equal in a second run           | {recompute_agreement:.3%}
samples across a weight update, rows       | {update_samples:,}, {update_rows_expected:,}
rows computed again with other experts     | {update_rows_recomputed:,}
of these rows, not those of sampling time  | {update_rows_wrong:,}
of these rows, missing                     | {update_rows_missing:,}
prompts handed over                        | {handovers:,}
rows transferred (blocks)                  | {transferred_rows:,} ({transferred_blocks:,})
prompt tokens that decode computed again   | {prefill_recomputed_tokens:,}
clients that went away                     | {clients_left:,}
every block has come back                  | {blocks_returned}
exit statuses                              | {exit_statuses}
seconds                                    | {seconds:.1f}
"""
"""A demo's table: a label and its numbers. Rows whose numbers this demo does not have are left out."""
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
    """The verdict: no row is wrong or missing, every token is right, and all blocks were freed."""
    ended = not any(found.get("exit_statuses", ()))
    return ended and not any(found.get(name) for name in NONE) and all(found.get(name, True) for name in TRUE)


def table(found: Mapping[str, Any]) -> str:
    """Lines of two columns; values that fail the run are marked."""
    lines = [f"{found['title']}: {found['model']}"]
    for line in ROWS.strip().splitlines():
        what, numbers = map(str.strip, line.split("|"))
        names = [part.partition("}")[0].partition(":")[0] for part in numbers.split("{")[1:]]
        if found.keys() >= set(names):
            bad = any((name in NONE and found[name]) or (name in TRUE and not found[name]) for name in names)
            lines.append(f"  {what:45} {numbers.format(**found)}{'   <-- WRONG' if bad else ''}")
    return "\n".join(lines) + "\n"

"""What a demo found: numbers by name, as one JSON object and as a table with the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paged_engine.engine import Engine

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
    """Lines of a name and a value; values that fail the run are marked."""
    lines = [f"{found['title']}: {found['model']}"]
    for name, value in list(found.items())[2:]:
        bad = (name in NONE and value) or (name in TRUE and not value)
        lines.append(f"  {name:28} {value:,}" if type(value) is int else f"  {name:28} {value}")
        lines[-1] += "   <-- WRONG" if bad else ""
    return "\n".join(lines) + "\n"

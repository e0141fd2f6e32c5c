"""What a run of the demo found, as numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from paged_engine.demo.update import UpdateResult
from paged_engine.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Traffic:
    """What an engine did with its blocks and rows; engines before and after a restart add up."""

    steps: int = 0
    computed_tokens: int = 0
    prefix_hit_rows: int = 0
    restored_rows: int = 0
    swapped_out_rows: int = 0
    swapped_in_rows: int = 0
    cow_rows: int = 0
    evicted_blocks: int = 0
    persisted_blocks: int = 0
    preemptions: int = 0
    dropped_sequences: int = 0
    store_failures: int = 0
    corrupt_records: int = 0

    @classmethod
    def of(cls, engine: Engine) -> Self:
        blocks, rows, store = engine.manager.counters, engine.aux.counters, engine.aux.store_counters
        return cls(
            steps=engine.steps,
            computed_tokens=engine.computed_tokens,
            prefix_hit_rows=blocks.prefix_hit_tokens,
            restored_rows=blocks.restored_tokens,
            swapped_out_rows=rows.swapped_out_rows,
            swapped_in_rows=rows.swapped_in_rows,
            cow_rows=rows.copied_rows,
            evicted_blocks=blocks.evicted_blocks,
            persisted_blocks=blocks.persisted_blocks,
            preemptions=blocks.preemptions,
            dropped_sequences=engine.scheduler.dropped,
            store_failures=blocks.store_failures,
            corrupt_records=store.corrupt if store else 0,
        )

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The demo's findings; ``ok`` is its verdict.

    A row is wrong when it differs from what the router chose, missing when it should have been there and was not.
    ``tokens_match``: every sample equals that of the plain engine. ``recompute_agreement`` is the share of (row, layer)
    pairs for which a second run of the whole sequence chose the same set of experts. ``update`` is of a run of its own,
    where there was one.
    """

    model: str
    seed: int
    store: str
    requests: int
    samples: int
    aborted: int
    tokens: int
    rows_expected: int
    rows_wrong: int
    rows_missing: int
    rows_judged_by_recompute: int
    prefixes_routed_differently: int
    traffic: Traffic
    tokens_match: bool
    recompute_agreement: float
    device_blocks: int
    host_blocks: int
    seconds: float
    update: UpdateResult | None = None

    @property
    def ok(self) -> bool:
        updated = self.update is None or not (self.update.update_rows_wrong or self.update.update_rows_missing)
        return self.tokens_match and not self.rows_wrong and not self.rows_missing and updated

    def write_json(self, path: Path) -> None:
        """One flat JSON object."""
        values = asdict(self)
        values |= values.pop("traffic") | (values.pop("update") or {})
        path.write_text(json.dumps({**values, "ok": self.ok}, indent=2) + "\n", encoding="utf-8")

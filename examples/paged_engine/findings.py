"""What a demo found: numbers, a table for people, a JSON object for machines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from rich.table import Table

from paged_engine.engine import Engine
from paged_engine.judge import Verdict


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
class Update:
    """What came of the rows of samples that generated across an update of the weights.

    ``update_rows_recomputed`` positions were computed again after it with another result: so many rows would be wrong
    if the rows in the blocks were handed out.
    """

    update_samples: int
    update_rows_expected: int
    update_rows_wrong: int
    update_rows_missing: int
    update_rows_recomputed: int


@dataclass(frozen=True, slots=True)
class Crossed:
    """What crossed from prefill to decode, and what the processes left behind.

    ``prefill_recomputed_tokens`` are prompt tokens that decode computed although prefill had, whatever the reason.
    """

    handovers: int
    transferred_blocks: int
    transferred_rows: int
    prefill_recomputed_tokens: int
    clients_left: int
    blocks_returned: bool
    exit_statuses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """All of it; ``ok`` is the verdict.

    ``tokens_match``: every sample equals that of an engine without reuse.
    """

    title: str
    model: str
    seed: int
    store: str
    requests: int
    samples: int
    aborted: int
    tokens: int
    verdict: Verdict
    prefixes_routed_differently: int
    traffic: Traffic
    tokens_match: bool
    device_blocks: int
    host_blocks: int
    seconds: float
    update: Update | None = None
    crossed: Crossed | None = None

    @property
    def ok(self) -> bool:
        update, crossed = self.update, self.crossed
        rows = not (self.verdict.rows_wrong or self.verdict.rows_missing) and self.tokens_match
        updated = update is None or not (update.update_rows_wrong or update.update_rows_missing)
        ended = crossed is None or bool(crossed.blocks_returned and crossed.transferred_rows)
        return rows and updated and ended and not (crossed and any(crossed.exit_statuses))

    def write_json(self, path: Path) -> None:
        """One flat JSON object."""
        values = asdict(self)
        for part in ("verdict", "traffic", "update", "crossed"):
            values |= values.pop(part) or {}
        agreement = self.verdict.agreement
        path.write_text(json.dumps({**values, "recompute_agreement": agreement, "ok": self.ok}, indent=2) + "\n")

    def table(self) -> Table:
        """The findings for people."""
        found = Table(title=f"{self.title}: {self.model}", show_header=False)
        found.add_column("what")
        found.add_column("how much", justify="right")
        did, verdict, update, crossed = self.traffic, self.verdict, self.update, self.crossed
        rows: list[tuple[str, str] | None] = [
            ("requests (samples, of which aborted)", f"{self.requests:,} ({self.samples:,}, {self.aborted:,})"),
            ("tokens generated", f"{self.tokens:,}"),
            ("tokens computed in forward passes", f"{did.computed_tokens:,} in {did.steps:,}"),
            None,
            ("rows found by prefix", f"{did.prefix_hit_rows:,}"),
            ("rows restored from the store", f"{did.restored_rows:,}"),
            ("rows swapped out, in", f"{did.swapped_out_rows:,}, {did.swapped_in_rows:,}"),
            ("sequences preempted, dropped to recompute", f"{did.preemptions:,}, {did.dropped_sequences:,}"),
            ("rows copied on write", f"{did.cow_rows:,}"),
            ("blocks evicted", f"{did.evicted_blocks:,}"),
            ("store failures, corrupt records", f"{did.store_failures:,}, {did.corrupt_records:,}"),
            None,
            ("rows expected", f"{verdict.rows_expected:,}"),
            ("rows wrong", _bad(verdict.rows_wrong)),
            ("rows missing", _bad(verdict.rows_missing)),
            ("rows only a second run could judge", f"{verdict.rows_judged_by_recompute:,}"),
            ("tokens equal the plain engine's", _yes(self.tokens_match)),
            ("top-k sets equal in a second run", f"{100 * verdict.agreement:.3f} %"),
        ]
        if update is not None:
            rows += [
                None,
                ("samples across a weight update, rows", f"{update.update_samples:,}, {update.update_rows_expected:,}"),
                ("rows computed again with other experts", f"{update.update_rows_recomputed:,}"),
                ("rows not those of sampling time", _bad(update.update_rows_wrong)),
                ("rows missing", _bad(update.update_rows_missing)),
            ]
        if crossed is not None:
            rows += [
                None,
                ("prompts handed over", f"{crossed.handovers:,}"),
                ("rows transferred (blocks)", f"{crossed.transferred_rows:,} ({crossed.transferred_blocks:,})"),
                ("prompt tokens that decode computed again", f"{crossed.prefill_recomputed_tokens:,}"),
                ("clients that went away", f"{crossed.clients_left:,}"),
                ("every block has come back", _yes(crossed.blocks_returned)),
                ("exit statuses", ", ".join(map(str, crossed.exit_statuses))),
            ]
        for row in (*rows, None, ("seconds", f"{self.seconds:.1f}")):
            found.add_section() if row is None else found.add_row(*row)
        return found


def _bad(count: int) -> str:
    return f"[red]{count:,}[/]" if count else "0"


def _yes(true: bool) -> str:
    return "yes" if true else "[red]NO[/]"


__all__ = ["Crossed", "Findings", "Traffic", "Update"]

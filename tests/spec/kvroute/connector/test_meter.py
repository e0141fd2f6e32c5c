"""Counters of an engine on their way to Prometheus; the dashboard and the page name only metrics that exist."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Self

import pytest
from waiting import GIVE_UP_S

from cache_manager.lock import AuxCounters
from cache_manager.ports import RecordCounters
from kvroute.capture import step_ids, step_weights
from kvroute.connector import Limits, job_counts, meter, worker
from kvroute.connector.carriers import by_key, none
from kvroute.connector.limits import LIMITS
from kvroute.connector.meter import EVENTS, FIELDLESS, METRICS, SECONDS, WHAT, WITHOUT_ROWS, Exported, Meter, merged
from kvroute.integrations.sglang import rows

DOCS = Path(__file__).parents[4] / "docs"
EAGER = Limits(metrics_s=0.0)


@dataclass
class Counters:
    rows: int = 0
    pulls_in_flight: int = 0


def test_the_first_of_each_cause_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: missing rows are not silent, and a cause that stays is one line. Method: two causes, of which one twice,
    with an address behind it that changes; then no token."""
    found = Meter(dict)
    with caplog.at_level(logging.WARNING):
        for tokens, reason in ((2, "gone: one"), (5, "gone: another"), (3, "late"), (0, "nothing")):
            found.miss(reason, tokens)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "2 tokens have no rows: gone: one",
        "3 tokens have no rows: late",
    ]
    assert found.missing == {"gone": 7, "late": 3}


def test_take_returns_the_counters_that_have_grown() -> None:
    """Goal: each count and time is taken once, causes are few. Method: a meter that is taken three times."""
    node = Counters()
    found = Meter(lambda: {"blocks": Counters(3), "transfer": {"node": node}}, EAGER)
    found.took("persist", 0.5)
    found.lose_field("no row was written; see the log")
    for at in range(EAGER.causes_max + 5):
        found.miss(f"cause {at}: detail", 2)
    first = found.take()
    assert first[EVENTS] == {"blocks/rows": 3}
    assert first[SECONDS] == {"persist": [0.5]}
    assert first[FIELDLESS] == {"no row was written": 1}
    assert len(first[WITHOUT_ROWS]) == EAGER.causes_max + 1
    assert (first[WITHOUT_ROWS]["cause 0"], first[WITHOUT_ROWS]["other"]) == (2, 10)
    assert found.take() is None
    node.rows = 4
    found.took("persist", 1.0)
    second = found.take()
    assert second == {EVENTS: {"transfer/node.rows": 4}, WITHOUT_ROWS: {}, FIELDLESS: {}, SECONDS: {"persist": [1.0]}}
    both = merged(first, second)
    assert (both[EVENTS], both[SECONDS]) == ({"blocks/rows": 3, "transfer/node.rows": 4}, {"persist": [0.5, 1.0]})


class Slowly(int):
    """A number that takes a while to be added to another."""

    def __new__(cls, n: int, begun: threading.Event, go: threading.Event) -> Self:
        made = super().__new__(cls, n)
        made.begun, made.go = begun, go
        return made

    def __radd__(self, other: int) -> int:
        self.begun.set()
        self.go.wait(GIVE_UP_S)
        return other + int(self)


def test_no_count_is_lost_between_threads() -> None:
    """Goal: tokens that two threads miss are counted, each once, whatever is taken meanwhile. Method: one thread is in
    the middle of adding when another one adds to the same cause, and a third one takes."""
    found, begun, go, taken = Meter(dict, EAGER), threading.Event(), threading.Event(), []
    found.miss("one", 1)
    calls = [partial(found.miss, "one", Slowly(2, begun, go)), partial(found.miss, "one", 4)]
    calls.append(lambda: taken.append(found.take()))
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
        assert begun.wait(GIVE_UP_S)
    for thread in threads[1:]:
        thread.join(0.05)  # a thread that does not wait is done by then
    go.set()
    for thread in threads:
        thread.join(GIVE_UP_S)
    taken.append(found.take())
    assert sum(each[WITHOUT_ROWS]["one"] for each in taken if each) == 7


class Sought(str):
    """A reason whose cause is itself, and which takes a while to be found the second time that it is looked up."""

    def __new__(cls, text: str, begun: threading.Event, go: threading.Event) -> Self:
        made = super().__new__(cls, text)
        made.begun, made.go, made.looks = begun, go, 0
        return made

    def partition(self, _: str, /) -> tuple[str, str, str]:
        return self, "", ""

    def __hash__(self) -> int:
        self.looks += 1
        if self.looks == 2:
            self.begun.set()
            self.go.wait(GIVE_UP_S)
        return super().__hash__()

    __eq__ = str.__eq__


def test_no_answer_without_its_field_is_lost_between_threads() -> None:
    """Goal: as above, for answers without their field. Method: one is amid being counted when another thread takes."""
    found, begun, go, taken = Meter(dict, EAGER), threading.Event(), threading.Event(), []
    found.lose_field("another")
    loses = threading.Thread(target=found.lose_field, args=(Sought("late", begun, go),))
    takes = threading.Thread(target=lambda: taken.append(found.take()))
    loses.start()
    assert begun.wait(GIVE_UP_S)
    takes.start()
    takes.join(0.05)  # a thread that does not wait is done by then
    go.set()
    for thread in (loses, takes):
        thread.join(GIVE_UP_S)
    taken.append(found.take())
    assert sum(each[FIELDLESS].get("late", 0) for each in taken if each) == 1


def test_it_is_taken_now_and_then_only() -> None:
    found = Meter(dict)
    found.miss("one", 1)
    assert found.take()
    found.miss("one", 1)
    assert found.take() is None


class Kept:
    """A kind of metric that keeps what it is told, by its labels; Prometheus's have these calls."""

    def __init__(self, name: str, documentation: str, labelnames: list[str], **_: object) -> None:
        assert documentation
        self.name, self.labelnames = name, labelnames
        self.told: dict[tuple[str, ...], list[float]] = {}

    def labels(self, *values: str) -> Self:
        assert len(values) == len(self.labelnames), self.name
        self.telling = self.told.setdefault(values, [])
        return self


class KeptCounter(Kept):
    def inc(self, amount: float) -> None:
        self.telling.append(amount)


class KeptHistogram(Kept):
    def observe(self, amount: float) -> None:
        self.telling.append(amount)


def test_an_engine_exports_what_was_taken() -> None:
    """Goal: each number of a take is in the metric of its name, under the engine's labels and its own, once. Method: a
    take with every metric; tiers, names and causes with a slash."""
    made = dict[str, Kept]()

    def kind_of(kind: type[Kept]) -> Callable[..., Kept]:
        return lambda name, **said: made.setdefault(name, kind(name, **said))

    exported = Exported((kind_of(KeptCounter), kind_of(KeptHistogram)), ["engine"])
    exported.observe(
        {
            EVENTS: {"blocks/rows": 3, "transfer/node/deep.rows": 4},
            WITHOUT_ROWS: {"no room in /dev/shm": 7},
            FIELDLESS: {"late": 2},
            SECONDS: {"persist": [0.5, 1.0]},
        },
        ["e0"],
    )
    assert {name: kept.told for name, kept in made.items()} == {
        EVENTS: {("e0", "blocks", "rows"): [3], ("e0", "transfer", "node/deep.rows"): [4]},
        WITHOUT_ROWS: {("e0", "no room in /dev/shm"): [7]},
        FIELDLESS: {("e0", "late"): [2]},
        SECONDS: {("e0", "persist"): [0.5, 1.0]},
    }
    assert [type(made[name]) for name in (EVENTS, SECONDS)] == [KeptCounter, KeptHistogram]


def test_the_dashboard_asks_for_what_is_exported() -> None:
    """Goal: no panel is empty because its metric does not exist. Method: metrics, labels and their values by name."""
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    events = {each.name for kind in (AuxCounters, RecordCounters) for each in fields(kind)}
    seen = set()
    for text in asked:
        for name, chosen in re.findall(r"(kvroute:\w+)(?:\{([^}]*)\})?", text):
            metric = SECONDS if name in (f"{SECONDS}_bucket", f"{SECONDS}_count") else name
            seen.add(metric)
            labels = dict(re.findall(r'(\w+)=~?"([^"]*)"', chosen))
            assert set(labels) <= set(METRICS[metric][1]), text
            for value in labels.get("event", "").split("|") if "event" in labels else ():
                assert value in events, text
    assert seen == set(METRICS)


def test_the_page_has_every_cause_and_every_time() -> None:
    """Goal: every cause has a remedy on the page. Method: the constants that name causes are rows of the page."""
    page = (DOCS / "missing-rows.md").read_text()
    causes = [
        meter.NO_IDS,
        worker.NO_SLOTS,
        none.NO_CARRIER,
        by_key.NO_ANSWER.format(LIMITS.restore_s),
        *job_counts.NOT_RESTORED.values(),
    ]
    causes += [
        rows.UNREPORTED,
        rows.UNVERIFIED,
        rows.OTHER_WEIGHTS,
        step_ids.OTHERS,
        step_ids.WIDTH,
        step_ids.TYPE,
        *step_ids.REASONS.values(),
        step_weights.FORM,
        step_weights.OTHER_TOKENS,
        *step_weights.NO_WEIGHTS.values(),
    ]
    causes += [by_key.WRONG_KV, by_key.NO_ROOM]
    rows_of_page = re.findall(r"^\| (`[^|]+`) \|", page, re.MULTILINE)
    told = {cause for row in rows_of_page for cause in re.findall(r"`([^`]+)`", row)}
    assert [cause for cause in causes if cause.partition(":")[0] not in told] == []
    assert all(f"`{name}`" in page for name in (*METRICS, *WHAT))

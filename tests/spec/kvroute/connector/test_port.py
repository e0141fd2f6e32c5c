"""The port of a carrier: a side by itself does nothing, and keeps nobody waiting."""

from __future__ import annotations

import numpy as np

from kvroute.connector.carriers.port import Moves, SchedulerSide, WorkerSide
from kvroute.connector.messages import StepMeta


def test_a_side_by_itself_does_nothing() -> None:
    """Goal: a carrier defines the calls that it needs. Method: each call of both sides that says something: all KV is
    taken, no row is flagged or explained, every request goes on, and the thread behind a step has nothing to begin."""
    scheduler, worker, step = SchedulerSide(), WorkerSide(), StepMeta(None, b"")
    nothing = np.zeros(0, np.int64)
    assert scheduler.takes(None, 1, 7) == 7  # type: ignore[arg-type]
    assert scheduler.step({"r": 1}) is None
    assert scheduler.why("r") == scheduler.ended("r") == worker.counters() == {}
    assert scheduler.unproved(nothing, nothing) is scheduler.ticket(None, {}) is None  # type: ignore[arg-type]
    assert worker.begun(step) is False
    assert worker.greeting is worker.look([]) is worker.computed(step) is worker.told() is None
    assert worker.arrived({"a", "b"}, {"b"}) == {"a", "b"}
    for call in (
        lambda: scheduler.leave(Moves()),
        lambda: scheduler.enter(Moves()),
        lambda: scheduler.load([]),
        lambda: scheduler.copied(0, 1, 4),
        lambda: scheduler.told(None),
        lambda: scheduler.attach(None),
        scheduler.close,
        lambda: worker.start(step),
        worker.land,
        lambda: worker.compare([], None),
        lambda: worker.filled(step, None),
        lambda: worker.fail({1}),
        worker.close,
    ):
        call()

"""The judge of ``bench.gpu_tokens``, on a CPU: right rows pass, and rows one token late do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.gpu_tokens import Load, in_batches, wide_moe
from kvroute.capture.launched import LaunchedCapture

LOAD = Load(sequences=2, prompt=9, new=3, batch_tokens=16)


@pytest.fixture(scope="module")
def model() -> Any:
    return wide_moe(2, "cpu", width=128)


def test_rows_are_judged_and_turns_are_timed(model: Any) -> None:
    """Goal: every computed token of every sequence is judged, and each turn has a speed. Method: one round, small."""
    found = in_batches(model, LOAD, rounds=1)
    assert (found.judged, found.wrong, found.missing) == (2 * (9 + 2), 0, 0)
    assert len(found.on) == len(found.off) == 1


def test_the_judge_sees_rows_one_token_late(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the judge does not believe the embedding. Method: a launch at slots that are rotated within a pass."""
    step = LaunchedCapture.step
    monkeypatch.setattr(LaunchedCapture, "step", lambda self, begin, slots: step(self, begin, np.roll(slots, 1)))
    found = in_batches(model, LOAD, rounds=0)
    assert found.wrong > found.judged // 2

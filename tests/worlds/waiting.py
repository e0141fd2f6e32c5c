"""How long tests wait, which is a last resort against a hang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

HUNT = os.environ.get("HYPOTHESIS_PROFILE") == "hunt"
GIVE_UP_S = 10.0 if HUNT else 1200.0
"""The limit of every wait of the tests, in this one place: a last resort against a hang, ten times the 120 s at which a
loaded machine was seen to fail examples that only were slow. Where a fault is planted, a hang is what is looked for."""
ENDING_S = 10.0
"""How long the end of a run waits for threads that are about to end. One that stays fails the run: that is no hang."""


def until(holds: Callable[[], object], wait_s: float = GIVE_UP_S, what: str = "waited in vain") -> None:
    """Wait until ``holds()`` is true; a failure is a hang, never slowness."""
    give_up_s = time.monotonic() + wait_s
    while not holds():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.0005)

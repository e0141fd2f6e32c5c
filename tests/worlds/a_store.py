"""A rollout store in a directory of its own, for tests that only want one."""

from __future__ import annotations

from itertools import count
from tempfile import TemporaryDirectory
from typing import Final

from kvroute.rollout import RolloutStore, open_rollouts

_HOME: Final = TemporaryDirectory()  # goes with the process
_NUMBERS: Final = count()


def a_store() -> RolloutStore:
    return open_rollouts(f"file://{_HOME.name}/{next(_NUMBERS)}")

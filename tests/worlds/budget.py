"""How many examples Hypothesis draws: one factor for all tests.

``KVROUTE_EXAMPLES`` is 1 for what the tests name, which is what CI runs; less on a developer's machine, more at night.
"""

from __future__ import annotations

import os
from typing import Any, Final

from hypothesis import settings

FACTOR: Final = float(os.environ.get("KVROUTE_EXAMPLES", "1"))


def scaled(count: int) -> int:
    """``count`` times the factor, and at least one."""
    return max(1, round(count * FACTOR))


def examples(count: int, **more: Any) -> settings:
    """Settings with so many examples where the factor is 1; ``more`` is as in :class:`hypothesis.settings`."""
    return settings(max_examples=scaled(count), **more)


ALL_LIVES: Final = max(100, scaled(100))
"""For the life-cycle kit, which fails where something never happened."""

"""The bounds of a transfer: what may be said, to its ends."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from cache_manager.errors import ConfigError
from transfer.limits import TransferLimits

LONG = {"lease_max_s": 999_999.0}
NAMES = [field.name for field in fields(TransferLimits)]


@pytest.mark.parametrize("name", NAMES)
def test_each_limit_has_a_range(name: str) -> None:
    """Goal: no time is 0 or without an end, and no count 0. Method: values at both ends, and beyond; other kinds."""
    others = {} if name == "lease_max_s" else LONG
    good: list[Any] = [1, 7, (1 << 40) - 1]
    bad: list[Any] = [0, 1.5, 1 << 40]
    if name.endswith("_s"):
        least = 30 if name == "lease_max_s" else 0.001  # no shorter than a lease
        good, bad = [least, 31, 999_999.0], [0.0009, 0, 1e6, float("inf"), float("nan")]
    for value in good:
        assert getattr(TransferLimits(**{name: value, **others}), name) == value
    for value in [*bad, -1, True, "1", None]:
        with pytest.raises(ConfigError, match=name):
            TransferLimits(**{name: value, **others})


def test_a_lease_is_no_longer_than_the_longest() -> None:
    assert TransferLimits(lease_s=5, lease_max_s=5)
    with pytest.raises(ConfigError, match=r"lease_s: wanted at most lease_max_s = 5, got 5\.1"):
        TransferLimits(lease_s=5.1, lease_max_s=5)

"""A mean over seeds with the interval that so few of them leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

STUDENT_T_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""The 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom (any table of the distribution)."""
NORMAL_975: Final = 1.960


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and half the width of its 95 % confidence interval, from ``count`` independent values.

    One value has no interval: ``half`` is infinite.
    """

    mean: float
    half: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Student's t interval of the mean of ``values``; at least one.

        >>> Interval.of([1.0, 2.0, 3.0])
        Interval(mean=2.0, half=2.4843..., count=3)
        """
        count = len(values)
        mean = math.fsum(values) / count
        if count == 1:
            return cls(mean, math.inf, 1)
        deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1))
        quantile = STUDENT_T_975[count - 2] if count - 2 < len(STUDENT_T_975) else NORMAL_975
        return cls(mean, quantile * deviation / math.sqrt(count), count)

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


__all__ = ["Interval"]

"""What an engine may name in place of slots, blocks and pairs, and which names none."""

from __future__ import annotations

import numpy as np


class Refusing:
    """What numpy makes no array of: a tensor on a device raises TypeError, one with a gradient RuntimeError."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        raise self.error("not on this machine")


class Incomparable:
    """An integer to numpy, which compares to none."""

    __hash__ = None  # type: ignore[assignment]

    def __int__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise TypeError("not with another")


UNREADABLE = {
    "a structure": np.array([(0,), (1,)], [("slot", "i8")]),
    "an object that compares to none": [Incomparable(), Incomparable()],
    "half": np.array([0.5]),
    "not a number": np.array([np.nan, 1.0]),
    "text": ["1"],
    "nothing": None,
    "ragged": [[0, 1], [2]],
    "a mask": np.array([True, False]),
    "a tensor on a device": Refusing(TypeError),
    "a tensor with a gradient": Refusing(RuntimeError),
}

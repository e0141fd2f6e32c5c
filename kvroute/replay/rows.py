"""Which rows of a sequence a trainer is given, and what every batch is checked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvroute.replay.errors import ReplayError
from kvroute.routes import Routes
from kvroute.routes.layout import check_alike


def read_rows(tokens: int) -> int:
    """How many of ``tokens`` tokens were read by a forward pass and have a row: all but the last."""
    if counted("tokens", tokens) < 1:
        raise ReplayError("tokens", "at least one", tokens)
    return tokens - 1


def counted(field: str, tokens: int) -> int:
    """``tokens``, unless that cannot be a number of them."""
    if not isinstance(tokens, (int, np.integer)) or isinstance(tokens, bool) or tokens < 0:
        raise ReplayError(field, "a number of tokens, 0 or more", repr(tokens))
    return int(tokens)


def cut(routes: Routes, tokens: int) -> Routes:
    """``routes`` without the rows behind ``tokens`` tokens, as a trainer that truncates a response has them."""
    return routes.slice(routes.start, max(routes.start, min(routes.stop, tokens)))


def check_batch(routes: Sequence[Routes], **counts: Sequence[int]) -> None:
    """Raise unless there are samples, as many of each of ``counts``, and all samples are of one model.

    :class:`ReplayError` names the counts; ``RowError`` the sample, the field and both values.
    """
    if not routes or any(len(each) != len(routes) for each in counts.values()):
        wanted = f"one number for each of {len(routes)} samples, at least one"
        raise ReplayError(", ".join(counts), wanted, " and ".join(str(len(each)) for each in counts.values()))
    check_alike([part.layout for part in routes])

"""Ranges of positions, and which weights version computed the rows in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import RowError

Span = tuple[int, int]
"""Positions ``[start, stop)``."""

WeightsSpan = tuple[int, int, int]
"""Positions ``[start, stop)`` and the weights version that computed their rows."""

STOP_MAX: Final = 1 << 62
"""Positions are below this."""

UNKNOWN = -1
"""The entry of a position without a known version, in an array of versions."""


def runs(mask: NDArray[np.bool_]) -> tuple[Span, ...]:
    """The maximal ranges in which ``mask`` ``[n]`` is true."""
    if len(mask) and mask.all():  # as the rows of nearly all answers are
        return ((0, len(mask)),)
    between_ends = np.concatenate(([False], mask, [False])).view(np.int8)
    edges = np.flatnonzero(np.diff(between_ends))
    return tuple((a, b) for a, b in edges.reshape(-1, 2).tolist())


def checked_versions(
    versions: Iterable[WeightsSpan],
    start: int,
    stop: int,
) -> tuple[WeightsSpan, ...]:
    """``versions`` with equal neighbours joined; :class:`RowError` unless they increase inside ``[start, stop)``."""
    joined: list[WeightsSpan] = []
    for span in versions:
        if len(span) != 3 or not all(isinstance(v, (int, np.integer)) and 0 <= v < 1 << 63 for v in span):
            wanted = "(start, stop, version), integers in [0, 2^63)"
            raise RowError("routes.weights_versions", wanted, repr(span))
        a, b, version = (int(v) for v in span)
        first = joined[-1][1] if joined else start
        if not first <= a < b <= stop:
            wanted = f"increasing ranges inside [{first}, {stop})"
            raise RowError("routes.weights_versions", wanted, f"[{a}, {b})")
        if joined and joined[-1][1:] == (a, version):
            a = joined.pop()[0]
        joined.append((a, b, version))
    return tuple(joined)


def clipped(
    versions: Iterable[WeightsSpan],
    start: int,
    stop: int,
) -> tuple[WeightsSpan, ...]:
    """The part of ``versions`` about the positions ``[start, stop)``."""
    cut = ((max(a, start), min(b, stop), version) for a, b, version in versions)
    return tuple(span for span in cut if span[0] < span[1])


def by_position(
    spans: Iterable[WeightsSpan],
    start: int,
    stop: int,
) -> NDArray[np.int64]:
    """The version of each position in ``[start, stop)``, or :data:`UNKNOWN`."""
    versions = np.full(stop - start, UNKNOWN, np.int64)
    for a, b, version in clipped(spans, start, stop):
        versions[a - start : b - start] = version
    return versions


def from_positions(versions: NDArray[Any], start: int) -> tuple[WeightsSpan, ...]:
    """The ranges of equal versions, without :data:`UNKNOWN` ones; ``versions[0]`` is that of position ``start``."""
    changes = np.flatnonzero(np.diff(versions)) + 1
    bounds = [0, *changes.tolist(), len(versions)]
    ranges = ((start + a, start + b, int(versions[a])) for a, b in pairwise(bounds) if a < b)
    return tuple(span for span in ranges if span[2] != UNKNOWN)


def flags(spans: Iterable[Sequence[int]], n: int) -> NDArray[np.bool_]:
    """Which of ``n`` positions lie in one of the ranges ``[start, stop)``."""
    inside = np.zeros(n, np.bool_)
    for start, stop in spans:
        inside[start:stop] = True
    return inside

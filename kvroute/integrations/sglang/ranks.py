"""Ranks that share their requests (tensor parallelism): what one of them has loaded counts if all have the same.

Each rank has a part of the heads, and a record of its part of the KV with the rows of the page. A rank may fail to
store or to load a page that the others have, and two stores may keep a page of two computations. So they compare the
rows that have come, page by page: a page counts if each rank has it and the rows are equal everywhere. Then the rows
are of each part of the KV, whichever rank answers. Every rank comes to the same verdict, because it sees the same least
values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from cache_manager.publish import Rows

Digests = NDArray[np.int64]
Least = Callable[[Digests], Digests]
"""The least of what all ranks say, place by place. Each rank calls it, in the same order, or all of them wait."""

logger = logging.getLogger(__name__)

ABSENT: Final = -1
"""In the place of the digest of a page that has not come."""


@dataclass(slots=True)
class RankCounters:
    """Of pages that were not loaded, because the ranks must load the same."""

    pages_short: int = 0  # which some rank has not
    pages_of_other_rows: int = 0  # which have other rows on another rank


def least_of(group: Any) -> Least | None:
    """Of the ranks in a group of torch on the host; ``None``: there is one."""
    if group is None or torch.distributed.get_world_size(group=group) == 1:
        return None

    def least(values: Digests) -> Digests:
        said = torch.from_numpy(values)
        torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MIN, group=group)
        return values

    return least


class Agreement(NamedTuple):
    """What all ranks have of some pages."""

    there: NDArray[np.bool_]  # [n], on every rank
    same: NDArray[np.bool_]  # [n], and with the same rows


def digests_of(kinds: Sequence[Rows], page: int) -> Digests:
    """``[n]`` of ``n`` pages with the rows ``[n * page, ...]`` of each kind: at least 0, equal for equal valid rows."""
    n = len(kinds[0].valid) // page
    digests = np.zeros(n, np.int64)
    for i in range(n):
        tokens = slice(i * page, (i + 1) * page)
        digest = xxhash.xxh3_64()
        for rows in kinds:
            valid = rows.valid[tokens]
            digest.update(valid.tobytes())
            digest.update(rows.values[tokens][valid].tobytes())
        digests[i] = digest.intdigest() >> 1
    return digests


def agreed(digests: Digests, least: Least) -> Agreement:
    """The ranks' verdict on pages, of which this one has what these ``digests [n]`` say."""
    low, high = np.split(least(np.concatenate([digests, -digests])), 2)
    there = low > ABSENT
    return Agreement(there, there & (low == -high))


class Ranks:
    """The ranks that share this one's requests, which say ``least`` together."""

    def __init__(self, least: Least) -> None:
        self._least = least
        self.counters = RankCounters()

    def agreed(self, digests: Digests) -> Agreement:
        """:func:`agreed`, and counted."""
        verdict = agreed(digests, self._least)
        others = int((verdict.there & ~verdict.same).sum())
        if others and not self.counters.pages_of_other_rows:
            logger.warning("ranks have pages of different computations, which are computed again; others are counted")
        self.counters.pages_of_other_rows += others
        self.counters.pages_short += int((~verdict.there).sum())
        return verdict


__all__ = ["ABSENT", "Agreement", "Digests", "Least", "RankCounters", "Ranks", "agreed", "digests_of", "least_of"]

"""Answers whose routes a process of their own cuts, hashes and stores: ``rollouts: "apart:URL"``.

It is the process of :mod:`kvroute.connector.rollouts_apart`, with the same law. SGLang's scheduler has read the rows of
an answer already, because their pages are about to be given out. So they go over themselves, with the request's tokens,
and the process lacks none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from cache_manager.errors import KVRouteError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.connector.computations import Computation
from kvroute.connector.end import End
from kvroute.connector.key import Key
from kvroute.connector.left import LeftValues, Tokens
from kvroute.connector.limits import LIMITS, Limits
from kvroute.connector.rollouts_apart import RolloutsApart
from kvroute.connector.unread import Seen
from kvroute.integrations.sglang.answers import RequestRows


class AllRead:
    """In the place of ``UnreadRows``: every computation has been read."""

    def source(self) -> tuple[list[tuple[str, list[int]]], bytes]:
        return [], b""

    def seen(self, groups: Sequence[Sequence[Computation]]) -> list[list[Seen]]:
        return [[Seen(each.read, each.read_labels, each.stop, True) for each in group] for group in groups]

    def read(self, computations: Iterable[Computation]) -> None: ...


_ALL_READ: Final = AllRead()


class AnswersApart:
    """Leaves the routes of answers by a process that it starts. The thread of answers alone calls it.

    ``rollouts`` is the setting. Raises what opening the store raises, and :class:`StorageError` if no process can be
    started.
    """

    def __init__(self, rollouts: str, spec: AuxBlockDataSpec, *, flagged: bool, limits: Limits = LIMITS) -> None:
        self._taker = RolloutsApart(rollouts, spec, flagged=flagged, limits=limits)

    @property
    def pid(self) -> int | None:
        """The current process's id; ``None`` while there is none."""
        return self._taker.pid

    @property
    def counters(self) -> Mapping[str, int]:
        return self._taker.counters

    def put(self, key: Key, rows: RequestRows | KVRouteError, tokens: Tokens | None) -> LeftValues:
        """What the request of this ``key`` has left: the handle of its routes, and the positions that are unseen or
        missing.

        Raises what kept its rows from being read, and what the process or its store raises. Then routes of an earlier
        request of this key are found no more, as far as the store lets.
        """
        (outcome,) = self._taker.take([ended(key, rows, tokens)], _ALL_READ)
        if isinstance(rows, KVRouteError):
            raise rows
        if isinstance(outcome, KVRouteError):
            raise outcome
        return outcome

    def close(self) -> None:
        self._taker.close()


def ended(key: Key, rows: RequestRows | KVRouteError, tokens: Tokens | None) -> End:
    """The end of a request, as the connector's engines have it."""
    if isinstance(rows, KVRouteError):
        return End(key=key, request_tokens=tokens, failure=str(rows))
    return End(key=key, request_tokens=tokens, last=_computation(rows), start=rows.start, why=rows.reasons)


def _computation(rows: RequestRows) -> Computation:
    none = np.zeros(0, np.int64)
    by_kv = rows.by_kv
    if by_kv is not None:
        by_kv = np.concatenate([np.zeros(rows.start, np.bool_), by_kv])
    computation = Computation(none, none, rows.start, rows.stop, [], rows.weights, None, True, by_kv)
    computation.read = rows.rows
    computation.read_labels = rows.labels
    return computation


__all__ = ["AllRead", "AnswersApart", "ended"]

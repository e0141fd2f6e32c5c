"""Who leaves the rows of ended requests: the port, and the engine's own process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from cache_manager.errors import KVRouteError, RowError
from kvroute.connector.cutting import Cutting
from kvroute.connector.end import End
from kvroute.connector.left import LeftRoutes, LeftValues
from kvroute.connector.tickets import gaps_of
from kvroute.connector.unread import UnreadRows

logger = logging.getLogger(__name__)

TakerOutcome = LeftValues | KVRouteError
"""What a request has left, or why it has left nothing."""


class RolloutTaker(Protocol):
    """Takes ended requests from the thread of :class:`~kvroute.connector.ends.Ends`, one call at a time.

    * ``take`` answers each end once, in order, and raises nothing that is about one of them.
    * It reads computations of ``unread`` only when the worker has written them; the others have an error.
    * A request that leaves nothing leaves no routes of an earlier one under its key either, as far as the store lets.
    """

    @property
    def burst_max(self) -> int:
        """The most ends that one call takes; their clients are told together."""

    @property
    def counters(self) -> Mapping[str, int]: ...

    def take(self, ends: Sequence[End], unread: UnreadRows) -> list[TakerOutcome]: ...

    def close(self) -> None: ...


class RolloutsHere:
    """A ``RolloutTaker`` of this process: rows are read and cut by the calling thread, and put into ``left``."""

    def __init__(self, cutting: Cutting, left: LeftRoutes, burst_max: int) -> None:
        self._cutting = cutting
        self._left = left
        self.burst_max = burst_max

    @property
    def counters(self) -> Mapping[str, int]:
        """None: its clients' answers and the log say what was not left."""
        return {}

    def take(self, ends: Sequence[End], unread: UnreadRows) -> list[TakerOutcome]:
        try:
            unread.read(computation for end in ends for computation in end.computations)
        except Exception:  # each is read by itself, and its client told why that fails
            logger.exception("the rows of requests cannot be read together")
        return [self._taken(end, unread) for end in ends]

    def close(self) -> None:
        self._left.close()

    def _taken(self, end: End, unread: UnreadRows) -> TakerOutcome:
        why: KVRouteError
        try:
            if end.failure:
                raise RowError("rows", "those that the worker has written", end.failure)
            unread.read_or_raise(end.computations)
            routes, unseen, weights = self._cutting.routes(end)
            gaps = gaps_of(routes.missing, end.why, self._cutting.spec.block_tokens) if end.why else []
            return self._left.put(end.key, routes, end.request_tokens, unseen, gaps, weights)
        except KVRouteError as error:
            why = error
        except Exception as error:
            logger.exception("rows of request %r are lost", end.key.text)
            why = RowError("rows", "left for the client", repr(error))
        self._left.void(end.key, end.request_tokens, self._cutting.layout)
        return why


__all__ = ["RolloutTaker", "RolloutsHere", "TakerOutcome"]

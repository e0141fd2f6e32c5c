"""The process of an engine's rollouts: ``python -m kvroute.connector.rollouts_process``.

It reads rows of ended requests from the engine's SharedMemory, cuts and hashes them, and puts them into a rollout
store. It holds no lives: a block may be given out at any moment, and then its rows are missing here. An end that lacks
a row is put nowhere; the engine's process, which has read such rows in time, sends them along the next time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress

from cache_manager.errors import KVRouteError, RegionError
from cache_manager.regions import RegionView
from cache_manager.regions.directory import region_path
from cache_manager.storage import apart_process
from cache_manager.storage.apart_process import Failure
from kvroute.connector.computations import read_whole
from kvroute.connector.cutting import Cutting
from kvroute.connector.end import End
from kvroute.connector.left import left_values, rollout_name, voided
from kvroute.connector.rollouts_wire import OPENINGS, QUESTIONS, RolloutsQuestion, TakenRollout, encode_message
from kvroute.connector.stages import RowsView, StageViews
from kvroute.connector.tickets import gaps_of
from kvroute.rollout import RolloutStore, open_rollouts

logger = logging.getLogger(__name__)

Regions = list[tuple[str, list[int]]]


class RolloutsProcess(apart_process.Process):
    """Takes what :class:`~kvroute.connector.rollouts_apart.RolloutsApart` asks it to, one question at a time."""

    def __init__(self) -> None:
        self._reading = threading.Lock()  # guards the view
        self._view: RowsView | None = None
        self._regions: Regions = []
        super().__init__()

    def opened(self, url: str) -> RolloutStore:
        opening = OPENINGS.decode(url)
        self._cutting = Cutting(opening.spec, opening.flagged)
        self._cuts_max = opening.cuts_max
        return open_rollouts(opening.url)

    def work(self, body: bytes) -> bytes:
        question = QUESTIONS.decode(body)
        for name in question.voids:
            with suppress(KVRouteError):
                voided(self.store, name, self._cutting.layout)
        ends = [ended.end(self._cutting.spec) for ended in question.ends]
        unread = [[computation for computation in end.computations if computation.rows is None] for end in ends]
        with self._reading:
            view = self._view_of(question) if any(unread) else None
            if view is not None:
                read_whole(view, self._cutting.spec, [computation for parts in unread for computation in parts])
        taken = list[TakenRollout]()
        for end, parts in zip(ends, unread, strict=True):
            rows = [computation.rows for computation in parts]
            lacks = any(part is None or not part.valid.all() for part in rows)
            taken.append(TakenRollout() if lacks else self._taken(end, again=question.again))
        return encode_message(taken)

    def _taken(self, end: End, *, again: bool) -> TakenRollout:
        try:
            routes, unseen, _ = self._cutting.routes(end)
            gaps = gaps_of(routes.missing, end.why, self._cutting.spec.block_tokens) if end.why else []
            tokens = end.request_tokens
            values = left_values(self.store, end.key, routes, tokens, unseen, gaps, self._cuts_max, again=again)
        except Exception as error:  # noqa: BLE001 - of one of many: its client gets the reason
            if end.key.of_client:
                with suppress(KVRouteError):
                    voided(self.store, rollout_name(end.key, end.request_tokens), self._cutting.layout)
            return TakenRollout(failure=Failure.of(error))
        return TakenRollout(values)

    # ---------------------------------------------------------------- held: _reading

    def _view_of(self, question: RolloutsQuestion) -> RowsView | None:
        """The view of the question's regions and namespace; ``None`` where they cannot be read, or are of another."""
        try:
            if self._view is None or self._regions != question.regions:
                self._forget()
                self._view = self._attached(question.regions, question.namespace)
                self._regions = question.regions
            self._view.follow(question.namespace)
        except RegionError as error:
            logger.warning("the rows of ended requests cannot be read here: %s", error)
            return None
        return self._view

    def _attached(
        self,
        regions: Sequence[tuple[str, Sequence[int]]],
        namespace: bytes,
    ) -> RowsView:
        if len(regions) > 1:
            return StageViews(self._cutting.spec, regions, namespace=namespace)
        ((name, _),) = regions
        return RegionView(name)  # of whatever namespace: the question says which one to follow

    def _forget(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    def tidy(self) -> None:
        """Unmap regions that have no name any more."""
        with self._reading:
            if self._view is not None and not all(region_path(name).exists() for name, _ in self._regions):
                self._forget()


if __name__ == "__main__":
    RolloutsProcess()

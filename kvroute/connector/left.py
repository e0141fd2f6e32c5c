"""The routes that a scheduler leaves for clients: in its answers and in a rollout store, bound to their very tokens."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import KVRouteError
from kvroute.connector.answers import ERROR, FIELD, LEFT, MISSING, UNSEEN
from kvroute.connector.tickets import Gap
from kvroute.rollout import RolloutStore
from kvroute.rollout.local import LocalRollouts
from kvroute.rollout.response import ResponseRollouts
from kvroute.routes import Routes

logger = logging.getLogger(__name__)

SIBLINGS_MAX: Final = 1024
"""Requests with several completions of which some are done and others are not."""
CUTS_MAX: Final = 1024
"""Last tokens of a request at each of which its front end may have ended it before it knew of the others."""


class Tokens(NamedTuple):
    """What a request that is done has read and said."""

    ids: Sequence[int]  # the prompt's, then those that were sampled
    prompt: int  # how many of them are the prompt's
    cut: bool = False  # its front end may have answered fewer: it was aborted, or has stop strings

    def counts(self, stop: int, start: int = 0) -> list[int]:
        """Of how many first tokens the hashes are wanted beside rows of the positions ``[start, stop)``."""
        first = max(self.prompt, stop - CUTS_MAX + 1) if self.cut else stop
        return [count for count in {start or stop, self.prompt, stop, *range(first, stop)} if count <= stop]


def settled(routes: Routes, by_kv: NDArray[np.bool_], *, flagged: bool) -> tuple[Routes, list[list[int]]]:
    """The answer where rows ``by_kv`` ``[n]`` were matched by KV, which cannot prove the last router's choice.

    The routes, without what that router chose there or, where the operator wants it ``flagged``, with it; and then the
    positions ``[start, stop)`` at which it is taken on trust.
    """
    if not (trusted := by_kv & routes.known[:, -1]).any():
        return routes, []
    if flagged:
        edges = np.flatnonzero(np.diff(trusted.astype(np.int8), prepend=0, append=0)) + routes.start
        return routes, edges.reshape(-1, 2).tolist()
    return routes.without(routes.layer_ids[-1:], trusted), []


class LeftRoutes:
    """Puts routes into a store, which it owns, and says what goes to the client beside an answer. Of any thread."""

    def __init__(self, store: RolloutStore) -> None:
        self._store = store
        self._near = isinstance(store, (ResponseRollouts, LocalRollouts))  # else others are asked
        self._lock = threading.Lock()
        self._siblings: OrderedDict[str, dict[str, dict[str, Any]]] = OrderedDict()

    def has_room(self, name: str) -> bool:
        """Whether nothing is left under this name, as far as that is known without asking anybody."""
        try:
            return self._near and self._store.find(name) is None
        except KVRouteError:
            return False

    def make_room(self, name: str, group: str | None) -> None:
        """A request of this name begins: what an earlier one has left under it is neither found nor told any more.

        Its tokens may be the same and its weights others. An answer without a handle is looked for by its name as soon
        as a front end has ended it, which is before the engine knows.
        """
        with self._lock:
            for told in self._siblings.get(group or "", {}).values():
                told.pop(name, None)
        try:
            if (left := self._store.find(name)) is not None:
                self._store.delete(left)
        except KVRouteError as error:
            logger.warning("a rollout %s that may be of an earlier request cannot be deleted: %s", name, error)

    def leave(
        self,
        name: str,
        routes: Routes,
        tokens: Tokens | None,
        group: str | None,
        unseen: Sequence[Sequence[int]],
        gaps: Sequence[Gap] = (),
    ) -> dict[str, Any]:
        """What goes to the client whose request ``name`` has these routes.

        ``tokens`` says what they are bound to. All that one ``group`` of requests has is told with each of them. Raises
        what the store raises.
        """
        if tokens is not None:
            routes = routes.bind(tokens.ids, tokens.counts(routes.stop, routes.start))
        handle = self._store.put(name, routes).to_json()
        said = {LEFT: handle, UNSEEN: unseen, MISSING: [list(gap) for gap in gaps]}
        return self._told(name, {kind: each for kind, each in said.items() if each}, group)

    def fail(self, name: str, error: KVRouteError, group: str | None) -> dict[str, Any]:
        """What goes to the client whose request ``name`` has no routes."""
        logger.warning("request %s has no routes: %s", name, error)
        return self._told(name, {ERROR: str(error)}, group)

    def _told(self, name: str, said: dict[str, Any], group: str | None) -> dict[str, Any]:
        with self._lock:
            found = {} if group is None else self._siblings.setdefault(group, {})
            for kind, each in said.items():
                found.setdefault(kind, {})[name] = each
            if group is not None:
                self._siblings.move_to_end(group)
            if len(self._siblings) > SIBLINGS_MAX:
                self._siblings.popitem(last=False)
            return {FIELD: {kind: dict(each) for kind, each in found.items() if each}}

    def close(self) -> None:
        self._store.close()


__all__ = ["LeftRoutes", "Tokens", "settled"]

"""The routes that a scheduler leaves for clients: in its answers and in a rollout store, bound to their tokens."""

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
from kvroute.rollout.response import ResponseRollouts
from kvroute.routes import Routes

logger = logging.getLogger(__name__)

QUIET_MAX: Final = 1024
"""Most groups none of whose completions is under way,"""
QUIET_NBYTES_MAX: Final = 64 << 20
"""and bytes of their data. A further completion may still come: vLLM sends the engine one after the other, so that the
first may be done before the next is there."""
CUTS_MAX: Final = 1024
"""How many last tokens the front end may have cut off, because it ended the request before it saw them."""


class Tokens(NamedTuple):
    """The tokens of a finished request."""

    ids: Sequence[int]  # of the prompt, then the sampled ones
    prompt: int  # how many of them are the prompt
    cut: bool = False  # the front end may have answered fewer: an abort, or stop strings

    def counts(self, stop: int, start: int = 0) -> list[int]:
        """The counts of first tokens to hash, beside rows of the positions ``[start, stop)``."""
        first = max(self.prompt, stop - CUTS_MAX + 1) if self.cut else stop
        return [count for count in {start or stop, self.prompt, stop, *range(first, stop)} if count <= stop]


def settled(routes: Routes, by_kv: NDArray[np.bool_], *, flagged: bool) -> tuple[Routes, list[list[int]]]:
    """Settle rows ``by_kv`` ``[n]`` that were matched by KV, which cannot prove the last router's choice.

    Returns the routes, without that router's choice there, and no positions; or, if the operator wants it ``flagged``,
    with it, and the positions ``[start, stop)`` at which it is not proved.
    """
    if not (trusted := by_kv & routes.known[:, -1]).any():
        return routes, []
    if flagged:
        edges = np.flatnonzero(np.diff(trusted.astype(np.int8), prepend=0, append=0)) + routes.start
        return routes, edges.reshape(-1, 2).tolist()
    return routes.without(routes.layer_ids[-1:], trusted), []


class LeftRoutes:
    """Puts routes into a store, which it owns, and makes the client's data beside an answer. Any thread may call it."""

    def __init__(self, store: RolloutStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._siblings: dict[str, dict[str, dict[str, Any]]] = {}
        self._under_way: dict[str, list[str]] = {}  # names by group; twice, if one begins before another has ended
        self._quiet: OrderedDict[str, int] = OrderedDict()  # groups without any, and the characters of their data,
        self._quiet_nbytes = 0  # and of all of them

    @property
    def keeps_none(self) -> bool:
        """Whether nothing is left under any name, because the answers have the routes."""
        return isinstance(self._store, ResponseRollouts)

    def make_room(self, name: str, group: str | None) -> None:
        """Remove the routes, and the told data, of an earlier request of this name.

        The earlier one may have the same tokens but other weights. A client may look for routes by the name as soon as
        a front end has ended the request, which is before the engine knows.
        """
        self._untell(name, group)
        try:
            if (left := self._store.find(name)) is not None:
                self._store.delete(left)
        except KVRouteError as error:
            logger.warning("a rollout %s that may be of an earlier request cannot be deleted: %s", name, error)

    def begins(self, name: str, group: str | None) -> None:
        """A request of this name is under way, until it has its data or is :meth:`unanswered`."""
        if group is not None:
            self._untell(name, group)
            with self._lock:
                self._under_way.setdefault(group, []).append(name)
                self._quiet_nbytes -= self._quiet.pop(group, 0)

    def _untell(self, name: str, group: str | None) -> None:
        with self._lock:
            for told in self._siblings.get(group, {}).values() if group is not None else ():
                told.pop(name, None)

    def unanswered(self, name: str, group: str | None) -> None:
        """The request of this name has ended without an answer."""
        if group is not None:
            with self._lock:
                self._over(name, group)

    def _over(self, name: str, group: str) -> None:
        """Forget the oldest groups that are done, where there are too many; held: _lock."""
        if name in (names := self._under_way.get(group, [])):
            names.remove(name)
        if not names:
            self._under_way.pop(group, None)
            if (told := self._siblings.get(group)) is not None:
                self._quiet_nbytes -= self._quiet.pop(group, 0)
                self._quiet[group] = sum(len(str(value)) for values in told.values() for value in values.values())
                self._quiet_nbytes += self._quiet[group]
        while len(self._quiet) > (QUIET_MAX if self._quiet_nbytes <= QUIET_NBYTES_MAX else 1):
            oldest, nbytes = self._quiet.popitem(last=False)
            self._quiet_nbytes -= nbytes
            self._siblings.pop(oldest, None)

    def leave(
        self,
        name: str,
        routes: Routes,
        tokens: Tokens | None,
        group: str | None,
        unseen: Sequence[Sequence[int]],
        gaps: Sequence[Gap] = (),
    ) -> dict[str, Any]:
        """The client's data for request ``name`` with these routes, which are bound to ``tokens``.

        A front end sends on only the data of a ``group``'s last request: so this has the data of all that are done,
        unless another one is still under way in the engine. A request that the front end may have ended by itself is
        not waited for by that front end: beside one, each has the data of all. Raises what the store raises.
        """
        if tokens is not None:
            routes = routes.bind(np.asarray(tokens.ids), tokens.counts(routes.stop, routes.start))
        handle = self._store.put(name, routes).to_json()
        said = {LEFT: handle, UNSEEN: unseen, MISSING: [list(gap) for gap in gaps]}
        ends_here = tokens is not None and not tokens.cut
        return self._client_data(name, {kind: each for kind, each in said.items() if each}, group, ends_here=ends_here)

    def fail(self, name: str, error: KVRouteError, group: str | None) -> dict[str, Any]:
        """The client's data for request ``name`` without routes."""
        logger.warning("request %s has no routes: %s", name, error)
        return self._client_data(name, {ERROR: str(error)}, group)

    def _client_data(
        self, name: str, said: dict[str, Any], group: str | None, *, ends_here: bool = False
    ) -> dict[str, Any]:
        own = {kind: {name: each} for kind, each in said.items()}
        if group is None:
            return {FIELD: own}
        with self._lock:
            found = self._siblings.setdefault(group, {})
            for kind, each in own.items():
                found.setdefault(kind, {}).update(each)
            self._over(name, group)
            if ends_here and group in self._under_way:
                return {FIELD: own}
            return {FIELD: {kind: dict(each) for kind, each in found.items() if each}}

    def close(self) -> None:
        self._store.close()


__all__ = ["LeftRoutes", "Tokens", "settled"]

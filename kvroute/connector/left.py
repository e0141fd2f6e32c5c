"""The routes that a scheduler leaves for clients: in its answers and in a rollout store, bound to their tokens."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from secrets import token_hex
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import KVRouteError, RowError
from cache_manager.ports import Absence
from kvroute.connector.fields import ERROR, FIELD, GAPS, KEY, LEFT, ROUTES, UNSEEN, WEIGHTS
from kvroute.connector.key import Key, rollout_id, void
from kvroute.connector.limits import LIMITS, Limits
from kvroute.connector.settings import RESPONSE
from kvroute.connector.tickets import MissingSpan
from kvroute.rollout import RolloutHandle, RolloutStore, open_rollouts
from kvroute.routes import Layout, Routes, RoutingWeights

logger = logging.getLogger(__name__)


class Tokens(NamedTuple):
    """The tokens of a finished request."""

    ids: Sequence[int]  # of the prompt, then the sampled ones
    prompt: int  # how many of them are the prompt
    cut: bool = False  # the front end may have answered fewer: an abort, or stop strings

    def counts(self, stop: int, start: int, cuts_max: int) -> list[int]:
        """The counts of first tokens to hash, beside rows of the positions ``[start, stop)``; the front end may have
        cut off ``cuts_max`` of them."""
        first = max(self.prompt, stop - cuts_max + 1) if self.cut else stop
        return [count for count in {start or stop, self.prompt, stop, *range(first, stop)} if count <= stop]


def settled(
    routes: Routes,
    by_kv: NDArray[np.bool_],
    *,
    flagged: bool,
) -> tuple[Routes, list[list[int]]]:
    """Settle rows ``by_kv`` ``[n]`` that were matched by KV, which cannot prove the last router's choice.

    Returns the routes, without that router's choice there, and no positions; or, if the operator wants it ``flagged``,
    with it, and the positions ``[start, stop)`` at which it is not proved.
    """
    trusted = by_kv & routes.known[:, -1]
    if not trusted.any():
        return routes, []
    if flagged:
        edges = np.flatnonzero(np.diff(trusted.astype(np.int8), prepend=0, append=0)) + routes.start
        return routes, edges.reshape(-1, 2).tolist()
    return routes.without(routes.layer_ids[-1:], trusted), []


LeftValues = Mapping[str, Any]
"""What one request has left, by kind: its routes or their handle, and the positions that are unseen or missing."""


class LeftRoutes:
    """Puts routes into a store, which it owns, and makes the client's data beside an answer. Any thread may call it.

    Without a store the data has the routes themselves.
    The data is ``{kind: {number: value}}``, with the request's number among the completions of its prompt.
    """

    def __init__(
        self,
        store: RolloutStore | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self._store = store
        self._limits = limits
        self._lock = threading.Lock()
        self._siblings: dict[str, dict[str, dict[str, Any]]] = {}
        self._under_way: dict[str, list[int]] = {}  # numbers of completions by group
        self._quiet: OrderedDict[str, int] = OrderedDict()  # groups without any, and the characters of their data,
        self._quiet_nbytes = 0  # and of all of them

    @classmethod
    def by(cls, rollouts: str, limits: Limits = LIMITS) -> Self:
        """For the setting ``rollouts``, which is not empty. Raises what :func:`~kvroute.rollout.open_rollouts` does."""
        return cls(None if rollouts == RESPONSE else open_rollouts(rollouts), limits)

    def begins(self, key: Key) -> None:
        """The request of this key is under way, until it has its data or is :meth:`unanswered`."""
        if key.group is None:
            return
        with self._lock:
            for values in self._siblings.get(key.group, {}).values():  # an id is used again: these are of the earlier
                values.pop(str(key.choice), None)
            self._under_way.setdefault(key.group, []).append(key.choice)
            self._quiet_nbytes -= self._quiet.pop(key.group, 0)

    def unanswered(self, key: Key) -> None:
        """The request of this key has ended without an answer."""
        if key.group is not None:
            with self._lock:
                self._over(key.choice, key.group)

    def _over(self, choice: int, group: str) -> None:
        """Forget the oldest groups that are done, where there are too many; held: _lock."""
        if choice in (choices := self._under_way.get(group, [])):
            choices.remove(choice)
        if not choices:
            self._under_way.pop(group, None)
            siblings = self._siblings.get(group)
            if siblings is not None:
                self._quiet_nbytes -= self._quiet.pop(group, 0)
                self._quiet[group] = sum(_size(value) for values in siblings.values() for value in values.values())
                self._quiet_nbytes += self._quiet[group]
        limits = self._limits
        while len(self._quiet) > (limits.idle_groups_max if self._quiet_nbytes <= limits.idle_nbytes_max else 1):
            oldest, nbytes = self._quiet.popitem(last=False)
            self._quiet_nbytes -= nbytes
            self._siblings.pop(oldest, None)

    def leave(
        self,
        key: Key,
        routes: Routes,
        tokens: Tokens | None,
        unseen: Sequence[Sequence[int]],
        gaps: Sequence[MissingSpan] = (),
    ) -> dict[str, Any]:
        """:meth:`put`, and the :meth:`answer` that has its values."""
        return self.answer(key, self.put(key, routes, tokens, unseen, gaps), tokens)

    def put(
        self,
        key: Key,
        routes: Routes,
        tokens: Tokens | None,
        unseen: Sequence[Sequence[int]],
        gaps: Sequence[MissingSpan] = (),
        weights: RoutingWeights | None = None,
    ) -> LeftValues:
        """:func:`left_values` for the request of this ``key``, in this store. Raises what the store raises."""
        return left_values(self._store, key, routes, tokens, unseen, gaps, self._limits.cuts_max, weights=weights)

    def answer(
        self,
        key: Key,
        values: LeftValues,
        tokens: Tokens | None,
    ) -> dict[str, Any]:
        """The client's data for the request of this ``key``, which has left these ``values``.

        A front end sends on only the data of a group's last request: so this has the data of all that are done,
        unless another one is still under way in the engine. A request that the front end may have ended by itself is
        not waited for by that front end: beside one, each has the data of all.
        """
        return self._client_data(key, values, ends_here=tokens is not None and not tokens.cut)

    def void(self, key: Key, tokens: Tokens | None, layout: Layout) -> None:
        """The request of this ``key`` leaves no routes: those of an earlier one are not found in their place either."""
        if key.of_client and self._store is not None:
            with suppress(KVRouteError):
                voided(self._store, rollout_name(key, tokens), layout)

    def fail(self, key: Key, error: KVRouteError) -> dict[str, Any]:
        """The client's data for the request of this ``key`` without routes."""
        logger.warning("request %r has no routes: %s", key.text, error)
        return self._client_data(key, {ERROR: str(error)})

    def _client_data(
        self,
        key: Key,
        values: LeftValues,
        *,
        ends_here: bool = False,
    ) -> dict[str, Any]:
        own = {kind: {str(key.choice): value} for kind, value in values.items()}
        if key.group is None:
            return {FIELD: own}
        with self._lock:
            siblings = self._siblings.setdefault(key.group, {})
            for kind, value in own.items():
                siblings.setdefault(kind, {}).update(value)
            self._over(key.choice, key.group)
            if ends_here and key.group in self._under_way:
                return {FIELD: own}
            return {FIELD: {kind: dict(values) for kind, values in siblings.items() if values}}

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def left_values(
    store: RolloutStore | None,
    key: Key,
    routes: Routes,
    tokens: Tokens | None,
    unseen: Sequence[Sequence[int]],
    gaps: Sequence[MissingSpan],
    cuts_max: int,
    *,
    again: bool = False,
    weights: RoutingWeights | None = None,
) -> dict[str, Any]:
    """Leave ``routes``, bound to ``tokens``, in the ``store``, or without one in the values themselves.

    If routes of an earlier request lie under a client's key and this prompt, none are found there any more, and
    these by the handle alone. ``again``: these may have been put before, and nobody knows; then they are not put twice.
    The ``weights`` of the routes are left in the values alone: :class:`RowError` for some beside a store.
    Raises what the store raises.
    """
    if weights is not None and store is not None:
        raise RowError("routing weights", "no rollout store, which has no part for them", type(store).__name__)
    if tokens is not None:
        counts = tokens.counts(routes.stop, routes.start, cuts_max)
        routes = routes.bind(np.asarray(tokens.ids), counts)
    values: dict[str, Any] = {UNSEEN: unseen, GAPS: [list(gap) for gap in gaps]}
    if store is None:
        values[ROUTES] = routes.to_json()
        values[WEIGHTS] = None if weights is None else weights.to_json()
    else:
        values[LEFT] = _put(store, key, tokens, routes, again=again).to_json()
    return {kind: value for kind, value in values.items() if value}


def _put(
    store: RolloutStore,
    key: Key,
    tokens: Tokens | None,
    routes: Routes,
    *,
    again: bool,
) -> RolloutHandle:
    name = rollout_name(key, tokens)
    if again:
        earlier = store.find(name)
        rollout = Absence.MISS if earlier is None else store.get(earlier)
        if earlier is not None and not isinstance(rollout, Absence) and rollout[0].to_bytes() == routes.to_bytes():
            return earlier
    if key.of_client and voided(store, name, routes.layout):
        logger.warning("%s.%s: wanted one that no other request has had with its prompt, got %r", FIELD, KEY, key.text)
        name = f"{key.text}@{token_hex(16)}"
    return store.put(name, routes)


def voided(store: RolloutStore, name: str, layout: Layout) -> bool:
    """Whether routes of an earlier request were there; then nobody finds them any more."""
    earlier = store.find(name)
    if earlier is None:
        return False
    try:
        store.put(name, void(layout))  # in its place at once: a process that is killed leaves one or the other
    except BaseException:
        store.delete(earlier)  # this may succeed where a put does not: a full disk
        raise
    return True


def _size(value: Any) -> int:
    """About how many characters a client's data has as JSON."""
    return len(value["record"]) if isinstance(value, dict) else len(str(value))


def rollout_name(key: Key, tokens: Tokens | None) -> str:
    """The id of a request's rollout; of one whose tokens are not known the key alone, where no client looks."""
    return key.text if tokens is None else rollout_id(key.text, tokens.ids[: tokens.prompt])


__all__ = ["LeftRoutes", "LeftValues", "Tokens", "left_values", "rollout_name", "settled", "voided"]

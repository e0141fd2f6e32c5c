"""The rows that a request's tokens were sampled with, whatever happened to the KV since.

The law. A token is sampled after a forward pass has read all tokens before it, so the rows of all positions read by
then are that token's *sampling-time* rows. :meth:`RequestJournal.settle` marks such a moment: positions before the last
token are settled from then on, and their rows never change. When KV is lost (preemption without room to swap, an abort
with a later resume, a weight update) the positions are computed again; those rows may differ, and are dropped. A
settled position whose row was not recorded in time never gets a row: the token was not sampled with a row that is
computed later. There is one exception, which the caller has to vouch for: a row that the same weights compute again.

A *sampling support*, the ids that a token was drawn from, is of the draw itself: it is kept here alone, and never
changes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cache_manager.errors import RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.routes import Layout, Routes, SamplingSupport, spans
from kvroute.routes.cells import some_known
from kvroute.routes.routes import checked_routes
from kvroute.routes.spans import UNKNOWN, Span
from kvroute.routes.support import joined
from kvroute.routes.token_hash import token_hashes, token_ids

TOKENS_MAX: Final = 1 << 22
"""Positions that one journal takes."""


class RequestJournal:
    """Rows by absolute position of one request: its prompt, its answer, and the turns that follow.

    :meth:`record` adds the rows of a forward pass, of an engine's answer or of a delta; then :meth:`settle` says which
    tokens were sampled with them; :meth:`routes` returns rows. Every call is idempotent, so a prefix that is sent again
    and a delta that comes twice change nothing. For one thread. Memory: each row once.
    """

    def __init__(self, spec: AuxBlockDataSpec) -> None:
        self._layout = Layout.of(spec)
        self._tokens = np.empty(0, np.int64)
        # By position, with room to grow:
        self._ids = np.empty((0, *spec.row_shape), spec.dtype)
        self._known = np.empty((0, len(self._layout.layer_ids)), np.bool_)
        self._versions = np.empty(0, np.int64)
        self._supports: dict[int, NDArray[np.int32]] = {}  # by position

    def record(
        self,
        routes: Routes,
        *,
        same_from: int | None = None,
    ) -> NDArray[np.int64]:
        """Add the rows of the current computation at their positions; missing ones change nothing. Returns the
        positions ``[n]`` whose rows were taken.

        A token's row is of one computation: all of its layers, or those that are known.

        A settled position does not change. At another one the new row replaces an earlier one, with which no token has
        been sampled. So an engine records its rows whenever it is about to lose them (see :meth:`discard_unsettled`),
        and at the end. :class:`RowError`, and no change, for rows of other layers, experts or top-k, or beyond the
        limit.

        ``same_from``: the tokens from this position on were sampled with the weights of these rows, and with KV of no
        others. There a row takes the place of one that was lost, and a whole row of one that lacks a layer.
        """
        self._layout.check_model(routes.layout)
        if routes.missing_layers:
            wanted = f"{self._layout.layer_ids}, as the model has"
            raise RowError("routes.layer_ids", wanted, routes.layer_ids)
        if routes.stop > TOKENS_MAX:
            raise RowError("routes.stop", f"{TOKENS_MAX} at most", routes.stop)
        self._grow(routes.stop)
        start = routes.start
        old = min(max(self.settled - start, 0), len(routes))  # how many of its positions are settled
        some = some_known(routes.mask)
        taken = some.copy()
        taken[:old] = False
        if same_from is not None:
            known = self._known[start : start + old]
            is_first = some[:old] & ~known.any(axis=1)
            is_whole = routes.valid[:old] & ~known.all(axis=1)
            is_same = np.arange(start, start + old) >= same_from
            taken[:old] = (is_first | is_whole) & is_same
        rows = np.flatnonzero(taken)
        positions = start + rows
        versions = spans.by_position(routes.weights_versions, start, routes.stop)
        self._ids[positions] = routes.ids[rows]
        self._known[positions] = routes.known[rows]
        self._versions[positions] = versions[rows]
        return positions

    def discard_unsettled(self) -> None:
        """The current computation is given up: forget rows with which no token was sampled; they are computed anew.

        Call it with every loss of KV, after recording and settling: else an old row would pass for one that the next
        computation lacks.
        """
        self._known[self.settled :] = False

    def settle(self, tokens: ArrayLike) -> None:
        """The request's tokens ``[n]`` so far, from position 0; the last was sampled, and all before it are settled.

        Record first the rows that they were sampled with, and call this before any token is computed again. ``tokens``
        may be the known ones, or fewer. :class:`RowError` names the first position whose token has changed: a history
        that was tokenised anew has other positions, which no old row fits.
        """
        ids = token_ids(tokens)
        if len(ids) > TOKENS_MAX + 1:
            raise RowError("tokens", f"{TOKENS_MAX + 1} at most", len(ids))
        both = min(len(ids), len(self._tokens))
        differs = ids[:both] != self._tokens[:both]
        if differs.any():
            position = int(differs.argmax())
            known_token = int(self._tokens[position])
            raise RowError(f"token at position {position}", known_token, int(ids[position]))
        if len(ids) > len(self._tokens):
            self._tokens = ids.astype(np.int64)

    def record_support(self, support: SamplingSupport) -> None:
        """Add the sampling supports of tokens that :meth:`settle` knows; missing ones change nothing.

        A token is drawn once: no loss of KV, no :meth:`discard_unsettled` and no later computation changes its support.
        The same support again changes nothing. :class:`RowError`, and no change, for supports of other tokens or of
        ones that are not known yet, and for one that differs from that of the same position.
        """
        if support.stop > len(self._tokens):
            wanted = f"{len(self._tokens)} at most, the tokens that settle() has been told"
            raise RowError("support.stop", wanted, support.stop)
        support.validate(self._tokens)
        positions = (support.start + np.flatnonzero(support.counts)).tolist()
        new = {position: support.row(position) for position in positions}
        for position in positions:
            earlier = self._supports.get(position)
            if earlier is not None and not np.array_equal(earlier, new[position]):
                what = f"sampling support of position {position}"
                wanted = f"the {len(earlier)} ids that it was drawn from, {earlier[:8].tolist()}"
                raise RowError(what, wanted, new[position][:8].tolist())
        self._supports.update(new)

    def support(self, start: int = 0, stop: int | None = None) -> SamplingSupport:
        """The sampling supports of the tokens at ``[start, stop)``, bound to the known tokens.

        Tokens that were not drawn, and those whose support was not recorded, have none. ``stop`` is the number of known
        tokens by default: unlike a row, the last token has a support. :class:`RowError` for tokens that are not known.
        """
        end = len(self._tokens) if stop is None else stop
        if not 0 <= start <= end <= len(self._tokens):
            wanted = f"a range inside [0, {len(self._tokens)}]"
            raise RowError("positions", wanted, f"[{start}, {end})")
        none = np.empty(0, np.int32)
        supports = [self._supports.get(position, none) for position in range(start, end)]
        return joined(supports, start, self._tokens)

    @property
    def settled(self) -> int:
        """How many first positions are settled: their rows never change."""
        return max(len(self._tokens) - 1, 0)

    @property
    def stop(self) -> int:
        """The position after the last that is settled or has a row."""
        rows = np.flatnonzero(self._known.any(1))
        return max(self.settled, int(rows[-1]) + 1 if rows.size else 0)

    @property
    def lost(self) -> tuple[Span, ...]:
        """The settled positions without a whole row, as ranges."""
        self._grow(self.settled)
        return spans.runs(~np.logical_and.reduce(self._known[: self.settled], axis=1))

    def routes(self, start: int = 0, stop: int | None = None) -> Routes:
        """The rows of the positions ``[start, stop)``, new memory, bound to the known tokens.

        They are the rows that the tokens were sampled with; lost ones are missing. ``start`` makes a delta: the rows
        after those that a client has. As settled rows never change, deltas of settled positions join to the whole.
        ``stop`` is :attr:`stop` by default.
        """
        end = self.stop if stop is None else stop
        if not 0 <= start <= end <= self.stop:
            wanted = f"a range inside [0, {self.stop}]"
            raise RowError("positions", wanted, f"[{start}, {end})")
        self._grow(end)
        known = self._known[start:end].copy()
        some = np.logical_or.reduce(known, axis=1)
        versions = np.where(some, self._versions[start:end], UNKNOWN)
        whole = np.logical_and.reduce(known, axis=1)
        mask = some if np.array_equal(some, whole) else known
        # A delta's beginning has the same hash as the end of a client's rows, so that the two can be joined.
        counts = {n + 1 for n in (start or end, end) if n < len(self._tokens)}
        hashes = token_hashes(self._tokens, counts)
        ids = self._ids[start:end].copy()
        labels = spans.from_positions(versions, start)
        return checked_routes(self._layout, ids, mask, start, labels, hashes)

    def _grow(self, stop: int) -> None:
        """Make room for positions before ``stop``, without rows yet."""
        if stop > len(self._ids):
            room = max(stop, 2 * len(self._ids), 64) - len(self._ids)
            no_ids = np.zeros((room, *self._ids.shape[1:]), self._ids.dtype)
            unknown = np.zeros((room, self._known.shape[1]), np.bool_)
            no_versions = np.full(room, UNKNOWN, np.int64)
            self._ids = np.concatenate([self._ids, no_ids])
            self._known = np.concatenate([self._known, unknown])
            self._versions = np.concatenate([self._versions, no_versions])

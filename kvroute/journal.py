"""The rows that a request's tokens were sampled with, whatever became of the KV since.

The law. A token is sampled after a forward pass that read everything before it, so the rows of all positions that were
read by then are that token's *sampling-time* rows. :meth:`RequestJournal.settle` says that such a moment has come:
positions before the last token are settled from there on, and their rows never change. When KV is lost (preemption
without room to swap, an abort with a later resume, a weight update) the positions are computed again; those rows may
differ, and are dropped. A settled position whose row nobody recorded in time has no row, ever: what is computed later
is not what its token was sampled with.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from cache_manager.errors import RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.routes import Layout, Routes, spans
from kvroute.routes.spans import UNKNOWN, Span
from kvroute.routes.token_hash import token_hashes

TOKENS_MAX: Final = 1 << 22
"""Positions that one journal takes, unless it is told otherwise."""


class RequestJournal:
    """Rows by absolute position of one request: its prompt, its answer, and the turns that follow.

    :meth:`record` puts in what a forward pass, an engine's answer or a delta of it has; then :meth:`settle` says which
    tokens were sampled with that; :meth:`routes` takes out. Every call is idempotent, so a prefix that is sent again
    and a delta that comes twice change nothing. It belongs to one thread. Memory: the rows, once.
    """

    def __init__(self, spec: AuxBlockDataSpec, *, tokens_max: int = TOKENS_MAX) -> None:
        self._layout = Layout.of(spec)
        self._tokens = np.empty(0, np.int64)
        self._tokens_max = tokens_max
        # By position, with room to grow:
        self._ids = np.empty((0, *spec.row_shape), spec.dtype)
        self._valid = np.empty(0, np.bool_)
        self._versions = np.empty(0, np.int64)

    def record(self, routes: Routes) -> None:
        """Rows of the computation that is in use now, at their positions; missing ones change nothing.

        A row that lacks a layer counts as missing: a token's row is of one computation, whole or not at all.

        Where a position is settled nothing changes. Where it is not, the new row takes the place of an earlier one: no
        token has been sampled with that. So an engine records what it holds whenever it is about to lose it (see
        :meth:`discard_unsettled`), and at the end.

        :class:`RowError` for rows of other layers, experts or top-k, or too far on; nothing is changed then.
        """
        self._layout.check_model(routes.layout)
        if routes.missing_layers:
            raise RowError("routes.layer_ids", f"{self._layout.layer_ids}, as the model has", routes.layer_ids)
        if routes.stop > self._tokens_max:
            raise RowError("routes.stop", f"{self._tokens_max} at most, tokens_max of the journal", routes.stop)
        old = min(max(self.settled - routes.start, 0), len(routes))  # how many of its positions are settled
        there = old + np.flatnonzero(routes.valid[old:])
        if len(there):
            at = routes.start + there
            self._grow(int(at[-1]) + 1)
            self._ids[at], self._valid[at] = routes.ids[there], True
            self._versions[at] = spans.by_position(routes.weights_versions, routes.start, routes.stop)[there]

    def discard_unsettled(self) -> None:
        """The computation in use is given up: what no token has been sampled with is computed anew, and is forgotten.

        Call it with every loss of KV, after recording and settling: a row that stayed would pass for one of the next
        computation where that has none.
        """
        self._valid[self.settled :] = False

    def settle(self, tokens: ArrayLike) -> None:
        """The request's tokens ``[n]`` so far, from position 0; the last was sampled, and all before it is settled.

        Record first what they were sampled with, and call this before anything is computed again. ``tokens`` may be
        those that it knows, or fewer. :class:`RowError` naming the first position whose token is another one than
        before: a history that was tokenised anew has other positions, and no row of the old ones fits it.
        """
        given = np.asarray(tokens)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise RowError("tokens", "integers [n]", f"{given.dtype} of shape {given.shape}")
        if len(given) > self._tokens_max + 1:
            raise RowError("tokens", f"{self._tokens_max + 1} at most, tokens_max of the journal and one", len(given))
        both = min(len(given), len(self._tokens))
        if (differs := given[:both] != self._tokens[:both]).any():
            at = int(differs.argmax())
            raise RowError(f"token at position {at}", int(self._tokens[at]), int(given[at]))
        if len(given) > len(self._tokens):
            self._tokens = given.astype(np.int64)

    @property
    def settled(self) -> int:
        """How many first positions are settled: what is handed out of them never changes."""
        return max(len(self._tokens) - 1, 0)

    @property
    def stop(self) -> int:
        """The position behind the last that is settled or has a row."""
        there = np.flatnonzero(self._valid)
        return max(self.settled, int(there[-1]) + 1 if there.size else 0)

    @property
    def lost(self) -> tuple[Span, ...]:
        """The settled positions that have no row, as ranges."""
        self._grow(self.settled)
        return spans.runs(~self._valid[: self.settled])

    def routes(self, start: int = 0, stop: int | None = None) -> Routes:
        """The rows of the positions ``[start, stop)``, new memory, bound to the tokens as far as they are known.

        They are what the tokens were sampled with, and missing where that was lost. ``start`` makes a delta: the rows
        behind those that a client has. As settled rows never change, deltas of settled positions laid end to end are
        the whole. ``stop`` is :attr:`stop` unless given.
        """
        end = self.stop if stop is None else stop
        if not 0 <= start <= end <= self.stop:
            raise RowError("positions", f"a range inside [0, {self.stop}]", f"[{start}, {end})")
        self._grow(end)
        valid = self._valid[start:end].copy()
        versions = np.where(valid, self._versions[start:end], UNKNOWN)
        # A delta's beginning is bound as the end of what a client has is, so that the two can be put together.
        counts = {n + 1 for n in (start or end, end) if n < len(self._tokens)}
        hashes = token_hashes(self._tokens, counts)
        ids = self._ids[start:end].copy()
        return Routes.checked(self._layout, ids, valid, start, spans.from_positions(versions, start), hashes)

    def _grow(self, stop: int) -> None:
        """Make room for positions before ``stop``, of which nothing is known yet."""
        if stop > len(self._ids):
            room = max(stop, 2 * len(self._ids), 64) - len(self._ids)
            self._ids = np.concatenate([self._ids, np.zeros((room, *self._ids.shape[1:]), self._ids.dtype)])
            self._valid = np.concatenate([self._valid, np.zeros(room, np.bool_)])
            self._versions = np.concatenate([self._versions, np.full(room, UNKNOWN, np.int64)])

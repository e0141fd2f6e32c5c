"""The rows that a request's tokens were sampled with, whatever became of the KV since.

The law. A token is sampled after a forward pass that read everything before it, so the rows of all positions that were
read by then are that token's *sampling-time* rows. :meth:`RequestJournal.settle` says that such a moment has come:
positions before the last token are settled from there on, and their sampled rows never change. When KV is lost
(preemption without room to swap, an abort with a later resume, a weight update) the positions are computed again; those
rows may differ, and are kept apart as *recomputed* ones. A settled position whose row nobody recorded in time has no
sampled row, ever: what is computed later is not what its token was sampled with.

Which of the two a trainer wants is its choice, and is always said: R3 wants ``sampled``.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cache_manager.errors import InvalidInputError, RowError
from cache_manager.spec import AuxBlockDataSpec
from kvroute import spans
from kvroute.routes import Routes
from kvroute.spans import UNKNOWN, Span
from kvroute.token_hash import token_hash

RowChoice = Literal["sampled", "recomputed", "any"]
ROW_CHOICES: Final[tuple[str, ...]] = get_args(RowChoice)
TOKENS_MAX: Final = 1 << 22
"""Positions that one journal takes, unless it is told otherwise."""


class RequestJournal:
    """Rows by absolute position of one request: its prompt, its answer, and the turns that follow.

    :meth:`record` puts in what a forward pass, an engine's answer or a delta of it has; then :meth:`settle` says which
    tokens were sampled with that; :meth:`routes` takes out. Every call is idempotent, so a prefix that is sent again
    and a delta that comes twice change nothing. It belongs to one thread. Memory: the rows, once; twice from the first
    row that was recomputed differently.

    >>> from kvroute.routing import routing_spec
    >>> spec = routing_spec(num_experts=8, top_k=1, layer_ids=[0], num_layers=1, block_tokens=8)
    >>> def rows(*ids, version):
    ...     ids = np.array(ids).reshape(-1, 1, 1)
    ...     return Routes(ids, np.ones(len(ids), bool), (0,), 8, 1, 0, ((0, len(ids), version),))
    >>> journal = RequestJournal(spec)
    >>> journal.record(rows(1, 2, 3, version=1))  # a prompt of two tokens and the first sampled one were read
    >>> journal.settle([50, 51, 52, 53])
    >>> journal.record(rows(4, 2, 6, 7, version=2))  # preempted; read again under new weights, and one more
    >>> journal.settle([50, 51, 52, 53, 54])
    >>> journal.routes().ids.ravel().tolist(), journal.routes().weights_versions
    ([1, 2, 3, 7], ((0, 3, 1), (3, 4, 2)))
    >>> journal.routes("recomputed").ids.ravel().tolist(), journal.recomputed
    ([4, 2, 6, 7], ((0, 1), (2, 3)))
    """

    def __init__(self, spec: AuxBlockDataSpec, *, tokens_max: int = TOKENS_MAX) -> None:
        layers, experts, total = (spec.attrs[name] for name in ("layer_ids", "num_experts", "num_layers"))
        ids = np.empty((0, *spec.row_shape), spec.dtype)
        self._layout = Routes(ids, np.empty(0, np.bool_), layers, experts, total)
        self._sampled = _Rows(ids)
        self._recomputed: _Rows | None = None
        self._tokens = np.empty(0, np.int64)
        self._tokens_max = tokens_max

    # ---------------------------------------------------------------- in

    def record(self, routes: Routes) -> None:
        """Rows of the computation that is in use now, at their positions; missing ones change nothing.

        A row that lacks a layer counts as missing: a token's row is of one computation, whole or not at all.

        Where a position is settled, its sampled row stays, and the new one is its recomputed row. Where it is not, the
        new row takes the place of an earlier one: no token has been sampled with that. So an engine records what it
        holds whenever it is about to lose it (see :meth:`discard_unsettled`), and at the end.

        :class:`RowError` for rows of other layers, experts or top-k, or too far on; nothing is changed then.
        """
        for name in ("layer_ids", "num_experts", "num_layers", "top_k"):
            if getattr(routes, name) != getattr(self._layout, name):
                raise RowError(f"routes.{name}", getattr(self._layout, name), getattr(routes, name))
        if routes.stop > self._tokens_max:
            raise RowError("routes.stop", f"{self._tokens_max} at most, tokens_max of the journal", routes.stop)
        versions = spans.by_position(routes.weights_versions, routes.start, routes.stop)
        old = min(max(self.settled - routes.start, 0), len(routes))  # how many of its positions are settled
        if old:
            self._record_again(routes, versions, old)
        self._sampled.put(routes.start + old, routes.ids[old:], routes.valid[old:], versions[old:])

    def discard_unsettled(self) -> None:
        """The computation in use is given up: what no token has been sampled with is computed anew, and is forgotten.

        Call it with every loss of KV, after recording and settling: a row that stayed would pass for one of the next
        computation where that has none.
        """
        self._sampled.cut(self.settled)

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

    # ---------------------------------------------------------------- out

    @property
    def settled(self) -> int:
        """How many first positions are settled: what is handed out of them as ``sampled`` never changes."""
        return max(len(self._tokens) - 1, 0)

    @property
    def stop(self) -> int:
        """The position behind the last that is settled or has a row."""
        return max(self.settled, self._sampled.stop)

    @property
    def lost(self) -> tuple[Span, ...]:
        """The settled positions that have no sampled row, as ranges."""
        return spans.runs(~self._sampled.window(0, self.settled)[1])

    @property
    def recomputed(self) -> tuple[Span, ...]:
        """The settled positions that were computed again with another result than the sampled row's, as ranges."""
        if self._recomputed is None:
            return ()
        ids, valid, _ = self._sampled.window(0, self.settled)
        again, known, _ = self._recomputed.window(0, self.settled)
        return spans.runs(known & valid & (ids != again).any(axis=(1, 2)))

    def routes(self, choice: RowChoice = "sampled", start: int = 0, stop: int | None = None) -> Routes:
        """The rows of the positions ``[start, stop)``, new memory, bound to the tokens as far as they are known.

        ``"sampled"``: what the tokens were sampled with, and missing where that was lost. ``"recomputed"``: of each
        position the row that was computed last. ``"any"``: the sampled row, and the recomputed one where it was lost.
        ``start`` makes a delta: the rows behind those that a client has. As settled rows never change, deltas of
        settled positions laid end to end are the whole. ``stop`` is :attr:`stop` unless given.
        """
        if choice not in ROW_CHOICES:
            raise InvalidInputError("choice", ", ".join(ROW_CHOICES), repr(choice))
        end = self.stop if stop is None else stop
        if not 0 <= start <= end <= self.stop:
            raise RowError("positions", f"a range inside [0, {self.stop}]", f"[{start}, {end})")
        ids, valid, versions = self._sampled.window(start, end)
        if choice != "sampled" and self._recomputed is not None:
            again, known, later = self._recomputed.window(start, end)
            takes = known if choice == "recomputed" else known & ~valid
            ids[takes], versions[takes] = again[takes], later[takes]
            valid |= takes
        layout = self._layout
        # A delta's beginning is bound as the end of what a client has is, so that the two can be put together.
        counts = sorted(n + 1 for n in {start or end, end} if n < len(self._tokens))
        return Routes.checked(
            ids,
            valid,
            layout.layer_ids,
            layout.num_experts,
            layout.num_layers,
            start,
            spans.from_positions(versions, start),
            tuple((count, token_hash(self._tokens[:count])) for count in counts),
        )

    def _record_again(self, routes: Routes, versions: NDArray[np.int64], count: int) -> None:
        """The first ``count`` rows of ``routes`` are of settled positions: recomputed, unless equal to the sampled."""
        ids, valid, held = self._sampled.window(routes.start, routes.start + count)
        new_ids, new_valid, new_versions = routes.ids[:count], routes.valid[:count], versions[:count]
        same = valid & (ids == new_ids).all(axis=(1, 2)) & ((held == new_versions) | (new_versions == UNKNOWN))
        if self._recomputed is None:
            if not (new_valid & ~same).any():
                return
            self._recomputed = _Rows(self._layout.ids)
        self._recomputed.put(routes.start, new_ids, new_valid, new_versions)


class _Rows:
    """Rows by position in arrays that grow: ids, whether there is one, and its weights version."""

    def __init__(self, empty: NDArray[Any]) -> None:
        self._ids = empty
        self._valid = np.empty(0, np.bool_)
        self._versions = np.empty(0, np.int64)
        self.stop = 0

    def put(self, start: int, ids: NDArray[Any], valid: NDArray[np.bool_], versions: NDArray[np.int64]) -> None:
        """Take the valid rows of the positions from ``start`` on."""
        there = np.flatnonzero(valid)
        if not len(there):
            return
        self._grow(start + int(there[-1]) + 1)
        at = slice(start, start + len(ids)) if len(there) == len(ids) else there + start
        of = slice(None) if len(there) == len(ids) else there
        self._ids[at], self._valid[at], self._versions[at] = ids[of], True, versions[of]

    def cut(self, stop: int) -> None:
        """Forget all rows from position ``stop`` on."""
        self._valid[stop:] = False
        self.stop = min(self.stop, stop)

    def window(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.int64]]:
        """Copies of what there is of the positions ``[start, stop)``; all ones, invalid and unknown behind the last."""
        count = stop - start
        ids = np.full((count, *self._ids.shape[1:]), np.iinfo(self._ids.dtype).max, self._ids.dtype)
        valid, versions = np.zeros(count, np.bool_), np.full(count, UNKNOWN, np.int64)
        held = max(min(stop, self.stop) - start, 0)
        ids[:held] = self._ids[start : start + held]
        valid[:held] = self._valid[start : start + held]
        versions[:held] = self._versions[start : start + held]
        versions[~valid] = UNKNOWN
        return ids, valid, versions

    def _grow(self, stop: int) -> None:
        if stop > len(self._ids):
            room = max(stop, 2 * len(self._ids), 64) - len(self._ids)
            self._ids = np.concatenate([self._ids, np.zeros((room, *self._ids.shape[1:]), self._ids.dtype)])
            self._valid = np.concatenate([self._valid, np.zeros(room, np.bool_)])
            self._versions = np.concatenate([self._versions, np.full(room, UNKNOWN, np.int64)])
        self.stop = max(self.stop, stop)

"""The sampling support of tokens: the ids that a sampler left to draw each of them from, after top-k, top-p and min-p.

A support is of a sampling event, not of a forward pass: a token is drawn once, however often its KV is computed. So
supports are kept in a journal (:class:`~kvroute.journal.RequestJournal`), and beside routes in a record; never in
blocks, where a prefix hit would return those of another request's draw. Tokens of a prompt have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from cache_manager.errors import RowError
from cache_manager.record import Buffer
from cache_manager.slots import integers
from kvroute.checks import whole
from kvroute.routes import wire
from kvroute.routes.cells import Cells, known_stop
from kvroute.routes.parts import ROWS_MAX
from kvroute.routes.spans import STOP_MAX, Span, runs
from kvroute.routes.token_hash import (
    TokenHash,
    check_tokens,
    joined_hashes,
    of_one_sequence,
    token_hashes,
    token_ids,
)

ID_MAX: Final = (1 << 31) - 1
"""Ids of the vocabulary are at most this."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SamplingSupport:
    """The supports of the tokens at positions ``start .. start + n - 1`` of one sequence.

    The token at position ``start + i`` was drawn from ``counts[i]`` ids, which follow those of the tokens before it in
    ``ids``, increasing. A count of 0 says that nothing is known: the token was not drawn (a tool's answer between two
    turns), or its support is missing. The arrays are read-only copies, 4 bytes a token and 4 an id.
    ``token_hashes`` ``(n, hash)`` identify the first ``n`` tokens of the sequence; one is of :attr:`stop` tokens.

    :meth:`of` makes one from an engine's lists. Raises :class:`RowError` for arrays that do not fit, for ids that do
    not increase within a row, and if no hash is of :attr:`stop` tokens.

    >>> support = SamplingSupport.of([[7, 3], [], [5]], tokens=[1, 2, 7, 8, 5], start=2)
    >>> support
    SamplingSupport(positions 2..4, 3 ids, 1 missing)
    >>> support.row(2).tolist(), support.missing, support.padded(2).tolist()
    ([3, 7], ((3, 4),), [[3, 7], [-1, -1], [5, -1]])
    """

    counts: NDArray[Any]  # [n]  int32
    ids: NDArray[Any]  # [sum of counts]  int32
    start: int
    token_hashes: tuple[TokenHash, ...]
    _first: NDArray[np.int64] = field(init=False)  # [n + 1], where each row begins in ids

    def __post_init__(self) -> None:
        counts = integers(self.counts, "support.counts", "integers [n]", error=RowError)
        ids = integers(self.ids, "support.ids", "integers [sum of counts]", error=RowError)
        start = whole("support.start", self.start, error=RowError)
        if len(counts) > ROWS_MAX or start + len(counts) > STOP_MAX:
            wanted = f"at most {ROWS_MAX}, of positions before {STOP_MAX}"
            raise RowError("support.counts", wanted, len(counts))
        if counts.size and not 0 <= counts.min() <= counts.max() <= len(ids):
            wanted = f"0 to {len(ids)} ids"
            got = f"{counts.min()} to {counts.max()}"
            raise RowError("support.counts", wanted, got)
        first = np.concatenate(([0], np.cumsum(counts)))
        if first[-1] != len(ids):
            wanted = f"{first[-1]}, the sum of the counts"
            raise RowError("support.ids", wanted, len(ids))
        if ids.size and not 0 <= ids.min() <= ids.max() <= ID_MAX:
            wanted = f"ids of a vocabulary, 0 to {ID_MAX}"
            raise RowError("support.ids", wanted, f"{ids.min()} to {ids.max()}")
        falls = np.diff(ids) <= 0
        begins = first[1:-1]
        inside = begins[(begins > 0) & (begins < len(ids))]
        falls[inside - 1] = False  # from one row to the next
        if falls.any():
            place = int(falls.argmax())
            position = start + int(np.searchsorted(first, place, "right")) - 1
            wanted = "increasing ids"
            raise RowError(f"support.ids of position {position}", wanted, ids[place : place + 2].tolist())
        hashes = joined_hashes(self.token_hashes)
        if start + len(counts) not in dict(hashes):
            wanted = f"a hash of the first {start + len(counts)} tokens"
            raise RowError("support.token_hashes", wanted, [count for count, _ in hashes])
        own = {"counts": counts.astype(np.int32), "ids": ids.astype(np.int32), "_first": first}
        for name, array in own.items():
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "token_hashes", hashes)

    @classmethod
    def of(
        cls,
        rows: Iterable[ArrayLike | None],
        tokens: ArrayLike,
        start: int,
    ) -> SamplingSupport:
        """The supports ``rows`` of the tokens from position ``start`` on: the ids of each in any order, or ``None``.

        ``tokens`` ``[m]`` are those of the sequence from position 0, at least to the last row; what is returned is
        bound to them. :class:`RowError` names the position for an id that comes twice, and for a support without its
        token.
        """
        supports = [() if row is None else row for row in rows]
        drawn, counts = _flat_ids(supports, start)
        order = np.lexsort((drawn, np.repeat(np.arange(len(counts)), counts)))
        stop = start + len(counts)
        ids = token_ids(tokens, stop)
        support = cls(counts, drawn[order], start, _hashes(ids, start, stop))
        support._check_drawn(ids)
        return support

    # ---------------------------------------------------------------- what there is

    def __len__(self) -> int:
        return len(self.counts)

    def __eq__(self, other: object) -> bool:
        """Equal positions, token hashes and supports."""
        if not isinstance(other, SamplingSupport):
            return NotImplemented
        same = self.start == other.start and self.token_hashes == other.token_hashes
        return same and np.array_equal(self.counts, other.counts) and np.array_equal(self.ids, other.ids)

    __hash__ = None  # type: ignore[assignment]  # arrays inside: compared by value, never used as a key

    def __repr__(self) -> str:
        where = f"positions {self.start}..{self.stop - 1}" if len(self) else f"no positions at {self.start}"
        lost = int((self.counts == 0).sum())
        return f"SamplingSupport({where}, {len(self.ids)} ids, {f'{lost} missing' if lost else 'complete'})"

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + len(self.counts)

    @property
    def missing(self) -> tuple[Span, ...]:
        """The positions without a support, as maximal ranges ``[start, stop)`` in order."""
        return tuple((self.start + a, self.start + b) for a, b in runs(self.counts == 0))

    def row(self, position: int) -> NDArray[np.int32]:
        """The ids from which the token at ``position`` was drawn, increasing; none, if nothing is known. Read-only.

        :class:`RowError` for a position outside ``[start, stop)``.
        """
        if not self.start <= position < self.stop:
            wanted = f"one inside [{self.start}, {self.stop})"
            raise RowError("position", wanted, position)
        i = position - self.start
        return self.ids[self._first[i] : self._first[i + 1]]

    def validate(
        self,
        tokens: ArrayLike,
        *,
        loss_mask: ArrayLike | None = None,
    ) -> None:
        """Raise :class:`RowError` unless these are the supports of ``tokens`` ``[m]``, which begin at position 0.

        Every token hash matches its number of first tokens, and each support has its token. With ``loss_mask`` ``[m]``:
        each position with a loss has a support.
        """
        ids = token_ids(tokens, self.stop)
        check_tokens(self.token_hashes, ids, self.stop)
        self._check_drawn(ids)
        if loss_mask is not None:
            if np.shape(loss_mask) != ids.shape:
                wanted = f"{len(ids)} values, as there are tokens"
                raise RowError("loss_mask", wanted, np.shape(loss_mask))
            self.check_losses(loss_mask)

    def _check_drawn(self, ids: NDArray[np.int64]) -> None:
        """:class:`RowError` unless each support has the token at its position, of ``ids`` from position 0."""
        drawn = ids[self.start : self.stop]
        rows = np.repeat(np.arange(len(self)), self.counts)
        has = np.zeros(len(self), np.bool_)
        has[rows[self.ids == drawn[rows]]] = True
        if (wrong := ~has & (self.counts > 0)).any():
            i = int(wrong.argmax())
            got = self.row(self.start + i)[:8].tolist()
            wanted = f"ids with its token {drawn[i]}"
            raise RowError(f"sampling support of position {self.start + i}", wanted, got)

    def over(
        self,
        start: int,
        stop: int,
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The counts ``[stop - start]`` of the positions ``[start, stop)``, and their ids one after another.

        Positions outside these supports have none. :class:`RowError` for a range that is none.
        """
        if not 0 <= start <= stop:
            raise RowError("positions", "a range from 0 on", f"[{start}, {stop})")
        counts = np.zeros(stop - start, np.int32)
        first, last = max(start, self.start), min(stop, self.stop)
        if first >= last:
            return counts, np.empty(0, np.int32)
        a, b = first - self.start, last - self.start
        counts[first - start : last - start] = self.counts[a:b]
        return counts, self.ids[self._first[a] : self._first[b]]

    def padded(
        self,
        width: int,
        start: int | None = None,
        stop: int | None = None,
    ) -> NDArray[np.int32]:
        """The supports of the positions ``[start, stop)``, by default all: ``[stop - start, width]``, new memory.

        Each row has its ids and then -1; a position without a support is -1 throughout. :class:`RowError` names the
        first position whose support has more ids.
        """
        wide = whole("width", width, error=RowError)
        begin = self.start if start is None else start
        counts, ids = self.over(begin, self.stop if stop is None else stop)
        if (wider := counts > wide).any():
            i = int(wider.argmax())
            wanted = f"{wide} ids at most"
            raise RowError(f"sampling support of position {begin + i}", wanted, int(counts[i]))
        rows = np.full((len(counts), wide), -1, np.int32)
        rows[np.arange(wide) < counts[:, None]] = ids
        return rows

    def check_losses(self, loss_mask: ArrayLike, start: int = 0) -> None:
        """Raise :class:`RowError` for the first position with a loss and without a support.

        ``loss_mask`` ``[m]`` is of the positions from ``start`` on.
        """
        trains = np.asarray(loss_mask) != 0
        if trains.ndim != 1:
            wanted = "one value for each position"
            raise RowError("loss_mask", wanted, f"shape {trains.shape}")
        lacks = trains & (self.over(start, start + len(trains))[0] == 0)
        if lacks.any():
            wanted = "a sampling support, as the position has a loss"
            raise RowError(f"position {start + int(lacks.argmax())}", wanted, "none")

    # ---------------------------------------------------------------- outside memory

    @classmethod
    def of_record(cls, data: Buffer) -> SamplingSupport | None:
        """The supports in a record that :meth:`Routes.to_bytes` has made with some; ``None`` if it has none.

        :class:`RowError` for anything else, also if one bit of the record has changed.
        """
        header, _, content = wire.read(data)
        return None if content is None else cls.of_part(header, content)

    @classmethod
    def of_part(cls, header: wire.Header, content: Buffer) -> SamplingSupport:
        """The supports of a record with this header, whose bytes these are.

        :class:`RowError` unless they are as they were written, by their number and their sum.
        """
        part = header.checked_support(content)
        values = np.frombuffer(content, "<i4")
        return cls(values[: part.rows], values[part.rows :], part.start, part.token_hashes)

    def to_part(self) -> tuple[wire.SupportPart, bytes]:
        """What a record's header says of these supports, and their bytes: the counts, then the ids."""
        content = b"".join(array.astype("<i4", copy=False).tobytes() for array in (self.counts, self.ids))
        part = wire.SupportPart(len(self.counts), len(self.ids), self.start, self.token_hashes, wire.sum_of(content))
        return part, content


def with_support(
    header: wire.Header,
    routes: Cells,
    support: SamplingSupport | None,
) -> tuple[wire.Header, bytes]:
    """The header of a record of ``routes`` and of ``support``, and the support's bytes behind the parts; of ``None``
    the header itself and no bytes. :class:`RowError` if nothing shows that they are of one sequence."""
    if support is None:
        return header, b""
    of_one_sequence([(known_stop(routes), routes.token_hashes), (support.stop, support.token_hashes)])
    part, content = support.to_part()
    return msgspec.structs.replace(header, support=part), content


def joined(
    supports: Sequence[NDArray[Any]],
    start: int,
    tokens: NDArray[np.int64],
) -> SamplingSupport:
    """The supports of positions from ``start`` on, increasing ids each, which were checked before, bound to
    ``tokens``."""
    counts = np.array([len(row) for row in supports], np.int64)
    stop = start + len(counts)
    ids = np.concatenate([np.empty(0, np.int64), *supports])
    return SamplingSupport(counts, ids, start, _hashes(tokens, start, stop))


def _flat_ids(rows: Sequence[Any], start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ids of all rows, one after another, and how many each has; :class:`RowError` names the first position with
    anything but integers."""
    wanted = "integers [ids]"
    try:
        counts = np.array([len(row) for row in rows], np.int64)
        flat = integers(list(chain.from_iterable(rows)), "sampling supports", wanted, error=RowError)
    except (RowError, TypeError):
        for i, row in enumerate(rows):
            integers(row, f"sampling support of position {start + i}", wanted, error=RowError)
        raise
    return flat, counts


def _hashes(tokens: NDArray[np.int64], start: int, stop: int) -> tuple[TokenHash, ...]:
    """Of the tokens before the first row, as a prompt's routes have it; before the last, as an answer's; and of all."""
    return token_hashes(tokens, {start, max(0, stop - 1), stop})


__all__ = ["ID_MAX", "SamplingSupport", "joined", "with_support"]

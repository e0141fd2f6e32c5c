"""Several parts of one sequence's routes made one, by absolute position and layer.

A row at position ``p`` is made of the tokens ``[0, p]``. So two parts are of one sequence when their tokens are the
same up to the end of the part that ends first, and nothing less shows it:

* ``tokens``: every part's hashes are of these tokens, and the caller says that its rows are, too;
* both parts are bound: both have the same hash of as many first tokens, or more, as the one that ends first has rows;
* one of them is not bound: both have the last row of the one that ends first, and it is the same.

Rows alone prove little, as equal tokens behind other ones are often routed alike. That is why they do not count where
hashes could say it. A part that adds nothing to the others needs no proof, and does not bind the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cache_manager.errors import RowError
from kvroute import spans
from kvroute.cells import some
from kvroute.layout import check_alike
from kvroute.spans import UNKNOWN, WeightsSpan
from kvroute.token_hash import TokenHash, check_tokens, joined_hashes, token_hash

if TYPE_CHECKING:
    from kvroute.routes import Routes

# Of one sequence ------------------------------------------------------------------------------------------------------


def of_one_sequence(parts: Sequence[Routes], tokens: ArrayLike | None = None) -> tuple[TokenHash, ...]:
    """The token hashes of the union of ``parts``; :class:`RowError` unless they are shown to be of one sequence.

    Only whether there are rows is looked at: :func:`union` compares those that two parts have.
    """
    check_alike(parts, "part")
    every = joined_hashes(each for part in parts for each in part.token_hashes)
    if tokens is not None:
        given = np.asarray(tokens)
        every = joined_hashes((*every, (len(given), token_hash(given))))
        check_tokens(every, given, max(part.stop for part in parts))
        return every
    longest, *waiting = sorted(parts, key=_extent, reverse=True)
    found, hashes = [longest], dict(longest.token_hashes)
    while waiting:
        for i, part in enumerate(waiting):
            shown = _shown(part, found, hashes)
            if shown >= part.end or not _adds(part, found):
                # What it says of tokens further on is so of the whole, if that says nothing of them itself.
                goes_on = shown >= max((longest.end, *hashes))
                found.append(waiting.pop(i))
                hashes |= {count: digest for count, digest in part.token_hashes if goes_on or count <= shown}
                break
        else:
            end = waiting[0].end
            wanted = (
                f"parts of one sequence: merge(..., tokens=...), or the hash of the first {end} tokens or more in "
                f"both, or, of routes that are not bound, row {end - 1} in both"
            )
            raise RowError("routes", wanted, f"rows up to position {end - 1} that nothing ties to the others")
    return tuple(sorted(hashes.items()))


def _extent(part: Routes) -> tuple[int, int, int]:
    cells = np.count_nonzero(part.known) if part.cellwise else np.count_nonzero(part.valid) * len(part.layer_ids)
    return part.end, int(cells), max((count for count, _ in part.token_hashes), default=0)


def _shown(part: Routes, found: Sequence[Routes], hashes: dict[int, bytes]) -> int:
    """Of how many first tokens ``part`` is shown to have the same as ``found``, which end no earlier."""
    shared = max((count for count, digest in part.token_hashes if hashes.get(count) == digest), default=0)
    if part.token_hashes and hashes:
        return shared
    return part.end if any(_both_know(part, other, part.end - 1) for other in found) else shared


def _both_know(one: Routes, other: Routes, position: int) -> bool:
    """Whether both have the row, or the same layer of it."""
    if not (one.start <= position < one.stop and other.start <= position < other.stop):
        return False
    mine, its = (
        {layer for layer, there in zip(p.layer_ids, p.known[position - p.start].tolist(), strict=True) if there}
        for p in (one, other)
    )
    return not mine.isdisjoint(its)


def _adds(part: Routes, found: Sequence[Routes]) -> bool:
    """Whether ``part`` has a cell that none of ``found`` has."""
    new = part.known.copy()
    for other in found:
        a, b = max(part.start, other.start), min(part.stop, other.stop)
        for i, layer in enumerate(part.layer_ids if a < b else ()):
            if layer in other.layer_ids:
                its = other.known[a - other.start : b - other.start, other.layer_ids.index(layer)]
                new[a - part.start : b - part.start, i] &= ~its
    return bool(new.any())


# The union ------------------------------------------------------------------------------------------------------------


def union(parts: Sequence[Routes]) -> Routes:
    """The union of ``parts`` that are of one sequence, in new memory, with the token hashes of the first.

    A cell that several parts know must be the same in all of them, computed by one weights version as far as the
    versions are known: :class:`RowError` names the position, and the layer, of the first that differs. Positions
    between the parts are missing. One pass over the bytes; only rows that two parts have are compared.
    """
    check_alike(parts, "part")
    first = parts[0]
    layer_ids = tuple(sorted({layer for part in parts for layer in part.layer_ids}))
    ordered = sorted((p for p in parts if len(p)), key=lambda p: p.start) or [min(parts, key=lambda p: p.start)]
    cellwise = any(p.cellwise or p.layer_ids != layer_ids for p in parts)
    start, stop = ordered[0].start, max(p.stop for p in ordered)
    ids = np.empty((stop - start, len(layer_ids), first.top_k), first.ids.dtype)
    known = np.zeros(ids.shape[:2] if cellwise else stop - start, np.bool_)
    versions = _Versions(start, stop)
    reached = start  # what lies before has been filled
    for part in ordered:
        its_ids, its = _of_layers(part, layer_ids) if cellwise else (part.ids, part.valid)
        if part.start > reached:
            ids[reached - start : part.start - start] = np.iinfo(ids.dtype).max
            reached = part.start
        both = min(reached, part.stop) - part.start  # how many of its positions are there already
        here = slice(part.start - start, part.start - start + both)
        if both:
            versions.settle(part, _some(known[here]), _some(its[:both]))  # first: it looks at what was known before
            _join(ids[here], known[here], its_ids[:both], its[:both], layer_ids, part.start)
        if part.stop > reached:
            after = slice(reached - start, part.stop - start)
            ids[after], known[after] = its_ids[both:], its[both:]
            versions.extend(part, reached)
            reached = part.stop
    missing = tuple(layer for layer in first.routed_layers if layer not in layer_ids)
    return first._with(
        ids=ids,
        known=known,
        start=start,
        weights_versions=versions.found(),
        layer_ids=layer_ids,
        missing_layers=missing,
    )


def _of_layers(part: Routes, layer_ids: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """The ids and the mask ``[n, layers]`` of ``part``, with a place for each of ``layer_ids``."""
    if part.layer_ids == layer_ids:
        return part.ids, part.known
    places = [layer_ids.index(layer) for layer in part.layer_ids]
    shape = len(part), len(layer_ids), part.top_k
    ids, known = np.full(shape, np.iinfo(part.ids.dtype).max, part.ids.dtype), np.zeros(shape[:2], np.bool_)
    ids[:, places], known[:, places] = part.ids, part.known
    return ids, known


def _some(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return some(mask, mask if mask.ndim == 2 else None)


def _join(
    ids: NDArray[Any],  # [n, layers, top_k]
    known: NDArray[np.bool_],  # [n] or [n, layers]
    new_ids: NDArray[Any],
    new: NDArray[np.bool_],
    layer_ids: tuple[int, ...],
    start: int,
) -> None:
    """Put ``new_ids`` into ``ids`` and ``known``, which have rows of the same positions, from ``start`` on."""
    twice = known & new
    whole = bool(twice.all())  # then there is nothing to pick out, and nothing to copy
    same = np.array_equal(ids, new_ids) if whole else np.array_equal(ids[twice], new_ids[twice])
    if not same:
        differs = (ids != new_ids).any(axis=2) & twice.reshape(len(ids), -1)
        row, layer = np.argwhere(differs)[0].tolist()
        where = f"row {start + row} layer {layer_ids[layer]}"
        raise RowError(where, f"{ids[row, layer].tolist()}, as in an earlier part", new_ids[row, layer].tolist())
    fills = new & ~known
    if fills.any():
        ids[fills] = new_ids[fills]
        known |= fills


class _Versions:
    """The weights version of every position. An array only where parts overlap: otherwise the ranges follow."""

    def __init__(self, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._spans: list[WeightsSpan] = []
        self._array: NDArray[np.int64] | None = None

    def extend(self, part: Routes, reached: int) -> None:
        """The positions ``[reached, part.stop)``, which nobody had, are those of ``part``."""
        clipped = [(max(a, reached), b, v) for a, b, v in part.weights_versions if b > reached]
        if self._array is None:
            self._spans += clipped
            return
        for a, b, version in clipped:
            self._array[a - self._start : b - self._start] = version

    def settle(self, part: Routes, there: NDArray[np.bool_], new_there: NDArray[np.bool_]) -> None:
        """The first ``n`` positions of ``part`` had versions; the masks ``[n]`` say where rows were, and are now."""
        if not self._spans and not part.weights_versions and self._array is None:
            return
        if self._array is None:
            self._array = spans.by_position(self._spans, self._start, self._stop)
        held = self._array[part.start - self._start :][: len(there)]
        new = spans.by_position(part.weights_versions, part.start, part.stop)[: len(there)]
        differs = (held != UNKNOWN) & (new != UNKNOWN) & (held != new) & (there == new_there)
        if differs.any():
            row = int(differs.argmax())
            raise RowError(f"weights version of row {part.start + row}", int(held[row]), int(new[row]))
        takes = (new_there & ~there) | ((new_there == there) & (held == UNKNOWN))
        held[takes] = new[takes]

    def found(self) -> tuple[WeightsSpan, ...]:
        if self._array is None:
            return spans.joined(self._spans)
        return spans.from_positions(self._array, self._start)


__all__ = ["of_one_sequence", "union"]

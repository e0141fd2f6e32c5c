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
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cache_manager.errors import RowError
from kvroute.routes.cells import Cells, Mask, some
from kvroute.routes.layout import check_alike
from kvroute.routes.spans import UNKNOWN, WeightsSpan, by_position, checked_versions, clipped, from_positions
from kvroute.routes.token_hash import TokenHash, check_tokens, joined_hashes, token_hash

C = TypeVar("C", bound=Cells)

# Of one sequence ------------------------------------------------------------------------------------------------------


def of_one_sequence(parts: Sequence[Cells], tokens: ArrayLike | None = None) -> tuple[TokenHash, ...]:
    """The token hashes of the union of ``parts``; :class:`RowError` unless they are shown to be of one sequence.

    Only whether there are rows is looked at: :func:`union` compares those that two parts have.
    """
    check_alike([part.layout for part in parts], "part")
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


def _extent(part: Cells) -> tuple[int, int, int]:
    cells = int(np.count_nonzero(part.mask)) * (len(part.layout.layer_ids) if part.mask.ndim == 1 else 1)
    return part.end, cells, max((count for count, _ in part.token_hashes), default=0)


def _shown(part: Cells, found: Sequence[Cells], hashes: dict[int, bytes]) -> int:
    """Of how many first tokens ``part`` is shown to have the same as ``found``, which end no earlier."""
    shared = max((count for count, digest in part.token_hashes if hashes.get(count) == digest), default=0)
    if part.token_hashes and hashes:
        return shared
    mine = _layers_at(part, part.end - 1)
    return part.end if any(mine & _layers_at(other, part.end - 1) for other in found) else shared


def _layers_at(part: Cells, position: int) -> set[int]:
    """The layers that are known at a position."""
    there = part.known[position - part.start].tolist() if part.start <= position < part.stop else ()
    return {n for n, known in zip(part.layout.layer_ids, there, strict=False) if known}


def _adds(part: Cells, found: Sequence[Cells]) -> bool:
    """Whether ``part`` has a cell that none of ``found`` has."""
    new = part.known.copy()
    for other in found:
        a, b = max(part.start, other.start), min(part.stop, other.stop)
        for i, layer in enumerate(part.layout.layer_ids if a < b else ()):
            if layer in other.layout.layer_ids:
                its = other.known[a - other.start : b - other.start, other.layout.layer_ids.index(layer)]
                new[a - part.start : b - part.start, i] &= ~its
    return bool(new.any())


# The union ------------------------------------------------------------------------------------------------------------


def union(parts: Sequence[C]) -> C:
    """The union of ``parts`` that are of one sequence, in new memory, with the token hashes of the first.

    A cell that several parts know must be the same in all of them, computed by one weights version as far as the
    versions are known: :class:`RowError` names the position, and the layer, of the first that differs. Positions
    between the parts are missing. One pass over the bytes; only rows that two parts have are compared.
    """
    check_alike([part.layout for part in parts], "part")
    layout = parts[0].layout
    layout = layout.only(tuple(sorted({layer for part in parts for layer in part.layout.layer_ids})))
    ordered = sorted((p for p in parts if len(p.ids)), key=lambda p: p.start) or [min(parts, key=lambda p: p.start)]
    cellwise = any(p.mask.ndim == 2 or p.layout.layer_ids != layout.layer_ids for p in parts)
    start, stop = ordered[0].start, max(p.stop for p in ordered)
    ids = np.empty((stop - start, len(layout.layer_ids), layout.top_k), layout.dtype)
    mask = np.zeros(ids.shape[: 1 + cellwise], np.bool_)
    told: tuple[WeightsSpan, ...] = ()
    reached = 0  # what is before it has been filled
    for part in ordered:
        its_ids, its = _in_columns(part, layout.layer_ids) if cellwise else (part.ids, part.mask)
        first = part.start - start
        ids[reached:first] = np.iinfo(ids.dtype).max
        both = min(max(reached - first, 0), len(its))  # how many of its rows are there already
        here, rest = slice(first, first + both), slice(first + both, first + len(its))
        middle = part.start + both
        if both:
            versions = by_position(told, part.start, middle)
            its_versions = by_position(part.weights_versions, part.start, middle)
            _settle(versions, some(mask[here]), its_versions, some(its[:both]), part.start)
            settled = from_positions(versions, part.start)
            told = (*clipped(told, start, part.start), *settled, *clipped(told, middle, start + reached))
            _join(ids[here], mask[here], its_ids[:both], its[:both], layout.layer_ids, part.start)
        ids[rest], mask[rest] = its_ids[both:], its[both:]
        told += clipped(part.weights_versions, max(middle, start + reached), part.stop)
        reached = max(reached, rest.stop)
    told = checked_versions(told, start, stop)
    return parts[0]._with(layout=layout, ids=ids, mask=mask, start=start, weights_versions=told)


def _in_columns(part: Cells, layer_ids: tuple[int, ...]) -> tuple[NDArray[Any], Mask]:
    """The ids and the mask ``[n, layers]`` of ``part``, with a place for each of ``layer_ids``."""
    if part.layout.layer_ids == layer_ids:
        return part.ids, part.known
    places = [layer_ids.index(layer) for layer in part.layout.layer_ids]
    shape = len(part.ids), len(layer_ids), part.layout.top_k
    ids, known = np.full(shape, np.iinfo(part.ids.dtype).max, part.ids.dtype), np.zeros(shape[:2], np.bool_)
    ids[:, places], known[:, places] = part.ids, part.known
    return ids, known


def _join(
    ids: NDArray[Any],  # [n, layers, top_k]
    mask: Mask,
    new_ids: NDArray[Any],
    new: Mask,
    layer_ids: tuple[int, ...],
    start: int,
) -> None:
    """Put ``new_ids`` into ``ids`` and ``mask``, which have rows of the same positions, from ``start`` on."""
    twice = mask & new
    same = np.array_equal(ids, new_ids) if twice.all() else np.array_equal(ids[twice], new_ids[twice])
    if not same:
        differs = (ids != new_ids).any(axis=2) & twice.reshape(len(ids), -1)
        row, layer = np.argwhere(differs)[0].tolist()
        where = f"row {start + row} layer {layer_ids[layer]}"
        raise RowError(where, f"{ids[row, layer].tolist()}, as in an earlier part", new_ids[row, layer].tolist())
    fills = new & ~mask
    ids[fills] = new_ids[fills]
    mask |= fills


def _settle(
    held: NDArray[np.int64],  # [n]
    there: NDArray[np.bool_],
    new: NDArray[np.int64],
    new_there: NDArray[np.bool_],
    start: int,
) -> None:
    """Put ``new`` versions into ``held`` ones of the same positions; the masks say where rows were, and are now."""
    differs = (held != UNKNOWN) & (new != UNKNOWN) & (held != new) & (there == new_there)
    if differs.any():
        row = int(differs.argmax())
        raise RowError(f"weights version of row {start + row}", int(held[row]), int(new[row]))
    takes = (new_there & ~there) | ((new_there == there) & (held == UNKNOWN))
    held[takes] = new[takes]

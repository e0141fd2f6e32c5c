"""Joins several parts of one sequence's routes, by absolute position and layer.

A row at position ``p`` depends on the tokens ``[0, p]``. So two parts are of one sequence if their tokens are the same
up to the end of the part that ends first. Two things prove that:

* ``tokens``: every part's hashes match these tokens, and the caller vouches for its rows;
* both parts have the same hash of at least as many first tokens as the part that ends first has rows.

Equal rows prove nothing, because equal tokens after different ones are often routed alike. A part that adds no cell and
no row's weights version needs no proof, and does not bind the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cache_manager.errors import RowError
from kvroute.routes.cells import Cells, Mask, some
from kvroute.routes.layout import check_alike
from kvroute.routes.spans import UNKNOWN, by_position, from_positions
from kvroute.routes.token_hash import TokenHash, check_tokens, joined_hashes, token_hash

C = TypeVar("C", bound=Cells)

# Of one sequence ------------------------------------------------------------------------------------------------------


def of_one_sequence(parts: Sequence[Cells], tokens: ArrayLike | None = None) -> tuple[TokenHash, ...]:
    """The token hashes of the union of ``parts``; :class:`RowError` unless they are proved to be of one sequence.

    This looks only at which rows exist: :func:`union` compares rows that two parts have.
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
            shown = max((n for n, digest in part.token_hashes if hashes.get(n) == digest), default=0)
            if shown >= part.end or not _adds(part, found):
                # Its hashes of later tokens hold for the whole if the whole has none of its own there.
                goes_on = shown >= max((longest.end, *hashes))
                found.append(waiting.pop(i))
                hashes |= {count: digest for count, digest in part.token_hashes if goes_on or count <= shown}
                break
        else:
            end = waiting[0].end
            wanted = f"parts of one sequence: merge(..., tokens=...), or in both the hash of {end} first tokens or more"
            raise RowError("routes", wanted, f"rows up to position {end - 1} without a tie to the others")
    return tuple(sorted(hashes.items()))


def _extent(part: Cells) -> tuple[int, int, int]:
    cells = int(np.count_nonzero(part.mask)) * (len(part.layout.layer_ids) if part.mask.ndim == 1 else 1)
    return part.end, cells, max((count for count, _ in part.token_hashes), default=0)


def _adds(part: Cells, found: Sequence[Cells]) -> bool:
    """Whether ``part`` has a cell, or knows a row's weights version, that none of ``found`` has."""
    new = part.known.copy()
    told = part.some & (by_position(part.weights_versions, part.start, part.stop) != UNKNOWN)
    for other in found:
        a, b = max(part.start, other.start), min(part.stop, other.stop)
        if a < b and part.weights_versions:
            told[a - part.start : b - part.start] &= by_position(other.weights_versions, a, b) == UNKNOWN
        for i, layer in enumerate(part.layout.layer_ids if a < b else ()):
            if layer in other.layout.layer_ids:
                its = other.known[a - other.start : b - other.start, other.layout.layer_ids.index(layer)]
                new[a - part.start : b - part.start, i] &= ~its
    return bool(new.any() or told.any())


# The union ------------------------------------------------------------------------------------------------------------


def union(parts: Sequence[C], **fields: Any) -> C:
    """The union of ``parts`` of one sequence, in new memory, with the ``fields`` given, else the first part's hashes.

    A cell known in several parts must be the same in all of them, with equal weights versions if they are known:
    :class:`RowError` names the position and layer of the first that differs. Positions between the parts are missing.
    One pass over the bytes; only rows that two parts have are compared.
    """
    check_alike([part.layout for part in parts], "part")
    layout = parts[0].layout
    if len(given := {part.layout.layer_ids for part in parts}) > 1:
        layout = layout.only(tuple(sorted({layer for layers in given for layer in layers})))
    ordered = sorted((p for p in parts if len(p.ids)), key=lambda p: p.start) or [min(parts, key=lambda p: p.start)]
    cellwise = any(p.mask.ndim == 2 or p.layout.layer_ids != layout.layer_ids for p in parts)
    start, stop = ordered[0].start, max(p.stop for p in ordered)
    ids = np.empty((stop - start, len(layout.layer_ids), layout.top_k), layout.dtype)
    mask = np.zeros(ids.shape[: 1 + cellwise], np.bool_)
    versions = np.full(stop - start, UNKNOWN) if any(p.weights_versions for p in ordered) else None
    reached = 0  # positions before it are filled
    for part in ordered:
        its_ids, its = _in_columns(part, layout.layer_ids) if cellwise else (part.ids, part.mask)
        first, last = part.start - start, part.stop - start
        if reached < first:
            ids[reached:first] = np.iinfo(ids.dtype).max
        both = min(max(reached - first, 0), len(its))  # how many of its rows exist already
        here, rest = slice(first, first + both), slice(first + both, last)
        if versions is not None:
            told = by_position(part.weights_versions, part.start, part.stop)
            _settle(versions[here], some(mask[here]), told[:both], some(its[:both]), part.start)
            versions[rest] = told[both:]
        if both:
            _join(ids[here], mask[here], its_ids[:both], its[:both], layout.layer_ids, part.start)
        ids[rest], mask[rest] = its_ids[both:], its[both:]
        reached = max(reached, last)
    known = () if versions is None else from_positions(versions, start)
    return parts[0]._with(layout=layout, ids=ids, mask=mask, start=start, weights_versions=known, **fields)


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
    """Put ``new_ids`` into ``ids`` and ``mask`` of the same positions, from ``start`` on."""
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

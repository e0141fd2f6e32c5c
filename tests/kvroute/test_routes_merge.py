"""Parts of one sequence, in any order, any number of times: merging returns its rows, or an error names where they
differ."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_routes import Cells, Shape, cells_of, cellwise, masks, shapes, without_layers

from cache_manager.errors import RowError
from kvroute.routes import Routes
from kvroute.routes.token_hash import token_hashes

SHAPE = Shape()
LENGTH = 24
TOKENS = list(range(LENGTH + 1))


@st.composite
def parts_of_one(draw: st.DrawFn, length: int = 4) -> tuple[Shape, list[Routes]]:
    """Parts of one sequence with any cells, that agree where they overlap; versions change at position 5."""
    shape = draw(shapes())
    parts: list[Routes] = []
    for part in draw(st.lists(cellwise(shape), min_size=1, max_size=length)):
        spans = ((0, 5, 1), (5, LENGTH, 2)) if draw(st.booleans()) else ()
        clipped = [(max(a, part.start), min(b, part.stop), v) for a, b, v in spans]
        versions = [span for span in clipped if span[0] < span[1]]
        parts.append(Routes.checked(part.layout, part.ids.copy(), part.mask, part.start, versions))
    return shape, parts


@given(parts_of_one(), st.randoms(use_true_random=False))
def test_merging_is_the_union_whatever_the_order(given_parts: tuple[Shape, list[Routes]], shuffler: Any) -> None:
    """Goal: the result has every row that any part has, once, with one version. Method: a dictionary of cells; other
    orders; one by one, as a trainer adds deltas as they come; every part once more."""
    shape, parts = given_parts
    merged = parts[0].merge(*parts[1:], tokens=TOKENS)
    expected: Cells = {}
    for part in parts:
        expected |= cells_of(shape, part)
    assert cells_of(shape, merged) == expected
    at = {(merged.start + i, merged.layer_ids[j]): merged.ids[i, j].tolist() for i, j in np.argwhere(merged.known)}
    assert at == expected
    assert merged.routed_layers == shape.layer_ids
    assert merged.missing_layers == tuple(n for n in shape.layer_ids if all(n in p.missing_layers for p in parts))
    there = [p for p in parts if len(p)]
    if there:
        assert (merged.start, merged.stop) == (min(p.start for p in there), max(p.stop for p in there))
    for position in range(merged.start, merged.stop):  # a version is known if any part has it
        known = {v for p in there for a, b, v in p.weights_versions if a <= position < b}
        rows = [p for p in there if p.start <= position < p.stop and p.some[position - p.start]]
        sure = {v for p in rows for a, b, v in p.weights_versions if a <= position < b}
        found = {v for a, b, v in merged.weights_versions if a <= position < b}
        assert found == (sure if rows else known)
    again = list(parts)
    shuffler.shuffle(again)
    folded = again[0].bind(TOKENS)
    for part in again[1:]:
        folded = folded.merge(part, tokens=TOKENS)
    assert again[0].merge(*again[1:], tokens=TOKENS) == folded == merged == merged.merge(*parts)


@given(parts_of_one(1), st.data())
def test_cutting_and_joining_gives_the_whole_back(given_part: tuple[Shape, list[Routes]], data: st.DataObject) -> None:
    (made,) = given_part[1]
    cuts = sorted(data.draw(st.lists(st.integers(made.start, made.stop), max_size=3)))
    parts = [made.slice(a, b) for a, b in pairwise([made.start, *cuts, made.stop])]
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.merge(part, tokens=range(part.stop))
    assert joined._with(token_hashes=()) == made


@given(masks(2), st.integers(0, 11), st.sampled_from([1, -1]))
def test_a_row_that_differs_is_named_with_position_and_layer(mask: Any, at: int, order: int) -> None:
    """Goal: a contradiction between two parts is always reported. Method: change one known cell of one part."""
    one = without_layers(SHAPE, mask, ())
    if not len(known := np.argwhere(mask)):
        return
    row, layer = known[at % len(known)]
    ids = one.ids.copy()
    ids[row, layer] = ids[row, layer][::-1]
    other = Routes(ids, mask, SHAPE.layer_ids, SHAPE.num_experts, SHAPE.num_layers)
    parts = [one, other][::order]
    where = f"^row {row} layer {SHAPE.layer_ids[layer]}: wanted .*, as in an earlier part"
    for first in (parts[0], parts[0].slice(0, int(row) + 1)):
        with pytest.raises(RowError, match=where):
            first.merge(parts[1], tokens=range(len(mask)))
    assert one.slice(0, int(row)) == other.slice(0, int(row))


def test_a_row_of_other_weights_is_a_conflict_even_with_equal_ids() -> None:
    """Goal: a row is of one weights version, in all its layers. Method: equal ids of two versions; two stages' layers
    of one position; where only one part has the row, its version counts."""
    old = SHAPE.routes(0, [True] * 4, versions=((0, 4, 1),))
    new = SHAPE.routes(2, [True] * 4, versions=((2, 6, 2),))
    with pytest.raises(RowError, match="weights version of row 2: wanted 1, got 2"):
        old.merge(new, tokens=TOKENS)
    holed = SHAPE.routes(0, [True, True, False, False], versions=((0, 4, 1),))
    assert holed.merge(new, tokens=TOKENS).weights_versions == ((0, 2, 1), (2, 6, 2))
    ids, layout = SHAPE.ids(range(3)), (SHAPE.num_experts, SHAPE.num_layers)
    first, second = (
        Routes(ids[:, [i]], np.ones(3, bool), (layer,), *layout, 0, ((0, 3, i),), missing_layers=(5 - layer,))
        for i, layer in enumerate((1, 4))
    )
    with pytest.raises(RowError, match="weights version of row 0: wanted 0, got 1"):
        first.merge(second, tokens=range(4))


@pytest.mark.parametrize("same", [True, False])
def test_parts_are_tied_by_the_longest_head_that_is_equal(same: bool) -> None:
    """Goal: rows come together where their tokens are known to be the same, and nowhere else. Method: two parts with
    hashes of two heads; the longer ones are equal, or only the shorter ones."""
    whole = SHAPE.routes(0, [False, True] * 4)._with(token_hashes=token_hashes(TOKENS, (2, 5)))
    tokens = TOKENS if same else [*TOKENS[:2], *TOKENS]
    head = SHAPE.routes(0, [True] * 4)._with(token_hashes=token_hashes(tokens, (2, 5)))
    if same:
        assert whole.merge(head).known[:4].all()
    else:
        with pytest.raises(RowError, match="hash of the first 5 tokens"):
            whole.merge(head)


def test_parts_of_other_models_are_refused() -> None:
    one = SHAPE.whole(3)
    for other in (Shape(layer_ids=(0, 4)), Shape(num_experts=301), Shape(num_layers=7), Shape(top_k=2)):
        wanted = r"part 1 (routed_layers|num_experts|num_layers|top_k): wanted .* as part 0 has"
        with pytest.raises(RowError, match=wanted):
            one.merge(other.whole(3))

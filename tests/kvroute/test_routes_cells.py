"""Rows that lack a layer, and layers of which no row is known: what is there comes out, what is not is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_routes import Cells, Shape, cells_of, cellwise, masks, shapes, without_layers

from cache_manager.errors import RowError
from kvroute.routes import Layout, Routes
from kvroute.routing import routing_spec

SHAPE = Shape()


def told(routes: Routes) -> Cells:
    """What ``routes`` say, cell by cell, in their own ids."""
    known = np.argwhere(routes.known).tolist()
    return {(routes.start + i, routes.layer_ids[j]): routes.ids[i, j].tolist() for i, j in known}


@st.composite
def of_shapes(draw: st.DrawFn) -> tuple[Shape, Routes]:
    shape = draw(shapes())
    return shape, draw(cellwise(shape))


@given(of_shapes())
def test_what_is_known_is_told_and_nothing_else(made: tuple[Shape, Routes]) -> None:
    """Goal: the masks are one thing. Method: walk the cells, beside valid, complete, missing and the gaps."""
    shape, routes = made
    assert told(routes) == cells_of(shape, routes)
    assert (routes.ids[~routes.known] == np.iinfo(routes.ids.dtype).max).all()
    assert routes.routed_layers == shape.layer_ids
    assert routes.valid.tolist() == [all(row) for row in routes.known.tolist()]
    known = told(routes)
    whole = [all((p, layer) in known for layer in shape.layer_ids) for p in range(routes.start, routes.stop)]
    assert routes.complete == (all(whole) and not routes.missing_layers)
    assert [p for a, b in routes.missing for p in range(a, b)] == [
        p for p, there in enumerate(whole, routes.start) if not there
    ]
    assert routes.end == max((p + 1 for p, _ in known), default=0)
    for start in range(routes.stop + 2):
        lacks = (p for p in range(start, routes.stop + 2) if not all((p, n) in known for n in shape.layer_ids))
        first = next(lacks, None)
        assert routes.first_missing(routes.stop + 2, start) == first
        assert routes.first_missing(start, start) is None


@given(of_shapes(), st.data())
def test_a_slice_knows_the_cells_of_its_positions(made: tuple[Shape, Routes], data: st.DataObject) -> None:
    _, routes = made
    start = data.draw(st.integers(routes.start, routes.stop))
    stop = data.draw(st.integers(start, routes.stop))
    part = routes.slice(start, stop)
    assert told(part) == {at: ids for at, ids in told(routes).items() if start <= at[0] < stop}
    assert part.missing_layers == routes.missing_layers
    fields = part.layer_ids, part.num_experts, part.num_layers, start
    assert part == Routes(part.ids, part.known, *fields, missing_layers=part.missing_layers)


@given(of_shapes(), st.data())
def test_without_takes_away_what_was_named_and_no_more(made: tuple[Shape, Routes], data: st.DataObject) -> None:
    shape, routes = made
    layers = data.draw(st.sets(st.sampled_from(shape.layer_ids)))
    at = np.array(data.draw(st.lists(st.booleans(), min_size=len(routes), max_size=len(routes))), bool)
    left = {cell: ids for cell, ids in told(routes).items() if cell[1] not in layers or not at[cell[0] - routes.start]}
    assert told(routes.without(layers, at)) == left
    assert told(routes.without(layers)) == {cell: ids for cell, ids in told(routes).items() if cell[1] not in layers}


def test_a_mask_by_cell_that_says_what_rows_say_is_the_same_thing() -> None:
    """Goal: one value, one representation. Method: both masks of whole and missing rows, compared."""
    rows = np.array([True, False, True])
    assert SHAPE.routes(4, np.repeat(rows[:, None], 2, axis=1)) == SHAPE.routes(4, rows)
    assert SHAPE.routes(4, np.repeat(rows[:, None], 2, axis=1)).mask.ndim == 1


def test_equality_sees_cells_and_missing_layers() -> None:
    base = without_layers(SHAPE, np.array([[True, True], [True, False]]), ())
    assert base == without_layers(SHAPE, np.array([[True, True], [True, False]]), ())
    assert base != without_layers(SHAPE, np.array([[True, True], [False, False]]), ())
    only = np.array([[True, False]] * 2)
    fields = SHAPE.ids([0, 1])[:, :1], np.ones(2, bool), (1,), SHAPE.num_experts, SHAPE.num_layers
    assert without_layers(SHAPE, only, (4,)) == Routes(*fields, missing_layers=(4,)) != Routes(*fields)


def test_only_known_cells_are_checked_and_each_of_them_is() -> None:
    """Goal: unknown memory refuses nothing, a known id that no expert has is refused. Method: both in one row."""
    ids = SHAPE.ids(range(3))
    ids[1, 1] = 7_000_000
    known = np.array([[True, True], [True, False], [True, True]])
    fields = SHAPE.layer_ids, SHAPE.num_experts, SHAPE.num_layers
    Routes(ids, known, *fields).validate()
    ids[1, 0, 2] = ids[1, 0, 1]
    with pytest.raises(RowError, match="row 1 layer 1: wanted distinct ids"):
        Routes(ids, known, *fields)
    with pytest.raises(RowError, match="row 1 layer 1: wanted distinct ids"):
        Routes.checked(Layout(*fields, SHAPE.top_k), ids, known).validate()


def test_rows_by_cell_from_a_spec() -> None:
    """Goal: from_rows takes what is known by cell. Method: a bad row, a bad unknown cell, layers of other stages."""
    spec = routing_spec(SHAPE.num_experts, SHAPE.top_k, SHAPE.layer_ids, SHAPE.num_layers, block_tokens=8)
    ids = SHAPE.ids(range(4))
    ids[1, 0], ids[2, 1] = 0, 0
    known = np.array([[True, True], [True, True], [True, False], [False, True]])
    rows: Any = SimpleNamespace(values=ids, valid=known)
    made = Routes.from_rows(spec, rows, 10, bad="missing", missing_layers=(5,))
    assert made.known.tolist() == [[True, True], [False, False], [True, False], [False, True]]
    assert (made.missing_layers, made.routed_layers, made.complete) == ((5,), (1, 4, 5), False)
    with pytest.raises(RowError, match="row 11 layer 1: wanted distinct ids"):
        Routes.from_rows(spec, rows, 10)


@pytest.mark.parametrize("layers", [(1,), (6,), (-1,), (0, 0), ("a",)])
def test_a_missing_layer_is_one_that_has_no_column(layers: Any) -> None:
    with pytest.raises(RowError, match=r"routes.missing_layers: wanted distinct layers in \[0, 6\)"):
        Routes(SHAPE.ids([0]), np.ones(1, bool), (1, 4), SHAPE.num_experts, 6, missing_layers=layers)


def test_what_cannot_be_taken_away_is_refused() -> None:
    with pytest.raises(RowError, match=r"layers: wanted some of the routed layers \(1, 4\), got 2"):
        SHAPE.whole(3).without([1, 2])
    for at in ([True, False], [1, 0, 1]):
        with pytest.raises(RowError, match=r"at: wanted bool of shape \(3,\)"):
            SHAPE.whole(3).without([1], at)


def test_validate_asks_for_every_routed_layer() -> None:
    """Goal: a layer that is lost is said before it is trained on. Method: rows and loss masks around it."""
    lacks = SHAPE.whole(5).without([4], np.arange(5) == 2)
    lacks.validate(rows=2)
    with pytest.raises(RowError, match=r"row 2 layer 4: wanted a row for each of the positions \[0, 5\), got one with"):
        lacks.validate(rows=5)
    lacks.validate(loss_mask=[0, 1, 1, 0, 1, 1])
    with pytest.raises(RowError, match="row 2 layer 4: wanted a row, as position 3 has a loss"):
        lacks.validate(loss_mask=[0, 0, 0, 1])
    stage = without_layers(SHAPE, np.ones((5, 2), bool), (4,))
    with pytest.raises(RowError, match="row 0 layer 4: wanted a row for each"):
        stage.validate(rows=1)
    with pytest.raises(RowError, match="row 1 layer 4: wanted a row, as position 2 has a loss"):
        stage.validate(loss_mask=[0, 0, 1])


def test_the_first_tokens_loss_needs_the_first_row() -> None:
    """Goal: no row is needed but the one before a loss, and that one always. Method: a hole at 0, losses around it."""
    holed = SHAPE.routes(0, [False, True, True])
    holed.validate(loss_mask=[1, 0, 1, 1])  # nothing was read before the first token
    with pytest.raises(RowError, match="row 0: wanted a row, as position 1 has a loss"):
        holed.validate(loss_mask=[0, 1, 0])


def test_repr_tells_what_is_missing() -> None:
    lacks = SHAPE.routes(3, [True] * 4 + [False]).without([4], np.arange(5) < 2)
    where = "Routes(positions 3..7, 2 of 6 layers, top 3 of 300 experts, "
    assert repr(lacks) == where + "1 missing, 1 layer missing in 2 rows)"
    stage = without_layers(SHAPE, np.ones((2, 2), bool), (4,))
    assert repr(stage) == "Routes(positions 0..1, 1 of 6 layers, top 3 of 300 experts, 1 layer missing in all rows)"


@given(shapes(), st.data())
def test_parts_are_merged_by_layer(shape: Shape, data: st.DataObject) -> None:
    """Goal: a layer that one part lacks comes from another. Method: parts of one sequence with any cells, in any order,
    beside a dictionary of cells."""
    parts = data.draw(st.lists(cellwise(shape), min_size=1, max_size=4))
    tokens = range(max(part.stop for part in parts))
    merged = parts[0].merge(*parts[1:], tokens=tokens)
    expected: Cells = {}
    for part in parts:
        expected |= told(part)
    assert told(merged) == expected
    assert merged.routed_layers == shape.layer_ids
    assert merged.missing_layers == tuple(n for n in shape.layer_ids if all(n in p.missing_layers for p in parts))
    assert merged.merge(*reversed(parts), tokens=tokens) == merged


@given(masks(2), st.integers(0, 11))
def test_a_cell_that_differs_is_named(mask: Any, at: int) -> None:
    """Goal: layers of two parts never contradict each other in silence. Method: change one known cell of one part."""
    one = without_layers(SHAPE, mask, ())
    known = np.argwhere(mask)
    if not len(known):
        return
    row, layer = known[at % len(known)]
    ids = one.ids.copy()
    ids[row, layer] = ids[row, layer][::-1]
    other = Routes(ids, mask, SHAPE.layer_ids, SHAPE.num_experts, SHAPE.num_layers)
    with pytest.raises(RowError, match=f"^row {row} layer {SHAPE.layer_ids[layer]}: wanted .*, as in an earlier part"):
        one.merge(other, tokens=range(len(mask)))


def test_layers_of_two_versions_are_no_row() -> None:
    """Goal: a row is of one weights version. Method: two stages' layers of one position, made by other weights."""
    ids, layout = SHAPE.ids(range(3)), (SHAPE.num_experts, SHAPE.num_layers)
    first, second = (
        Routes(ids[:, [i]], np.ones(3, bool), (layer,), *layout, 0, ((0, 3, i),), missing_layers=(5 - layer,))
        for i, layer in enumerate((1, 4))
    )
    with pytest.raises(RowError, match="weights version of row 0: wanted 0, got 1"):
        first.merge(second, tokens=range(4))

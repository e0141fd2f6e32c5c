"""Routes: known rows are returned, missing ones are marked, and stale or unsound ones are refused."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_routes import Cells, Shape, cells_of, of_shapes

from cache_manager.errors import RowError, SpecError
from cache_manager.publish import Rows
from kvroute.routes import Layout, Routes
from kvroute.routes.cells import known_stop, some_known
from kvroute.routes.routes import checked_routes
from kvroute.routing import routing_spec, weights_version_spec

SHAPE = Shape()
FIELDS: Any = (SHAPE.layer_ids, SHAPE.num_experts, SHAPE.num_layers)
SPEC = routing_spec(SHAPE.num_experts, SHAPE.top_k, SHAPE.layer_ids, SHAPE.num_layers, block_tokens=16)


def told(routes: Routes) -> Cells:
    """The content of ``routes``, cell by cell, in their own ids."""
    known = np.argwhere(routes.known).tolist()
    return {(routes.start + i, routes.layer_ids[j]): routes.ids[i, j].tolist() for i, j in known}


def versions_of(routes: Routes) -> dict[int, int]:
    return {p: version for a, b, version in routes.weights_versions for p in range(a, b)}


@given(of_shapes())
def test_only_known_cells_have_ids(made: tuple[Shape, Routes]) -> None:
    """Goal: the masks are one thing. Method: walk the cells, beside valid, complete, missing and the gaps."""
    shape, routes = made
    known = told(routes)
    assert known == cells_of(shape, routes)
    assert (routes.ids[~routes.known] == np.iinfo(routes.ids.dtype).max).all()
    assert routes.routed_layers == shape.layer_ids
    assert routes.valid.tolist() == [all(row) for row in routes.known.tolist()]
    assert routes.mask.ndim == 1 + any(any(row) and not all(row) for row in routes.known.tolist())
    whole = [all((p, layer) in known for layer in shape.layer_ids) for p in range(routes.start, routes.stop)]
    assert routes.complete == (all(whole) and not routes.missing_layers)
    lost = [p for p, there in enumerate(whole, routes.start) if not there]
    assert [p for a, b in routes.missing for p in range(a, b)] == lost
    assert all(a < b < c for (a, b), (c, _) in pairwise(routes.missing))
    assert known_stop(routes) == max((p + 1 for p, _ in known), default=0)
    for start in range(routes.stop + 2):
        for stop in (start, (start + routes.stop) // 2, routes.stop + 2):
            lacks = [p for p in range(start, stop) if not all((p, n) in known for n in shape.layer_ids)]
            gap = routes.first_gap(stop, start)
            assert (gap and gap[0]) == (lacks[0] if lacks else None)
            lost = [n for n in shape.layer_ids if gap and (gap[0], n) not in known]
            assert not gap or gap[1] == (lost[0] if len(lost) < len(shape.layer_ids) else None)


@given(of_shapes(), st.data())
def test_a_slice_knows_the_cells_of_its_positions(made: tuple[Shape, Routes], data: st.DataObject) -> None:
    routes = made[1].bind(range(made[1].stop + 3))
    start = data.draw(st.integers(routes.start, routes.stop))
    stop = data.draw(st.integers(start, routes.stop))
    part = routes.slice(start, stop)
    assert told(part) == {at: ids for at, ids in told(routes).items() if start <= at[0] < stop}
    assert versions_of(part) == {p: v for p, v in versions_of(routes).items() if start <= p < stop}
    assert part.missing_layers == routes.missing_layers
    assert part.token_hashes == (routes.token_hashes if some_known(part.mask).any() else ())
    # What was checked once is not checked again, so it must still satisfy the check.
    fields = part.layer_ids, part.num_experts, part.num_layers, start, part.weights_versions, part.token_hashes
    assert part == Routes(part.ids, part.known, *fields, missing_layers=part.missing_layers)
    for wrong in ((routes.start - 1, stop), (start, routes.stop + 1), (stop + 1, stop)):
        with pytest.raises(RowError, match="positions inside"):
            routes.slice(*wrong)


def test_dense_layers_alone_lack_nothing_where_there_is_a_row() -> None:
    """Goal: a gap of a stage of dense layers is a missing row. Method: a mask by cell, layers without a router."""
    routes = SHAPE.routes(0, np.array([[True, False], [False, False], [True, True]]))
    assert routes.first_gap(3, layers=(0, 2)) == (1, None)
    assert routes.first_gap(1, layers=(0, 2)) is None


@given(of_shapes(), st.data())
def test_without_takes_away_what_was_named_and_no_more(made: tuple[Shape, Routes], data: st.DataObject) -> None:
    shape, routes = made
    layers = data.draw(st.sets(st.sampled_from(shape.layer_ids)))
    at = np.array(data.draw(st.lists(st.booleans(), min_size=len(routes), max_size=len(routes))), bool)
    left = {cell: ids for cell, ids in told(routes).items() if cell[1] not in layers or not at[cell[0] - routes.start]}
    assert told(routes.without(layers, at)) == left


@pytest.mark.parametrize(
    ("layers", "at", "message"),
    [
        ([1], [True], r"at: wanted bool of shape \(2,\), got bool of shape \(1,\)"),
        ([1], [[True], [False]], r"at: wanted bool of shape \(2,\), got bool of shape \(2, 1\)"),
        ([1], [1, 0], r"at: wanted bool of shape \(2,\), got int64 of shape \(2,\)"),
        ([1, 2], [True, False], r"layers: wanted some of the routed layers \(1, 4\), got \{2\}"),
    ],
)
def test_what_without_cannot_take_away_is_refused_by_name(layers: list[int], at: Any, message: str) -> None:
    """Goal: neither other rows nor a layer without rows are meant by accident. Method: each wrong argument alone."""
    with pytest.raises(RowError, match=message):
        SHAPE.whole(2).without(layers, at)


def test_equality_sees_every_part() -> None:
    """Goal: one value, one representation. Method: each part changed; masks by row and by cell of the same rows."""
    rows = np.array([True, False, True])
    base = SHAPE.routes(3, rows, versions=((3, 5, 1),))
    assert base == SHAPE.routes(3, rows, versions=((3, 4, 1), (4, 5, 1)))
    assert base == SHAPE.routes(3, np.repeat(rows[:, None], 2, axis=1), versions=((3, 5, 1),))
    others = [
        SHAPE.routes(4, rows, versions=((4, 6, 1),)),
        SHAPE.routes(3, [True] * 3, versions=((3, 5, 1),)),
        SHAPE.routes(3, rows, versions=((3, 5, 2),)),
        SHAPE.routes(3, rows[:2], versions=((3, 5, 1),)),
        SHAPE.routes(3, rows[:, None] & np.array([True, False]), versions=((3, 5, 1),)),
        Routes(base.ids, base.valid, (2, 4), *FIELDS[1:], 3, base.weights_versions),
        Routes(base.ids, base.valid, SHAPE.layer_ids, 301, 6, 3, base.weights_versions),
        Routes(base.ids, base.valid, SHAPE.layer_ids, 300, 7, 3, base.weights_versions),
        Routes(base.ids, base.valid, *FIELDS, 3, base.weights_versions, missing_layers=(2,)),
        "routes",
    ]
    assert all(base != other for other in others)
    with pytest.raises(TypeError, match="unhashable"):
        hash(base)


def test_routes_own_what_they_hold() -> None:
    """Goal: frozen through and through. Method: change the sources afterwards; try to write."""
    ids, valid = SHAPE.ids(range(3)), np.array([True, True, False])
    made = Routes(ids, valid, *FIELDS)
    ids[:] = 0
    valid[:] = False
    assert made == SHAPE.routes(0, [True, True, False])
    pickled = [pickle.dumps(made, protocol) for protocol in range(2, 6)]
    copies = [copy.deepcopy(made), *(pickle.loads(each) for each in pickled)]  # noqa: S301 - made here
    assert all(each == made for each in copies)
    for array in (made.ids, made.slice(0, 2).valid, *(array for each in copies for array in (each.ids, each.mask))):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(FrozenInstanceError):
        made.start = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.zeros((2, 2), int)}, r"routes.ids: wanted integers \[n, layers, top_k\]"),
        ({"ids": np.zeros((2, 2, 3))}, "routes.ids.*float64"),
        ({"ids": np.zeros((2, 1, 3), int)}, "2 layers as in layer_ids, 3.*got int64 of shape"),
        ({"valid": np.ones(3, bool)}, "routes.valid"),
        ({"valid": np.ones((2, 2, 3), bool)}, r"routes.valid: .*got bool of shape \(2, 2, 3\)"),
        ({"valid": np.ones(2, int)}, "routes.valid: wanted bool"),
        ({"start": -1}, "routes.start"),
        ({"start": 1.5}, "routes.start"),
        *[({"start": start}, "routes.start: wanted the first of 2 positions before") for start in (2**62 - 1, 2**63)],
        ({"weights_versions": ((0, 3, 1),)}, r"ranges inside \[0, 2\), got \[0, 3\)"),
        ({"weights_versions": ((0, 2, 1), (1, 2, 2))}, r"increasing ranges inside \[2, 2\), got \[1, 2\)"),
        ({"weights_versions": ((1, 1, 1),)}, "ranges inside"),
        ({"weights_versions": ((0, 1),)}, r"\(start, stop, version\)"),
        *[({"weights_versions": ((0, 1, version),)}, "weights_versions") for version in ("a", -1, 2**63)],
        ({"layer_ids": (4, 1)}, "increasing"),
        *[
            ({"missing_layers": layers}, r"routes.missing_layers: wanted distinct ones of")
            for layers in ((1,), (6,), (-1,), (0, 0), ("a",))
        ],
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"ids": SHAPE.ids(range(2)), "valid": np.ones(2, bool)}
    good |= dict(zip(("layer_ids", "num_experts", "num_layers"), FIELDS, strict=True))
    Routes(**good)
    with pytest.raises(SpecError if "layer_ids" in change else RowError, match=message):
        Routes(**{**good, **change})


def test_a_layout_of_very_many_layers_is_looked_at_in_their_number() -> None:
    """Goal: few bytes of JSON cost little time and memory; they once cost seconds and megabytes of text. Method: half
    of 2^20 layers, which the square of their number would hold up for hours; and a layer too many."""
    n = 1 << 19
    layout = Layout(tuple(range(n)), 4, 2 * n, 1, tuple(range(n, 2 * n)))
    assert len(layout.routed_layers) == 2 * n
    with pytest.raises(RowError, match=r"routes\.missing_layers: wanted distinct ones of") as error:
        Layout(layout.layer_ids, 4, 2 * n, 1, tuple(range(n - 1, 2 * n)))
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("value", [300, -1, 70_000, None])
def test_only_known_cells_are_checked_and_each_of_them_is(value: int | None) -> None:
    """Goal: nothing wraps around silently. Method: an id beyond the experts, below 0, beyond the dtype, or twice in a
    layer, named with position and layer if the cell is known; the memory of missing cells may hold anything."""
    ids, known = SHAPE.ids(range(5)), np.ones((5, 2), bool)
    ids[1, 0], known[1, 0] = 7_000_000, False
    ids[3, 1, 0] = ids[3, 1, 1] if value is None else value
    wanted = "wanted distinct ids" if value is None else rf"wanted ids in \[0, 300\), got {value}"
    with pytest.raises(RowError, match=f"row 23 layer 4: {wanted}"):
        Routes(ids, known, *FIELDS, start=20)
    if value is None:
        with pytest.raises(RowError, match="row 3 layer 4: wanted distinct ids"):
            checked_routes(Layout(*FIELDS, SHAPE.top_k), ids.astype(np.uint16), known.copy()).validate()
    known[3, 1] = False
    assert Routes(ids, known, *FIELDS, start=20).known.tolist() == known.tolist()


def test_from_rows_takes_the_layout_from_the_spec() -> None:
    rows = Rows(SPEC.rows(SHAPE.ids(range(7, 11)), tokens=4), valid := np.array([True, True, False, True]))
    assert Routes.from_rows(SPEC, rows, start=7) == SHAPE.routes(7, valid)
    assert Routes.from_rows(SPEC, rows, 7, weights_version=3).weights_versions == ((7, 11, 3),)
    assert Routes.from_rows(SPEC, rows, 7, missing_layers=(5,)).routed_layers == (1, 4, 5)
    told = Rows(np.arange(4), np.ones(4, int))  # which would be indices
    with pytest.raises(RowError, match=r"weights_version valid: wanted bool \[4\], got int64"):
        Routes.from_rows(SPEC, rows, 7, weights_version=told)
    nothing = Rows(np.empty((0, 2, 3), np.uint16), np.empty(0, bool))
    empty = Routes.from_rows(SPEC, nothing, 7, weights_version=3)
    assert (len(empty), empty.complete, empty.missing, empty.weights_versions) == (0, True, (), ())


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12), st.integers(0, 9))
def test_versions_by_token_become_ranges(tokens: list[tuple[int, bool]], start: int) -> None:
    rows = Rows(SHAPE.ids(range(start, start + len(tokens))), np.ones(len(tokens), bool))
    versions = Rows(np.array([v for v, _ in tokens], np.uint32), np.array([k for _, k in tokens], bool))
    made = Routes.from_rows(SPEC, rows, start, weights_version=versions)
    assert versions_of(made) == {p: v for p, (v, known) in enumerate(tokens, start) if known}


def test_checked_rows_are_taken_at_their_word_and_copied() -> None:
    """Goal: rows that were checked when written cost one copy. Method: one that could not pass, and mutation."""
    ids = SHAPE.ids(range(3)).astype(np.uint16)
    ids[1, 0, 1] = ids[1, 0, 0]
    rows = Rows(ids, np.ones(3, bool))
    with pytest.raises(RowError, match="row 11 layer 1: wanted distinct ids"):
        Routes.from_rows(SPEC, rows, 10)
    made = Routes.from_rows(SPEC, rows, checked=True)
    assert np.array_equal(made.ids, ids)
    ids[:] = 299
    assert (made.ids != 299).all()
    with pytest.raises(RowError, match="row 1 layer 1: wanted distinct ids"):
        made.validate()


@pytest.mark.parametrize(
    ("spec", "rows", "more", "message"),
    [
        (SPEC, Rows(np.zeros((2, 2, 2), np.uint16), np.ones(2, bool)), {}, "routing rows"),
        (SPEC, Rows(np.zeros((2, 2, 3), np.uint16), np.ones(4, bool)), {"checked": True}, r"routes\.valid"),
        (SPEC, Rows(SHAPE.ids(range(2)), np.ones(2, bool)), {"weights_version": -1}, "weights_version: wanted"),
        (weights_version_spec(16), Rows(np.zeros(2, np.uint32), np.ones(2, bool)), {}, "a routing spec"),
        (
            SPEC,
            Rows(SHAPE.ids(range(2)), np.ones(2, bool)),
            {"weights_version": Rows(np.zeros(3, np.uint32), np.ones(3, bool))},
            "weights_version rows",
        ),
    ],
)
def test_from_rows_refuses_rows_of_another_spec(spec: Any, rows: Rows, more: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        Routes.from_rows(spec, rows, **more)


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_routes_are_bound_to_their_tokens() -> None:
    """Goal: rows of another sequence are noticed. Method: change, cut and extend the tokens of bound routes."""
    tokens = list(range(100, 111))
    bound = SHAPE.whole(10).bind(tokens)
    bound.validate(tokens)
    bound.validate([*tokens, 7])  # tokens generated since
    with pytest.raises(RowError, match="hash of the first 11 tokens"):
        bound.validate([*tokens[:4], 0, *tokens[5:]])
    with pytest.raises(RowError, match="tokens: wanted 11 or more"):
        bound.validate(tokens[:10])
    with pytest.raises(RowError, match="a hash of the tokens"):
        SHAPE.whole(10).validate(tokens)
    with pytest.raises(RowError, match="tokens: wanted 10 or more"):
        SHAPE.whole(10).bind(tokens[:9])
    assert bound.bind(tokens) == bound
    with pytest.raises(RowError, match="hash of the first 11 tokens"):
        bound.bind([0, *tokens[1:]])
    with pytest.raises(RowError, match=r"tokens: wanted integers .* below"):  # not wrapped into -1
        SHAPE.whole(1).bind(np.array([2**64 - 1], np.uint64))


@given(of_shapes(), st.lists(st.booleans(), max_size=16), st.integers(0, 16))
def test_validate_asks_for_the_rows_that_a_loss_needs(made: tuple[Shape, Routes], mask: list[bool], rows: int) -> None:
    """Goal: no token is trained on without its route in every layer, and no other row is asked for. Method: walk the
    positions; nothing was read before the first token."""
    shape, routes = made
    there = {p for p in range(routes.stop) if all((p, n) in told(routes) for n in shape.layer_ids)}
    lost = [t for t, loss in enumerate(mask) if loss and t > 0 and t - 1 not in there]
    for gap, how, why in (
        (lost[0] - 1 if lost else None, {"loss_mask": mask}, f"a row, as position {lost[0] if lost else 0} has a loss"),
        (next((p for p in range(rows) if p not in there), None), {"rows": rows}, "a row for each of the positions"),
    ):
        if gap is None:
            routes.validate(**how)  # type: ignore[arg-type]
            continue
        with pytest.raises(RowError, match=f"^row {gap}( layer [0-9]+)?: wanted {why}"):
            routes.validate(**how)  # type: ignore[arg-type]

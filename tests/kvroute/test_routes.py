"""Routes: their laws, and that nothing stale or unsound gets through."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_manager.errors import RowError, SpecError
from kvroute.routes import Routes
from kvroute.routes.union import union
from kvroute.routing import routing_spec, weights_version_spec

LAYER_IDS, NUM_EXPERTS, NUM_LAYERS, TOP_K = (1, 4), 300, 6, 3


@dataclass
class Rows:
    values: NDArray[Any]
    valid: NDArray[np.bool_]


def sound_ids(positions: range) -> NDArray[np.int64]:
    """Ids that say which position, layer and place they are, distinct in each row."""
    base = np.array(positions, dtype=np.int64)[:, None, None] * 7 + np.arange(2)[None, :, None] * 31
    return (base + np.arange(TOP_K) * 100) % NUM_EXPERTS


def make(start: int, valid: list[bool], versions: Any = ()) -> Routes:
    ids = sound_ids(range(start, start + len(valid)))
    ids[~np.array(valid, dtype=bool)] = -9  # whatever the memory held
    return Routes(ids, np.array(valid, dtype=bool), LAYER_IDS, NUM_EXPERTS, NUM_LAYERS, start, versions)


@st.composite
def routes(draw: st.DrawFn, start: int | None = None) -> Routes:
    first = draw(st.integers(0, 50)) if start is None else start
    valid = draw(st.lists(st.booleans(), max_size=20))
    cuts = sorted(draw(st.sets(st.integers(first, first + len(valid)), max_size=4)))
    known = [(a, b, draw(st.integers(0, 2))) for a, b in pairwise(cuts) if draw(st.booleans())]
    return make(first, valid, tuple(known))


def version_at(routes: Routes, position: int) -> int | None:
    return next((v for a, b, v in routes.weights_versions if a <= position < b), None)


def missing_ranges(valid: list[bool], start: int) -> list[tuple[int, int]]:
    """An independent account of the holes: walk the list."""
    holes: list[tuple[int, int]] = []
    for i, there in enumerate(valid, start):
        if there:
            continue
        if holes and holes[-1][1] == i:
            holes[-1] = (holes[-1][0], i + 1)
        else:
            holes.append((i, i + 1))
    return holes


@given(st.integers(0, 1000), st.lists(st.booleans(), max_size=70))
def test_missing_is_the_holes_and_complete_is_none(start: int, valid: list[bool]) -> None:
    made = make(start, valid)
    assert list(made.missing) == missing_ranges(valid, start)
    assert made.complete == all(valid) == (made.missing == ())
    assert (made.start, made.stop, len(made)) == (start, start + len(valid), len(valid))


@given(routes())
def test_valid_rows_are_the_rows_given_and_the_others_say_nothing(made: Routes) -> None:
    expected = sound_ids(range(made.start, made.stop))
    assert np.array_equal(made.ids[made.valid], expected[made.valid])
    assert (made.ids[~made.valid] == 0xFFFF).all()
    assert made.ids.dtype == np.uint16


@given(routes(), st.data())
def test_a_slice_is_the_rows_of_its_positions(made: Routes, data: st.DataObject) -> None:
    start = data.draw(st.integers(made.start, made.stop))
    stop = data.draw(st.integers(start, made.stop))
    part = made.slice(start, stop)
    assert (part.start, part.stop) == (start, stop)
    assert np.array_equal(part.ids, made.ids[start - made.start : stop - made.start])
    assert np.array_equal(part.valid, made.valid[start - made.start : stop - made.start])
    assert [version_at(part, p) for p in range(start, stop)] == [version_at(made, p) for p in range(start, stop)]
    inner = data.draw(st.integers(start, stop))
    assert part.slice(start, inner) == made.slice(start, inner)
    # What was checked once is not checked again, so it must still satisfy the check.
    again = Routes(part.ids, part.valid, LAYER_IDS, NUM_EXPERTS, NUM_LAYERS, start, part.weights_versions)
    assert again == part


@given(routes(), st.data())
def test_cutting_and_joining_gives_the_whole_back(made: Routes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(made.start, made.stop), max_size=3)))
    bounds, tokens = [made.start, *cuts, made.stop], range(made.stop)
    parts = [made.slice(a, b) for a, b in pairwise(bounds)]
    assert parts[0].merge(*parts[1:], tokens=tokens) == made.bind(tokens)
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.append(part, tokens=tokens[: part.stop])
    assert joined._with(token_hashes=()) == union(parts) == made


@given(routes(), st.data())
def test_joining_is_associative(first: Routes, data: st.DataObject) -> None:
    second = data.draw(routes(start=first.stop))
    third = data.draw(routes(start=second.stop))
    assert (
        union([union([first, second]), third])
        == union([first, union([second, third])])
        == union([third, first, second])
    )
    assert len(union([first, second])) == len(first) + len(second)


@given(routes(), routes())
def test_nothing_is_appended_behind_a_gap(first: Routes, second: Routes) -> None:
    if len(first) and second.start > first.stop:
        with pytest.raises(RowError, match=f"routes.start: wanted position {first.stop}"):
            first.append(second)
    elif len(first) and second.stop < first.start:
        with pytest.raises(RowError, match=f"routes.stop: wanted position {first.start}"):
            first.append(second)


def test_equality_sees_every_part() -> None:
    base = make(3, [True, False, True], ((3, 5, 1),))
    assert base == make(3, [True, False, True], ((3, 4, 1), (4, 5, 1)))
    others = [
        make(4, [True, False, True], ((4, 6, 1),)),
        make(3, [True, True, True], ((3, 5, 1),)),
        make(3, [True, False, True], ((3, 5, 2),)),
        make(3, [True, False], ((3, 5, 1),)),
        Routes(base.ids, base.valid, (2, 4), NUM_EXPERTS, NUM_LAYERS, 3, base.weights_versions),
        Routes(base.ids, base.valid, LAYER_IDS, NUM_EXPERTS, 7, 3, base.weights_versions),
        Routes(base.ids, base.valid, LAYER_IDS, 301, NUM_LAYERS, 3, base.weights_versions),
        "routes",
    ]
    assert all(base != other for other in others)
    with pytest.raises(TypeError, match="unhashable"):
        hash(base)


def test_routes_own_what_they_hold() -> None:
    """Goal: frozen through and through. Method: change the sources afterwards; try to write."""
    ids, valid = sound_ids(range(3)), np.array([True, True, False])
    made = Routes(ids, valid, LAYER_IDS, NUM_EXPERTS, NUM_LAYERS)
    ids[:] = 0
    valid[:] = False
    assert made == make(0, [True, True, False])
    with pytest.raises(ValueError, match="read-only"):
        made.ids[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        made.slice(0, 2).valid[0] = False
    with pytest.raises(FrozenInstanceError):
        made.start = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.zeros((2, 2), int)}, r"routes.ids: wanted integers \[n, layers, top_k\]"),
        ({"ids": np.zeros((2, 2, 3))}, "routes.ids.*float64"),
        ({"ids": np.zeros((2, 1, 3), int)}, "2 layers as in layer_ids, 3.*got int64 of shape"),
        ({"valid": np.ones(3, bool)}, "routes.valid"),
        ({"valid": np.ones(2, int)}, "routes.valid: wanted bool"),
        ({"start": -1}, "routes.start"),
        ({"start": 1.5}, "routes.start"),
        ({"weights_versions": ((0, 3, 1),)}, r"ranges inside \[0, 2\), got \[0, 3\)"),
        ({"weights_versions": ((0, 2, 1), (1, 2, 2))}, r"increasing ranges inside \[2, 2\), got \[1, 2\)"),
        ({"weights_versions": ((1, 1, 1),)}, "ranges inside"),
        ({"weights_versions": ((0, 1),)}, r"\(start, stop, version\)"),
        ({"weights_versions": ((0, 1, "a"),)}, "weights_versions"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    good = {
        "ids": sound_ids(range(2)),
        "valid": np.ones(2, bool),
        "layer_ids": LAYER_IDS,
        "num_experts": NUM_EXPERTS,
        "num_layers": NUM_LAYERS,
    }
    Routes(**good)  # type: ignore[arg-type]
    with pytest.raises(RowError, match=message):
        Routes(**{**good, **change})


def test_a_layer_map_that_cannot_be_is_a_spec_error() -> None:
    with pytest.raises(SpecError, match="increasing"):
        Routes(sound_ids(range(1)), np.ones(1, bool), (4, 1), NUM_EXPERTS, NUM_LAYERS)


@pytest.mark.parametrize("value", [300, -1, 70_000])
def test_an_id_no_expert_has_is_named_with_position_and_layer(value: int) -> None:
    """Goal: H12, nothing wraps around silently. Method: ids beyond num_experts, below 0 and beyond the dtype."""
    ids = sound_ids(range(5))
    ids[3, 1, 0] = value
    valid = np.array([True, False, True, True, True])
    with pytest.raises(RowError, match=rf"row 23 layer 4: wanted ids in \[0, 300\), got {value}"):
        Routes(ids, valid, LAYER_IDS, NUM_EXPERTS, NUM_LAYERS, start=20)
    valid[3] = False
    assert Routes(ids, valid, LAYER_IDS, NUM_EXPERTS, NUM_LAYERS, start=20).missing == ((21, 22), (23, 24))


def test_a_repeated_id_is_named_with_position_and_layer() -> None:
    ids = sound_ids(range(5))
    ids[2, 0, 2] = ids[2, 0, 0]
    with pytest.raises(RowError, match="row 2 layer 1: wanted distinct ids"):
        Routes(ids, np.ones(5, bool), LAYER_IDS, NUM_EXPERTS, NUM_LAYERS)


def test_from_rows_takes_the_layout_from_the_spec() -> None:
    spec = routing_spec(NUM_EXPERTS, TOP_K, LAYER_IDS, NUM_LAYERS, block_tokens=16)
    valid = np.array([True, True, False, True])
    rows = Rows(spec.rows(sound_ids(range(7, 11)), tokens=4), valid)
    assert Routes.from_rows(spec, rows, start=7) == make(7, valid.tolist())
    assert Routes.from_rows(spec, rows, 7, weights_version=3).weights_versions == ((7, 11, 3),)
    versions = Rows(np.array([1, 1, 2, 2], np.uint32), np.array([True, True, False, True]))
    assert Routes.from_rows(spec, rows, 7, weights_version=versions).weights_versions == ((7, 9, 1), (10, 11, 2))
    nothing = Rows(np.empty((0, 2, 3), np.uint16), np.empty(0, bool))
    empty = Routes.from_rows(spec, nothing, 7, weights_version=3)
    assert (len(empty), empty.complete, empty.missing, empty.weights_versions) == (0, True, (), ())


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12), st.integers(0, 9))
def test_versions_by_token_become_ranges(tokens: list[tuple[int, bool]], start: int) -> None:
    spec = routing_spec(NUM_EXPERTS, TOP_K, LAYER_IDS, NUM_LAYERS, block_tokens=16)
    positions = range(start, start + len(tokens))
    rows = Rows(sound_ids(positions), np.ones(len(tokens), bool))
    versions = Rows(np.array([v for v, _ in tokens], np.uint32), np.array([k for _, k in tokens], bool))
    made = Routes.from_rows(spec, rows, start, weights_version=versions)
    assert [version_at(made, p) for p in positions] == [v if known else None for v, known in tokens]


def test_bad_rows_are_an_error_or_missing_as_asked() -> None:
    """Goal: silent zeros of one token do not cost a request all its routes, unless it wants to know. Method: both."""
    spec = routing_spec(NUM_EXPERTS, TOP_K, LAYER_IDS, NUM_LAYERS, block_tokens=16)
    ids = sound_ids(range(6)).astype(np.uint16)
    ids[1], ids[4, 1, 2] = 0, 300
    rows = Rows(ids, np.array([True, True, False, True, True, True]))
    with pytest.raises(RowError, match="row 14 layer 4: wanted ids in"):
        Routes.from_rows(spec, rows, 10)
    made = Routes.from_rows(spec, rows, 10, bad="missing", weights_version=3)
    assert made.valid.tolist() == [True, False, False, True, False, True]
    assert (made.ids[~made.valid] == 0xFFFF).all()
    assert np.array_equal(made.ids[made.valid], sound_ids(range(6))[[0, 3, 5]])
    assert made.weights_versions == ((10, 16, 3),)
    with pytest.raises(RowError, match="bad: wanted raise or missing"):
        Routes.from_rows(spec, rows, bad="zero")  # type: ignore[arg-type]


def test_checked_rows_are_taken_at_their_word_and_copied() -> None:
    """Goal: rows that were checked when written cost one copy. Method: one that could not pass, and mutation."""
    spec = routing_spec(NUM_EXPERTS, TOP_K, LAYER_IDS, NUM_LAYERS, block_tokens=16)
    ids = sound_ids(range(3)).astype(np.uint16)
    ids[1, 0, 1] = ids[1, 0, 0]
    made = Routes.from_rows(spec, Rows(ids, np.ones(3, bool)), checked=True)
    assert np.array_equal(made.ids, ids)
    ids[:] = 299
    assert (made.ids != 299).all()
    with pytest.raises(RowError, match="row 1 layer 1: wanted distinct ids"):
        made.validate()
    with pytest.raises(RowError, match=r"routes\.valid"):
        Routes.from_rows(spec, Rows(ids, np.ones(4, bool)), checked=True)


def test_from_rows_refuses_rows_of_another_spec() -> None:
    spec = routing_spec(NUM_EXPERTS, TOP_K, LAYER_IDS, NUM_LAYERS, block_tokens=16)
    with pytest.raises(RowError, match="routing rows"):
        Routes.from_rows(spec, Rows(np.zeros((2, 2, 2), np.uint16), np.ones(2, bool)))
    with pytest.raises(RowError, match="a routing spec"):
        Routes.from_rows(weights_version_spec(16), Rows(np.zeros(2, np.uint32), np.ones(2, bool)))
    wrong = Rows(np.zeros(3, np.uint32), np.ones(3, bool))
    with pytest.raises(RowError, match="weights_version rows"):
        Routes.from_rows(spec, Rows(sound_ids(range(2)), np.ones(2, bool)), weights_version=wrong)


def test_slices_stay_inside_and_parts_match() -> None:
    made = make(5, [True] * 4)
    for start, stop in ((4, 6), (5, 10), (7, 6)):
        with pytest.raises(RowError, match=r"positions inside \[5, 9\]"):
            made.slice(start, stop)
    other = Routes(sound_ids(range(9, 10)), np.ones(1, bool), (0, 4), NUM_EXPERTS, NUM_LAYERS, start=9)
    with pytest.raises(RowError, match=r"part 1 routed_layers: wanted \(1, 4\), as part 0 has, got \(0, 4\)"):
        made.append(other)


def test_repr_tells_what_matters() -> None:
    assert repr(make(5, [])) == "Routes(no positions at 5, 2 of 6 layers, top 3 of 300 experts, complete)"
    assert repr(make(5, [True, False])) == "Routes(positions 5..6, 2 of 6 layers, top 3 of 300 experts, 1 missing)"

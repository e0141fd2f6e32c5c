"""Routes as a trainer's array: every row at its position, every layer in its place, every hole spelled as asked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_routes import SHAPES, Shape, cells_of, cellwise, shapes

from cache_manager.errors import RowError
from kvroute.routes.fill import FILLERS

SHAPE = SHAPES[2]  # dense layers first; 256 experts


def spelled(shape: Shape, missing: str, position: int, layer: int, ep: int) -> list[int]:
    """The ids of one layer of a missing row, as the reference defines them."""
    k, experts = shape.top_k, shape.num_experts
    if missing == "zero":
        return [0] * k
    if missing == "minus1":
        return [-1] * k
    if missing == "arange":
        return list(range(k))
    found = []
    for column in range(k):
        a = position * k + column + layer * ep * k
        found.append(a % ep * (experts // ep) + (a // ep) % (experts // ep))
    return found


@st.composite
def asked(draw: st.DrawFn) -> dict[str, Any]:
    shape = draw(shapes())
    routes = draw(cellwise(shape, start=draw(st.integers(0, 4))))
    rows = draw(st.integers(0, 18))
    chosen = draw(st.lists(st.integers(0, shape.num_layers - 1), unique=True, min_size=1))
    return {
        "shape": shape,
        "routes": routes,
        "rows": rows,
        "layers": draw(st.sampled_from(["all", "moe", chosen])),
        "dtype": draw(st.sampled_from(["int32", "int64"])),
        "missing": draw(st.sampled_from(FILLERS)),
        "ep": draw(st.sampled_from([1, 2])),
    }


def expected(want: dict[str, Any]) -> list[list[list[int]]]:
    """Row by row and layer by layer, without an array."""
    shape: Shape = want["shape"]
    layers = {"all": range(shape.num_layers), "moe": shape.layer_ids}.get(str(want["layers"]), want["layers"])
    found = []
    known = cells_of(shape, want["routes"])
    for position in range(want["rows"]):
        some = any((position, layer) in known for layer in shape.layer_ids)
        row = []
        for layer in layers:
            if (position, layer) in known:
                row.append(known[position, layer])
            elif some and layer not in shape.layer_ids:
                row.append([0] * shape.top_k)  # a dense layer of a row that is there
            else:
                row.append(spelled(shape, want["missing"], position, layer, want["ep"]))
        found.append(row)
    return found


@given(asked())
def test_every_row_layer_and_hole_is_where_and_what_was_asked_for(want: dict[str, Any]) -> None:
    routes = want["routes"]
    how = {name: want[name] for name in ("layers", "dtype", "missing", "ep")}
    made = routes.materialize(want["rows"], **how)
    assert made.dtype == want["dtype"]
    assert made.tolist() == expected(want)
    assert made.flags.c_contiguous
    assert made.flags.writeable


def test_the_last_sampled_token_has_no_row() -> None:
    """Goal: the off-by-one of every trainer is reported, not guessed. Method: n - 1 rows of n tokens, both ways."""
    routes = SHAPE.whole(5)
    assert len(routes.materialize(5)) == 5
    with pytest.raises(RowError, match="row 5"):
        routes.materialize(6)

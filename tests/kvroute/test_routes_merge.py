"""Parts of one sequence, in any order, any number of times: its rows come out, or an error says where they differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_routes import Shape

from cache_manager.errors import RowError
from kvroute.routes import Routes

SHAPE = Shape()
LENGTH = 24
TOKENS = list(range(LENGTH + 1))


@st.composite
def parts_of_one(draw: st.DrawFn) -> list[Routes]:
    """Parts of one sequence that agree where they overlap; versions change at position 10."""
    parts = []
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, LENGTH))
        valid = draw(st.lists(st.booleans(), max_size=LENGTH - start))
        known = draw(st.booleans())
        spans = ((0, 10, 1), (10, LENGTH, 2)) if known else ()
        clipped = [(max(a, start), min(b, start + len(valid)), v) for a, b, v in spans]
        parts.append(SHAPE.routes(start, valid, versions=tuple(s for s in clipped if s[0] < s[1])))
    return parts


def by_position(parts: list[Routes]) -> dict[int, bytes]:
    """An independent account: a dictionary, filled row by row."""
    rows: dict[int, bytes] = {}
    for part in parts:
        for i in np.flatnonzero(part.valid).tolist():
            rows[part.start + i] = part.ids[i].tobytes()
    return rows


@given(parts_of_one(), st.randoms(use_true_random=False))
def test_merging_is_the_union_whatever_the_order(parts: list[Routes], shuffler: object) -> None:
    merged = parts[0].merge(*parts[1:], tokens=TOKENS)
    assert by_position([merged]) == by_position(parts)
    there = [p for p in parts if len(p)]
    if there:
        assert (merged.start, merged.stop) == (min(p.start for p in there), max(p.stop for p in there))
    assert (merged.ids[~merged.valid] == 0xFFFF).all()
    for position in range(merged.start, merged.stop):  # a version is known when some part knew it
        known = {v for p in there for a, b, v in p.weights_versions if a <= position < b}
        rows = [p for p in there if p.start <= position < p.stop and p.valid[position - p.start]]
        sure = {v for p in rows for a, b, v in p.weights_versions if a <= position < b}
        found = {v for a, b, v in merged.weights_versions if a <= position < b}
        assert found == (sure if rows else known)
    again = list(parts)
    shuffler.shuffle(again)  # type: ignore[attr-defined]
    assert again[0].merge(*again[1:], tokens=TOKENS) == merged
    assert merged.merge(*parts) == merged  # every part once more changes nothing


@given(parts_of_one())
def test_parts_without_rows_merge_in_any_order(parts: list[Routes]) -> None:
    """Goal: the union of nothing is one thing, too. Method: no part has a row, each is somewhere else."""
    empty = [part.slice(part.stop, part.stop) for part in parts]
    merged = empty[0].merge(*empty[1:])
    assert merged == empty[-1].merge(*empty[::-1])
    assert (len(merged), merged.start) == (0, min(part.stop for part in parts))


@given(parts_of_one())
def test_merging_in_steps_is_merging_at_once(parts: list[Routes]) -> None:
    """Goal: a trainer may add deltas as they come. Method: left fold against one call, compared by rows."""
    folded = parts[0].bind(TOKENS)
    for part in parts[1:]:
        folded = folded.merge(part, tokens=TOKENS)
    assert by_position([folded]) == by_position(parts)
    assert folded == parts[0].merge(*parts[1:], tokens=TOKENS)


@given(st.integers(0, LENGTH), st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_a_resumed_rollout_changes_nothing_that_is_there(first: int, again: int, stop: int) -> None:
    """Goal: verl 6029, a resume that hands out the prefix once more. Method: overlap by any number of rows."""
    whole = SHAPE.whole(LENGTH).bind(TOKENS)
    head = whole.slice(0, first)
    tail = whole.slice(min(again, first), max(min(again, first), stop))
    end = max(first, tail.stop if len(tail) else 0)
    joined = head.append(tail, tokens=TOKENS[: end + 1])
    assert joined == whole.slice(0, end).bind(TOKENS[: end + 1])
    assert joined.append(tail) == joined
    assert joined.append(head) == joined


@pytest.mark.parametrize("order", [1, -1])
def test_a_row_that_differs_is_named_with_position_and_layer(order: int) -> None:
    one, other = SHAPE.whole(10), SHAPE.whole(10)
    ids = other.ids.copy()
    ids[6, 1] = [7, 8, 9]
    other = Routes(ids, other.valid, SHAPE.layer_ids, SHAPE.num_experts, SHAPE.num_layers)
    parts = [one, other][::order]
    with pytest.raises(RowError, match=r"row 6 layer 4: wanted \[.*\], as in an earlier part, got \["):
        parts[0].merge(parts[1])
    with pytest.raises(RowError, match="row 6 layer 4"):
        parts[0].slice(0, 8).append(parts[1].slice(3, 10))
    assert parts[0].slice(0, 6).append(parts[1].slice(2, 6)) == one.slice(0, 6)


def test_a_row_of_other_weights_is_a_conflict_even_with_equal_ids() -> None:
    old = SHAPE.routes(0, [True] * 4, versions=((0, 4, 1),))
    new = SHAPE.routes(2, [True] * 4, versions=((2, 6, 2),))
    with pytest.raises(RowError, match="weights version of row 2: wanted 1, got 2"):
        old.append(new)
    holed = SHAPE.routes(0, [True, True, False, False], versions=((0, 4, 1),))
    spans = holed.append(new, tokens=TOKENS).weights_versions
    assert spans == ((0, 2, 1), (2, 6, 2))  # where only one has the row, its version counts


def test_parts_of_other_models_are_refused() -> None:
    one = SHAPE.whole(3)
    for other in (Shape(layer_ids=(0, 4)), Shape(num_experts=301), Shape(num_layers=7), Shape(top_k=2)):
        with pytest.raises(
            RowError, match=r"part 1 (routed_layers|num_experts|num_layers|top_k): wanted .* as part 0 has"
        ):
            one.merge(other.whole(3))


def test_nothing_and_something() -> None:
    nothing, some = SHAPE.routes(5, []), SHAPE.whole(3, start=9)
    assert nothing.merge(some) == some.merge(nothing) == nothing.append(some) == some
    assert nothing.merge(nothing) == nothing


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_routes_are_bound_to_their_tokens() -> None:
    """Goal: rows of another sequence are noticed. Method: change, cut and extend the tokens of bound routes."""
    tokens = list(range(100, 111))
    bound = SHAPE.whole(10).bind(tokens)
    bound.validate(tokens)
    bound.validate([*tokens, 7])  # what was generated since
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


def test_turns_stay_bound_when_they_are_merged() -> None:
    tokens = list(range(30))
    first, second = SHAPE.whole(9).bind(tokens[:10]), SHAPE.whole(20).bind(tokens[:21])
    both = first.append(second)
    assert [count for count, _ in both.token_hashes] == [21]  # the rows say nothing of the tenth token
    both.validate(tokens)
    second = second.bind(tokens[:20])
    both = first.bind(tokens[:20]).append(second)
    assert [count for count, _ in both.token_hashes] == [10, 20, 21]
    with pytest.raises(RowError, match="hash of the first 10 tokens"):
        first.append(SHAPE.whole(9).bind([*tokens[:9], 99]))
    assert [count for count, _ in both.slice(0, 9).token_hashes] == [10]
    assert both.slice(3, 8).token_hashes == ()


def test_validate_asks_for_the_rows_that_a_loss_needs() -> None:
    """Goal: no token is trained on without its route. Method: a hole, and loss masks around it."""
    routes = SHAPE.routes(0, [True, True, False, True, True])
    routes.validate(loss_mask=[0, 1, 1, 0, 1, 1])
    with pytest.raises(RowError, match="row 2: wanted a row, as position 3 has a loss"):
        routes.validate(loss_mask=[0, 0, 0, 1, 0, 0])
    with pytest.raises(RowError, match="row 5: wanted a row, as position 6 has a loss"):
        routes.validate(loss_mask=[0, 0, 0, 0, 0, 0, 1])
    with pytest.raises(RowError, match="row 2: wanted a row for each of the positions"):
        routes.validate(rows=5)
    SHAPE.whole(5).validate(rows=5)
    with pytest.raises(RowError, match="row 5: wanted a row for each"):
        SHAPE.whole(5).validate(rows=6)
    with pytest.raises(RowError, match="row 0: wanted a row for each"):
        SHAPE.whole(5, start=1).validate(rows=6)

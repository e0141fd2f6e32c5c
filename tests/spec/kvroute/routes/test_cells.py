"""Parts of one sequence, in any order, any number of times: merging returns its rows where there is proof that they are
of one sequence, or an error names where they differ.

Rows prove nothing: those of two prompts may be equal at every position, as they are here.
"""

from __future__ import annotations

import copy
import pickle
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_routes import Cells, Shape, cells_of, cellwise, changed, masks, shapes, without_layers

from cache_manager.errors import RowError
from kvroute.replay import verl
from kvroute.routes import Routes, wire
from kvroute.routes.cells import known_stop, some_known
from kvroute.routes.routes import checked_routes, routes_of_record
from kvroute.routes.token_hash import token_hashes

SHAPE = Shape()
LENGTH = 24
TOKENS = list(range(LENGTH + 1))  # the last one has no row
PROMPT = TOKENS[:10]
UNTIED = "routes: wanted parts of one sequence"


@st.composite
def parts_of_one(draw: st.DrawFn) -> tuple[Shape, list[Routes]]:
    """Parts of one sequence with any cells, that agree where they overlap; versions change at position 5."""
    shape = draw(shapes())
    parts: list[Routes] = []
    for part in draw(st.lists(cellwise(shape), min_size=1, max_size=4)):
        spans = ((0, 5, 1), (5, LENGTH, 2)) if draw(st.booleans()) else ()
        clipped = [(max(a, part.start), min(b, part.stop), v) for a, b, v in spans]
        versions = [span for span in clipped if span[0] < span[1]]
        parts.append(checked_routes(part.layout, part.ids.copy(), part.mask, part.start, versions))
    return shape, parts


@given(parts_of_one(), st.randoms(use_true_random=False))
def test_merging_is_the_union_whatever_the_order(given_parts: tuple[Shape, list[Routes]], shuffler: Any) -> None:
    """Goal: the result has every row that any part has, once, and its version if all its cells have one. Method: a
    dictionary of cells; other orders; one by one, as a trainer adds deltas as they come; every part once more. One by
    one, fewer versions may be known: a merged row does not say which of its cells have one."""
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
    told = [cells_of(shape, p.slice(a, b)) for p in there for a, b, _ in p.weights_versions]
    for position in range(merged.start, merged.stop):
        cells = {cell for cell in expected if cell[0] == position}
        lacks = cells.difference(*told)
        rows = [p for p in there if p.start <= position < p.stop and some_known(p.mask)[position - p.start]]
        sure = {v for p in rows for a, b, v in p.weights_versions if a <= position < b}
        found = {v for a, b, v in merged.weights_versions if a <= position < b}
        assert found == (set() if lacks or not cells else sure)
    again = list(parts)
    shuffler.shuffle(again)
    folded = again[0].merge(tokens=TOKENS)
    for part in again[1:]:
        folded = folded.merge(part, tokens=TOKENS)
    assert set(positions_of(folded)) <= set(positions_of(merged))
    folded = changed(folded, weights_versions=merged.weights_versions)
    assert again[0].merge(*again[1:], tokens=TOKENS) == folded == merged == merged.merge(*parts, tokens=TOKENS)


def positions_of(routes: Routes) -> list[tuple[int, int]]:
    """Every position with a version, and the version."""
    return [(position, v) for a, b, v in routes.weights_versions for position in range(a, b)]


def test_cells_of_unknown_weights_have_no_version() -> None:
    """Goal: every row has the version that made it, in all its layers, or none. Method: two stages' layers of the same
    positions, of which one knows its version; then that of the other, too."""
    ids, layout = SHAPE.ids(range(3)), (SHAPE.num_experts, SHAPE.num_layers)
    one, other, again = (
        Routes(ids[:, [i]], np.ones(3, bool), (layer,), *layout, 0, versions, missing_layers=(5 - layer,))
        for i, layer, versions in ((0, 1, [(0, 3, 7)]), (1, 4, []), (1, 4, [(0, 2, 7)]))
    )
    for order in ((one, other), (other, one)):
        assert order[0].merge(order[1], tokens=range(4)).weights_versions == ()
    for order in ((one, other, again), (again, other, one)):
        assert order[0].merge(*order[1:], tokens=range(4)).weights_versions == ((0, 2, 7),)


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


def test_a_missing_row_has_no_weights() -> None:
    """Goal: turns of a rollout across an update of the weights are merged, whatever both lack. Method: each says one
    version of all its rows; one row is missing in both, or in all but the last, in every order."""
    old = SHAPE.routes(0, [True, False, True], versions=((0, 3, 1),))
    new = SHAPE.routes(0, [False, False, True, True], versions=((0, 2, 2), (2, 3, 1), (3, 4, 2)))
    late = SHAPE.routes(1, [True], versions=((1, 2, 3),))
    for parts in permutations((old, new)):
        assert parts[0].merge(*parts[1:], tokens=TOKENS).weights_versions == ((0, 1, 1), (2, 3, 1), (3, 4, 2))
    for parts in permutations((old, new, late)):
        merged = parts[0].merge(*parts[1:], tokens=TOKENS)
        assert merged.weights_versions == ((0, 1, 1), (1, 2, 3), (2, 3, 1), (3, 4, 2))


def test_parts_of_other_models_are_refused() -> None:
    one = SHAPE.whole(3)
    for other in (Shape(layer_ids=(0, 4)), Shape(num_experts=301), Shape(num_layers=7), Shape(top_k=2)):
        wanted = r"part 1 (routed_layers|num_experts|num_layers|top_k): wanted .* as part 0 has"
        with pytest.raises(RowError, match=wanted):
            one.merge(other.whole(3))


# Of one sequence ------------------------------------------------------------------------------------------------------


def bound_to(routes: Routes, tokens: list[int], *counts: int) -> Routes:
    """``routes`` with the hashes of so many first ``tokens``, whatever rows there are."""
    return changed(routes, token_hashes=token_hashes(tokens, counts))


def decode(known_from: int = len(PROMPT)) -> Routes:
    """Decode's answer: the prompt's last row or none of the prompt, and its own rows; bound to the prompt and to all
    tokens."""
    return bound_to(SHAPE.routes(0, np.arange(LENGTH) >= known_from), TOKENS, len(PROMPT), LENGTH)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("known_from", [9, 10])
@pytest.mark.parametrize("length", [8, 9, 10, 11])
def test_another_prompts_rows_are_refused(length: int, known_from: int, order: int) -> None:
    """Goal: merging brings no row of another prompt. Method: prefill of a prompt that is one shorter, as long, one
    longer; decode has only the last of the prompt's rows, or none; rows that agree by luck."""
    other = SHAPE.whole(length).bind([*PROMPT[:4], *range(300, 296 + length)])
    parts = [other, decode(known_from)][::order]
    with pytest.raises(RowError, match=f"{UNTIED}|hash of the first 10 tokens"):
        parts[0].merge(parts[1])
    with pytest.raises(RowError, match=r"hash of the first (8|9|10|11) tokens"):
        parts[0].merge(parts[1], tokens=TOKENS)
    right = SHAPE.whole(len(PROMPT)).bind(PROMPT).merge(decode(known_from))
    verl.agent_loop(right, len(PROMPT), LENGTH + 1 - len(PROMPT), missing="error")


def test_equal_rows_tie_nothing() -> None:
    """Goal: rows alone prove nothing. Method: unbound parts of one sequence, which share rows, one bound part, and a
    part twice; a turn that goes on from another one brings its hash along."""
    whole = SHAPE.whole(12)
    parts = whole.slice(0, 6), whole.slice(3, 12)
    for one, other in (parts, parts[::-1], (parts[0].bind(TOKENS[:6]), parts[1]), (whole, whole)):
        with pytest.raises(RowError, match=UNTIED):
            one.merge(other)
        counts = {len(TOKENS), *(n for n, _ in one.token_hashes)}
        assert one.merge(other, tokens=TOKENS) == bound_to(whole, TOKENS, *counts)
    turn = bound_to(whole, TOKENS, 6, 13)
    assert bound_to(parts[0], TOKENS, 6).merge(turn) == turn.merge(parts[0].slice(0, 0)) == turn
    deltas = [bound_to(whole.slice(n, n + 4), TOKENS, n + 1, n + 5) for n in (4, 0, 8)]
    assert deltas[0].merge(*deltas[1:]) == bound_to(whole, TOKENS, 1, 5, 9, 13)


@pytest.mark.parametrize(
    "parts", [((2, [2]), (1, [2, 4, 7]), (1, [0, 7])), ((1, [1]), (0, [3, 4, 5]), (0, [1, 2, 5]))], ids=["tie", "hash"]
)
def test_parts_with_the_same_last_row_and_hash_come_in_any_order(parts: Any) -> None:
    """Goal: the order of parts does not matter. Method: of two parts that end alike, only one has the hash that ties
    both to the third, or that the whole may have beside the third's; every order."""
    made = [bound_to(SHAPE.whole(rows), TOKENS, *counts) for rows, counts in parts]
    merged = [one.merge(*others) for one, *others in permutations(made)]
    assert all(each == merged[0] for each in merged)


def test_a_weights_version_wants_proof_like_a_row() -> None:
    """Goal: every row has the version that made it. Method: rows of one prompt that were all there are bound, and have
    no versions; beside them the same rows, which another prompt may have made, have one."""
    bound, told = SHAPE.whole(5).bind(PROMPT), changed(SHAPE.whole(5), weights_versions=((1, 3, 7),))
    for one, other in ((bound, told), (told, bound)):
        with pytest.raises(RowError, match=UNTIED):
            one.merge(other)
        assert one.merge(other, tokens=PROMPT).weights_versions == ((1, 3, 7),)


def test_binding_to_fewer_counts_does_not_hide_other_tokens() -> None:
    """Goal: routes are never bound to other tokens than they were. Method: counts that they are bound to, and not."""
    bound = SHAPE.whole(5).bind(TOKENS[:6])
    assert bound.bind(TOKENS, [5, 7]).token_hashes == token_hashes(TOKENS, [5, 7])
    with pytest.raises(RowError, match="hash of the first 6 tokens"):
        bound.bind([*TOKENS[:5], 0, 0], [5, 6])
    for counts in ([5], [7], [], None):  # the hash that they have is not among those asked for
        with pytest.raises(RowError, match="hash of the first 6 tokens"):
            bound.bind([9, *TOKENS[1:7]], counts)
    for wrong in (TOKENS[:5], [*TOKENS[:4], 0]):  # the tie is to six tokens: of five nothing can be said
        with pytest.raises(RowError, match="tokens: wanted 6 or more, as the routes are bound to, got 5"):
            bound.bind(wrong, [5])
    for counts in ([2], []):
        assert bound.bind(TOKENS, counts).token_hashes == token_hashes(TOKENS, [*counts, 6])


def test_a_part_never_loses_its_tie_to_tokens() -> None:
    """Goal: rows of another branch are never taken, however the part was made. Method: two sequences that share three
    tokens, rows equal; a part of the first by slice, a mask, a record, a record's rows, a pickle, a bind to the tokens
    that both share; the second's tokens and rows refuse it, the first's take it."""
    branch = [*TOKENS[:3], *range(100, 104)]
    whole, other = SHAPE.whole(6).bind(TOKENS[:7]), SHAPE.whole(6).bind(branch)
    header, ids, _ = wire.read(whole.to_bytes())
    parts = [
        whole.slice(0, 4),
        whole.slice(3, 5),
        whole.slice(0, 5).slice(1, 4),
        whole.without(SHAPE.layer_ids[:1], np.arange(6) > 3).slice(0, 5),
        Routes.from_bytes(whole.slice(0, 4).to_bytes()),
        Routes.from_json(whole.slice(0, 4).to_json()),
        routes_of_record(header, ids[:4].copy()),
        routes_of_record(header, ids[2:5, :1].copy(), 2, [0]),
        pickle.loads(pickle.dumps(whole.slice(0, 4))),  # noqa: S301 - made here
        copy.deepcopy(whole).slice(0, 4),
        whole.bind(TOKENS[:7], [3]).slice(0, 4),
        whole.merge(whole.slice(2, 4)).slice(0, 4),
    ]
    for part in parts:
        for taken in (
            lambda part=part: part.merge(other.slice(4, 6), tokens=branch),
            lambda part=part: part.merge(tokens=branch[:5]),
            lambda part=part: part.validate(branch),
            lambda part=part: part.validate(branch[: part.stop]),
            lambda part=part: part.bind(branch[: part.stop]),
            lambda part=part: part.bind(branch),
            lambda part=part: part.merge(other),
        ):
            with pytest.raises(RowError, match="tokens"):
                taken()
        part.validate(TOKENS[:7])
        for merged in (part.merge(whole, tokens=TOKENS[:7]), part.merge(whole)):
            assert merged.bind(TOKENS[:7], [7]) == whole
    cut = whole.bind(TOKENS[:7], [5, 7]).slice(0, 4)  # a sequence that is cut off there
    assert cut.token_hashes == token_hashes(TOKENS, [5])
    cut.validate(TOKENS[:5], rows=4)


def test_a_short_part_among_longer_ones_hides_no_difference() -> None:
    """Goal: what is compared is what is there, not the last part. Method: a part inside an earlier one, and one that
    begins in it after the short one's end and differs."""
    long, short, late = SHAPE.whole(10), SHAPE.whole(4).slice(2, 4), SHAPE.whole(12).slice(3, 12)
    ids = late.ids.copy()
    ids[3] = ids[3, :, ::-1]
    differs = changed(late, ids=ids)
    for parts in permutations((long, short, differs)):
        with pytest.raises(RowError, match=r"^row 6 layer"):
            parts[0].merge(*parts[1:], tokens=TOKENS)
    assert long.merge(short, late, tokens=TOKENS) == SHAPE.whole(12).bind(TOKENS)


def test_a_hash_of_fewer_tokens_than_rows_does_not_bind_them() -> None:
    """Goal: validate means every row. Method: routes that go on behind the tokens that they are bound to."""
    further = bound_to(SHAPE.whole(8), TOKENS, 5)
    with pytest.raises(RowError, match="a hash of 8 tokens or more, as there are rows, got of 5"):
        further.validate(TOKENS)
    further.bind(TOKENS).validate(TOKENS)
    for wrong in ([0.5] * 8, [TOKENS], [None] * 8, 5, [[1], [2, 3]], "abc"):
        with pytest.raises(RowError, match=r"tokens: wanted integers \[n\]"):
            SHAPE.whole(8).bind(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_merged_parts_are_of_one_sequence(seed: int) -> None:
    """Goal: never another prompt's rows, and no row is bound to another prompt. Method: a thousand times two or three
    parts of two sequences of tokens that differ from some position on and have equal rows, each with hashes of its own
    tokens, of so few lengths that they often meet; what is merged is all of one of them, and bound to that alone."""
    draw, merges = np.random.default_rng(seed), 0
    for _ in range(1000):
        differ = int(draw.integers(2, 5))
        texts = TOKENS, [*TOKENS[:differ], *range(500, 500 + len(TOKENS) - differ)]
        parts, of = list[Routes](), list[int]()
        for _ in range(draw.integers(2, 4)):
            of.append(which := int(draw.integers(2)))
            rows, counts = draw.integers(0, 7), draw.choice([2, 3, 4, 5, 8, 9], draw.integers(1, 4), replace=False)
            parts.append(bound_to(SHAPE.whole(int(rows)), texts[which], *counts.tolist()))
        try:
            merged = parts[0].merge(*parts[1:])
        except RowError:
            continue
        fits = [
            all(who == text or known_stop(part) <= differ for part, who in zip(parts, of, strict=True))
            for text in (0, 1)
        ]
        told = dict(merged.token_hashes)
        assert any(fits[i] and merged.token_hashes == token_hashes(texts[i], told) for i in (0, 1))
        merges += len(set(of)) > 1
    assert merges > 20, "parts of two texts that have one beginning are merged, too"

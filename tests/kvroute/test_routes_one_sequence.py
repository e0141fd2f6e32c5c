"""Parts are merged when there is proof that they are of one sequence, and refused otherwise.

The worst case throughout: rows prove nothing, as those of two prompts are equal at every position.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_routes import Shape

from cache_manager.errors import RowError
from kvroute.replay import verl
from kvroute.routes import Routes

SHAPE = Shape()
UNTIED = "routes: wanted parts of one sequence"
PROMPT, ANSWER = list(range(100, 110)), list(range(200, 206))
TOKENS = PROMPT + ANSWER  # the last one has no row


def prefill(prompt: list[int]) -> Routes:
    """Prefill's answer at one token: rows of the prompt, bound to the prompt, whatever token was sampled."""
    return SHAPE.whole(len(prompt)).bind(prompt)


def decode(known_from: int = len(PROMPT)) -> Routes:
    """Decode's answer: the prompt's last row or none of the prompt, and its own rows; bound to the prompt and to all
    tokens."""
    rows = np.arange(len(TOKENS) - 1) >= known_from
    return SHAPE.routes(0, rows).bind(TOKENS[:-1])._with(token_hashes=hashes(len(PROMPT), len(TOKENS) - 1))


def hashes(*counts: int) -> tuple[tuple[int, bytes], ...]:
    return tuple(SHAPE.routes(0, []).bind(TOKENS[:n]).token_hashes[0] for n in counts)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("known_from", [9, 10])
@pytest.mark.parametrize("length", [8, 9, 10, 11])
def test_another_prompts_rows_are_refused(length: int, known_from: int, order: int) -> None:
    """Goal: merging brings no row of another prompt. Method: prefill of a prompt that is one shorter, as long, one
    longer; decode has only the last of the prompt's rows, or none; rows that agree by luck."""
    other = prefill([*PROMPT[:4], *range(300, 296 + length)])
    parts = [other, decode(known_from)][::order]
    with pytest.raises(RowError, match=f"{UNTIED}|hash of the first 10 tokens"):
        parts[0].merge(parts[1])
    with pytest.raises(RowError, match=r"hash of the first (8|9|10|11) tokens"):
        parts[0].merge(parts[1], tokens=TOKENS)
    right = prefill(PROMPT).merge(decode(known_from))
    verl.agent_loop(right, len(PROMPT), len(ANSWER), missing="error")


def test_equal_rows_tie_nothing() -> None:
    """Goal: rows alone prove nothing. Method: unbound parts of one sequence, which share rows, and one bound part."""
    whole = SHAPE.whole(12)
    parts = whole.slice(0, 6), whole.slice(3, 12)
    for one, other in (parts, parts[::-1], (parts[0].bind(TOKENS[:6]), parts[1])):
        with pytest.raises(RowError, match=UNTIED):
            one.merge(other)
        assert one.merge(other, tokens=TOKENS) == whole.bind(TOKENS)._with(token_hashes=one.bind(TOKENS).token_hashes)


def test_a_part_that_adds_nothing_changes_nothing_and_binds_no_other() -> None:
    """Goal: rows are bound only to tokens for which there is proof. Method: a prompt's first rows, bound to all of its
    tokens, beside rows that another prompt may have made."""
    whole, bound = SHAPE.whole(12), SHAPE.whole(5).bind(PROMPT)
    assert whole.merge(bound) == bound.merge(whole) == whole
    with pytest.raises(RowError, match="a hash of the tokens"):
        whole.merge(bound).validate(TOKENS)
    turns = SHAPE.whole(5).bind(TOKENS[:6]), SHAPE.whole(12).bind(TOKENS[:13])
    assert turns[0].merge(turns[1]) == turns[1]


def test_a_weights_version_wants_proof_like_a_row() -> None:
    """Goal: every row has the version that made it. Method: rows of one prompt that were all there are bound, and have
    no versions; beside them the same rows, which another prompt may have made, have one."""
    bound, told = SHAPE.whole(5).bind(PROMPT), SHAPE.whole(5)._with(weights_versions=((1, 3, 7),))
    for one, other in ((bound, told), (told, bound)):
        with pytest.raises(RowError, match=UNTIED):
            one.merge(other)
        assert one.merge(other, tokens=PROMPT).weights_versions == ((1, 3, 7),)
    again = bound._with(weights_versions=((0, 5, 7),))
    assert again.merge(told) == told.merge(again)._with(token_hashes=again.token_hashes) == again


def test_binding_to_fewer_counts_does_not_hide_other_tokens() -> None:
    """Goal: routes are never bound to other tokens than they were. Method: counts that they are bound to, and not."""
    bound = SHAPE.whole(5).bind(TOKENS[:6])
    assert bound.bind(TOKENS, [5, 7]).token_hashes == hashes(5, 7)
    with pytest.raises(RowError, match="hash of the first 6 tokens"):
        bound.bind([*TOKENS[:5], 0, 0], [5, 6])


def test_a_hash_of_fewer_tokens_than_rows_does_not_bind_them() -> None:
    """Goal: validate means every row. Method: routes that go on behind the tokens that they are bound to."""
    further = SHAPE.whole(8)._with(token_hashes=hashes(5))
    with pytest.raises(RowError, match="a hash of 8 tokens or more, as there are rows, got of 5"):
        further.validate(TOKENS)
    further.bind(TOKENS).validate(TOKENS)
    for wrong in ([0.5] * 8, [TOKENS], [None] * 8, 5, [[1], [2, 3]], "abc"):
        with pytest.raises(RowError, match=r"tokens: wanted integers \[n\]"):
            SHAPE.whole(8).bind(wrong)  # type: ignore[arg-type]


@given(st.data())
def test_merged_parts_are_of_one_sequence(data: st.DataObject) -> None:
    """Goal: never another prompt's rows. Method: parts of two sequences of tokens that differ from some position on and
    have equal rows, each bound to its own; what is merged is all of one of them, and bound to that alone."""
    differ = data.draw(st.integers(0, 8))
    texts = TOKENS, [*TOKENS[:differ], *range(500, 500 + len(TOKENS) - differ)]
    parts, of = [], []
    for _ in range(data.draw(st.integers(2, 4))):
        start, rows = data.draw(st.integers(0, 6)), data.draw(st.lists(st.booleans(), max_size=8))
        which, part = data.draw(st.integers(0, 1)), SHAPE.routes(start, rows)
        for count in data.draw(st.sets(st.integers(part.stop, len(TOKENS)), min_size=1, max_size=3)):
            part = part.bind(texts[which][:count])
        for count in data.draw(st.sets(st.integers(0, part.stop), max_size=3)):
            shorter = SHAPE.routes(0, []).bind(texts[which][:count])
            part = part._with(token_hashes=tuple(sorted({*part.token_hashes, *shorter.token_hashes})))
        parts.append(part)
        of.append(which)
    try:
        merged = parts[0].merge(*parts[1:])
    except RowError:
        assert len(set(of)) > 1 or len({p.token_hashes for p in parts}) > 1
        return

    def made_by(text: int, position: int) -> bool:
        return any(
            part.start <= position < part.stop
            and part.valid[position - part.start]
            and (which == text or position < differ)
            for part, which in zip(parts, of, strict=True)
        )

    known = [merged.start + i for i in np.flatnonzero(merged.valid).tolist()]
    assert any(
        all(made_by(text, position) for position in known)
        and all(SHAPE.routes(0, []).bind(texts[text][:n]).token_hashes[0] == (n, h) for n, h in merged.token_hashes)
        for text in (0, 1)
    )

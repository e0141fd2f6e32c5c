"""Rows as bits, against the plain definition: row t is bit t % 64 of word t // 64."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.numbers import full_bits, prefix_bits, unpack_bits, words_of


@given(tokens=st.integers(1, 300), counts=st.lists(st.integers(-3, 400), max_size=20))
def test_prefixes_are_the_first_rows_of_a_block_and_of_no_other(tokens: int, counts: list[int]) -> None:
    """Goal: no bit too many, at word borders too. Method: test each bit by arithmetic on Python integers."""
    words = prefix_bits(np.array(counts, np.int64), tokens)
    assert (words.shape, words.dtype) == ((len(counts), 1, words_of(tokens)), np.dtype(np.uint64))
    as_integers = [sum(int(word) << 64 * i for i, word in enumerate(each[0])) for each in words]
    assert as_integers == [(1 << max(0, min(count, tokens))) - 1 for count in counts]


@given(tokens=st.integers(1, 300), data=st.data())
def test_unpacked_bits_are_the_rows(tokens: int, data: st.DataObject) -> None:
    """Goal: a mask says what the words say. Method: shift Python integers; bits behind the block do not show."""
    rows = data.draw(st.lists(st.integers(0, (1 << 64 * words_of(tokens)) - 1), max_size=4))
    raw = b"".join(row.to_bytes(8 * words_of(tokens), "little") for row in rows)
    words = np.frombuffer(raw, "<u8").reshape(len(rows), words_of(tokens))
    mask = unpack_bits(words, tokens)
    assert (mask.shape, mask.dtype) == ((len(rows), tokens), np.dtype(np.bool_))
    assert mask.tolist() == [[bool(row >> t & 1) for t in range(tokens)] for row in rows]


@given(tokens=st.integers(1, 300))
def test_a_full_block_has_every_row_and_nothing_behind_it(tokens: int) -> None:
    full = full_bits(tokens)
    assert sum(int(word) << 64 * i for i, word in enumerate(full)) == (1 << tokens) - 1

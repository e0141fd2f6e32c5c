"""Ids, slots and counts that callers pass, and validity bits: against plain lists, also in blocks of several words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import ConfigError, InvalidInputError
from cache_manager.slots import (
    COUNT_END,
    SlotSpace,
    count_in_range,
    full_bits,
    integers,
    prefix_bits,
    readable,
    rows_in,
    unpack_bits,
    unsigned,
)

BLOCKS = 3
TOKENS = st.sampled_from((1, 3, 4, 48, 63, 64, 65, 96, 128, 130, 192))


@given(TOKENS, st.lists(st.integers(-3, 200), min_size=1, max_size=4))
def test_a_prefix_has_its_first_bits_and_no_other(tokens: int, counts: list[int]) -> None:
    """Goal: no row behind a count is readable. Method: each bit of each word, those behind the last row, too."""
    bits = prefix_bits(np.array(counts), tokens)
    words = -(-tokens // 64)
    assert bits.shape == (len(counts), 1, words)
    flags = [[i < min(count, tokens) for i in range(64 * words)] for count in counts]
    assert [[bool(word >> i & 1) for word in row for i in range(64)] for row in bits[:, 0].tolist()] == flags
    assert unpack_bits(bits[:, 0], tokens).tolist() == [row[:tokens] for row in flags]
    assert rows_in(bits) == sum(map(sum, flags))
    assert full_bits(tokens).tolist() == prefix_bits(np.array([tokens]), tokens)[0, 0].tolist()


@given(TOKENS, st.data())
def test_mask_words_have_the_bits_of_their_slots(tokens: int, data: st.DataObject) -> None:
    """Goal: a slot is one bit, whatever the size of blocks; a slot that is given twice is no step. Method: slots in
    any order, by division."""
    space = SlotSpace("device", BLOCKS, tokens)
    slots = data.draw(st.lists(st.integers(0, BLOCKS * tokens - 1), max_size=12))
    found = space.mask_words_of(np.array(slots, np.int64))
    if len(set(slots)) < len(slots):
        assert found is None
        return
    assert found is not None
    words = -(-tokens // 64)
    bits = {(slot // tokens * words + slot % tokens // 64, slot % tokens % 64) for slot in slots}
    pairs = list(zip(*(array.tolist() for array in found), strict=True))
    assert {(word, i) for word, mask in pairs for i in range(64) if mask >> i & 1} == bits
    assert len({word for word, _ in pairs}) == len(pairs)
    assert set(space.blocks_of(found[0]).tolist()) == {slot // tokens for slot in slots}


@given(st.lists(st.integers(-2, BLOCKS + 1), max_size=5))
def test_known_blocks_are_inside_and_each_once(ids: list[int]) -> None:
    space = SlotSpace("device", BLOCKS, 4)
    array, good = space.known(ids)
    assert array.tolist() == ids
    assert good.tolist() == [0 <= block < BLOCKS and block not in ids[:i] for i, block in enumerate(ids)]
    if all(0 <= block < BLOCKS for block in ids):
        assert space.ids(ids).tolist() == ids
    else:
        with pytest.raises(InvalidInputError, match=r"blocks: wanted device block ids in \[0, 3\)"):
            space.ids(ids)


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ([1.5], r"float64 of shape \(1,\)"),
        ([[1]], r"int64 of shape \(1, 1\)"),
        ([[1], [2, 3]], r"list \(ValueError"),
        (np.array([1 << 63], np.uint64), "9223372036854775808"),
        ([1, 2, 3], "n: wanted 2, integers, got 3"),
    ],
)
def test_what_is_no_flat_sequence_of_integers_is_refused(values: Any, got: str) -> None:
    with pytest.raises(InvalidInputError, match=got):
        integers(values, "n", "integers", n=2)


def test_integers_are_a_new_array() -> None:
    """Goal: an engine may use its buffer again. Method: it does."""
    buffer = np.array([1, 2])
    ids = integers(buffer, "n", "integers")
    buffer[:] = 9
    assert ids.tolist() == [1, 2]
    assert integers(np.zeros(0, np.float32), "n", "integers").dtype == np.int64
    assert unsigned(np.array([1 << 63], np.uint64), "n", "numbers", n=1).tolist() == [1 << 63]
    assert unsigned([0, 1], "n", "numbers", n=2).tolist() == [0, 1]
    for wrong in ([-1, 0], [1], np.zeros((1, 2), np.uint64)):
        with pytest.raises(InvalidInputError, match=r"n: wanted (2, numbers|numbers)"):
            unsigned(wrong, "n", "numbers", n=2)


def test_values_that_an_engine_may_pass_by_mistake_are_counted() -> None:
    """Goal: which integers a wrong argument has, or that this is unknown. Method: one of each kind."""
    numbers, size = readable([[1.0, 2.0]])
    assert numbers is not None
    assert (numbers.tolist(), size) == ([1, 2], 2)
    assert readable([1.5, 2]) == (None, 2)
    assert readable([float("nan")]) == (None, 1)
    assert readable([[1], [2, 3]]) == (None, 1)
    assert readable(np.zeros(2, [("slot", "i8")])) == (None, 2)


@pytest.mark.parametrize("value", [0, COUNT_END, True, 1.0, "1"])
def test_a_count_out_of_range_is_refused(value: Any) -> None:
    assert count_in_range(COUNT_END - 1, "blocks", 1) == COUNT_END - 1
    assert count_in_range(1, "blocks", 1) == 1
    with pytest.raises(ConfigError, match=r"blocks: wanted an integer in \[1, "):
        count_in_range(value, "blocks", 1)

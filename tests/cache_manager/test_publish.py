"""The order in which rows are published and read: every moment of a read met by every step of a writer."""

from __future__ import annotations

import numpy as np
import pytest
from life_canary import Writer, layout_of, wrong
from watched_region import WatchedRegion

from cache_manager.numbers import unpack_bits
from cache_manager.publish import (
    GENERATION_SHIFT,
    READ_RETRIES_MAX,
    gather,
)
from cache_manager.regions import HeapRegion

BLOCKS = 3
IDS = np.arange(BLOCKS)
RUNNING, RETRIED = 4, 4  # loads of a try: word, bits, bytes, word again


def make(tokens: int = 100) -> tuple[Writer, WatchedRegion]:
    """A writer and a reader's sight of the same memory; every block is in a life of its own with every row written."""
    region = HeapRegion(layout_of(tokens, words=4), BLOCKS)
    writer = Writer(region)
    writer.begin_lives(IDS)
    writer.begin_lives(IDS[1:])
    writer.rewrite(IDS, np.ones(tokens, np.bool_))
    return writer, WatchedRegion.over(region)


@pytest.mark.parametrize("change", ["rewrite", "begin", "clear"])
def test_a_block_that_never_holds_still_has_no_valid_row_and_ends(change: str) -> None:
    """Goal: the number of tries is bounded and giving up is said. Method: one of three blocks changes after each load
    of bytes; the others are read whole."""
    writer, region = make()
    every = np.ones(100, np.bool_)

    def disturb(n: int) -> None:
        if n % RETRIED == 3:
            if change == "begin":
                writer.begin_lives(IDS[:1])
            writer.rewrite(IDS[:1], every)
            if change == "clear":
                writer.clear(IDS[:1], every)
                writer.write(IDS[:1], every, (0,))
                writer.add(IDS[:1], ~every)

    region.after_load = disturb
    found, bits, words = gather(region, 0, IDS)
    assert region.loads == RUNNING * READ_RETRIES_MAX
    assert unpack_bits(bits, 100).sum(axis=1).tolist() == [0, 100, 100]
    assert wrong(region, 0, IDS, found, bits, words) == (200, 0)


# ---- what the writer's side promises ---------------------------------------------------------------------------------


def test_the_sequence_goes_round_within_its_sixteen_bits() -> None:
    """Goal: a change of sequence is never a change of generation. Method: the last sequence there is."""
    writer, region = make(4)
    region.words[0] = np.uint64((7 << GENERATION_SHIFT) + 0xFFFF)
    writer.clear(IDS[:1], np.ones(4, np.bool_))
    assert int(region.words[0]) == 7 << GENERATION_SHIFT


# ---- block size 1 ----------------------------------------------------------------------------------------------------

"""The order in which rows are published and read: a reader and a writer in every order of their loads and stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from life_canary import Writer, layout_of, written, wrong
from numpy.typing import NDArray
from watched_region import WatchedRegion, Who, interleave

from cache_manager.publish import GENERATION_SHIFT, READ_RETRIES_MAX, copies_of, gather, gather_slots
from cache_manager.regions import HeapRegion
from cache_manager.slots import unpack_bits
from cache_manager.spec import AuxBlockDataSpec, RecordLayout

TOKENS = 3
IDS = np.arange(2)
EVERY, FEW, NONE = (np.arange(TOKENS) < n for n in (TOKENS, 1, 0))
Work = Callable[[Writer], None]
SHAPES, DTYPES = st.sampled_from(((), (1,), (3,), (5, 2))), st.sampled_from(("uint8", "uint16", "float32"))


def begin_and_write(writer: Writer) -> None:
    writer.begin_lives(IDS)
    writer.rewrite(IDS, FEW)


def begin_in_the_middle_of_a_write(writer: Writer) -> None:
    """A step that will never commit, and the next life, which gets no row."""
    writer.clear(IDS, EVERY)
    writer.write(IDS, EVERY, (0,))
    writer.begin_lives(IDS)


WORK: dict[str, tuple[NDArray[np.bool_], Work, int]] = {  # rows that are there before, and how many stores it takes
    "the first rows of a life": (NONE, lambda writer: writer.rewrite(IDS, EVERY), 3),
    "the same rows again": (EVERY, lambda writer: writer.rewrite(IDS, EVERY), 5),
    "rows beside others": (EVERY, lambda writer: writer.rewrite(IDS, ~FEW), 5),
    "a new life": (EVERY, begin_and_write, 5),
    "a life that ends in a write": (EVERY, begin_in_the_middle_of_a_write, 5),
}


def region_with(rows: NDArray[np.bool_]) -> HeapRegion:
    region = HeapRegion(layout_of(TOKENS, words=4, specs=1), len(IDS))
    writer = Writer(region)
    writer.begin_lives(IDS)
    writer.rewrite(IDS, rows)
    return region


def every_order(reader: int, writer: int) -> Iterator[list[Who]]:
    for of_reader in combinations(range(reader + writer), reader):
        yield ["reader" if i in of_reader else "writer" for i in range(reader + writer)]


@given(st.integers(1, 130), st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=3), st.data())
def test_a_copy_has_the_valid_rows_and_no_other_byte(tokens: int, kinds: list, data: st.DataObject) -> None:
    """Goal: what is stored or sent has no byte of a former life, and every layout has its rows. Method: any bytes in
    blocks, gaps included, any valid rows, any blocks in any order; the copy is made anew, row by row."""
    layout = RecordLayout(
        tuple(AuxBlockDataSpec(f"s{i}", shape, dtype, tokens) for i, (shape, dtype) in enumerate(kinds))
    )
    region = HeapRegion(layout, 3)
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    region.rows[:] = random.integers(1, 256, region.rows.shape)
    ids = np.array(data.draw(st.lists(st.integers(0, 2), max_size=3, unique=True)), np.int64)
    share = data.draw(st.sampled_from((0.0, 0.5, 1.0)))
    valid = (
        random.random((ids.size, len(kinds), tokens)) < share
        if share < 1
        else np.ones((ids.size, len(kinds), tokens), bool)
    )
    packed = np.packbits(valid, axis=2, bitorder="little")
    bits = np.zeros((ids.size, len(kinds), layout.valid_words * 8), np.uint8)
    bits[:, :, : packed.shape[2]] = packed
    wanted = np.zeros((ids.size, layout.nbytes), np.uint8)
    for i, spec, row in zip(*np.nonzero(valid), strict=True):
        at = layout.offsets[spec] + row * layout.specs[spec].row_nbytes
        place = slice(at, at + layout.specs[spec].row_nbytes)
        wanted[i, place] = region.rows[ids[i], place]
    assert np.array_equal(copies_of(region, ids, bits.view("<u8").astype(np.uint64)), wanted)


@pytest.mark.parametrize("what", WORK)
def test_every_order_of_loads_and_stores(what: str) -> None:
    """Goal: no order makes a wrong row valid, and none loses a row that is not written. Method: all orders of a copy's
    four loads and of the stores of one piece of work; a retry comes after."""
    before, work, stores = WORK[what]
    for turns in every_order(4, stores):
        region = region_with(before)
        writers: list[Writer] = []

        def write(watched: WatchedRegion, writers: list[Writer] = writers) -> None:
            writers.append(Writer(watched, round=1))
            work(writers[0])

        rows, bits, words = interleave(turns, region, lambda watched: gather(watched, 0, IDS), write)
        assert wrong(region, 0, IDS, rows, bits, words)[1] == 0, turns
        assert writers[0].region.stores == stores, "all orders are only all if this is how many there are"
        if what == "rows beside others":
            assert unpack_bits(bits, TOKENS)[:, 0].all(), "one change costs one retry and no row that stays"


@pytest.mark.parametrize("what", WORK)
def test_every_order_of_loads_and_stores_of_single_rows(what: str) -> None:
    """Goal: the same where single rows are read, each with its block's word of its own. Method: all orders."""
    before, work, stores = WORK[what]
    blocks, offsets = np.divmod(np.arange(len(IDS) * TOKENS), TOKENS)
    for turns in every_order(4, stores):
        region = region_with(before)

        def write(watched: WatchedRegion) -> None:
            work(Writer(watched, round=1))

        rows, valid, words = interleave(turns, region, lambda watched: gather_slots(watched, 0, blocks, offsets), write)
        got = rows.view(np.uint64)
        lives = (words >> np.uint64(GENERATION_SHIFT)).astype(np.int64)
        rounds = np.broadcast_to(got[:, :1], (len(got), TOKENS))
        expected = written(blocks, lives, TOKENS, got.shape[1], rounds)[np.arange(len(got)), offsets]
        assert (got == expected)[valid].all(), turns
        if what == "rows beside others":
            assert valid.reshape(-1, TOKENS)[:, 0].all(), "one change costs one retry and no row that stays"


@pytest.mark.parametrize("second", WORK)
def test_every_order_of_a_retry_and_a_second_piece_of_work(second: str) -> None:
    """Goal: a retry's loads are in order, too. Method: a rewrite between a copy's loads makes it begin again; then all
    orders of the retry's loads and the stores of other work."""
    _, work, stores = WORK[second]
    if WORK[second][0] is NONE:
        work, stores = (lambda writer: (writer.begin_lives(IDS), writer.rewrite(IDS, EVERY))[0]), 5
    first: list[Who] = ["reader"] * 3 + ["writer"] * 5  # the copy has its bytes when the rewrite comes
    for turns in every_order(5, stores):
        region = region_with(EVERY)

        def write(watched: WatchedRegion) -> None:
            writer = Writer(watched, round=1)
            writer.rewrite(IDS, EVERY)
            work(writer)

        rows, bits, words = interleave([*first, *turns], region, lambda watched: gather(watched, 0, IDS), write)
        assert wrong(region, 0, IDS, rows, bits, words)[1] == 0, turns


@pytest.mark.parametrize("change", ["rewrite", "begin", "clear"])
def test_a_block_that_never_holds_still_has_no_valid_row_and_ends(change: str) -> None:
    """Goal: the number of tries is bounded, and giving up is reported. Method: one of two blocks changes after each
    load of bytes; the other is read whole."""
    memory = region_with(EVERY)
    writer, region = Writer(memory), WatchedRegion.over(memory)

    def disturb(n: int) -> None:
        if n % 4 == 3:  # loads of a try: word, bits, bytes, word again
            if change == "begin":
                writer.begin_lives(IDS[:1])
            writer.rewrite(IDS[:1], EVERY)
            if change == "clear":
                writer.clear(IDS[:1], EVERY)
                writer.write(IDS[:1], EVERY, (0,))
                writer.add(IDS[:1], NONE)

    region.after_load = disturb
    rows, bits, words = gather(region, 0, IDS)
    assert region.loads == 4 * READ_RETRIES_MAX
    assert unpack_bits(bits, TOKENS).sum(axis=1).tolist() == [0, TOKENS]
    assert wrong(region, 0, IDS, rows, bits, words) == (TOKENS, 0)


def test_the_sequence_goes_round_within_its_sixteen_bits() -> None:
    """Goal: a change of sequence is never a change of generation. Method: the last sequence there is."""
    region = region_with(EVERY)
    region.words[0] = np.uint64((7 << GENERATION_SHIFT) + 0xFFFF)
    Writer(region).clear(IDS[:1], EVERY)
    assert int(region.words[0]) == 7 << GENERATION_SHIFT

"""Sparse regions: rows of blocks in use alone have memory; what is read or written is as in a whole one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import numpy as np
import pytest
from budget import examples
from canary import canary_rows
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import BlockStateError, InvalidInputError, NoSpaceError, SlotError
from cache_manager.feed import BlockFeed
from cache_manager.keys import Namespace
from cache_manager.regions import SharedRegion
from cache_manager.regions.directory import region_path
from cache_manager.regions.header import extent_of
from cache_manager.regions.region import PAGE_NBYTES
from cache_manager.regions.view import RegionView
from cache_manager.spec import AuxBlockDataSpec, RecordLayout

BLOCKS, TOKENS = 12, 4
SHAPES = {"several blocks a page": (1000,), "as long as a page": (1024,), "several pages a block": (3000,)}
"""Rows of uint8, four a block: records of 4,032, 4,096 and 12,032 bytes."""


def spec_of(shape: str) -> AuxBlockDataSpec:
    return AuxBlockDataSpec("rows", SHAPES[shape], "uint8", TOKENS)


def memory_of(blocks: AuxBlocks) -> int:
    """Bytes of memory that the kernel counts for the region's file."""
    region = blocks.region("device")
    assert isinstance(region, SharedRegion)
    return os.stat(region_path(region.name)).st_blocks * 512


def needed(blocks: AuxBlocks, held: set[int]) -> int:
    """Header, words and bits, and each page that has a byte of a held block."""
    extent = extent_of(blocks.layout, BLOCKS)
    nbytes = blocks.layout.nbytes
    pages = set[int]()
    for block in held:
        start = extent.rows_offset + block * nbytes
        pages |= set(range(start // PAGE_NBYTES, -(-(start + nbytes) // PAGE_NBYTES)))
    return extent.rows_offset + PAGE_NBYTES * len(pages)


@pytest.fixture(params=SHAPES)
def blocks(request: pytest.FixtureRequest) -> Iterator[AuxBlocks]:
    with AuxBlocks(
        [spec_of(request.param)], blocks=BLOCKS, namespace=Namespace("m", 1), memory="sparse", strict=True
    ) as made:
        yield made


def write(blocks: AuxBlocks, block: int, life: int) -> np.ndarray:
    spec = blocks.layout.specs[0]
    rows = canary_rows(spec, [(f"{block} {life}", i) for i in range(TOKENS)])
    slots = np.arange(block * TOKENS, (block + 1) * TOKENS)
    assert blocks.write_step(slots, {"rows": rows}) == TOKENS
    return rows


def test_memory_is_that_of_the_blocks_in_use(blocks: AuxBlocks) -> None:
    """Goal: the bound, and that it is reached from above and below. Method: the kernel's own count of the file."""
    assert memory_of(blocks) == needed(blocks, set())
    blocks.renew([1, 2, 7])
    assert memory_of(blocks) == needed(blocks, {1, 2, 7})
    write(blocks, 7, 1)
    blocks.retire([2, 7])
    assert memory_of(blocks) == needed(blocks, {1})
    blocks.renew([2])
    blocks.renew([2])
    assert memory_of(blocks) == needed(blocks, {1, 2})
    blocks.retire([0, 1, 2])
    assert memory_of(blocks) == needed(blocks, set())


@given(
    st.sampled_from(sorted(SHAPES)),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, BLOCKS - 1), max_size=5, unique=True)), max_size=30),
)
@examples(40)
def test_rows_are_those_of_a_whole_region(shape: str, acts: list[tuple[bool, list[int]]]) -> None:
    """Goal: no row is lost, changed or of another life beside blocks that come and go; no reader brings memory back.
    Method: lives begin with rows and without, through a feed; every block is read here and by a view after each."""
    with AuxBlocks(
        [spec_of(shape)], blocks=BLOCKS, namespace=Namespace("m", 1), memory="sparse", strict=True
    ) as blocks:
        feed = BlockFeed(BLOCKS)
        with RegionView(blocks.region("device").name) as view:
            rows = dict[int, np.ndarray]()
            for number, (has_rows, ids) in enumerate(acts):
                (feed.renew if has_rows else feed.retire)(ids)
                blocks.apply(feed.take())
                for block in ids:
                    rows.pop(block, None)
                    if has_rows:
                        rows[block] = write(blocks, block, number)
                everything = list(range(BLOCKS))
                for read in (
                    blocks.read("rows", everything, generations=feed.generations),
                    view.read("rows", everything, generations=feed.generations),
                    view.read_slots(
                        "rows", np.arange(BLOCKS * TOKENS), generations=np.repeat(feed.generations, TOKENS)
                    ),
                ):
                    for block in everything:
                        place = slice(block * TOKENS, (block + 1) * TOKENS)
                        assert read.valid[place].all() == read.valid[place].any() == (block in rows)
                        if block in rows:
                            assert np.array_equal(read.values[place], rows[block])
                blocks.assert_consistent()
                assert memory_of(blocks) == needed(blocks, set(rows))


def test_to_attach_brings_no_memory(blocks: AuxBlocks) -> None:
    """Goal: a process that reads, or writes, leaves a sparse region so. Method: both kinds, with a block in use."""
    blocks.renew([3])
    rows = write(blocks, 3, 1)
    for writable in (False, True):
        with SharedRegion.attach(blocks.region("device").name, writable=writable) as region:
            assert np.array_equal(region.rows[3][: rows.nbytes], rows.reshape(-1).view(np.uint8))
            assert memory_of(blocks) == needed(blocks, {3})


def test_nothing_is_written_where_there_is_no_memory(blocks: AuxBlocks) -> None:
    """Goal: a write to a retired block is refused, as to one that was never given out, and no copy arrives."""
    blocks.renew([0, 1, 2])
    write(blocks, 0, 1)
    blocks.retire([1])
    with pytest.raises(SlotError, match="blocks whose rows have memory"):
        write(blocks, 1, 2)
    with pytest.raises(InvalidInputError, match="targets into which no copy, step or device writes"):
        blocks.copy([(0, 1)])
    assert not blocks.read("rows", [1]).valid.any()
    with pytest.raises(BlockStateError, match="always have memory"):
        blocks.begin_step(np.arange(4), in_place=True)
    assert memory_of(blocks) == needed(blocks, {0, 2})


def test_without_memory_rows_are_missing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a file system that is full costs rows, not the process. Method: memory for one block is refused once."""
    spec = spec_of("several pages a block")
    hold = SharedRegion.hold

    def refuses(region: SharedRegion, ids: np.ndarray) -> None:
        if 5 in ids:
            hold(region, ids[:1])
            raise NoSpaceError("here", 12_032, 0, "nothing")
        hold(region, ids)

    with AuxBlocks([spec], blocks=BLOCKS, namespace=Namespace("m", 1), memory="sparse") as blocks:
        blocks.renew([1])
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            patched.setattr(SharedRegion, "hold", refuses)
            blocks.renew([4, 5])
        assert "no memory for the rows of 2 blocks" in caplog.text
        assert memory_of(blocks) == needed(blocks, {1})
        rows = canary_rows(spec, [("x", i) for i in range(TOKENS)])
        assert blocks.write_step(np.arange(20, 24), {"rows": rows}) == 0
        assert blocks.counters.bad_writes_dropped == TOKENS
        assert blocks.write_step(np.arange(4, 8), {"rows": rows}) == TOKENS
        blocks.renew([5])
        assert blocks.write_step(np.arange(20, 24), {"rows": rows}) == TOKENS


def test_no_row_of_another_process_lands_where_there_is_no_memory(blocks: AuxBlocks) -> None:
    """Goal: rows that cross from another engine take no memory behind the region's back: a file system that is full
    would end the process. Method: a record for a block that was retired, and for one that has memory."""
    lives = blocks.renew([0, 1])
    rows = write(blocks, 0, 1)
    key = blocks.keys.adopt(bytes(16))
    (record,) = blocks.exchange.export({key: 0}, lives[:1])
    assert record is not None
    header = record.seal()
    for has_rows in (False, True):
        (life,) = (blocks.renew if has_rows else blocks.retire)([1]).tolist()
        landed = blocks.exchange.install(1, life, header, record.payload)
        assert landed == (TOKENS if has_rows else 0)
        assert blocks.counters.installs_without_memory_dropped == 1
        read = blocks.read("rows", [1])
        assert read.valid.all() == read.valid.any() == has_rows
        assert memory_of(blocks) == needed(blocks, {0, 1} if has_rows else {0})
        blocks.assert_consistent()
    assert np.array_equal(read.values, rows)


def test_whole_regions_have_all_memory() -> None:
    """Goal: what is said of sparse ones holds of no other. Method: the same count, before a block is given out."""
    spec = spec_of("several pages a block")
    with AuxBlocks([spec], blocks=BLOCKS, namespace=Namespace("m", 1), memory="shared") as blocks:
        assert memory_of(blocks) == extent_of(RecordLayout((spec,)), BLOCKS).nbytes
        blocks.renew([1])
        write(blocks, 1, 1)
        blocks.retire([1])
        assert not blocks.read("rows", [1]).valid.any()
        assert memory_of(blocks) == blocks.region("device").nbytes

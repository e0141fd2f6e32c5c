"""The mover of one kind of record: between regions, and to a store and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.mover import RowsMover
from cache_manager.ports import Absence, BlockRecords, Found
from cache_manager.regions import HeapRegion
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.faults import FaultyStore

LAYOUT = RecordLayout((AuxBlockDataSpec("routing", (3,), "uint8", 4),))
BLOCKS = 16
ALL = b"\x0f" + bytes(7)


def key(n: int) -> BlockKey:
    return BlockKey(n.to_bytes(32, "big"))


def filled(blocks: int, seed: int) -> HeapRegion:
    region = HeapRegion(LAYOUT, blocks)
    region.rows[:] = np.random.default_rng(seed).integers(0, 256, region.rows.shape, dtype=np.uint8)
    return region


@given(
    pairs=st.lists(
        st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)), max_size=24, unique_by=lambda p: p[1]
    ),
    runs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 6)), max_size=3),
)
def test_a_copy_is_block_by_block(pairs: list[tuple[int, int]], runs: list[tuple[int, int, int]]) -> None:
    """Goal: what is copied as one slice is what single copies give. Method: pairs at random, and runs among them."""
    taken = {t for _, t in pairs}
    for s, t, n in runs:
        more = [(s + i, t + i) for i in range(n)]
        if taken.isdisjoint(t for _, t in more):
            pairs = pairs + more
            taken |= {t for _, t in more}
    with filled(BLOCKS, 1) as device, filled(BLOCKS, 2) as host:
        wanted = host.rows.copy()
        for s, t in pairs:
            wanted[t] = device.rows[s]
        before = device.rows.copy()
        mover = RowsMover(device, host, None)
        mover.copy("device", "host", *(np.array([p[i] for p in pairs], dtype=np.int64) for i in (0, 1)))
        assert (host.rows == wanted).all()
        assert (device.rows == before).all()
        del wanted, before


def test_a_block_cannot_be_source_and_target_of_one_copy() -> None:
    with filled(4, 1) as device:
        mover = RowsMover(device, None, None)
        with pytest.raises(AssertionError, match="source and target"):
            mover.copy("device", "device", np.array([0, 1]), np.array([1, 2]))
        mover.copy("device", "device", np.array([0, 0]), np.array([1, 2]))
        assert (device.rows[1:3] == device.rows[0]).all()


def test_records_go_to_the_store_and_come_back_with_their_origin() -> None:
    with filled(4, 1) as device:
        mover = RowsMover(device, None, RecordStore(MemoryStore(1 << 16), LAYOUT))
        rows = device.rows[:2].copy()
        batch = BlockRecords([key(1), key(2)], [0, 1], [7, 8], [ALL, b"\x01" + bytes(7)], [3, 4])
        assert mover.put(batch) == [Found(7, ALL), Found(8, b"\x01" + bytes(7))]
        assert mover.put(BlockRecords([key(1)], [1], [9], [ALL], [4])) == [Found(7, ALL)]
        assert mover.contains([key(1), key(3)]) == [True, False]
        found = mover.get_into([key(2), key(3), key(1)], [2, 0, 3])
        assert found == [Found(8, b"\x01" + bytes(7)), Absence.MISS, Found(7, ALL)]
        assert (device.rows[[3, 2]] == rows).all()
        mover.flush()
        assert (mover.counters.stored, mover.counters.conflicts) == (2, 1)


def test_without_a_store_nothing_is_stored_and_nothing_comes_back() -> None:
    with filled(2, 1) as device:
        mover = RowsMover(device, None, None)
        assert mover.put(BlockRecords([key(1)], [0], [7], [ALL], [3])) == [None]
        assert mover.get_into([key(1)], [0]) == [Absence.MISS]
        assert mover.contains([key(1)]) == [False]
        mover.flush()
        assert mover.counters.stored == 0


@pytest.mark.parametrize("fault", ["fail_put", "fail_get"])
def test_a_call_that_fails_lets_the_region_go(fault: str) -> None:
    """Goal: no view of the region outlives a call. Method: the region closes while the exception is still held."""
    device = filled(2, 1)
    faulty = FaultyStore(MemoryStore(1 << 16))
    setattr(faulty, fault, True)
    mover = RowsMover(device, None, RecordStore(faulty, LAYOUT))
    batch = BlockRecords([key(1)], [0], [7], [ALL], [3])
    call = (lambda: mover.put(batch)) if fault == "fail_put" else (lambda: mover.get_into([key(1)], [0]))
    with pytest.raises(StorageError) as caught:
        call()
    device.close()
    assert caught.value.__traceback__ is not None

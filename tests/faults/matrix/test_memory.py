"""Faults of owners and of full stores, in memory: double frees, more than there is room for, bad rows."""

from __future__ import annotations

import pytest
from matrix.blocks import BLOCKS, TOKENS, make_aux, rows_of, says_nothing

from cache_manager.errors import BlockStateError, RecordError, RowError
from cache_manager.manager import BlockManager
from cache_manager.ports import Absence
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, get, key_of, payload_of, put, valid_of


def filled(manager: BlockManager, owner: str, token: int) -> None:
    """A prompt of one block, computed and published."""
    prompt = [token] * TOKENS
    assert manager.allocate(owner, prompt) is not None
    with manager.aux.begin_step(manager.slots(owner, 0, TOKENS)) as step:
        step.write("routing", rows_of(owner))
    manager.publish(owner, prompt)


def has_its_rows(manager: BlockManager, owner: str, who: str) -> bool:
    return manager.read("routing", owner, 0, TOKENS).values.tobytes() == rows_of(who).tobytes()


def test_r01_an_address_freed_twice_is_given_out_once() -> None:
    """Fault: free the same address twice, allocate twice. kvroute: each record comes back as its own bytes."""
    backend = MemoryStore(4 * LAYOUT.nbytes)
    store = RecordStore(backend, LAYOUT)
    assert put(store, [1, 2]) == [True, True]
    backend.delete([key_of(1), key_of(1)])
    backend.delete([key_of(1)])
    assert put(store, [3, 4]) == [True, True]
    assert get(store, [1, 2, 3, 4]) == [Absence.MISS, *(payload_of(n) for n in (2, 3, 4))]
    assert backend.usage()["free_nbytes"] == LAYOUT.nbytes


def test_r02_r15_a_block_freed_twice_stays_with_its_other_owner() -> None:
    """Fault: release one of eight owners twice, then one of a block's two. kvroute: one block, one owner, and counts
    follow; the ninth is refused."""
    manager = BlockManager(make_aux())
    for n in range(BLOCKS):
        filled(manager, f"s{n}", n)
    manager.fork("s1", "child")
    for owner in ("s0", "s0", "s1", "s1", "s1"):
        manager.free(owner)
    assert [manager.allocate(f"t{n}", [100 + n] * TOKENS) is not None for n in range(3)] == [True, False, False]
    tables = [block for owner in manager.owners for block in manager.table(owner)]
    assert sorted(tables) == list(range(BLOCKS))
    assert has_its_rows(manager, "child", "s1")
    manager.assert_consistent()
    manager.aux.close()


def test_r09_a_full_store_refuses_and_does_not_grow() -> None:
    """Fault: more objects than slots, all of them in use. kvroute: refusals as values, the same memory as before."""
    manager = BlockManager(make_aux(blocks=4, host_blocks=2, steps_max=2))
    aux = manager.aux
    nbytes = [aux.region(tier).nbytes for tier in ("device", "host")]
    for n in range(4):
        filled(manager, f"s{n}", n)
    assert [manager.allocate(f"t{n}", [50 + n] * TOKENS) for n in range(5)] == [None] * 5
    assert not manager.append("s0", TOKENS + 1)
    assert [manager.preempt(f"s{n}") for n in range(4)] == [True, True, False, False]
    assert aux.renew([4]).tolist() == [0]
    steps = [aux.begin_step([]), aux.begin_step([])]
    with pytest.raises(BlockStateError, match="steps in flight"):
        aux.begin_step([])
    for step in steps:
        step.abort()
    assert [aux.region(tier).nbytes for tier in ("device", "host")] == nbytes
    assert all(has_its_rows(manager, f"s{n}", f"s{n}") for n in range(4))
    manager.assert_consistent()
    aux.close()
    store = RecordStore(MemoryStore(4 * LAYOUT.nbytes), LAYOUT)
    for n in range(9):
        assert put(store, [n]) == [True]
        assert store.usage()["used_nbytes"] <= store.usage()["capacity_nbytes"] == 4 * LAYOUT.nbytes
    assert get(store, range(9)) == [Absence.MISS] * 5 + [payload_of(n) for n in range(5, 9)]


@pytest.mark.parametrize("length", [0, 1, LAYOUT.nbytes - 1, LAYOUT.nbytes + 1])
def test_r11_a_short_payload_registers_nothing(length: int) -> None:
    """Fault: 10 bytes for a slot of 1024. kvroute: nothing is stored, and a step keeps none of the rows."""
    store = RecordStore(MemoryStore(1 << 20), LAYOUT)
    with pytest.raises(RecordError, match="payload size"):
        store.put([key_of(1)], [bytes(length)], [valid_of(1)], [1], [1])
    assert get(store, [1]) == [Absence.MISS]
    assert put(store, [1]) == [True]
    assert get(store, [1]) == [payload_of(1)]
    with make_aux() as aux:
        aux.renew([0])
        step = aux.begin_step(range(TOKENS))
        for rows in (rows_of("a")[:length] if length < TOKENS else rows_of("a").repeat(2, axis=0), rows_of("a")[:, 1:]):
            with pytest.raises(RowError, match="shape"):
                step.write("routing", rows)
        assert step.commit() == 0
        assert says_nothing(aux, 0)

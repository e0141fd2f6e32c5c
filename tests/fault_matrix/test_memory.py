"""Faults R1, R2, R9, R11 and R15: double frees, full stores, bad calls. Rows in memory."""

from __future__ import annotations

import pytest

from cache_manager.errors import BlockStateError, RecordError, RowError
from cache_manager.manager import BlockManager
from cache_manager.ports import Absence
from cache_manager.storage.memory import MemoryStore
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, get, key_of, payload_of, put, valid_of
from tests.fault_matrix.blocks import (
    BLOCKS,
    TOKENS,
    holds_rows_of,
    make_aux,
    rows_of,
    says_nothing,
)

PROMPT = TOKENS


def make_manager(**options: int) -> BlockManager:
    return BlockManager(make_aux(**options))


def test_r01_an_address_freed_twice_is_given_out_once() -> None:
    """Fault: free the same address twice, allocate twice. kvroute: each record comes back as its own bytes."""
    backend = MemoryStore(4 * LAYOUT.nbytes)
    store = RecordStore(backend, LAYOUT)
    assert put(store, [1, 2]) == [True, True]
    backend.delete([key_of(1), key_of(1)])
    backend.delete([key_of(1)])
    assert put(store, [3, 4]) == [True, True]
    assert get(store, [1, 2, 3, 4]) == [Absence.MISS, *(payload_of(n) for n in (2, 3, 4))]
    usage = backend.usage()
    assert usage["used_nbytes"] == 3 * LAYOUT.nbytes
    assert usage["used_nbytes"] + usage["free_nbytes"] == usage["capacity_nbytes"]
    backend.close()


def test_r02_nine_sequences_never_share_eight_blocks() -> None:
    """Fault: release one of eight live objects twice, then allocate until it stops. kvroute: one block, one owner."""
    manager = make_manager()
    for n in range(BLOCKS):
        assert manager.allocate(f"s{n}", [n] * PROMPT) is not None
    manager.free("s0")
    manager.free("s0")
    admitted = [manager.allocate(f"t{n}", [100 + n] * PROMPT) is not None for n in range(3)]
    assert admitted == [True, False, False]
    tables = [block for owner in manager.owners for block in manager.table(owner)]
    assert sorted(tables) == list(range(BLOCKS))
    manager.assert_consistent()
    manager.aux.close()


def test_r09_a_full_store_refuses_and_does_not_grow() -> None:
    """Fault: more objects than slots, all of them in use. kvroute: refusals as values, the same memory as before."""
    manager = make_manager(blocks=4, host_blocks=2, steps_max=2)
    aux = manager.aux
    nbytes = [aux.region(tier).nbytes for tier in ("device", "host")]
    for n in range(4):
        assert manager.allocate(f"s{n}", [n] * PROMPT) is not None
        with aux.begin_step(manager.slots(f"s{n}", 0, PROMPT)) as step:
            step.write("routing", rows_of(f"s{n}"))
        manager.publish(f"s{n}", [n] * PROMPT)
    assert [manager.allocate(f"t{n}", [50 + n] * PROMPT) for n in range(5)] == [None] * 5
    assert not manager.append("s0", PROMPT + 1)
    assert [manager.preempt(f"s{n}") for n in range(4)] == [True, True, False, False]
    assert aux.renew([4]).tolist() == [0]
    steps = [aux.begin_step([]), aux.begin_step([])]
    with pytest.raises(BlockStateError, match="steps in flight"):
        aux.begin_step([])
    for step in steps:
        step.abort()
    assert [aux.region(tier).nbytes for tier in ("device", "host")] == nbytes
    for n in range(4):
        assert manager.read("routing", f"s{n}", 0, PROMPT).values.tobytes() == rows_of(f"s{n}").tobytes()
    manager.assert_consistent()
    aux.close()

    backend = MemoryStore(4 * LAYOUT.nbytes)
    store = RecordStore(backend, LAYOUT)
    for n in range(9):
        assert put(store, [n]) == [True]
        assert backend.usage()["used_nbytes"] <= backend.usage()["capacity_nbytes"] == 4 * LAYOUT.nbytes
    assert get(store, range(9)) == [Absence.MISS] * 5 + [payload_of(n) for n in range(5, 9)]
    backend.close()


@pytest.mark.parametrize("length", [0, 1, LAYOUT.nbytes - 1, LAYOUT.nbytes + 1])
def test_r11_a_short_payload_registers_nothing(length: int) -> None:
    """Fault: 10 bytes for a slot of 1024. kvroute: nothing is stored, and a step keeps none of the rows."""
    backend = MemoryStore(1 << 20)
    store = RecordStore(backend, LAYOUT)
    with pytest.raises(RecordError, match="payload size"):
        store.put([key_of(1)], [bytes(length)], [valid_of(1)], [1], [1])
    assert store.contains([key_of(1)]) == [False]
    assert get(store, [1]) == [Absence.MISS]
    assert put(store, [1]) == [True]
    assert get(store, [1]) == [payload_of(1)]
    backend.close()

    with make_aux() as aux:
        aux.renew([0])
        step = aux.begin_step(range(TOKENS))
        for rows in (rows_of("a")[:length] if length < TOKENS else rows_of("a").repeat(2, axis=0), rows_of("a")[:, 1:]):
            with pytest.raises(RowError, match="shape"):
                step.write("routing", rows)
        assert step.commit() == 0
        assert says_nothing(aux, 0)


def test_r15_a_block_freed_twice_stays_with_its_other_owner() -> None:
    """Fault: four blocks, free one twice, allocate three times. kvroute: sequences have blocks, and counts follow."""
    manager = make_manager(blocks=4)
    with manager.aux as aux:
        assert manager.allocate("a", [1] * PROMPT) is not None
        with aux.begin_step(manager.slots("a", 0, PROMPT)) as step:
            step.write("routing", rows_of("a"))
        manager.publish("a", [1] * PROMPT)
        manager.fork("a", "b")
        for _ in range(3):
            manager.free("a")
        (block,) = manager.table("b")
        assert [manager.allocate(f"s{n}", [2 + n] * PROMPT) is not None for n in range(4)] == [True] * 3 + [False]
        assert block not in {b for n in range(3) for b in manager.table(f"s{n}")}
        assert holds_rows_of(aux, block, "a")
        manager.free("b")
        manager.free("b")
        assert [manager.allocate(f"t{n}", [9 + n] * PROMPT) is not None for n in range(2)] == [True, False]
        manager.assert_consistent()

"""Classes of published bugs for which no other test stands; see ``docs/faults.md``."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from matrix.blocks import holds_rows_of, key, make_aux, persist, rows_of, write
from waiting import GIVE_UP_S

from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.slots import SlotSpace, integers
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store
from cache_manager.testing.faults import FaultyStore

SMALL = AuxBlockDataSpec("routing", (3,), "uint8", 4)
KEYS = """
from matrix.blocks import key, make_aux
with make_aux() as aux:
    print(key(aux, 1).hex(), aux.namespace.fingerprint.hex(), aux.layout.fingerprint.hex())
"""


def test_processes_with_other_hash_seeds_agree_on_every_key() -> None:
    """Goal: no key depends on ``PYTHONHASHSEED``. Method: the same key in three processes, each with its own seed."""
    path = os.pathsep.join(p for p in sys.path if p)
    said = {
        subprocess.run(
            [sys.executable, "-c", KEYS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
            timeout=GIVE_UP_S,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(said) == 1


@pytest.mark.parametrize("call", ["persist", "restore"])
def test_a_slow_store_delays_no_other_request(call: str) -> None:
    """Goal: no convoy behind one slow look-up. Method: a store that waits until others have done everything."""
    store = FaultyStore(open_store("memory:"))
    with make_aux(store) as aux:
        assert persist(aux, [1])
        aux.renew([0])
        write(aux, 1, "r")
        finished = threading.Event()

        def others() -> None:
            write(aux, 2, "b")
            aux.swap_out([(2, 0)])
            aux.renew([3])
            aux.swap_in([(0, 3)])
            assert holds_rows_of(aux, 3, "b")
            finished.set()

        def wait() -> None:
            thread = threading.Thread(target=others, daemon=True)
            thread.start()
            thread.join(GIVE_UP_S)
            assert finished.is_set(), "others waited for the store"

        store.during_get = store.during_put = wait
        if call == "persist":
            assert all(aux.persist({key(aux, 7): 1}, aux.generations([1])).values())
        else:
            assert all(aux.restore({key(aux, 1): 0}, aux.generations([0])).values())
            assert holds_rows_of(aux, 0, "record-1")
        assert finished.is_set()


@pytest.mark.parametrize("memory", ["heap", "shared"])
def test_rows_handed_out_are_the_readers_own(memory: str) -> None:
    """Goal: rows that were read never change. Method: give the block away, overwrite, reset and close; look again."""
    aux = make_aux(memory=memory)
    write(aux, 0, "a")
    read = aux.read("routing", [0])
    write(aux, 0, "b")
    aux.reset(weights_version=2)
    assert read.valid.all()
    aux.close()
    assert read.values.tobytes() == rows_of("a").tobytes()
    read.values[:] = 0


def test_offsets_beyond_two_gigabytes_are_right() -> None:
    """Goal: no 32-bit offset. Method: slots and keys of the last of a hundred million blocks, without the memory; block
    ids come from a shift, and from a division."""
    blocks = 100_000_000
    for tokens in (64, 48):
        last = np.array([(blocks - 1) * tokens + tokens - 1, 2**31 // tokens * tokens + 1])
        geometry = SlotSpace("device", 1, tokens)
        mask_words, bits = geometry.bit_by_bit(integers(last, "slots", "integers"))
        assert geometry.blocks_of(mask_words).tolist() == [blocks - 1, 2**31 // tokens]
        assert bits.tolist() == [1 << (tokens - 1), 1 << 1]


def test_reading_the_rows_of_a_turn_costs_that_turn() -> None:
    """Goal: a conversation's next turn does not copy all turns before. Method: the memory that a read allocates, for a
    few rows at the end of a long sequence.
    """
    spec = AuxBlockDataSpec("routing", (8, 8), "uint8", 16)
    blocks = list(range(1024))
    with AuxBlocks([spec], blocks=1024, namespace=Namespace("m", 1)) as aux:
        aux.renew(blocks)
        tokens = len(blocks) * spec.block_tokens
        with aux.begin_step(range(tokens)) as step:
            step.write("routing", (np.arange(tokens)[:, None, None] % 251).astype("uint8").repeat(8, 1).repeat(8, 2))
        aux.read("routing", blocks, 0, 1)  # whatever is made once, at the first call
        tracemalloc.start()
        try:
            read = aux.read("routing", blocks, tokens - 20, tokens)
            assert tracemalloc.get_traced_memory()[1] < spec.row_nbytes * tokens // 8
        finally:
            tracemalloc.stop()
    assert read.valid.all()
    assert read.values[:, 0, 0].tolist() == [n % 251 for n in range(tokens - 20, tokens)]


def test_a_slot_buffer_that_is_used_again_changes_no_step_in_flight() -> None:
    """Goal: engines keep one slot array for all steps. Method: refill it between begin and a commit with rejections.

    Rows used to become readable at the slots of the *next* step, which were unwritten.
    """
    with AuxBlocks([SMALL], blocks=3, namespace=Namespace("m", 1)) as aux:
        aux.renew([0, 1, 2])
        slots = np.arange(8)
        step = aux.begin_step(slots)
        step.write("routing", np.full((8, 3), 7))
        slots[:] = np.arange(4, 12)
        later = aux.begin_step(slots[4:])
        assert step.commit(np.array([False] + [True] * 7)) == 7
        later.abort()
        found = aux.read("routing", [0, 1, 2])
    assert found.valid.tolist() == [False] + [True] * 7 + [False] * 4
    assert (found.values[found.valid] == 7).all()


@pytest.mark.parametrize("integer", [np.int32, np.int64, np.uint16])
def test_numpy_scalars_are_integers(integer: Any) -> None:
    """Goal: sizes and positions often come out of arrays. Method: the same spec and the same read with them."""
    plain, scalar = AuxBlockDataSpec("r", (3,), "uint8", 4), AuxBlockDataSpec("r", (integer(3),), "uint8", integer(4))
    assert scalar == plain
    assert scalar.to_json() == plain.to_json()
    assert type(scalar.block_tokens) is int
    with AuxBlocks([SMALL], blocks=2, namespace=Namespace("m", 1)) as aux:
        aux.renew([integer(1)])
        with aux.begin_step([integer(5)]) as step:
            step.write("routing", np.full((1, 3), 3))
        assert aux.read("routing", [1], integer(1), integer(2)).valid.tolist() == [True]

"""AuxBlocks by example: what is stored, what comes back, and from a store that keeps no contract."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from aux_house import SPEC, fill
from canary import canary_rows

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import StorageError
from cache_manager.keys import Namespace
from cache_manager.lifecycle import State
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store
from cache_manager.testing.faults import FaultyStore


def test_a_reset_while_the_store_is_read_drops_what_was_read(aux, store) -> None:
    """Goal: a reset that lands during I/O. Method: the store calls reset in the middle of a get."""
    fill(aux, [0], "old", "a")
    key = aux.keys.key(None, [1])
    aux.persist({key: 0}, owner="a")
    aux.allocate([1], "b")
    store.during_get = lambda: aux.reset(weights_version=2)
    assert aux.restore({key: 1}, owner="b") == {key: False}
    assert not aux.read("routing", range(6)).valid.any()
    assert aux.counters.late_restores_dropped == 1


def test_rows_come_back_beside_the_kv_that_the_caller_names_and_no_other(aux) -> None:
    """Goal: KV that somebody else keeps, and knows the origin of. Method: another origin, none at all, the right."""
    rows = fill(aux, [0], "a", "a")
    key = aux.keys.key(None, [1])
    origin = aux.persist({key: 0}, owner="a")[key]
    aux.allocate([1], "b")
    for said in ({key: origin ^ 1}, {}):
        assert aux.restore({key: 1}, owner="b", origins=said) == {key: False}
        assert not aux.read("routing", [1]).valid.any()
    assert aux.counters.blocks_of_another_origin_not_restored == 2
    assert aux.restore({key: 1}, owner="b", origins={key: origin}) == {key: True}
    assert np.array_equal(aux.read("routing", [1]).values, rows)


def test_a_block_that_nobody_holds_is_restored_in_the_life_that_it_begins(aux) -> None:
    rows = fill(aux, [0], "a", "a")
    key, life = aux.keys.key(None, [1]), aux.generations([1])
    aux.persist({key: 0}, owner="a")
    assert aux.restore({key: 1}, generations=life) == {key: True}
    assert aux.generations([1]) == life + 1
    assert aux.blocks_in(State.CACHED) == 1
    assert np.array_equal(aux.read("routing", [1]).values, rows)


def test_after_a_restore_that_brought_nothing_nobody_knows_what_kv_is_there(aux) -> None:
    """Goal: a mover may have written over KV that had come. Method: its name is gone."""
    aux.allocate([0], "a")
    assert aux.bind_origin(0, int(aux.generations([0])[0]), 77, 4)
    assert aux.restore({aux.keys.key(None, [1]): 0}, owner="a") == {aux.keys.key(None, [1]): False}
    assert aux.origins([0]) == [0]


def test_an_incomplete_block_is_not_persisted(aux) -> None:
    aux.allocate([0], "a")
    with aux.step([0, 1, 2]) as step:
        step.write("routing", canary_rows(SPEC, [("x", i) for i in range(3)]))
    key = aux.keys.key(None, [1])
    assert aux.persist({key: 0}, owner="a") == {key: 0}
    assert aux.counters.incomplete_blocks_not_persisted == 1
    with aux.step([3]) as step:
        step.write("routing", canary_rows(SPEC, [("x", 3)]))
    assert aux.persist({key: 0}, owner="a") == {key: aux.origins([0])[0]}, (
        "what was stored without rows is filled in later"
    )


def test_what_a_reader_needs_decides_whether_a_record_will_do() -> None:
    """Goal: two engines with different ``required`` on one store. Method: one stores less than the other needs."""
    store = open_store("memory:")
    specs = [SPEC, AuxBlockDataSpec("logprob", (), "float32", 4)]
    arguments = {"device_blocks": 2, "namespace": Namespace("m", 1), "store": store}
    with AuxBlocks(specs, required=["routing"], **arguments) as writer, AuxBlocks(specs, **arguments) as reader:
        fill(writer, [0], "mine", "a")
        key = writer.keys.key(None, [1])
        assert writer.persist({key: 0}, owner="a") == {key: writer.origins([0])[0]}
        reader.allocate([0], "b")
        assert reader.restore({key: 0}, owner="b") == {key: False}
        assert not reader.read("routing", [0]).valid.any()
        assert reader.counters.incomplete_blocks_not_restored == 1


class HalfAnswer(FaultyStore):
    """A foreign backend that is not sound: forgets an answer, or answers with a header of another shape."""

    header_valid: bytes | None = None

    def get_into(self, keys, buffers):
        found = super().get_into(keys, buffers)
        if self.header_valid is None:
            return found[:-1]
        return [msgspec.structs.replace(h, valid=self.header_valid) for h in found]


@pytest.mark.parametrize("valid", [None, b"", b"\xff" * 8, b"\xff" * 16])
def test_a_backend_that_breaks_its_contract_leaves_no_block_stuck(valid) -> None:
    """Goal: nothing stays ARRIVING, nothing wrong becomes readable. Method: a backend that answers nonsense."""
    store = HalfAnswer(open_store("memory:"))
    store.header_valid = valid
    with AuxBlocks([SPEC], device_blocks=3, namespace=Namespace("m", 1), store=store) as aux:
        fill(aux, [0], "mine", "a")
        key = aux.keys.key(None, [1])
        aux.persist({key: 0}, owner="a")
        aux.allocate([1], "b")
        if valid is None:
            with pytest.raises(StorageError, match="answered 0 of 1 keys"):
                aux.restore({key: 1}, owner="b")
        else:
            assert aux.restore({key: 1}, owner="b") == {key: False}
        assert aux.in_flight == 0
        assert not aux.read("routing", [1]).valid.any()
        aux.free("b")
        aux.allocate([1], "c")

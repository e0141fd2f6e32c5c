"""The seam by which another process can move the bytes: one mover, for moves and for the store."""

from __future__ import annotations

import numpy as np
import pytest
from canary import canary_rows
from job_house import JobHouse

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import ConfigError, StorageError
from cache_manager.keys import Namespace
from cache_manager.mover import RowsMover
from cache_manager.regions import list_regions
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store
from cache_manager.storage.records import RecordStore

SPEC = AuxBlockDataSpec("routing", (3,), "uint8", 4)
ROWS = canary_rows(SPEC, [("mine", i) for i in range(4)])


class Asked(RowsMover):
    """A mover over the regions that it is handed and a store of its own; it keeps what it was asked, and can fail."""

    __slots__ = ("asked", "fail", "handed")

    def __init__(self, device, host) -> None:
        super().__init__(device, host, RecordStore(open_store("memory:"), device.layout))
        self.handed = device, host
        self.asked: list[tuple[object, ...]] = []
        self.fail = False

    def copy(self, source, target, sources, targets) -> None:
        self.asked.append((source, target, sources.tolist(), targets.tolist()))
        super().copy(source, target, sources, targets)
        if self.fail:  # what it has copied by then means nothing
            raise StorageError("the mover's process has died")

    def put(self, records, *, replace=False):
        self.asked.append(("put", records.blocks, records.generations, records.origins))
        if self.fail:
            raise StorageError("the mover's process has died")
        return super().put(records, replace=replace)

    def get_into(self, keys, blocks):
        self.asked.append(("get_into", blocks))
        if self.fail:
            raise StorageError("the mover's process has died")
        return super().get_into(keys, blocks)


class House:
    """A block of owner ``a`` with every row, and the mover that was made for it."""

    def __init__(self, **arguments: object) -> None:
        self.aux = AuxBlocks(
            [SPEC], device_blocks=4, host_blocks=2, namespace=Namespace("m", 1), mover=self._make, **arguments
        )
        self.aux.allocate([0], "a")
        with self.aux.step(range(4)) as step:
            step.write("routing", ROWS)

    def _make(self, device, host) -> Asked:
        self.mover = Asked(device, host)
        return self.mover


def test_every_move_s_bytes_go_through_the_mover_and_its_failure_changes_nothing() -> None:
    house = House()
    with house.aux as aux:
        house.mover.fail = True
        for attempt in (lambda: aux.swap_out([(0, 1)]), lambda: aux.copy([(0, 2)])):
            with pytest.raises(StorageError, match="has died"):
                attempt()
        assert aux.holds("a", 0)
        assert aux.in_flight == 0
        assert aux.counters.moves_aborted == 2
        house.mover.fail = False
        aux.copy([(0, 2)])
        aux.swap_out([(0, 1)])
        aux.swap_in([(1, 3)])
        assert house.mover.asked[2:] == [
            ("device", "device", [0], [2]),
            ("device", "host", [0], [1]),
            ("host", "device", [1], [3]),
        ]
        for block in (2, 3):
            assert np.array_equal(aux.read("routing", [block]).values, ROWS)


def test_the_mover_stands_in_for_the_store() -> None:
    """Method: persist and restore by a mover that was made over the regions that it is handed; then let it fail."""
    house = House()
    with house.aux as aux:
        assert [region.blocks for region in house.mover.handed] == [4, 2]
        assert house.mover.handed == (aux.region("device"), aux.region("host"))
        key, origin = aux.keys.key(None, [1]), aux.origins([0])[0]
        assert aux.persist({key: 0}, owner="a") == {key: origin}
        assert aux.stored([key]) == [True]
        aux.allocate([1], "b")
        assert aux.restore({key: 1}, owner="b") == {key: True}
        assert np.array_equal(aux.read("routing", [1], owner="b").values, ROWS)
        assert aux.origins([1]) == [origin]
        assert house.mover.asked == [("put", [0], aux.generations([0]).tolist(), [origin]), ("get_into", [1])]
        assert aux.store_counters == house.mover.counters
        aux.flush()
        house.mover.fail = True
        aux.allocate([2], "c")
        for attempt in (lambda: aux.persist({key: 0}, owner="a"), lambda: aux.restore({key: 2}, owner="c")):
            with pytest.raises(StorageError, match="has died"):
                attempt()
        assert aux.in_flight == 0
        assert not aux.read("routing", [2]).valid.any()


@pytest.mark.parametrize("beside", ["store", "kv"])
def test_a_mover_is_instead_of_a_store_and_a_mover_of_kv(beside: str) -> None:
    with pytest.raises(ConfigError, match="mover: wanted a mover, or a store and the KV's mover, got both"):
        House(**{beside: open_store("memory:")})


def test_a_mover_that_cannot_start_leaves_no_region_behind() -> None:
    made = []

    def none(*regions):
        made.extend(region.name for region in regions)
        raise StorageError("no process")

    with pytest.raises(StorageError, match="no process"):
        AuxBlocks([SPEC], device_blocks=4, host_blocks=2, namespace=Namespace("m", 1), memory="shared", mover=none)
    assert len(made) == 2
    assert not {*made} & {region.name for region in list_regions()}


@pytest.mark.parametrize("policy", ["gate", "mask"])
def test_rows_of_another_pass_are_not_given_beside_the_kv_that_stayed(policy) -> None:
    """Goal: `rows_are_of_the_pass_that_made_the_kv`. Method: one part is lost; a second put fails half way."""
    house = JobHouse(with_kv=True, policy=policy)
    house.store_block(0)
    house.fill(1, "b")
    if policy == "gate":  # rows go first: they are of the second pass, the KV is of the first
        house.store.delete([house.key])
        house.kv.fail_next = StorageError
    else:  # KV goes first
        del house.kv.stored[house.key]
        house.store.fail_put = True
    with pytest.raises(StorageError, match="on purpose"):
        house.aux.persist({house.key: 1}, owner="b")
    house.aux.allocate([2], "c")
    assert house.aux.restore({house.key: 2}, owner="c") == {house.key: policy == "mask"}
    assert not house.aux.read("routing", [2]).valid.any()
    counters = house.aux.counters
    assert counters.restored_without_rows == (policy == "mask")
    assert counters.blocks_of_another_origin_not_restored == (policy == "gate")
    house.aux.close()

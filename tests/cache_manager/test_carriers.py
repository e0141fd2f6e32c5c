"""The two seams by which another process can move the bytes: a carrier for the store, a copier for moves."""

from __future__ import annotations

import numpy as np
import pytest
from canary import canary_rows

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.carrier import LocalCarrier, LocalCopier, Transport
from cache_manager.errors import ConfigError, StorageError
from cache_manager.keys import Namespace
from cache_manager.regions import list_regions
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.storage import open_store
from cache_manager.storage.records import RecordStore

SPEC = AuxBlockDataSpec("routing", (3,), "uint8", 4)
ROWS = canary_rows(SPEC, [("mine", i) for i in range(4)])


class Mover(LocalCopier):
    """A copier and a carrier's maker that keep what they were asked, and fail when told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []
        self.fail = False

    def copy(self, source, target, sources, targets) -> None:
        self.asked.append((list(sources), list(targets)))
        super().copy(source, target, sources[: 0 if self.fail else None], targets[: 0 if self.fail else None])
        if self.fail:
            raise StorageError("the mover's process has died")


def _filled(**arguments: object) -> AuxBlocks:
    aux = AuxBlocks([SPEC], device_blocks=4, host_blocks=2, namespace=Namespace("m", 1), **arguments)
    aux.allocate([0], "a")
    with aux.step(range(4)) as step:
        step.write("routing", ROWS)
    return aux


def test_every_move_s_bytes_go_through_the_copier_and_its_failure_changes_nothing() -> None:
    mover = Mover()
    with _filled(transport=lambda *_: Transport(mover, None)) as aux:
        mover.fail = True
        for attempt in (lambda: aux.swap_out([(0, 1)]), lambda: aux.copy([(0, 2)])):
            with pytest.raises(StorageError, match="has died"):
                attempt()
        assert aux.holds("a", 0)
        assert aux.in_flight == 0
        mover.fail = False
        aux.copy([(0, 2)])
        aux.swap_out([(0, 1)])
        aux.swap_in([(1, 3)])
        assert mover.asked[2:] == [([0], [2]), ([0], [1]), ([1], [3])]
        for block in (2, 3):
            assert np.array_equal(aux.read("routing", [block]).ids, ROWS)


def test_a_carrier_stands_in_for_the_store() -> None:
    """Method: a carrier made over the region that it is handed, with a store of its own."""
    made = []

    def transport(device, host):
        assert (device.blocks, host.blocks) == (4, 2)
        made.append(LocalCarrier(device, RecordStore(open_store("memory:"), device.layout)))
        return Transport(LocalCopier(), made[-1])

    with _filled(transport=transport) as aux:
        key = aux.keys.key(None, [1])
        assert aux.persist({key: 0}) == {key: True}
        assert aux.stored([key]) == [True]
        aux.allocate([1], "b")
        assert aux.restore({key: 1}) == {key: True}
        assert np.array_equal(aux.read("routing", [1], owner="b").ids, ROWS)
        assert aux.store_counters == made[0].counters
        aux.flush()
    with pytest.raises(ConfigError, match="transport: wanted a store or a transport, got both"):
        _filled(store=open_store("memory:"), transport=transport)


def test_a_transport_that_cannot_start_leaves_no_region_behind() -> None:
    def transport(*_):
        raise StorageError("no process")

    before = {region.name for region in list_regions()}
    with pytest.raises(StorageError, match="no process"):
        _filled(memory="shared", transport=transport)
    assert {region.name for region in list_regions()} <= before

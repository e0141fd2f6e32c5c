"""The life-cycle kit finds faults of the kinds that trackers report, and none in the managers they are planted in."""

from __future__ import annotations

import pytest
from finding import check_found
from nano import Nano
from planted_managers import PLANTED, Planted
from tiered_manager import Stored, Tiered

from cache_manager.testing.life import BlockManagerMachine


class TestNano(BlockManagerMachine):
    adapter = Nano


class TestTiered(BlockManagerMachine):
    adapter = Tiered


class TestStored(BlockManagerMachine):
    adapter = Stored


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Planted) -> None:
    """Goal: no fault of a kind that was reported escapes. Method: each is planted alone, in one manager."""
    check_found(fault)

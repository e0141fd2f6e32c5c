"""Each invariant of the life-cycle kit is broken by a fault that it names."""

from __future__ import annotations

import pytest
from tiny_faults import FAULTS
from tiny_managers import Plain, Sharing
from tiny_told import check_sound_without

from cache_manager.testing.life import (
    InvariantBroken,
    prove,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_by_its_invariant_and_told_shortly(fault) -> None:
    """Goal: each invariant can break, and its story is short and can be replayed. Method: a manager with that one
    fault; the manager without the fault passes the same story."""
    assert len(check_sound_without(fault)) <= 9


class SaltIsABoolean(Sharing):
    """Knows whether there is a salt, but not its value."""

    breaks = "salts_apart"

    def key(self, salt, tokens):
        return super().key((bool(salt[0]), salt[1]), tokens)


class BreaksLate(Plain):
    """Loses a block with the eightieth sequence that ends."""

    breaks = "no_block_lost"
    ended = 0

    def free(self, seq):
        self.ended += seq in self.tables
        super().free(seq)
        if self.ended == 80:
            self.free_list.pop()


@pytest.mark.parametrize("fault", [SaltIsABoolean, BreaksLate], ids=lambda fault: fault.__name__)
def test_what_needs_other_salts_or_long_lives_is_found(fault) -> None:
    with pytest.raises(InvariantBroken) as caught:
        prove(fault)
    assert caught.value.name == fault.breaks

"""Which keys a set knows as its own, and those of before a reset."""

from __future__ import annotations

import pytest
from blocks_house import House

from cache_manager.errors import InvalidInputError
from cache_manager.keys import BlockKey
from cache_manager.own_keys import OUTDATED_MAX


@pytest.mark.parametrize("key", [b"k", "k", 7, b"h" * 32], ids=repr)
def test_a_key_that_was_made_nowhere_is_a_mistake(key, caplog) -> None:
    """Goal: an engine's own hash that was not adopted is no silent "nothing stored". Method: persist, restore and
    export under it, strict or not; then under a key from before a reset, which is late."""
    for strict in (True, False):
        house = House(strict=strict)
        engine = house.engine
        (life,) = engine.renew([0]).tolist()
        house.fill(0, "mine")
        for call in (engine.persist, engine.restore, engine.begin_persist, engine.exchange.export):
            if strict:
                with pytest.raises(InvalidInputError, match=r"keys: wanted keys that .* has adopted"):
                    call({key: 0}, [life])
            else:
                call({key: 0}, [life])
        assert engine.counters.foreign_keys == (0 if strict else 4)
        assert engine.counters.stale_keys == 0
        engine.reset(weights_version=2)
        assert engine.persist({house.key: 0}, [life]) == {house.key: 0}
        assert engine.counters.stale_keys == 1
        house.close()
    assert [record.message[:36] for record in caplog.records] == ["keys: wanted keys that AuxBlocks.key"]


def test_of_many_resets_the_latest_are_remembered() -> None:
    """Goal: what a set keeps of its past is bounded. Method: more resets than it remembers, and the first one's key."""
    house = House()
    (life,) = house.engine.renew([0]).tolist()
    for version in range(2, OUTDATED_MAX + 2):
        house.engine.reset(weights_version=version)
    house.engine.persist({house.key: 0}, [life])
    assert (house.engine.counters.stale_keys, house.engine.counters.foreign_keys) == (1, 0)
    house.engine.reset(weights_version=0)
    house.engine.persist({house.key: 0}, [life])
    assert (house.engine.counters.stale_keys, house.engine.counters.foreign_keys) == (1, 1)
    house.close()


def test_a_key_of_ours_beside_a_foreign_one_is_no_mistake(house) -> None:
    """Goal: each key of a call is judged by itself. Method: one that was made here and one that was not are stored; and
    are restored in a namespace that has come again, where ours was outdated once."""
    engine = house.engine
    foreign = BlockKey(bytes(32))
    lives = engine.renew([0, 1]).tolist()
    house.fill(0, "mine")
    house.fill(1, "too")
    stored = engine.persist({house.key: 0, foreign: 1}, lives)
    assert stored[house.key]
    assert not stored[foreign]
    assert (engine.counters.stale_keys, engine.counters.foreign_keys) == (0, 1)
    version = engine.namespace.weights_version
    engine.reset(weights_version=version + 1)
    engine.reset(weights_version=version)
    lives = engine.renew([2, 3]).tolist()
    assert engine.restore({house.key: 2, foreign: 3}, lives) == {house.key: True, foreign: False}
    assert (engine.counters.stale_keys, engine.counters.foreign_keys) == (0, 2)

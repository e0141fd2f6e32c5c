"""Keys that are no hits any more are remembered, up to a limit."""

from __future__ import annotations

from cache_manager.keys import BlockKey
from kvroute.integrations.sglang.gone import GONE_MAX, GoneKeys


def keys_of(start: int, stop: int) -> set[BlockKey]:
    return {BlockKey(number.to_bytes(32, "little")) for number in range(start, stop)}


def test_the_latest_keys_are_remembered_up_to_a_limit() -> None:
    """Goal: memory has a limit, and below it no key is a hit again. Method: keys up to the limit, and one more."""
    gone = GoneKeys()
    (first,) = keys_of(0, 1)
    (last,) = keys_of(GONE_MAX, GONE_MAX + 1)
    gone.add({first})
    gone.add(set())
    assert first in gone
    gone.add(keys_of(1, GONE_MAX))
    assert first in gone
    gone.add({last})
    assert last in gone
    assert first not in gone
    gone.clear()
    assert last not in gone

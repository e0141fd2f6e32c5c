"""The index of a file store, against a dict."""

from __future__ import annotations

import os

from budget import examples
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.keys import BlockKey
from cache_manager.record import RecordHeader
from cache_manager.storage.file.extent import Extent, Run, Shape
from cache_manager.storage.file.index import ANY_TAIL, KeyIndex
from cache_manager.storage.guard import StoreLock

SLOTS, EXTENTS, KEYS = 6, 3, 12
STEPS = st.tuples(
    st.sampled_from(["hold", "hold", "forget", "release", "replace"]),
    *(st.integers(0, most) for most in (EXTENTS - 1, SLOTS - 1, 3, KEYS - 1)),
)


def key_of(n: int) -> BlockKey:
    """Three keys have one number, so that they are in one chain whatever the number of buckets."""
    return BlockKey(n.to_bytes(28, "little") + (n // 3).to_bytes(4, "big"))


def joined(index: KeyIndex) -> Extent:
    extent = Extent("x", os.open(os.devnull, os.O_RDONLY), Shape(1, SLOTS, (b"f" * 16, 64, 8)))
    index.join([extent], [])
    return extent


@examples(100)
@given(steps=st.lists(STEPS, min_size=5, max_size=30))
def test_an_index_finds_what_is_held_and_nothing_else(steps: list[tuple[str, int, int, int, int]]) -> None:
    """Goal: the newest head of a key is found until it is forgotten or its extent leaves. Method: any steps on the
    slots of three extents, none of which has a file; keys are looked up together, and each alone."""
    index = KeyIndex(StoreLock("an index"))
    held: dict[BlockKey, tuple[Extent, int]] = {}
    everything = [key_of(n) for n in range(KEYS)]
    extents = [joined(index) for _ in range(EXTENTS)]
    for tick, (what, number, start, more, first) in enumerate(steps, 1):
        extent, keys = extents[number], list[BlockKey]()
        count = min(1 + more, SLOTS - start)
        gone = {(extent, slot) for slot in range(start, start + count)}
        match what:
            case "hold":
                keys = [key_of((first + k) % KEYS) for k in range(count)]
                headers = [RecordHeader(key, b"f" * 16, 1, 1, b"\xff" * 8, 64, 5) for key in keys]
                older = list[Run]()
                index.hold(extent, start, extent.pack(headers, 100 * tick, 0), ANY_TAIL, older)
                assert {(each, slot) for each, slot, _ in older} == {held[key] for key in keys if key in held} - gone
            case "forget":
                extent.forget(start, count)
            case "release":
                index.release(extent, start, count)
            case "replace":
                index.leave(extent)
                extents[number] = joined(index)
                gone = {(extent, slot) for slot in range(SLOTS)}
        held = {key: place for key, place in held.items() if place not in gone}
        held |= {key: (extent, start + k) for k, key in enumerate(keys)}
        found = {everything[at + k]: (each, slot + k) for at, each, slot, n in index.find(everything) for k in range(n)}
        assert found == held
        for key in everything:
            assert index.find([key]) == ([(0, *held[key], 1)] if key in held else [])

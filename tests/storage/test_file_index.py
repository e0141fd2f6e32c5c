"""The index of a file store, against a dict."""

from __future__ import annotations

import os

from budget import examples
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.keys import BlockKey
from cache_manager.record import RecordHeader
from cache_manager.storage.file.extent import Extent, Shape
from cache_manager.storage.file.index import KeyIndex

SLOTS, EXTENTS, KEYS = 6, 3, 12
STEPS = st.tuples(
    st.sampled_from(["hold", "forget", "release", "leave", "join"]),
    *(st.integers(0, most) for most in (EXTENTS - 1, SLOTS - 1, 3, KEYS - 1)),
)


def key_of(n: int) -> BlockKey:
    """Three keys have one number, so that they are in one chain whatever the number of buckets."""
    return BlockKey(n.to_bytes(28, "little") + (n // 3).to_bytes(4, "big"))


@examples(150)
@given(steps=st.lists(STEPS, max_size=40))
def test_an_index_finds_what_is_held_and_nothing_else(steps: list[tuple[str, int, int, int, int]]) -> None:
    """Goal: the newest head of a key is found until it is forgotten or its extent leaves. Method: any steps on the
    slots of three extents, none of which has a file; keys are looked up together, and each alone."""
    index, held, tick = KeyIndex(), dict[BlockKey, tuple[Extent, int]](), 0
    extents: list[Extent | None] = [None] * EXTENTS
    for what, number, start, more, first in steps:
        extent, count = extents[number], min(1 + more, SLOTS - start)
        if what == "join" and extent is None:
            fd = os.open(os.devnull, os.O_RDONLY)
            extent = extents[number] = Extent("x", fd, Shape(number, SLOTS, (b"f" * 16, 64, 8)))
            index.join([extent])
        if extent is None:
            continue
        slots = [(extent, slot) for slot in range(start, start + count)]
        if what == "leave":
            index.leave(extent)
            extents[number] = None
        elif what == "hold":
            keys = list(dict.fromkeys(key_of((first + k) % KEYS) for k in range(count)))
            headers = [RecordHeader(key, b"f" * 16, 1, 1, b"\xff" * 8, 64, 5) for key in keys]
            older = index.hold(extent, start, extent.pack(headers, tick + 1, 0))
            overwritten = {key for key, place in held.items() if place in slots}
            assert {(each, slot) for each, slot, _ in older} == {held[key] for key in keys if key in held} - {*slots}
            held = {key: place for key, place in held.items() if key not in overwritten}
            held |= dict(zip(keys, slots, strict=True))
            tick += count
        elif what != "join":
            (extent.forget if what == "forget" else lambda *run, its=extent: index.release(its, *run))(start, count)
        if what in ("forget", "release", "leave"):
            gone = slots if what != "leave" else [(extent, slot) for slot in range(SLOTS)]
            held = {key: place for key, place in held.items() if place not in gone}
        everything = [key_of(n) for n in range(KEYS)]
        found = {everything[at + k]: (each, slot + k) for at, each, slot, n in index.find(everything) for k in range(n)}
        assert found == held
        assert all(
            index.find([key]) == [(0, *held[key], 1)] if key in held else not index.find([key]) for key in everything
        )

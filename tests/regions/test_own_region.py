"""Regions that an embedder made: what is as good as ours, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from life_canary import Writer, layout_of, wrong
from numpy.typing import NDArray
from watched_region import WatchedRegion

from cache_manager.errors import InvalidInputError
from cache_manager.memory import gather
from cache_manager.regions.choice import check_region
from cache_manager.spec import RecordLayout

BLOCKS = 3
IDS = np.arange(BLOCKS)


def arrays(layout: RecordLayout) -> dict[str, NDArray[Any]]:
    return {
        "rows": np.zeros((BLOCKS, layout.nbytes), np.uint8),
        "words": np.zeros(BLOCKS, np.uint64),
        "valid": np.zeros((BLOCKS, 2, layout.valid_words), np.uint64),
    }


def test_an_embedders_own_region_is_as_good() -> None:
    """Goal: any arrays of the right kind are a region. Method: numpy's own, written and read."""
    layout = layout_of(70, words=4)
    region = WatchedRegion(layout, BLOCKS, **arrays(layout))
    check_region(region, layout, BLOCKS)
    writer = Writer(region)
    writer.begin_lives(IDS)
    writer.rewrite(IDS, np.ones(70, np.bool_))
    assert wrong(region, 1, IDS, *gather(region, 1, IDS)) == (210, 0)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("rows", lambda a: a[:, :-64]),
        ("rows", lambda a: a.view(np.int8)),
        ("rows", lambda a: np.repeat(a, 2, axis=1)[:, ::2]),
        ("words", lambda a: a[:-1]),
        ("words", lambda a: a.view(np.int64)),
        ("valid", lambda a: a[:, :1]),
        ("valid", lambda a: a.transpose(0, 2, 1)),
        ("valid", lambda a: np.repeat(a, 2, axis=1)[:, ::2]),
        ("valid", lambda a: np.frombuffer(a.tobytes(), np.uint64).reshape(a.shape)),
        ("words", lambda _: np.frombuffer(bytearray(8 * BLOCKS + 1), np.uint64, BLOCKS, 1)),
    ],
)
def test_an_array_that_cannot_be_a_regions_is_refused(name: str, bad: Callable[[Any], Any]) -> None:
    """Goal: a strided, read-only or misplaced array is refused before a row is lost in a copy of it."""
    layout = layout_of(70, words=4)
    arrays_ = arrays(layout)
    arrays_[name] = bad(arrays_[name])
    with pytest.raises(InvalidInputError) as caught:
        check_region(WatchedRegion(layout, BLOCKS, **arrays_), layout)
    assert caught.value.field == f"region {name}"


def test_a_region_of_another_layout_or_size_is_refused() -> None:
    layout = layout_of(70, words=4)
    region = WatchedRegion(layout, BLOCKS, **arrays(layout))
    for wanted, blocks, field in ((layout_of(71, words=4), None, "layout"), (layout, BLOCKS + 1, "blocks")):
        with pytest.raises(InvalidInputError) as caught:
            check_region(region, wanted, blocks)
        assert caught.value.field == f"region {field}"

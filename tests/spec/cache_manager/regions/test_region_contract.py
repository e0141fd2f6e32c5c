"""The contract of every Region, tested with both kinds."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from region_children import LAYOUT, NAMESPACE

from cache_manager.errors import InvalidInputError, NoSpaceError
from cache_manager.ports import Region
from cache_manager.regions import HeapRegion, SharedRegion
from cache_manager.regions.region import BLOCKS_MAX
from cache_manager.regions.room import memory_free_nbytes
from cache_manager.spec import DTYPES, AuxBlockDataSpec, RecordLayout

MAKERS: dict[str, Callable[[RecordLayout, int], HeapRegion | SharedRegion]] = {
    "heap": HeapRegion,
    "shared": lambda layout, blocks: SharedRegion.create(layout, blocks, tier="device", namespace=NAMESPACE),
}


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_every_page_of_a_region_is_there_from_the_start() -> None:
    """Goal: a machine without room says so when an engine starts, and no step waits for a page. Method: the memory that
    the process has, before and after a region of 64 MiB is made and not touched."""
    layout = RecordLayout((AuxBlockDataSpec("rows", (64,), "uint8", 64),))
    for make_one in MAKERS.values():
        gc.collect()
        before = resident_nbytes()
        region = make_one(layout, 16_384)
        assert resident_nbytes() - before > 56 << 20
        region.close()


@st.composite
def layouts(draw: st.DrawFn) -> RecordLayout:
    tokens = draw(st.integers(1, 200))
    specs = draw(
        st.lists(
            st.tuples(st.lists(st.integers(1, 6), max_size=3).map(tuple), st.sampled_from(DTYPES)),
            min_size=1,
            max_size=4,
        )
    )
    return RecordLayout(
        tuple(AuxBlockDataSpec(f"spec_{i}", shape, dtype, tokens) for i, (shape, dtype) in enumerate(specs))
    )


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[RecordLayout, int], HeapRegion | SharedRegion]:
    return MAKERS[request.param]


@pytest.mark.parametrize("kind", MAKERS)
@given(layout=layouts(), blocks=st.integers(1, 40), seed=st.integers(0, 1 << 32))
def test_arrays_have_their_shape_start_at_zero_and_do_not_overlap(
    kind: str, layout: RecordLayout, blocks: int, seed: int
) -> None:
    """Goal: three independent arrays. Method: fill all with random bytes, find all of them unchanged after that."""
    region: Region = MAKERS[kind](layout, blocks)
    assert region.layout is layout
    assert region.blocks == blocks
    assert (region.rows.shape, region.rows.dtype) == ((blocks, layout.nbytes), np.dtype(np.uint8))
    assert (region.words.shape, region.words.dtype) == ((blocks,), np.dtype(np.uint64))
    assert region.valid.shape == (blocks, len(layout.specs), layout.valid_words)
    assert region.valid.dtype == np.dtype(np.uint64)
    rng = np.random.default_rng(seed)
    filled = []
    for name in ("rows", "words", "valid"):
        array = getattr(region, name)
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.ctypes.data % 64 == 0
        assert not array.any()
        filled.append(rng.integers(0, 256, array.nbytes, np.uint8))
    for name, expected in zip(("rows", "words", "valid"), filled, strict=True):
        getattr(region, name).reshape(-1).view(np.uint8)[:] = expected
    for name, expected in zip(("rows", "words", "valid"), filled, strict=True):
        np.testing.assert_array_equal(getattr(region, name).reshape(-1).view(np.uint8), expected)
    array = None
    region.close()


@pytest.mark.parametrize("name", ["rows", "words", "valid"])
def test_close_with_a_live_view_changes_nothing_and_succeeds_once_it_is_gone(
    make: Callable[[RecordLayout, int], Region], name: str
) -> None:
    """Goal: never a segmentation fault. Method: a view of a view outlives close, is written to, then goes."""
    region = make(LAYOUT, 3)
    view = getattr(region, name)[1:][0:1]
    with pytest.raises(BufferError, match="alive"):
        region.close()
    view[...] = 9
    assert (getattr(region, name)[1] == 9).all()
    with pytest.raises(BufferError):
        region.close()
    del view
    region.close()
    region.close()
    with pytest.raises(AttributeError):
        getattr(region, name)


def test_views_that_outlive_the_region_keep_its_memory(make: Callable[[RecordLayout, int], Region]) -> None:
    """Goal: a lost region is not a dangling pointer. Method: drop the region, collect, read and write its view."""
    region = make(LAYOUT, 3)
    region.rows[2] = 5
    view = region.rows[2]
    del region
    gc.collect()
    assert (view == 5).all()
    view[:] = 6
    assert (view == 6).all()


@pytest.mark.parametrize("blocks", [0, -1, BLOCKS_MAX + 1, 1.0, True, "8"])
def test_a_number_of_blocks_that_cannot_be_is_refused(make: Callable[..., Region], blocks: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        make(LAYOUT, blocks)
    assert caught.value.field == "region blocks"


def test_more_memory_than_there_is_is_refused_with_the_numbers(make: Callable[[RecordLayout, int], Region]) -> None:
    """Goal: an error instead of the OOM killer. Method: ask for more than any machine has."""
    with pytest.raises(NoSpaceError) as caught:
        make(LAYOUT, BLOCKS_MAX)
    assert caught.value.wanted_nbytes >= BLOCKS_MAX * LAYOUT.nbytes > caught.value.free_nbytes
    assert str(caught.value.wanted_nbytes) in str(caught.value)
    assert str(caught.value.free_nbytes) in str(caught.value)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"proc/self/cgroup": "0::/a/b\n"}, 1000 << 10),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "77\n",
                "sys/fs/cgroup/a/b/memory.stat": "anon 70\ninactive_file 7\n",
                "sys/fs/cgroup/a/memory.max": "5000\n",
                "sys/fs/cgroup/a/memory.current": "4000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 3900\ninactive_file 100\nactive_file 0\n",
            },
            1100,
        ),
        (
            {
                "proc/self/cgroup": "0::/path/of/the/host\n",
                "sys/fs/cgroup/memory.max": "9000\n",
                "sys/fs/cgroup/memory.current": "9100\n",
                "sys/fs/cgroup/memory.stat": "inactive_file 50\n",
            },
            0,
        ),
    ],
    ids=["no limit", "a limit two levels up", "from within a container"],
)
def test_free_memory_is_the_tightest_of_machine_and_cgroups(tmp_path: Path, files: dict[str, str], free: int) -> None:
    for name, text in {**files, "proc/meminfo": "MemTotal: 9999 kB\nMemAvailable: 1000 kB\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_free_nbytes(tmp_path)[1] == free

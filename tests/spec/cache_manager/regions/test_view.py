"""RegionView: rows of the generations that are asked for, by a process that does not own them, and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from life_canary import Writer, layout_of, written
from region_children import NAMESPACE

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import InvalidInputError, RegionError, RegionMissingError
from cache_manager.keys import Namespace
from cache_manager.publish import GENERATION_END
from cache_manager.regions import RegionView, SharedRegion
from cache_manager.regions import view as view_module

BLOCKS, TOKENS = 6, 70
IDS = np.arange(BLOCKS)
EVERY = np.ones(TOKENS, np.bool_)


@pytest.fixture
def shared() -> Iterator[SharedRegion]:
    layout = layout_of(TOKENS, words=4)
    with SharedRegion.create(layout, BLOCKS, tier="device", namespace=NAMESPACE) as region:
        yield region
        gc.collect()  # a writer's places


@given(data=st.data(), tokens=st.sampled_from([1, 3, 64, 70]))
def test_rows_of_the_generations_asked_for_and_no_others(data: st.DataObject, tokens: int) -> None:
    """Goal: a view hands out a row exactly if it was written for the generation asked for. Method: a model that knows
    block by block generation and written rows; any blocks, also twice, any window, any generations."""
    layout = layout_of(tokens, words=4)
    region = SharedRegion.create(layout, BLOCKS, tier="host", namespace=NAMESPACE)
    writer, there = Writer(region), np.zeros((BLOCKS, tokens), np.bool_)
    for _ in range(data.draw(st.integers(0, 6))):
        ids = np.array(data.draw(st.lists(st.integers(0, BLOCKS - 1), unique=True, min_size=1)))
        if data.draw(st.booleans()):
            writer.begin_lives(ids)
            there[ids] = False
        else:
            rows = np.arange(tokens) % data.draw(st.integers(1, 3)) == 0
            writer.rewrite(ids, rows)
            there[np.ix_(ids, rows)] = True
    blocks = np.array(data.draw(st.lists(st.integers(0, BLOCKS - 1), max_size=8)), np.int64)
    asked = np.array([data.draw(st.integers(0, 4)) for _ in blocks], np.int64)
    start = data.draw(st.integers(0, len(blocks) * tokens))
    stop = data.draw(st.integers(start, len(blocks) * tokens))
    with RegionView(region.name) as view:
        for name, words in (("long", 4), ("short", 2)):
            found = view.read(name, blocks, start, stop, generations=asked)
            expected = (there[blocks] & (writer.generations[blocks] == asked)[:, None]).reshape(-1)[start:stop]
            assert found.valid.tolist() == expected.tolist()
            assert (found.values.shape, found.values.dtype) == ((stop - start, words), np.dtype(np.uint64))
            rounds = np.zeros((len(blocks), tokens), np.uint64)
            rounds.reshape(-1)[start:stop] = found.values[:, 0]
            right = written(blocks, asked, tokens, words, rounds).reshape(-1, words)[start:stop]
            assert (found.values[found.valid] == right[found.valid]).all()
            assert (found.values[~found.valid] == np.uint64(0xFFFF_FFFF_FFFF_FFFF)).all()
            places = np.array(
                data.draw(st.lists(st.integers(0, max(0, len(blocks) * tokens - 1)), max_size=9)), np.int64
            )
            if len(blocks) and len(places):  # single rows of the same blocks, in any order
                whole = view.read(name, blocks, generations=asked)
                of, offsets = places // tokens, places % tokens
                single = view.read_slots(name, blocks[of] * tokens + offsets, generations=asked[of])
                assert single.valid.tolist() == whole.valid[places].tolist()
                assert (single.values == whole.values[places]).all()
    del writer
    region.close()


@pytest.mark.parametrize("copied", ["gather", "gather_slots"])
def test_an_owner_that_goes_and_comes_back_hands_out_no_row_of_between(
    monkeypatch: pytest.MonkeyPatch, copied: str
) -> None:
    """Goal: a view of one namespace reads no row of another. Method: the owner has other weights while the rows are
    copied, and again the first ones when the namespace is looked at."""
    first = Namespace("m", 1)
    layout = layout_of(TOKENS, words=4)
    with AuxBlocks(layout.specs, blocks=2, namespace=first, memory="shared") as aux:
        lives = aux.renew([0])
        slots = np.arange(TOKENS)
        aux.reset(weights_version=2)
        aux.write_step(slots, {"long": np.ones((TOKENS, 4), np.uint64), "short": np.ones((TOKENS, 2), np.uint64)})
        copy = getattr(view_module, copied)

        def comes_back(*arguments: Any) -> Any:
            copies = copy(*arguments)
            aux.reset(weights_version=1)
            return copies

        region: Any = aux.region("device")
        with RegionView(region.name) as view:
            view.follow(first.fingerprint)
            monkeypatch.setattr(view_module, copied, comes_back)
            if copied == "gather":
                rows = view.read("long", [0], generations=lives)
            else:
                rows = view.read_slots("long", slots, generations=lives.repeat(TOKENS))
        assert not rows.valid.any()


def test_after_a_weight_update_nothing_older_is_readable(shared: SharedRegion) -> None:
    """Goal: rows of another namespace are missing even where block and generation are those asked for. Method: renew
    without a new life, which no table does; then ``follow``, before the next renewal and after it."""
    writer = Writer(shared)
    writer.begin_lives(IDS)
    writer.rewrite(IDS, EVERY)
    later, latest = b"later-namespace-", b"latest-namespace"
    ones = np.ones(BLOCKS, np.int64)
    with RegionView(shared.name, namespace=NAMESPACE) as view:
        assert view.read("long", IDS, generations=ones).valid.all()
        shared.enter(later)
        assert not view.read("long", IDS, generations=ones).valid.any()
        view.follow(later)
        assert view.read("long", IDS, generations=ones).valid.all()
        view.follow(latest)  # told before the owner has done it
        assert not view.read("long", IDS, generations=ones).valid.any()
        shared.enter(latest)
        assert view.read("long", IDS, generations=ones).valid.all()
        with pytest.raises(InvalidInputError):
            view.follow(b"short")
        assert view.read("long", IDS, generations=ones).valid.all()


# ---- requests that are refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "generations", "more", "field"),
    [
        ([0, BLOCKS], [1, 1], {}, "blocks"),
        ([-1], [1], {}, "blocks"),
        ([0.5], [1], {}, "blocks"),
        ([[0]], [1], {}, "blocks"),
        ([0, 1], [1], {}, "generations"),
        ([0, 1], 1, {}, "generations"),
        ([0], [-1], {}, "generations"),
        ([0], [GENERATION_END], {}, "generations"),
        ([0], [1.0], {}, "generations"),
        ([0], [1], {"start": -1}, "start, stop"),
        ([0], [1], {"stop": TOKENS + 1}, "start, stop"),
        ([0], [1], {"start": 2, "stop": 1}, "start, stop"),
        ([0], [1], {"start": 0.0}, "start, stop"),
    ],
)
def test_what_cannot_be_is_refused(
    shared: SharedRegion, blocks: Any, generations: Any, more: dict[str, Any], field: str
) -> None:
    with RegionView(shared.name) as view:
        with pytest.raises(InvalidInputError) as caught:
            view.read("long", blocks, generations=generations, **more)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("slots", "generations", "field"),
    [
        ([-1], [1], "slots"),
        ([0.5], [1], "slots"),
        ([BLOCKS * TOKENS], [1], "blocks"),
        ([0, 1], [1], "generations"),
        ([0], [-1], "generations"),
    ],
)
def test_slots_that_cannot_be_are_refused(shared: SharedRegion, slots: Any, generations: Any, field: str) -> None:
    with RegionView(shared.name) as view:
        with pytest.raises(InvalidInputError) as caught:
            view.read_slots("long", slots, generations=generations)
        assert caught.value.field == field


@pytest.mark.parametrize("blocks", [3, "3", [-1], [BLOCKS], [0.5], [[0]], None])
def test_generations_of_what_is_no_block_are_refused(shared: SharedRegion, blocks: Any) -> None:
    with RegionView(shared.name) as view:
        with pytest.raises(InvalidInputError) as caught:
            view.generations(blocks)
        assert caught.value.field == "blocks"
        assert view.generations([]).tolist() == []


def test_the_generation_of_one_block(shared: SharedRegion) -> None:
    Writer(shared).begin_lives(IDS[2:3])
    with RegionView(shared.name) as view:
        assert [view.generation(block) for block in range(BLOCKS)] == view.generations(IDS).tolist()
        for block in (-1, BLOCKS):
            with pytest.raises(InvalidInputError, match="block"):
                view.generation(block)


# ---- the owner's end -------------------------------------------------------------------------------------------------


def test_a_view_outlives_its_owner() -> None:
    """Goal: a request that ends while the engine shuts down keeps its rows. Method: the owner closes; read; close."""
    writer = Writer(SharedRegion.create(layout_of(4, 4), 2, tier="device", namespace=NAMESPACE))
    ids = np.arange(2)
    writer.begin_lives(ids)
    writer.rewrite(ids, np.ones(4, np.bool_))
    owner, view = writer.region, RegionView(writer.region.name)
    del writer
    owner.close()
    assert view.read("long", ids, generations=[1, 1]).valid.all()
    assert view.generations(ids).tolist() == [1, 1]
    with pytest.raises(RegionMissingError):
        RegionView(owner.name)
    view.close()
    view.close()
    for ask in (lambda: view.read("long", ids, generations=[1, 1]), lambda: view.generations(ids)):
        with pytest.raises(RegionError, match="closed"):
            ask()


def test_a_with_statement_detaches(shared: SharedRegion) -> None:
    """Goal: a view that is left holds no memory of an owner that has ended. Method: leave one, also by an error."""
    with RegionView(shared.name) as left:
        pass
    with pytest.raises(ZeroDivisionError), RegionView(shared.name) as failed:
        raise ZeroDivisionError
    for view in (left, failed):
        with pytest.raises(RegionError, match="closed"):
            view.generation(0)

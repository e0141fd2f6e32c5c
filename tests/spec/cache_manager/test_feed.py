"""BlockFeed and its reader: order, gaps, repetitions, bytes that no feed made, and two real processes."""

from __future__ import annotations

import contextlib
import threading

import msgspec
import numpy as np
import pytest
from amid import amid_a_call
from blocks_house import SPEC, TOKENS, House
from budget import examples
from canary import canary_rows
from hypothesis import given
from hypothesis import strategies as st
from standing_still import until_it_waits
from stopped import is_stopped
from waiting import GIVE_UP_S

from cache_manager.blocks import AuxBlocks
from cache_manager.errors import ConfigError, FeedGapError, InvalidInputError, KVRouteError
from cache_manager.feed import BlockFeed, Renew
from cache_manager.keys import Namespace
from cache_manager.publish import GENERATION_END
from cache_manager.regions.view import RegionView
from cache_manager.storage import open_store

BLOCKS = 5
NAMESPACE = Namespace("m", 1)


def new_engine(**options: object) -> AuxBlocks:
    return AuxBlocks([SPEC], blocks=BLOCKS, host_blocks=2, namespace=NAMESPACE, **options)


def fill(engine: AuxBlocks, block: int, who: str) -> np.ndarray:
    rows = canary_rows(SPEC, [(who, i) for i in range(TOKENS)])
    engine.write_step(np.arange(block * TOKENS, (block + 1) * TOKENS), {"routing": rows})
    return rows


def state(engine: AuxBlocks) -> tuple[object, ...]:
    """The state that a refused batch must not change."""
    regions = [engine.region(tier) for tier in ("device", "host")]
    return tuple(array.tobytes() for r in regions for array in (r.words, r.valid, r.rows)), engine.namespace


def test_a_life_of_a_host_block_comes_once_though_the_scheduler_was_started_anew() -> None:
    """A bug that was found: another feed began the lives of host blocks anew, so that a reader of the first one read
    what was swapped out into the second one. Method: swap out, another feed, swap out to the same block."""
    with new_engine() as engine:
        feed, other = BlockFeed(blocks=BLOCKS), BlockFeed(blocks=BLOCKS)
        feed.renew([0])
        engine.apply(feed.take())
        fill(engine, 0, "before")
        engine.swap_out([(0, 1)])
        before = engine.generations([1], "host")
        assert engine.read("routing", [1], generations=before, tier="host").valid.all()
        other.renew([0])
        engine.apply(other.take())
        assert not engine.read("routing", [1], tier="host").valid.any()
        rows = fill(engine, 0, "after")
        engine.swap_out([(0, 1)])
        assert not engine.read("routing", [1], generations=before, tier="host").valid.any()
        after = engine.generations([1], "host")
        assert np.array_equal(engine.read("routing", [1], generations=after, tier="host").values, rows)


def test_a_strict_set_raises_for_a_gap_and_goes_on_with_another_scheduler() -> None:
    """Goal: in a strict set a gap is an error, and a scheduler that was started anew is no mistake. Method: lose one of
    three batches; then a feed whose numbers and generations begin anew."""
    with new_engine(strict=True) as engine:
        feed, other = BlockFeed(blocks=BLOCKS), BlockFeed(blocks=BLOCKS)
        feed.renew([0, 1])
        engine.apply(feed.take())
        fill(engine, 0, "before")
        feed.renew([1])
        feed.take()  # lost
        feed.renew([1])
        with pytest.raises(FeedGapError, match="wanted batch 1, got batch 2"):
            engine.apply(feed.take())
        assert not engine.read("routing", range(BLOCKS)).valid.any()
        lives = other.renew([0])
        engine.apply(other.take())
        rows = fill(engine, 0, "after")
        assert np.array_equal(engine.read("routing", [0], generations=lives).values, rows)
        assert engine.generations([0, 1]).tolist() == [*lives, 0]
        assert (engine.counters.feed_repetitions, engine.counters.feed_gaps) == (0, 1)


def test_a_scheduler_that_was_started_anew_reads_no_row_of_the_one_before() -> None:
    """Goal: a scheduler reads only rows of the lives that it gave out. Method: a second feed gives out the block that
    the first one gave out as often, and reads before the worker has its batch, which is then applied."""
    with new_engine(memory="shared") as engine, RegionView(engine.region("device").name) as view:
        feed, other = BlockFeed(blocks=BLOCKS), BlockFeed(blocks=BLOCKS)
        assert not view.read("routing", [0], generations=feed.generations[[0]]).valid.any()
        lives = feed.renew([0])
        engine.apply(feed.take())
        rows = fill(engine, 0, "before")
        assert (view.read("routing", [0], generations=lives).values == rows).all()
        anew = other.renew([0])
        assert not view.read("routing", [0], generations=anew).valid.any()
        engine.apply(other.take())
        rows = fill(engine, 0, "after")
        assert not view.read("routing", [0], generations=lives).valid.any()
        assert (view.read("routing", [0], generations=anew).values == rows).all()


@pytest.mark.parametrize("how", ["interrupted", "refused"])
def test_rows_after_a_batch_that_ended_are_not_of_an_older_life(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a reader of a block's old life never gets the rows of the next one. Method: the batch that gives the block
    out again ends with a signal's exception, or has an operation before it that a strict set refuses; then a step
    writes into the block."""
    with new_engine(strict=how == "refused") as engine:
        feed = BlockFeed(blocks=BLOCKS)
        old = feed.renew([0])
        engine.apply(feed.take())
        fill(engine, 0, "old")
        if how == "refused":
            feed.copy([(1, 1)])
        new = feed.renew([0])
        again = feed.take()
        if how == "interrupted":
            with monkeypatch.context() as patch:
                patch.setattr(Renew, "do", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    engine.apply(again)
        else:
            with pytest.raises(KVRouteError):
                engine.apply(again)
        with contextlib.suppress(KVRouteError):  # of a strict set, to which no such life was announced
            fill(engine, 0, "new")
        for life in (old, new):
            assert not engine.read("routing", [0], generations=life).valid.any()
        feed.renew([0])
        engine.apply(feed.take())
        rows = fill(engine, 0, "later")
        assert (engine.read("routing", [0], generations=feed.generations[[0]]).values == rows).all()


def test_no_feed_begins_near_the_last_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a feed does not run out of generations. Method: the largest number that its random start can be."""

    class Largest:
        def integers(self, end: int) -> int:
            return end - 1

    monkeypatch.setattr(np.random, "default_rng", Largest)
    (first,) = BlockFeed(1).generations
    assert first <= GENERATION_END // 2


def test_an_engine_that_renews_beside_its_feed_hands_out_no_row_of_its_own_lives() -> None:
    """Goal: a reader who has a generation from the scheduler gets no row of an earlier life. Method: the engine renews
    a block by itself and writes it; the scheduler's next life has the same generation."""
    with new_engine() as engine:
        feed = BlockFeed(blocks=BLOCKS)
        feed.renew([0, 1])
        engine.apply(feed.take())
        engine.renew([0])
        fill(engine, 0, "its own")
        rows = fill(engine, 1, "the feed's")
        lives = [*feed.renew([0]), feed.generations[1]]
        engine.apply(feed.take())
        found = engine.read("routing", [0, 1], generations=lives)
        assert found.valid.tolist() == [False] * TOKENS + [True] * TOKENS
        np.testing.assert_array_equal(found.values[TOKENS:], rows)
        assert engine.counters.stale_blocks == 1
        rows = fill(engine, 0, "the feed's, too")
        np.testing.assert_array_equal(engine.read("routing", [0], generations=lives[:1]).values, rows)


def test_an_operation_that_cannot_be_done_is_counted_and_the_others_are_done() -> None:
    """Goal: one mistake costs only its own operation. Method: a persist without a store, between two good
    operations."""
    with new_engine() as engine:
        feed = BlockFeed(blocks=BLOCKS)
        feed.renew([0])
        feed.persist({engine.keys.key(None, [1]): 0})
        feed.renew([1])
        engine.apply(feed.take())
        assert engine.counters.feed_operations_failed == 1
        assert engine.generations([0, 1]).tolist() == feed.generations[:2].tolist()
    with new_engine(strict=True) as strict:
        feed = BlockFeed(blocks=BLOCKS)
        feed.persist({strict.keys.key(None, [1]): 0})
        with pytest.raises(ConfigError, match="store: wanted a storage backend"):
            strict.apply(feed.take())


def batch(*operations: list[object], number: int = 0, version: int = 5) -> bytes:
    return msgspec.msgpack.encode([version, 0, number, operations])


ONE, TWO = np.array([1], "<i8").tobytes(), np.array([1, 2], "<i8").tobytes()


@pytest.mark.parametrize(
    "packed",
    [
        b"\xc1",
        b"nonsense",
        msgspec.msgpack.encode({"a": 1}),
        batch(version=4),
        batch(["renew", ONE, TWO]),
        batch(["renew", b"\0" * 7, ONE]),
        batch(["renew", 1, 1]),
        batch(["retire", ONE, TWO]),
        batch(["renow", ONE, ONE]),
        batch(["copy", ONE, None]),
        batch(["copy", TWO, TWO]),
        batch(["copy", TWO, b"x"]),
        batch(["copy", "device", "host", TWO, None]),
        batch(["copy", TWO]),
        batch(["moved", "device", "host", TWO, None]),
        batch(["persist", b"\0" * 31, ONE, ONE]),
        batch(["persist", b"\0" * 32, ONE, TWO]),
        batch(["restore", b"\0" * 64, TWO, TWO]),
        batch(["reset", -1]),
    ],
    ids=range(19),
)
def test_bytes_that_no_feed_made_are_refused_and_change_nothing(packed: bytes) -> None:
    """Goal: a typed error before anything is done. Method: each kind of mistake, after a valid operation."""
    with new_engine(store=open_store("memory:")) as engine:
        feed = BlockFeed(blocks=BLOCKS)
        feed.renew(range(BLOCKS))
        engine.apply(feed.take())
        fill(engine, 0, "mine")
        before = state(engine)
        with pytest.raises(InvalidInputError, match="feed"):
            engine.apply(packed)
        assert state(engine) == before
        feed.renew([1])
        engine.apply(feed.take())
        assert engine.counters.feed_gaps == 0, "the next batch is still the next"


def test_all_changes_of_a_batch_are_made_under_the_lock() -> None:
    """Goal: of two threads that apply batches, never both apply the same one. Method: two threads have the same batch
    while a third one has the lock, and are told at once that it is free; one of them has a repetition."""
    with new_engine() as engine:
        feed = BlockFeed(blocks=BLOCKS)
        feed.renew([0])
        packed = feed.take()
        threads = [threading.Thread(target=engine.apply, args=(packed,), daemon=True) for _ in range(2)]

        def both_wait() -> None:
            for thread in threads:
                thread.start()
                assert until_it_waits(thread)

        amid_a_call(engine, both_wait)
        for thread in threads:
            thread.join(GIVE_UP_S)
        assert (engine.counters.feed_repetitions, engine.counters.feed_gaps) == (1, 0)
        assert engine.generations([0]).tolist() == feed.generations[:1].tolist()


ints = st.lists(st.integers(-2, 6), max_size=4).map(lambda ids: np.array(ids, "<i8").tobytes())
tiers = st.sampled_from(("device", "host"))
keyed = st.tuples(st.sampled_from(("persist", "restore")), st.binary(max_size=64), ints, ints)
OPERATIONS = st.one_of(
    st.tuples(st.just("renew"), ints, ints),
    st.tuples(st.just("moved"), tiers, tiers, ints, st.none() | ints),
    keyed,
    st.tuples(st.just("reset"), st.integers(-2, 1 << 63)),
)


@examples(60)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(
            lambda operations, number: batch(*operations, number=number),
            st.lists(OPERATIONS, max_size=3),
            st.integers(0, 3),
        ),
    )
)
def test_any_bytes_are_a_batch_or_a_typed_error(packed: bytes) -> None:
    """Goal: no other error, and a set that is sound afterwards. Method: bytes, and batches of any operations."""
    with new_engine(store=open_store("memory:?capacity=1MiB")) as engine:
        engine.renew(range(BLOCKS))
        fill(engine, 0, "mine")
        with contextlib.suppress(InvalidInputError):
            engine.apply(packed)
        engine.jobs.wait(GIVE_UP_S)
        engine.jobs.poll()
        engine.assert_consistent()
        assert engine.in_flight == 0


@pytest.mark.parametrize("anew", [False, True])
def test_a_batch_that_is_interrupted_leaves_nothing_from_before_it(anew: bool) -> None:
    """Goal: the remaining operations of an interrupted batch are not missed. Method: one of two operations, the second
    a weight update, interrupted at each place; the scheduler, which may have been started ``anew`` before, goes on, and
    its batches are applied."""
    house, feed, at, stopped = House(), BlockFeed(6), 1, True
    while stopped:
        feed.renew(range(6))
        feed.renew([4])
        house.engine.apply(feed.take())
        house.fill(2, "before")
        house.engine.swap_out([(2, 1)])
        feed = BlockFeed(6) if anew else feed
        feed.renew([5])
        feed.reset(at)
        batch = feed.take()
        stopped = is_stopped(lambda: house.engine.apply(batch), at)  # noqa: B023
        feed.renew([4])
        house.engine.apply(feed.take())
        assert house.engine.generations([4]).tolist() == feed.generations[[4]].tolist(), f"place {at}"
        left = [
            house.engine.read("routing", range(n), tier=tier).valid.any() for tier, n in (("device", 6), ("host", 3))
        ]
        assert left == [False, False], f"interrupted at place {at}"
        at += 1
    house.close()

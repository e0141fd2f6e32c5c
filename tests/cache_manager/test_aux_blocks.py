"""AuxBlocks by example: each hazard that some engine has, and each wrong call."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from aux_house import SPEC, fill, snapshot
from canary import canary_rows

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.errors import (
    BlockBusyError,
    BlockStateError,
    InvalidInputError,
)
from cache_manager.keys import Namespace
from cache_manager.lifecycle import State
from cache_manager.spec import AuxBlockDataSpec


def test_slot_reuse_never_shows_the_earlier_tenant(aux) -> None:
    """Goal: H1. Method: fill, free, give the block to another owner, read before it has written."""
    fill(aux, [0], "first", "a")
    aux.free("a")
    aux.allocate([0], "b")
    rows = aux.read("routing", [0], owner="b")
    assert not rows.valid.any()
    assert (rows.values == 0xFF).all()


def test_rows_are_read_for_the_lives_that_a_reader_means(aux) -> None:
    """Goal: a reader that names generations needs no owner. Method: two blocks, one of which begins another life."""
    fill(aux, [0, 1], "first", "a")
    lives = aux.generations([0, 1])
    aux.free("a")
    assert aux.read("routing", [0, 1], generations=lives).valid.all()
    aux.allocate([0], "b")
    fill(aux, [0], "second")
    assert aux.read("routing", [0, 1], generations=lives).valid.tolist() == [False] * 4 + [True] * 4
    with pytest.raises(InvalidInputError, match="generations: wanted one for each of 2 blocks, got 1"):
        aux.read("routing", [0, 1], generations=lives[:1])


def test_a_late_write_into_a_reused_block_is_dropped(aux) -> None:
    """Goal: H4. Method: begin a step, give its block away before the step commits, as overlap schedulers do."""
    aux.allocate([0, 1], "a")
    step = aux.begin_step([0, 1, 4])
    step.write("routing", canary_rows(SPEC, [("late", i) for i in range(3)]))
    aux.free("a")
    aux.allocate([0], "b")
    mine = fill(aux, [0], "mine")
    assert step.commit() == 1, "the row in block 1, which nobody got, still counts"
    rows = aux.read("routing", [0], owner="b")
    assert rows.valid.all()
    assert np.array_equal(rows.values, mine)
    assert aux.counters.late_writes_dropped == 2


def test_of_two_steps_that_write_a_slot_the_later_one_counts(aux) -> None:
    """Goal: a step that completes late cannot undo a newer one. Method: commit them in the wrong order."""
    aux.allocate([0], "a")
    older, newer = aux.begin_step([0, 1]), aux.begin_step([1, 2])
    old, new = canary_rows(SPEC, [("old", 0), ("old", 1)]), canary_rows(SPEC, [("new", 1), ("new", 2)])
    older.write("routing", old)
    newer.write("routing", new)
    newer.commit()
    older.commit()
    rows = aux.read("routing", [0], 0, 3)
    assert np.array_equal(rows.values, [old[0], new[0], new[1]])


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_slot_that_a_newer_step_has_taken_is_not_given_back(aux, end) -> None:
    """Goal: the older step knows it, also when nothing else is in flight any more. Method: the newer one ends first."""
    aux.allocate([0], "a")
    older, newer = aux.begin_step([0, 1]), aux.begin_step([1, 2])
    old, new = canary_rows(SPEC, [("old", 0), ("old", 1)]), canary_rows(SPEC, [("new", 1), ("new", 2)])
    newer.write("routing", new)
    newer.commit() if end == "commit" else newer.abort()
    older.write("routing", old)
    assert older.commit() == 1
    assert aux.counters.late_writes_dropped == 1
    rows = aux.read("routing", [0], 0, 3)
    assert rows.valid.tolist() == [True, end == "commit", end == "commit"]
    assert np.array_equal(rows.values[rows.valid], np.stack([old[0], new[0], new[1]])[rows.valid])


def test_rejected_tokens_and_padding_never_become_valid(aux) -> None:
    """Goal: H6 and speculative decoding. Method: commit a step with padding and a keep mask."""
    aux.allocate([0], "a")
    step = aux.begin_step([-1, 0, 1, -1, 2])
    step.write("routing", canary_rows(SPEC, [("x", i) for i in range(5)]))
    step.commit(keep=np.array([True, True, False, True, True]))
    assert aux.read("routing", [0]).valid.tolist() == [True, False, True, False]
    assert aux.counters.rows_rejected == 1


def test_one_mask_for_each_spec_leaves_the_others_whole() -> None:
    """Goal: a token whose ids are bad keeps its other rows. Method: two specs, a mask for one of them."""
    specs = [AuxBlockDataSpec(name, (2,), "uint8", 4) for name in ("routing", "logprob")]
    with AuxBlocks(specs, device_blocks=1, namespace=Namespace("m", 1)) as aux:
        aux.allocate([0], "a")
        step = aux.begin_step([0, -1, 1])
        for spec in specs:
            step.write(spec.name, np.ones((3, 2), np.uint8))
        assert step.commit(keep={"routing": np.array([True, True, False])}) == 2
        assert aux.read("routing", [0]).valid.tolist() == [True, False, False, False]
        assert aux.read("logprob", [0]).valid.tolist() == [True, True, False, False]
        assert aux.counters.rows_rejected == 0


def test_an_exception_in_a_step_commits_nothing(aux) -> None:
    aux.allocate([0], "a")
    with pytest.raises(RuntimeError), aux.step([0]) as step:  # noqa: PT012 (the exception must leave the step)
        step.write("routing", canary_rows(SPEC, [("x", 0)]))
        raise RuntimeError("the forward pass died")
    assert not aux.read("routing", [0]).valid.any()
    assert aux.in_flight == 0
    assert aux.counters.steps_aborted == 1


def test_a_block_with_a_step_in_flight_is_not_exported(aux) -> None:
    """Goal: H5, export before flush. Method: swap out, copy and persist while a step is open."""
    aux.allocate([0, 1], "a")
    step = aux.begin_step([0])
    before = snapshot(aux)
    for attempt in (lambda: aux.swap_out([(0, 0)]), lambda: aux.copy([(0, 1)]), lambda: aux.copy([(1, 0)])):
        with pytest.raises(BlockBusyError, match="device block 0: wanted no step in flight"):
            attempt()
    assert snapshot(aux) == before
    step.abort()


def test_a_swap_takes_the_origin_along(aux) -> None:
    """Goal: rows_are_of_the_pass_that_made_the_kv. Method: out and in again, with one origin all the way."""
    fill(aux, [0], "a", "a")
    (origin,) = aux.origins([0])
    aux.swap_out([(0, 1)])
    assert aux.origins([1], "host") == [origin]
    aux.swap_in([(1, 2)])
    assert aux.origins([2]) == [origin] != [0]


def test_a_move_whose_kv_copy_fails_changes_nothing(aux) -> None:
    """Goal: one command moves both or neither. Method: the engine's own copy raises inside the move."""
    fill(aux, [0, 1], "mine", "a")
    before = snapshot(aux)
    with pytest.raises(RuntimeError), aux.begin_swap_out([(0, 1), (1, 0)]):
        raise RuntimeError("the KV copy failed")
    assert snapshot(aux) == before
    aux.swap_out([(0, 1), (1, 0)])
    assert aux.holds("a", 0, "host")
    assert not aux.holds("a", 0)


def test_only_the_named_owner_leaves_a_shared_block(aux) -> None:
    """Goal: preempting one of two owners of a prefix block. Method: swap out with ``owner``, then free each."""
    mine = fill(aux, [0], "mine", "a")
    aux.share([0], "b")
    aux.swap_out([(0, 2)], owner="a")
    assert aux.holds("b", 0)
    assert not aux.holds("a", 0)
    assert np.array_equal(aux.read("routing", [2], tier="host", owner="a").values, mine)
    assert np.array_equal(aux.read("routing", [0], owner="b").values, mine)
    assert not aux.read("routing", [0], owner="a").valid.any()


def test_reset_reaches_every_tier_and_everything_in_flight(aux) -> None:
    """Goal: H9. Method: rows on device, host and store, a step and a move in flight, a key from before; then reset."""
    fill(aux, [0, 1, 2], "old", "a")
    key = aux.keys.key(None, [1, 2, 3, 4])
    assert aux.persist({key: 0}, owner="a") == {key: aux.origins([0])[0]}
    aux.swap_out([(1, 0)])
    step = aux.begin_step([8])
    step.write("routing", canary_rows(SPEC, [("old", 0)]))
    move = aux.begin_copy([(0, 3)])
    aux.reset(weights_version=2)
    step.commit()
    move.commit()
    assert not aux.read("routing", range(6)).valid.any()
    assert not aux.read("routing", range(3), tier="host").valid.any()
    aux.allocate([4], "b")
    assert aux.restore({key: 4}, owner="b") == {key: False}
    fresh = aux.keys.key(None, [1, 2, 3, 4])
    assert fresh != key
    assert aux.restore({fresh: 4}, owner="b") == {fresh: False}
    assert aux.counters.stale_keys == 1


def test_a_copy_can_be_limited_to_the_first_rows(aux) -> None:
    mine = fill(aux, [0], "mine", "a")
    aux.allocate([1], "b")
    aux.copy([(0, 1)], rows=[3])
    rows = aux.read("routing", [1])
    assert rows.valid.tolist() == [True, True, True, False]
    assert np.array_equal(rows.values[:3], mine[:3])


def test_a_lease_taken_during_a_move_stays_where_it_was_taken(aux) -> None:
    """Goal: a prefix hit while the block is swapped out. Method: share between begin and commit."""
    fill(aux, [0], "mine", "a")
    with aux.begin_swap_out([(0, 1)]):
        aux.share([0], "b")
    assert aux.holds("b", 0)
    assert not aux.holds("b", 1, "host")
    assert aux.holds("a", 1, "host")
    assert not aux.holds("a", 0)


def test_a_lease_given_up_during_a_move_leaves_no_ghost_at_the_source(aux) -> None:
    """Of two holders one lets go while the move is open: the other goes along, and the source is free again."""
    fill(aux, [0], "mine", "a")
    aux.share([0], "b")
    with aux.begin_swap_out([(0, 1)]):
        aux.free("a")
    assert aux.holds("b", 1, "host")
    aux.assert_consistent()
    aux.allocate([0], "c")
    aux.free("c")
    assert aux.blocks_in(State.HELD) == 0


def test_a_step_or_move_is_ended_once_whichever_thread_ends_it(aux) -> None:
    """Goal: commit and abort from two threads. Method: both wait for the lock, then run."""
    fill(aux, [0], "mine", "a")
    for begin in (lambda: aux.begin_swap_out([(0, 1)]), lambda: aux.begin_step([0])):
        if aux.holds("a", 1, "host"):
            aux.swap_in([(1, 0)])
        work, errors = begin(), []

        def commit(work=work, errors=errors) -> None:
            try:
                work.commit()
            except BlockStateError as error:
                errors.append(error)

        threads = [threading.Thread(target=work.abort, daemon=True), threading.Thread(target=commit)]
        with aux._lock:
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join()
        assert aux.in_flight == 0
        aux.assert_consistent()


def test_a_step_can_be_committed_inside_its_with_statement(aux) -> None:
    aux.allocate([0], "a")
    with aux.step([0, 1]) as step:
        step.write("routing", canary_rows(SPEC, [("x", 0), ("x", 1)]))
        assert step.commit(keep=np.array([True, False])) == 1
    assert aux.read("routing", [0]).valid.tolist() == [True, False, False, False]


def test_steps_in_flight_are_limited() -> None:
    with AuxBlocks([SPEC], device_blocks=2, namespace=Namespace("m", 1), steps_max=2) as small:
        steps = [small.begin_step([]) for _ in range(2)]
        with pytest.raises(BlockBusyError, match="steps in flight: wanted fewer than 2, got 2"):
            small.begin_step([])
        for step in steps:
            step.abort()


def test_after_close_every_call_says_so(aux) -> None:
    fill(aux, [0], "mine", "a")
    aux.close()
    aux.close()
    for call in (
        lambda: aux.read("routing", [0]),
        lambda: aux.allocate([1], "b"),
        lambda: aux.begin_step([0]),
        lambda: aux.swap_out([(0, 0)]),
        lambda: aux.free("a"),
        lambda: aux.reset(weights_version=2),
    ):
        with pytest.raises(BlockStateError, match="AuxBlocks: wanted one that is open, got one that was closed"):
            call()


def test_close_waits_for_views_and_can_be_called_again(aux) -> None:
    """Goal: a view that somebody keeps must not leave a half-closed object. Method: keep one, close, drop it, close."""
    view = aux.region("host").rows[0]
    with pytest.raises(BufferError):
        aux.close()
    del view
    aux.close()


def test_a_reader_beside_the_scheduler_never_sees_a_foreign_row(aux) -> None:
    """Goal: the output thread reads while the scheduler reuses blocks. Method: real threads, rows name their owner.

    The scheduler gives the same blocks to owner after owner; readers ask for owner n's rows and may find them or find
    them missing, but never another owner's.
    """
    rounds, wrong, seen = 300, [], []
    current = ["none"]
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            owner = current[0]
            rows = aux.read("routing", [0, 1, 2], owner=owner)
            expected = canary_rows(SPEC, [(owner, i) for i in range(12)])
            if not np.array_equal(rows.values[rows.valid], expected[rows.valid]):
                wrong.append(owner)
            seen.append(int(rows.valid.sum()))

    readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
    for thread in readers:
        thread.start()
    for n in range(rounds):
        fill(aux, [0, 1, 2], f"owner-{n}", f"owner-{n}")
        current[0] = f"owner-{n}"
        aux.free(f"owner-{n}") if n % 3 else aux.swap_out([(0, 0), (1, 1), (2, 2)])
        aux.free(f"owner-{n}")
    done.set()
    for thread in readers:
        thread.join()
    assert not wrong
    assert len(seen) > 10

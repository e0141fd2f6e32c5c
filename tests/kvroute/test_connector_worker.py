"""What a worker does when the engine, the store or its own thread does what they should not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_engine import TOKENS, Toy, admitted, computed, judge, seen

from cache_manager.stored import RestoreJob
from kvroute.connector import worker
from kvroute.connector.behind import PENDING_MAX, Behind
from kvroute.connector.settings import StepMeta
from kvroute.integrations.vllm.connector import RowsWithKV
from kvroute.witness import Run

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.mark.parametrize("late", [False, True])
def test_slots_are_those_of_the_pass(late: bool) -> None:
    """Goal: no row goes to another token. Method: the engine uses the memory of the slots again before the step's end,
    as a draft model does.
    """
    toy = Toy(late=late)
    request, slots = admitted(toy, PROMPT, [5, 2, 3]), torch.zeros(11, dtype=torch.int64)
    computed(toy, request, 11)
    assert toy.worker.slots is not None
    toy.worker.slots = slots.copy_(toy.worker.slots)
    slots.copy_(slots.flip(0))
    toy.worker.end()
    assert judge(seen(toy, 11), PROMPT) == {"right": 11}
    toy.close()


def _twice(toy: Toy) -> None:
    toy.hooks[0](torch.zeros((2, 2), dtype=torch.int64))


def _nowhere(toy: Toy) -> None:
    toy.worker.slots = None


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("spoil", [_twice, _nowhere])
def test_what_a_step_without_ids_has_written_over_is_missing(late: bool, spoil: Callable[[Toy], None]) -> None:
    """Goal: a row is of the KV that is there. Method: two rejected drafts are computed over by a step whose rows are
    lost, for one reason or another.
    """
    toy, right = Toy(late=late), [3, 1, 4, 2, 6]
    request = admitted(toy, [3, 1, 4, 7, 7], [5, 2])
    computed(toy, request, 5)
    toy.worker.end()
    request.tokens, request.num_computed_tokens = right, 3
    computed(toy, request, 2)
    spoil(toy)
    toy.worker.end()
    found = judge(seen(toy, 5), right)
    assert not found["wrong"]
    assert found["missing"] >= 2
    toy.close()


def test_a_store_that_is_stuck_holds_up_one_step_and_for_one_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: no wait without end. Method: the store answers nothing; a step with two loads, and one with another."""
    monkeypatch.setattr(worker, "RESTORE_S", 0.2)
    toy, go, waits = Toy(store=f"file://{tmp_path}", witness="off"), threading.Event(), list[float]()
    wait = RestoreJob.wait

    def waited(job: RestoreJob, timeout_s: float) -> bool:
        waits.append(timeout_s)
        return wait(job, timeout_s)

    monkeypatch.setattr(RestoreJob, "wait", waited)
    assert toy.worker.store is not None
    monkeypatch.setattr(type(toy.worker.store), "get_into", lambda *_: go.wait(60) and [])
    feed, keys = toy.scheduler.feed, toy.scheduler.keys
    for blocks in ([1, 2], [3]):
        feed.renew(blocks)
        for block in blocks:
            feed.restore({keys.adopt(bytes([block]) * 32): block})
        toy.worker.begin(StepMeta(None, feed.take(), b"", loads=[Run(-1, blocks, TOKENS * len(blocks))]))
        toy.worker.end()
    assert sum(waits) <= 3 * 0.2
    assert len(waits) == 3  # each job once
    go.set()
    toy.close()


def test_a_thread_behind_outlives_what_undoes_a_failure() -> None:
    """Goal: nobody puts without end. Method: what is told of a failure fails, too; then more than there is room for."""

    def undone(_: Exception) -> None:
        raise ValueError("again")

    behind, done = Behind("behind", undone, PENDING_MAX), list[int]()
    behind.put(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    with ThreadPoolExecutor(1) as threads:
        putting = threads.submit(lambda: [behind.put(lambda i=i: done.append(i)) for i in range(2 * PENDING_MAX)])  # type: ignore[misc]
        try:
            putting.result(10)
        finally:
            while not putting.done():  # or the test has no end
                behind._calls.get()
    assert behind.close(60)
    assert done == list(range(2 * PENDING_MAX))
    assert behind.settle(60)  # at once, as nothing is to be done
    assert behind.close(0.01)


def test_slots_of_a_pass_in_one_graph_are_not_a_draft_models() -> None:
    """Goal: as above, where the engine says the slots when the draft model has run. Method: with and without one."""

    class Inner:
        def start_load_kv(self, *_: Any, **__: Any) -> None: ...

    toy, context = Toy(), SimpleNamespace(slot_mapping={})
    made = type("Made", (RowsWithKV, Inner), {"__init__": lambda _: None})()
    made._worker_rows = toy.worker
    for drafts in (True, False):
        made._engine = replace(toy.worker.engine, drafts=drafts)
        toy.worker.begin(StepMeta(None, b"", b""))
        made.start_load_kv(context, attn_metadata={"layer": SimpleNamespace(slot_mapping=torch.tensor([3]))})
        assert (toy.worker.slots is None) == drafts
    toy.close()

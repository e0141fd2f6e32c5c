"""Steps in which many requests load KV from outside: the rows of all come, and what has no room says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from toy_engine import TOKENS, Asked, Toy

from cache_manager.jobs import JobLimits
from kvroute.connector.carriers.by_key import NO_ROOM

MANY = JobLimits().jobs_max + 6


def loads_in_a_step(toy: Toy, prompts: list[list[int]]) -> list[bool]:
    """All ``prompts`` get their first block in one step, whose KV is loaded; whether the rows of each are there."""
    tables = {str(i): [2 * i, 2 * i + 1] for i in range(len(prompts))}
    toy.scheduler.blocks_of = lambda name, first, last: tables[name][first:last]
    requests = [Asked(str(i), tokens) for i, tokens in enumerate(prompts)]
    for request in requests:
        blocks = tables[request.request_id]
        assert toy.scheduler.matched(request, 0, TOKENS, later=False) == TOKENS
        toy.scheduler.given(blocks)
        toy.scheduler.admitted(request, blocks, TOKENS)
        request.num_computed_tokens = TOKENS
    toy.worker.begin(toy.scheduler.step({}))
    assert toy.kept is not None
    for request in requests:
        for name, page in toy.kept[request.block_hashes[0]].items():
            toy.kv[name][tables[request.request_id][0]] = page
    toy.worker.end()
    toy.worker.settle()
    firsts = [blocks[0] for blocks in tables.values()]
    return toy.worker.blocks.read("routing", firsts).valid.reshape(-1, TOKENS).all(axis=1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("late", [False, True])
def test_more_requests_load_in_a_step_than_there_may_be_jobs(
    start: Callable[..., Toy], outside: Any, late: bool
) -> None:
    """Goal: every request of a step gets its rows. Method: more prompts than jobs may be under way, two of which are
    the same, so that their rows go into two blocks."""
    prompts = [[i % 200, i * 7 % 200, 3, 5, 9, 1] for i in range(MANY)]
    kept, store = outside(*prompts, blocks=3 * MANY)
    toy = start(kept=kept, store=store, witness="flagged", blocks=2 * MANY + 2, late=late)
    assert all(loads_in_a_step(toy, [*prompts, prompts[0]]))
    assert not toy.worker.missing
    assert toy.worker.blocks.counters.jobs_begun == 2


def test_a_load_without_room_says_so(start: Callable[..., Toy], outside: Any) -> None:
    """Goal: no row is missing without a cause. Method: so many requests load one block that there are no jobs for
    all."""
    prompt = [3, 1, 4, 1, 5, 9]
    kept, store = outside(prompt)
    toy = start(kept=kept, store=store, witness="flagged", blocks=2 * MANY, strict=False)
    came = loads_in_a_step(toy, [prompt] * MANY)
    assert not all(came)
    assert toy.worker.missing == {NO_ROOM: TOKENS * came.count(False)}
    assert toy.worker.blocks.counters.refused_blocks_not_restored == came.count(False)

"""The simulated fleet: what it counts adds up, and where the answer is known it gives it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from budget import examples
from hypothesis import given
from hypothesis import strategies as st

from bench.fleet_simulation import Costs, Fleet, Found, Pool, requests, simulate

COSTS = Costs(exist_s=1e-6, put_s=2e-5, get_s=7e-6)
FLEET = Fleet(engines=8, own_blocks=4, lent_blocks=40, kv_nbytes=1000, rows_nbytes=10, costs=COSTS)
ENDLESS = 1 << 30


def trace_of(seed: int, lines: int = 60, gap_ms: int = 1000) -> list[dict[str, Any]]:
    """Prompts that share prefixes: a path down a tree of blocks."""
    rng = np.random.default_rng(seed)
    trace = []
    for number in range(lines):
        path, ids = 0, []
        for _ in range(int(rng.integers(1, 12))):
            path = path * 3 + 1 + int(rng.integers(2))
            ids.append(path)
        trace.append({"timestamp": gap_ms * number, "hash_ids": ids})
    return trace


fleets = st.builds(
    Fleet,
    engines=st.integers(1, 32),
    own_blocks=st.integers(0, 20),
    lent_blocks=st.integers(1, 30),
    kv_nbytes=st.just(1000),
    rows_nbytes=st.just(10),
    costs=st.just(COSTS),
    groups=st.booleans(),
    affine=st.booleans(),
    common=st.integers(0, 2),
    prefill_tokens_s=st.sampled_from([1e2, 1e9]),
    seed=st.integers(0, 3),
)


@examples(30)
@given(fleet=fleets, seed=st.integers(0, 5))
def test_every_block_is_had_fetched_or_computed_and_bytes_follow(fleet: Fleet, seed: int) -> None:
    trace = trace_of(seed, 30)
    it = simulate(trace, fleet)
    assert it.asked == it.own + it.pooled + it.computed
    assert it.asked == sum(len(blocks) for _, blocks, _ in requests(trace, fleet))
    assert it.without_rows <= it.computed_again <= it.computed
    assert it.pooled * fleet.kv_nbytes <= it.get_nbytes <= it.pooled * (fleet.kv_nbytes + fleet.rows_nbytes)
    assert it.put_nbytes <= it.computed * (fleet.kv_nbytes + fleet.rows_nbytes)
    assert it.remote_nbytes <= it.get_nbytes + it.put_nbytes
    assert not fleet.groups or it.without_rows == 0
    assert (it.calls, it.keys) <= (3 * it.asked, 8 * it.asked)
    assert len(it.waits_s) == it.calls
    assert min(it.waits_s) >= 0
    assert simulate(trace, fleet) == it


@examples(30)
@given(puts=st.lists(st.integers(0, 60), max_size=200), groups=st.booleans())
def test_a_pool_never_holds_more_than_it_may(puts: list[int], groups: bool) -> None:
    pool = Pool(20_000, replace(FLEET, groups=groups), Found())
    for block in puts:
        pool.put((0, block))
        sizes = [FLEET.rows_nbytes if kind else FLEET.kv_nbytes for _, kind in pool.objects]
        assert pool.used_nbytes == sum(sizes) <= pool.capacity_nbytes
        if groups:
            assert all((block, not kind) in pool.objects for block, kind in pool.objects)


def test_a_pool_that_holds_all_loses_nothing() -> None:
    """Method: prefill that takes no time, so that what was asked once is there; then hits are what was asked before."""
    trace, seen, again = trace_of(1), set(), 0
    for line in trace:
        again += sum(block in seen for block in line["hash_ids"])
        seen.update(line["hash_ids"])
    for groups in (True, False):
        it = simulate(trace, replace(FLEET, lent_blocks=ENDLESS, prefill_tokens_s=1e12, groups=groups))
        assert (it.own + it.pooled, it.computed_again, it.rows_evicted) == (again, 0, 0)


def test_one_engine_without_a_pool_worth_the_name_is_an_lru_cache() -> None:
    cache: OrderedDict[int, None] = OrderedDict()
    hits, trace = 0, trace_of(2)
    for line in trace:
        run = True
        for block in line["hash_ids"]:
            run = run and block in cache
            hits += run
        for block in reversed(line["hash_ids"]):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > 16:
            cache.popitem(last=False)
    it = simulate(trace, replace(FLEET, engines=1, own_blocks=16, lent_blocks=1, prefill_tokens_s=1e12))
    assert it.own == hits
    assert it.remote_nbytes == 0


def test_a_request_that_finds_its_engine_again_crosses_the_network_less() -> None:
    """Goal: affinity is worth what it should be. Method: the same fleet with and without; the pool holds all."""
    fleet = replace(FLEET, own_blocks=ENDLESS, lent_blocks=ENDLESS, prefill_tokens_s=1e12)
    anywhere, home = (simulate(trace_of(3), replace(fleet, affine=affine)) for affine in (False, True))
    assert home.own + home.pooled == anywhere.own + anywhere.pooled
    assert home.get_nbytes < anywhere.get_nbytes


def test_cells_cost_hits_unless_requests_go_where_their_prefix_is() -> None:
    fleet = replace(FLEET, engines=32, lent_blocks=ENDLESS, prefill_tokens_s=1e12)
    whole, apart = (simulate(trace_of(4), replace(fleet, cells=cells)) for cells in (1, 4))
    sent = simulate(trace_of(4), replace(fleet, cells=4, affine=True))
    assert apart.hit_rate < sent.hit_rate == whole.hit_rate
    assert apart.master_s < whole.master_s


def test_smaller_records_are_more_keys_and_nothing_else() -> None:
    one, eight = (simulate(trace_of(6), replace(FLEET, records_a_block=n)) for n in (1, 8))
    assert (eight.keys, eight.calls, eight.hit_rate) == (8 * one.keys, one.calls, one.hit_rate)
    assert eight.master_s == pytest.approx(8 * one.master_s)


@pytest.mark.parametrize("engines", [8, 64])
def test_a_master_that_is_asked_more_than_it_can_lets_calls_wait(engines: int) -> None:
    """Goal: saturation shows. Method: a call a millisecond and more, of a master that takes half a second a key."""
    slow = Costs(exist_s=0.5, put_s=0.5, get_s=0.5)
    trace = trace_of(5, gap_ms=1)
    fast, stuck = (
        simulate(trace, replace(FLEET, engines=engines)),
        simulate(trace, replace(FLEET, engines=engines, costs=slow)),
    )
    assert stuck.load > 1 > fast.load > 0
    assert stuck.wait_s(0.99) > 1.0 > fast.wait_s(0.5)
    assert stuck.wait_s(0.5) <= stuck.wait_s(0.99)

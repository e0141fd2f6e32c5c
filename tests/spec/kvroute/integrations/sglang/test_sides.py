"""Windows and states of a prefix come back beside pages of the same computation, or the prefix is no hit.

An engine of pages, windows and states whose contents name the computation that made them. Offloads that are refused,
lost or of another computation than the stored page's are what a store of several engines, or of one amid faults, does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import budget
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from waiting import GIVE_UP_S

from cache_manager.keys import Namespace
from kvroute import ConfigError, routing_spec
from kvroute.connector.settings import Common
from kvroute.integrations.sglang.pools import STATES, WINDOWS, PagedBytes, is_last_full, pools_of, state_bytes
from kvroute.integrations.sglang.rows import RoutedRows, SidePages
from kvroute.integrations.sglang.sides import restorable

PAGE, PAGES, SLOTS = 4, 9, 5
SPEC = routing_spec(num_experts=250, top_k=2, layer_ids=[0, 1], num_layers=2, block_tokens=PAGE)
PREFIX = ["a" * 16, "b" * 16, "c" * 16]


def paged(memory: torch.Tensor, name: str, tokens: int) -> PagedBytes:
    return PagedBytes([memory], name, tokens, [])


@dataclass
class Engine:
    """Each content of a page, a window and a state is its computation's number."""

    full: torch.Tensor = field(default_factory=lambda: torch.zeros(PAGES, PAGE, dtype=torch.int64))
    windows: torch.Tensor = field(default_factory=lambda: torch.zeros(PAGES, PAGE, dtype=torch.int64))
    states: torch.Tensor = field(default_factory=lambda: torch.zeros(SLOTS, 3, dtype=torch.int64))

    def __post_init__(self) -> None:
        self.rows = RoutedRows(SPEC, PAGES, Namespace("m", 1), Common(strict=True, store="memory:"))
        sides = {WINDOWS: paged(self.windows, WINDOWS, PAGE), STATES: paged(self.states, STATES, 1)}
        self.rows.attach(kv=paged(self.full, "kv", PAGE), sides=sides)

    def compute(self, computation: int, pages: list[int], state: int) -> None:
        """The prefix by a pass of its own: pages and windows at the same numbers, and the state behind the last one."""
        slots = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])
        self.full[pages] = self.windows[pages] = computation
        self.states[state] = computation
        ids = torch.tensor([computation, computation + 100], dtype=torch.int32).expand(len(slots), 2, 2)
        self.rows.launch(slots, ids).finalize()

    def sides(self, keys: list[str], windows: list[int], state: int) -> list[SidePages]:
        """Windows beside the last of these pages, and the state behind them."""
        last = keys[len(keys) - len(windows) :]
        return [
            SidePages(self.rows.sides[WINDOWS], last, np.array(windows)),
            SidePages(self.rows.sides[STATES], keys[-1:], np.array([state])),
        ]

    def offload(self, keys: list[str], pages: list[int], state: int, *, lost: str = "") -> None:
        """Of this prefix; the record of this side is ``lost``."""
        jobs = self.rows.keep(keys, np.array(pages), self.sides(keys, pages[-2:], state))
        assert jobs is not None
        assert all(job.wait(GIVE_UP_S) for job in jobs)
        self.rows.go_on()
        if lost:
            aux = self.rows.sides[lost].aux
            assert aux.store is not None
            aux.store.backend.delete([aux.keys.adopt(keys[-1].encode())])

    def load(self, keys: list[str], pages: list[int], windows: list[int], state: int) -> bool:
        return self.rows.fill(keys, np.array(pages), self.sides(keys, windows, state))


@given(st.integers(0, 1 << 32))
@budget.examples(60)
def test_a_prefix_that_is_loaded_is_of_one_computation_at_its_end(seed: int) -> None:
    """Goal: rows, KV, windows and states of what is loaded are of one computation. Method: computations of the same
    prefix offload parts of it, in any order, and records of sides are lost; then it is loaded."""
    source = random.Random(seed)
    engine = Engine()
    for computation in range(1, source.randrange(2, 5)):
        n = source.randrange(1, 4)
        engine.compute(computation, [1, 2, 3][:n], 1)
        engine.offload(PREFIX[:n], [1, 2, 3][:n], 1, lost=source.choice(["", "", WINDOWS, STATES]))
    n = source.randrange(1, 4)
    keys, pages = PREFIX[:n], [5, 6, 7][:n]
    hit = engine.rows.stored(keys) == n
    if not hit:
        return
    loaded = engine.load(keys, pages, pages[-2:], 2)
    rows = engine.rows.aux.read(SPEC.name, np.array(pages), 0, n * PAGE)
    made_by = engine.full[pages][:, 0]
    assert rows.valid.all()
    assert (rows.values[:, 0, 0] == np.repeat(made_by.numpy(), PAGE)).all()
    if loaded:
        assert (engine.windows[pages[-2:]] == made_by[-2:, None]).all()
        assert (engine.states[2] == made_by[-1]).all()
    else:
        there = [engine.rows.stored_sides(name, keys) for name in (WINDOWS, STATES)]
        assert not (all(there[0][-2:]) and there[1][-1]), "what has not come is no hit any more"


def test_a_state_of_another_computation_is_no_hit_any_more() -> None:
    """Goal: the state behind a page is its own. Method: the first computation's state is lost, the second's stored."""
    engine = Engine()
    engine.compute(1, [1], 1)
    engine.offload(PREFIX[:1], [1], 1, lost=STATES)
    engine.compute(2, [2], 2)
    engine.offload(PREFIX[:1], [2], 2)
    assert engine.rows.stored_sides(STATES, PREFIX[:1]) == [True]
    assert not engine.load(PREFIX[:1], [5], [5], 3)
    assert not engine.states[3].any()
    assert engine.rows.stored_sides(STATES, PREFIX[:1]) == [False]


def test_sides_of_earlier_weights_are_found_no_more() -> None:
    engine = Engine()
    engine.compute(1, [1], 1)
    engine.offload(PREFIX[:1], [1], 1)
    engine.rows.weights.changed(2)
    engine.rows.weights.forgotten()
    assert engine.rows.stored(PREFIX[:1]) == 0
    assert [engine.rows.stored_sides(name, PREFIX[:1]) for name in (WINDOWS, STATES)] == [[False], [False]]


def test_an_offload_is_copied_before_its_blocks_have_another_content() -> None:
    """Goal: what is stored is the content of the offload. Method: windows and states that are written over at once."""
    engine = Engine()
    engine.compute(1, [1, 2], 1)
    engine.offload(PREFIX[:2], [1, 2], 1)
    engine.full[:], engine.windows[:], engine.states[:] = 9, 9, 9
    assert engine.load(PREFIX[:2], [5, 6], [5, 6], 2)
    assert (engine.windows[[5, 6]] == 1).all()
    assert (engine.states[2] == 1).all()


def test_a_prefix_ends_where_everything_is_there() -> None:
    assert restorable(range(1, 6), [True, True, False, True, True], 2) == [1, 2, 5]
    assert restorable([1, 2], [False, True], 1) == [2]


class MHATokenToKVPool(SimpleNamespace):
    """SGLang's pool of this name."""


class MambaPool(SimpleNamespace):
    """SGLang's pool of this name."""


def kv_pool(**more: Any) -> Any:
    return MHATokenToKVPool(k_buffer=[torch.ones(8, 1, 8)], v_buffer=[torch.ones(8, 1, 8)], **more)


def given_by(kvcache: Any, **requests: Any) -> Any:
    allocator = SimpleNamespace(get_kvcache=lambda: kvcache)
    return SimpleNamespace(
        token_to_kv_pool_allocator=allocator, page_size=4, req_to_token_pool=SimpleNamespace(**requests)
    )


def states(**more: Any) -> Any:
    cache = SimpleNamespace(temporal=torch.zeros(2, 0), conv=[torch.ones(2, 5, 4, 3)], **more)
    return MambaPool(mamba_cache=cache, mamba_layer_ids=[0, 2])


def test_the_pools_of_a_model() -> None:
    windows = SimpleNamespace(
        full_kv_pool=kv_pool(), swa_kv_pool=kv_pool(), layers_mapping={0: (0, True), 1: (0, False)}
    )
    pools = pools_of(given_by(windows), ["FULL", "SWA"], "linker")
    assert pools.is_last_full
    assert pools.sides[WINDOWS].blocks == 2
    linear = SimpleNamespace(full_kv_pool=kv_pool(), full_attention_layer_id_mapping={1: 0})
    pools = pools_of(given_by(linear, mamba_pool=states()), ["FULL", "MAMBA"], "linker")
    assert not pools.is_last_full, "a convolution is behind the last attention"
    assert pools.sides[STATES].blocks == 5
    assert pools.sides[STATES].spec.row_shape == (2 * 4 * 3 * 4,)
    assert pools_of(given_by(kv_pool()), ["FULL"], "linker").sides == {}
    windows.layers_mapping = {0: (0, False), 1: (0, True)}
    assert not is_last_full(windows)


@pytest.mark.parametrize(
    ("components", "kvcache", "requests", "refused"),
    [
        (["FULL", "C128"], kv_pool(), {}, r"linker: wanted a model whose layers .*got C128, FULL"),
        (["FULL"], kv_pool(k_scale_buffer=[1]), {}, r"pages of keys and values alone.*got MHATokenToKVPool, k_scale_b"),
        (
            ["FULL", "MAMBA"],
            SimpleNamespace(full_kv_pool=kv_pool()),
            {"mamba_pool": states(), "short_conv_pool": SimpleNamespace(enabled=True)},
            r"linker: wanted states of layers alone, got short_conv_pool",
        ),
        (
            ["FULL", "MAMBA"],
            SimpleNamespace(full_kv_pool=kv_pool()),
            {"mamba_pool": states(replayssm_d=1)},
            r"linker: wanted states in MambaPool, as they are, got MambaPool, replayssm_d",
        ),
    ],
)
def test_what_was_not_judged_is_refused_by_name(components: Any, kvcache: Any, requests: Any, refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        pools_of(given_by(kvcache, **requests), components, "linker")


def test_states_are_filled_in_place() -> None:
    """Goal: SGLang's own states change, not a copy of them."""
    pool = states()
    taken = np.zeros((1, 2 * 4 * 3 * 4), np.uint8)
    kv = state_bytes(pool)
    kv.take(np.array([1]), taken)
    pool.mamba_cache.conv[0][:] = 0
    kv.fill(np.array([3]), taken)
    assert (pool.mamba_cache.conv[0][:, 3] == 1).all()
    assert not pool.mamba_cache.conv[0][:, 1].any()

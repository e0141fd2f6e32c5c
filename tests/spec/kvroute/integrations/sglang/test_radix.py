"""Pages on the host of SGLang up to 0.5.16: what its hooks say to the rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from waiting import until

from cache_manager.keys import Namespace
from kvroute import ConfigError, routing_spec
from kvroute.connector.settings import Common
from kvroute.connector.witness import KvFolder
from kvroute.integrations.sglang import radix
from kvroute.integrations.sglang.rows import RoutedRows

PAGE, PAGES, HOST = 4, 3, 3
KEYS = ["one" * 8, "other" * 8]
SPEC = routing_spec(num_experts=250, top_k=2, layer_ids=[1, 2], num_layers=3, block_tokens=PAGE)


class HiCacheController:
    """By SGLang's own name."""

    enable_storage = False
    page_size = PAGE
    mem_pool_host = SimpleNamespace(size=HOST * PAGE, page_size=PAGE)


class HybridCacheController(HiCacheController):
    """It copies pages by itself."""


@pytest.fixture
def current() -> Any:
    """Rows of SGLang's pages, as its hooks are given them."""
    rows = RoutedRows(SPEC, PAGES, Namespace("m", 1), Common(strict=True, store="memory:"))
    yield SimpleNamespace(rows=rows)
    rows.close()


def slots_of(page: int) -> torch.Tensor:
    return torch.arange(page * PAGE, (page + 1) * PAGE)


def test_pages_of_the_tree_that_is_followed_have_rows(current: Any) -> None:
    """Method: rows of a page go to the last page on the host, and from there to another page."""
    rows = current.rows
    radix.hosted(current, None, HiCacheController())
    ids = torch.arange(PAGE * 3 * 2, dtype=torch.int32).reshape(PAGE, 3, 2)
    rows.launch(slots_of(1), ids, slots_of(1)).finalize()
    there = rows.pages_of(slots_of(HOST - 1), host=True)
    rows.copied(rows.pages_of(slots_of(1)), there)
    rows.copied(there, rows.pages_of(slots_of(2)))
    routing = rows.aux.read(SPEC.name, np.array([2]), 0, PAGE)
    assert routing.valid.all()
    assert (routing.values == ids[:, 1:].numpy()).all()


def test_a_controller_that_copies_pages_by_itself_is_refused_by_name_and_nothing_is_attached(current: Any) -> None:
    wanted = r"enable_hierarchical_cache: wanted a model .* HiCacheController: .*, got HybridCacheController"
    with pytest.raises(ConfigError, match=wanted):
        radix.hosted(current, None, HybridCacheController())
    radix.hosted(current, None, HiCacheController())  # as if for the first time


def test_a_hit_of_a_storage_is_cut_where_rows_end_and_its_pages_have_their_rows(current: Any) -> None:
    """Method: rows of a page on the host are stored; its KV comes to another one from a storage that has two pages."""
    rows, kv = current.rows, torch.zeros(HOST, PAGE, dtype=torch.int64)
    whole = KEYS, 2 * PAGE
    assert radix.found(current, whole, HiCacheController()) == whole  # nobody keeps KV yet
    rows.attach(folder=KvFolder([kv]), host_pages=HOST)
    ids = torch.arange(PAGE * 3 * 2, dtype=torch.int32).reshape(PAGE, 3, 2)
    rows.launch(slots_of(1), ids, slots_of(1)).finalize()
    kept = rows.pages_of(slots_of(0), host=True)
    rows.copied(rows.pages_of(slots_of(1)), kept)
    kv[0] = 7
    (job,) = rows.keep(KEYS[:1], kept)
    until(job.poll, what="the rows are not stored")
    rows.go_on()
    assert radix.found(current, whole, HiCacheController()) == (KEYS[:1], PAGE)

    kv[2] = 7
    radix.prefetched(current, None, None, None, slots_of(2), KEYS[:1])
    radix.prefetched(current, None, None, None, slots_of(1)[:0], [])
    routing = rows.aux.read(SPEC.name, rows.pages_of(slots_of(2), host=True), 0, PAGE)
    assert routing.valid.all()
    assert (routing.values == ids[:, 1:].numpy()).all()

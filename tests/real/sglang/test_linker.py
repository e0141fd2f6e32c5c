"""Both linkers on pages and rows, without an engine: when jobs end, and whose KV is folded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt import runtime_context as context

from cache_manager.keys import Namespace
from kvroute import ConfigError, routing_spec
from kvroute.connector.settings import Common
from kvroute.integrations.sglang.capturer import Capturer
from kvroute.integrations.sglang.host_pages import host_folder
from kvroute.integrations.sglang.linker import Beside, KvrouteLinker, device_folder
from kvroute.integrations.sglang.rows import RoutedRows

PAGE, PAGES, LAYERS = 4, 5, 3
SPEC = routing_spec(num_experts=250, top_k=2, layer_ids=[0, 1, 2], num_layers=LAYERS, block_tokens=PAGE)


class MHATokenToKVPool(SimpleNamespace):
    """The buffers of SGLang's pool of this name."""


class DSATokenToKVPool(MHATokenToKVPool):
    """That of sparse attention, which has an index beside keys and values."""


def pool() -> Any:
    """KV on the device as SGLang has it: by layer, ``[slots, heads, values]``."""
    halves = torch.arange(2 * LAYERS * PAGES * PAGE * 2 * 8, dtype=torch.float32).reshape(2, LAYERS, -1, 2, 8)
    return MHATokenToKVPool(k_buffer=list(halves[0]), v_buffer=list(halves[1]))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The arguments from which SGLang makes a linker, in a process that has rows."""
    rows = RoutedRows(SPEC, PAGES, Namespace("m", 1), Common(store="memory:", strict=True))
    theirs = SimpleNamespace(
        device_cache=SimpleNamespace(buffer=torch.zeros(8, 3, 2, dtype=torch.int32)), destroy=lambda: None
    )
    monkeypatch.setattr(context.get_resources(), "experts_capturer", Capturer(theirs, rows))
    kv = pool()
    allocator = SimpleNamespace(get_kvcache=lambda: kv)
    params = SimpleNamespace(token_to_kv_pool_allocator=allocator, page_size=PAGE, attn_tp_cache_group=None)
    yield SimpleNamespace(rows=rows, params=params, kv=kv)
    rows.close()


class Theirs:
    """A linker whose offloads are over at once."""

    name, done = "theirs", 0

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        self.done += 1
        return True

    def num_completed_offloads(self) -> int:
        return self.done

    def pop_completed_offload(self) -> bool:
        self.done -= 1
        return True

    def reset(self) -> None:
        self.done = 0


def slots(page: int) -> torch.Tensor:
    return torch.arange(page * PAGE, (page + 1) * PAGE)


def launched(rows: RoutedRows, page: int) -> Any:
    return rows.launch(slots(page), torch.tensor([page, 100 + page], dtype=torch.int32).expand(PAGE, LAYERS, 2))


def test_no_offload_of_a_linker_of_others_is_over_before_that_of_its_rows_has_begun(given: Any) -> None:
    """Goal: SGLang gives no page away whose rows are not copied. Method: passes that end after the offloads of KV."""
    linker = Beside(Theirs(), given.params, ["FULL"])
    assert linker.name == "theirs"
    passes = [launched(given.rows, 1)]
    linker.offload([SimpleNamespace(name="kv", keys=["a" * 64], device_indices=slots(1))])
    passes.append(launched(given.rows, 2))
    linker.offload([SimpleNamespace(name="kv", keys=["b" * 64], device_indices=slots(2))])
    for over, each in enumerate(passes):
        assert linker.num_completed_offloads() == over
        each.finalize()
    assert linker.num_completed_offloads() == 2
    assert linker.pop_completed_offload()
    assert linker.num_completed_offloads() == 1
    launched(given.rows, 3)
    linker.offload([SimpleNamespace(name="kv", keys=["c" * 64], device_indices=slots(3))])
    linker.reset()
    assert linker.num_completed_offloads() == 0
    given.rows.weights.changed()  # it is unknown to what: no rows are stored, and none are waited for
    linker.offload([SimpleNamespace(name="kv", keys=["d" * 64], device_indices=slots(3))])
    assert linker.num_completed_offloads() == 1


def test_our_linker_brings_kv_and_rows_back(given: Any) -> None:
    linker = KvrouteLinker(None, given.params, components=["FULL"], extra_config={})
    before = [each.clone() for each in (*given.kv.k_buffer, *given.kv.v_buffer)]
    over = launched(given.rows, 1)
    transfer = SimpleNamespace(name="kv", keys=["a" * 64], device_indices=slots(1))
    assert linker.offload([transfer])
    assert linker.num_completed_offloads() == 0
    over.finalize()
    for job in given.rows.aux.jobs:
        assert job.wait(10)
    assert linker.num_completed_offloads() == 1
    assert linker.pop_completed_offload()
    assert linker.lookup("r", [transfer]) == [1]
    assert linker.load("r", [SimpleNamespace(name="kv", keys=["a" * 64], device_indices=slots(3))])
    assert not linker.load("r", [SimpleNamespace(name="kv", keys=["b" * 64], device_indices=slots(2))])
    for old, new in zip(before, (*given.kv.k_buffer, *given.kv.v_buffer), strict=True):
        assert torch.equal(new[slots(3)], old[slots(1)])
    found = given.rows.read(slots(3).numpy(), 0).routes()[0]
    assert found.known.all()
    assert (found.ids == [1, 101]).all()


def test_what_may_not_be_stored_is_over_in_its_turn_and_not_stored(given: Any) -> None:
    """Goal: SGLang counts offloads on each rank, in their order, and gives no page away that an earlier offload still
    holds. Method: an offload with unknown weights, behind one whose pass runs."""
    linker = KvrouteLinker(None, given.params, components=["FULL"], extra_config={})
    over = launched(given.rows, 1)
    assert linker.offload([SimpleNamespace(name="kv", keys=["a" * 64], device_indices=slots(1))])
    given.rows.weights.changed()
    assert linker.offload([SimpleNamespace(name="kv", keys=["b" * 64], device_indices=slots(1))])
    assert linker.num_completed_offloads() == 0
    over.finalize()
    for job in given.rows.aux.jobs:
        assert job.wait(10)
    assert linker.num_completed_offloads() == 2
    linker.pop_completed_offload()
    assert not linker.pop_completed_offload()


@pytest.mark.parametrize("linker", [KvrouteLinker, Beside])
def test_pages_that_are_more_than_keys_and_values_are_refused_by_name(given: Any, linker: type) -> None:
    """Goal: no linker stores a page without its index. Method: the pool of sparse attention."""
    sparse = DSATokenToKVPool(**vars(given.kv))
    given.params.token_to_kv_pool_allocator = SimpleNamespace(get_kvcache=lambda: sparse)
    named: dict[str, Any] = {"extra_config": {}} if linker is KvrouteLinker else {}
    with pytest.raises(ConfigError, match=r"wanted pages of keys and values alone, .*got DSATokenToKVPool"):
        linker(None, given.params, components=["FULL"], **named)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_kv_on_the_host_has_the_folds_of_the_device(layout: str, latent: bool) -> None:
    device = pool()
    halves = [torch.stack(device.k_buffer), torch.stack(device.v_buffer)][: 1 if latent else 2]
    if layout != "layer_first":
        halves = [each.transpose(0, 1) for each in halves]
    if layout == "page_first_direct":  # [pages, layers, page, ...]
        halves = [each.unflatten(0, (-1, PAGE)).transpose(1, 2) for each in halves]
    host = SimpleNamespace(layout=layout, page_size=PAGE, dtype=torch.float32)
    if latent:
        host.kv_buffer = halves[0].contiguous()
        device = SimpleNamespace(kv_buffer=device.k_buffer)
    else:
        host.k_buffer, host.v_buffer = (each.contiguous() for each in halves)
    pages = list(range(PAGES))
    folds = host_folder(host).folds(pages)
    assert len(set(folds.tolist())) == PAGES
    np.testing.assert_array_equal(folds, device_folder(device, PAGE).folds(pages))

"""With several data-parallel ranks a hook keeps the ids of its own rank's tokens, in every layout, or none."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.errors import ConfigError
from kvroute import routing_spec
from kvroute.capture.step_ids import NO_ID, StepIds
from kvroute.integrations.vllm.layouts import Place, hook_of, join_of, own_part
from kvroute.integrations.vllm.routers import place_of

COUNTS = st.lists(st.integers(1, 9), min_size=2, max_size=4)


def sizes_of(counts: list[int], shards: int) -> list[int]:
    """As vLLM's ``_compute_sp_num_tokens`` says: each rank's tokens are divided, rounded up."""
    return [-(-count // shards) for count in counts for _ in range(shards)]


def tokens_of(rank: int, count: int) -> torch.Tensor:
    """Ids ``[tokens, 2]`` that say of which rank and token they are."""
    return torch.stack([torch.full((count,), rank), torch.arange(count)], 1)


def in_shards(ids: torch.Tensor, shards: int) -> list[torch.Tensor]:
    """As vLLM's ``sequence_parallel_chunk`` divides: with padding at the end."""
    missing = -len(ids) % shards
    return list(torch.cat([ids, ids.new_full((missing, 2), 99)]).chunk(shards))


@given(counts=COUNTS, shards=st.sampled_from([1, 2, 4]), gathered=st.booleans(), rank=st.integers(0, 3))
def test_each_rank_keeps_its_own_tokens(counts: list[int], shards: int, gathered: bool, rank: int) -> None:
    """Goal: the four layouts. Method: tokens that know their rank, laid out as vLLM does; what the shards of a rank
    keep, joined in order, begins with its own tokens."""
    rank %= len(counts)
    parts = [part for data, count in enumerate(counts) for part in in_shards(tokens_of(data, count), shards)]
    sizes = sizes_of(counts, shards)
    kept = []
    for shard in range(shards):
        place = Place(rank, len(counts), shard, shards)
        ids = torch.cat(parts) if gathered else parts[place.part]
        part = own_part(len(ids), sizes, place, gathered=gathered)
        assert part is not None
        kept.append(ids[part])
    assert torch.cat(kept)[: counts[rank]].tolist() == tokens_of(rank, counts[rank]).tolist()


@given(counts=COUNTS, shards=st.sampled_from([1, 2]), gathered=st.booleans(), more=st.sampled_from([-1, 1, 5]))
def test_other_numbers_of_ids_are_of_nobody(counts: list[int], shards: int, gathered: bool, more: int) -> None:
    """Goal: a layout that is not the one that the layer says gives no rows, though the number may fit another one."""
    place, sizes = Place(1, len(counts), 0, shards), sizes_of(counts, shards)
    ids = sum(sizes) if gathered else sizes[place.part]
    assert own_part(ids + more, sizes, place, gathered=gathered) is None
    assert own_part(ids, None, place, gathered=gathered) is None
    assert own_part(ids, [*sizes, 1], place, gathered=gathered) is None
    other = sizes[place.part] if gathered else sum(sizes)
    assert own_part(other, sizes, place, gathered=gathered) is None


SPEC = routing_spec(num_experts=200, top_k=2, layer_ids=[1, 3], num_layers=4, block_tokens=4)


class Ranks:
    """Tensor-parallel ranks whose all-gather waits for all of them: here the other ranks' shards are there already."""

    def __init__(self, *others: torch.Tensor) -> None:
        self.others, self.calls = others, 0

    def all_gather(self, shard: torch.Tensor, dim: int) -> torch.Tensor:
        self.calls += 1
        return torch.cat([shard, *self.others], dim)


def a_shard(first: int, tokens: int) -> torch.Tensor:
    """Ids ``[tokens, layers, top_k]`` of layers 1 and 3."""
    layers = [torch.stack([torch.arange(first, first + tokens), torch.full((tokens,), layer)], 1) for layer in (1, 3)]
    return torch.stack(layers, 1).to(torch.int32)


def test_shards_of_a_step_are_joined_once_a_pass() -> None:
    """Goal: a rank that sees half of a step's tokens has the rows of all; the padding of the last shard is no row.
    Method: five tokens in two shards of three; two steps, the second one shorter."""
    for tokens in (5, 3):
        size = -(-tokens // 2)
        group = Ranks(a_shard(size, size))
        ids = StepIds(SPEC, 5, torch.device("cpu"), join_of(Place(0, 2, 0, 2), group))
        ids.begin()
        for layer, values in zip((1, 3), a_shard(0, size).unbind(1), strict=True):
            ids.hook(layer)(values.contiguous())
        assert ids.take(tokens).tolist() == a_shard(0, tokens).tolist()  # type: ignore[union-attr]
        assert group.calls == 1
        ids.begin()
        assert (ids.take(tokens) == NO_ID).all()  # type: ignore[union-attr]


def test_a_failed_pass_takes_part_in_the_join() -> None:
    """Goal: no rank waits forever for one whose pass has no ids. Method: a router of another width."""
    group = Ranks(a_shard(2, 2))
    ids = StepIds(SPEC, 8, torch.device("cpu"), join_of(Place(0, 2, 0, 2), group))
    ids.begin()
    ids.hook(1)(torch.zeros((2, 2), dtype=torch.int32))
    ids.hook(3)(torch.zeros((2, 5), dtype=torch.int32))
    assert group.calls == 1
    taken = ids.take(4)
    assert (taken[:2] == NO_ID).all()  # type: ignore[index]


def test_a_pass_whose_router_is_called_twice_takes_part_in_the_join() -> None:
    """Goal: the same. Method: this rank alone calls a router twice; the other shard's rows are there."""
    group = Ranks(a_shard(2, 2))
    ids = StepIds(SPEC, 8, torch.device("cpu"), join_of(Place(0, 2, 0, 2), group))
    ids.begin()
    first, third = a_shard(0, 2).unbind(1)
    for layer, values in ((1, first), (1, first), (3, third)):
        ids.hook(layer)(values.contiguous())
    assert group.calls == 1
    assert (ids.take(4)[:2] == NO_ID).all()  # type: ignore[index]


@pytest.mark.parametrize(("shards", "expected"), [(1, []), (2, [[NO_ID, NO_ID]] * 3)])
def test_ids_that_are_not_this_rank_s_are_none_of_its_shard(
    monkeypatch: pytest.MonkeyPatch, shards: int, expected: list[list[int]]
) -> None:
    """Goal: a rank whose layer has other ids than it says still hands on a shard of the right size, as others wait."""
    sizes = [3] * 2 * shards
    context = SimpleNamespace(dp_metadata=SimpleNamespace(local_sizes=sizes))
    vllm = SimpleNamespace(get_forward_context=lambda: context)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", vllm)  # type: ignore[arg-type]
    kept = list[torch.Tensor]()
    hook_of("layers.1", MoERunner(shards), Place(0, 2, 0, shards), kept.append)(torch.zeros((5, 2), dtype=torch.int32))
    assert kept[0].tolist() == expected


def test_a_rank_that_has_all_tokens_joins_nothing() -> None:
    assert join_of(None, None) is None
    assert join_of(Place(1, 2), None) is None


class MoERunner:
    """Under the name of vLLM's layer; a kernel that routes inside has a ``preparation``."""

    do_naive_dispatch_combine = False
    layer_id = 1

    def __init__(self, shards: int = 1, preparation: Any = None) -> None:
        self.moe_config = SimpleNamespace(sp_size=shards)
        kernel = SimpleNamespace(prepare_finalize=preparation)
        method = SimpleNamespace(is_monolithic=preparation is not None, moe_kernel=kernel)
        self.routed_experts, self.router = SimpleNamespace(quant_method=method), None


def placed(data_size: int, tensor_rank: int, **modules: Any) -> Place | None:
    config = SimpleNamespace(data_parallel_size=data_size, data_parallel_rank=data_size - 1)
    named = {name.replace("_", "."): module for name, module in modules.items()}
    return place_of(config, named, SPEC, "layers.0.attn", tensor_rank)


def test_where_a_rank_is_among_all() -> None:
    """Goal: who is asked for which part. Method: one rank of data; two, and a model whose layers divide sequences; an
    attention layer and a draft model's layers say nothing."""
    attention = SimpleNamespace(layer_id=1)
    draft = SimpleNamespace(layer_id=1, router=None)
    assert placed(1, 1, layers_1=MoERunner()) is None
    assert placed(2, 1, layers_1=MoERunner(), attention=attention, mtp_layers_1=draft) == Place(1, 2, 0, 1)
    assert placed(2, 1, layers_1=MoERunner(2), layers_3=MoERunner(2)) == Place(1, 2, 1, 2)
    assert placed(1, 1, layers_1=MoERunner(2)) == Place(0, 1, 1, 2)
    preparation = type("MoEPrepareAndFinalizeNaiveDPEPMonolithic", (), {})()
    assert placed(2, 0, layers_1=MoERunner(1, preparation)) == Place(1, 2)


def test_layers_of_unknown_layout_are_refused_by_name() -> None:
    """Goal: no guess. Method: experts that do without vLLM's runner, a kernel with another preparation, layers that
    divide sequences differently; one rank of data takes the first two."""
    others = SimpleNamespace(layer_id=1, capture_fn=None)
    kernel = MoERunner(1, SimpleNamespace())
    unmade = MoERunner(1, SimpleNamespace())  # of which vLLM knows that it routes inside, before there is a kernel
    unmade.routed_experts.quant_method.moe_kernel = None
    for module, kind in (others, "SimpleNamespace"), (kernel, "SimpleNamespace"), (unmade, "SimpleNamespace"):
        assert placed(1, 0, layers_1=module) is None
        with pytest.raises(ConfigError, match=rf"layer layers\.1: wanted vLLM's own runner, or .*, got {kind}"):
            placed(2, 0, layers_1=module)
    with pytest.raises(ConfigError, match=r"one number of shards of a sequence for all, got \[1, 2\]"):
        placed(2, 0, layers_1=MoERunner(), layers_3=MoERunner(2))

"""vLLM's own numbers beside kvroute's layouts: what a layer gathers, and what its router's hook keeps of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import DPMetadata, ForwardContext, override_forward_context
from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep, no_dp_ep
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.models import utils

from kvroute.integrations.vllm.layouts import GATHERS, Place, gathers, hook_of

COUNTS = [5, 1, 8]


def layer_of(*, shards: int, kernel: bool, preparation: Any = None) -> Any:
    """As much of vLLM's layer as its own methods ask for; with a ``kernel`` the router chooses before the gather."""
    method = SimpleNamespace(
        supports_internal_mk=kernel,
        is_monolithic=preparation is not None,
        moe_kernel=SimpleNamespace(prepare_finalize=preparation),
    )
    config = SimpleNamespace(
        dp_size=len(COUNTS), is_sequence_parallel=shards > 1, sp_size=shards, pcp_size=1, use_ep=True
    )
    layer = SimpleNamespace(moe_config=config, routed_experts=SimpleNamespace(quant_method=method))
    layer._quant_method = method
    layer.do_naive_dispatch_combine = MoERunner.do_naive_dispatch_combine.fget(layer)
    return layer


def ids_of(rank: int) -> torch.Tensor:
    """Ids ``[tokens, 2]`` that say of which rank and token they are."""
    return torch.stack([torch.full((COUNTS[rank],), rank), torch.arange(COUNTS[rank])], 1)


def sharded(ids: torch.Tensor, shards: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What each tensor-parallel rank has of a data-parallel rank's tokens, by vLLM's own function."""
    monkeypatch.setattr(utils, "get_tensor_model_parallel_world_size", lambda: shards)
    parts = []
    for shard in range(shards):
        monkeypatch.setattr(utils, "get_tensor_model_parallel_rank", lambda shard=shard: shard)
        parts.append(utils.sequence_parallel_chunk_impl(ids))
    return parts


def kept(layer: Any, place: Place, ids: torch.Tensor) -> torch.Tensor:
    """What the hook keeps in a pass of these numbers, in the context that vLLM's layer makes for its call."""
    seen = list[torch.Tensor]()
    metadata = DPMetadata(torch.tensor(COUNTS, dtype=torch.int32))
    context = ForwardContext({}, {}, {}, metadata, CUDAGraphMode.NONE)
    with override_forward_context(context), MoERunner._sequence_parallel_context(layer):
        hook_of("layers.1", layer, place, seen.append)(ids)
    return seen[0]


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("rank", range(3))
def test_a_hook_keeps_its_ranks_tokens(rank: int, kernel: bool, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: kvroute's arithmetic is vLLM's. Method: vLLM's division into shards, its numbers, its answer to whether a
    layer gathers first; the ids as its gather lays them out, one part after the other."""
    layer = layer_of(shards=shards, kernel=kernel)
    parts = [part for data in range(3) for part in sharded(ids_of(data), shards, monkeypatch)]
    found = []
    for shard in range(shards):
        place = Place(rank, 3, shard, shards)
        found.append(kept(layer, place, parts[place.part] if kernel else torch.cat(parts)))
    assert torch.cat(found)[: COUNTS[rank]].tolist() == ids_of(rank).tolist()


def test_ids_that_are_not_what_the_layer_says_are_not_kept() -> None:
    """Goal: another rank's rows are never taken. Method: all ranks' ids where the layer says its own, and the other way
    round; no numbers, as outside of a layer's call."""
    every = torch.cat([ids_of(data) for data in range(3)])
    assert len(kept(layer_of(shards=1, kernel=True), Place(1, 3), every)) == 0
    assert len(kept(layer_of(shards=1, kernel=False), Place(1, 3), ids_of(1))) == 0
    seen = list[torch.Tensor]()
    with override_forward_context(ForwardContext({}, {}, {}, None, CUDAGraphMode.NONE)):
        hook_of("layers.1", layer_of(shards=1, kernel=True), Place(1, 3), seen.append)(ids_of(1))
    assert len(seen[0]) == 0


def test_kernels_that_route_inside_say_by_their_preparation_what_they_gather() -> None:
    """Goal: the table has vLLM's classes. Method: both of them, and one that nobody knows."""
    for made, gathered in (
        (naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPMonolithic(), True),
        (no_dp_ep.MoEPrepareAndFinalizeNoDPEPMonolithic(), False),
    ):
        assert GATHERS[type(made).__name__] is gathered
        assert gathers(layer_of(shards=1, kernel=True, preparation=made)) is gathered
    assert gathers(layer_of(shards=1, kernel=True, preparation=SimpleNamespace())) is None

"""What the hook of each of vLLM's router classes sees, beside the ids that its kernel is given."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy
from vllm.model_executor.layers.fused_moe.router import (
    base_router,
    fused_topk_bias_router,
    fused_topk_router,
    zero_expert_router,
)
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulatorRouter

from kvroute import routing_spec
from kvroute.integrations.vllm.routers import ROUTERS, bind

EXPERTS, TOP_K, TOKENS = 16, 4, 50
SHAPE: dict[str, Any] = {"top_k": TOP_K, "global_num_experts": EXPERTS}
GROUPS: dict[str, Any] = {"num_expert_group": 4, "topk_group": 2}
HOME = Path(vllm.__file__).parent
ABSTRACT = {"BaseRouter", "FusedMoERouter"}


def plain(gating_output: Any, topk: int, **_: Any) -> Any:
    """A model's own routing function."""
    return gating_output.softmax(-1).topk(topk, -1)


def bias() -> torch.Tensor:
    return torch.linspace(0, 0.5, EXPERTS)


ON_A_CPU: dict[str, Callable[[], Any]] = {
    "CPURouter": lambda: CPURouter(**SHAPE),
    "CPURouter, not renormalised": lambda: CPURouter(**SHAPE, renormalize=False),
    "CPURouter, grouped": lambda: CPURouter(**SHAPE, use_grouped_topk=True, **GROUPS),
    "CPURouter, grouped and biased": lambda: CPURouter(
        **SHAPE, use_grouped_topk=True, scoring_func="sigmoid", e_score_correction_bias=bias(), **GROUPS
    ),
    "CPURouter, a function": lambda: CPURouter(**SHAPE, custom_routing_function=plain),
    "CustomRoutingRouter": lambda: CustomRoutingRouter(**SHAPE, custom_routing_function=plain),
    "RoutingSimulatorRouter": lambda: RoutingSimulatorRouter(**SHAPE),
    "FusedTopKRouter": lambda: fused_topk_router.FusedTopKRouter(**SHAPE),
    "FusedTopKBiasRouter": lambda: fused_topk_bias_router.FusedTopKBiasRouter(
        **SHAPE, e_score_correction_bias=bias(), scoring_func="softmax"
    ),
    "GroupedTopKRouter": lambda: GroupedTopKRouter(**SHAPE, **GROUPS),
    "GroupedTopKRouter, biased": lambda: GroupedTopKRouter(
        **SHAPE, scoring_func="sigmoid", e_score_correction_bias=bias(), **GROUPS
    ),
}


def top(scores: torch.Tensor, k: int, by: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    ids = (scores if by is None else scores + by).topk(k, -1).indices
    return scores.gather(1, ids), ids.to(torch.int32)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that exist on GPUs alone, as the same arithmetic in torch; and simulated routing has a strategy."""

    def fused_topk(gating_output: Any, topk: int, **_: Any) -> Any:
        weights, ids = top(gating_output.softmax(-1), topk)
        return weights, ids, ids

    def fused_topk_bias(gating_output: Any, topk: int, **more: Any) -> Any:
        if (table := more.get("hash_indices_table")) is not None:
            ids = table[more["input_tokens"]]
            return gating_output.gather(1, ids.long()), ids
        return top(gating_output.softmax(-1), topk, more["e_score_correction_bias"])

    monkeypatch.setattr(fused_topk_router, "fused_topk", fused_topk)
    monkeypatch.setattr(fused_topk_bias_router, "fused_topk_bias", fused_topk_bias)
    monkeypatch.setattr(zero_expert_router, "fused_topk_bias", fused_topk_bias)
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")


def bound(router: Any) -> list[torch.Tensor]:
    """The ids that kvroute's hook gets from now on."""
    seen = list[torch.Tensor]()
    spec = routing_spec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=[0], num_layers=1, block_tokens=4)
    bind(
        {"model.layers.0.mlp.experts": SimpleNamespace(layer_id=0, router=router)},
        spec,
        lambda _: seen.append,
        "model.layers.0.attn",
    )
    return seen


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ON_A_CPU)
def test_the_hook_sees_what_the_kernel_uses(name: str) -> None:
    """Goal: no class changes its ids between the hook and the kernel. Method: vLLM's class, its own call; what it
    returns is what its kernel is given."""
    torch.manual_seed(0)
    router = ON_A_CPU[name]()
    seen = bound(router)
    _, used = router.select_experts(
        hidden_states=torch.randn(TOKENS, 8), router_logits=torch.randn(TOKENS, EXPERTS), topk_indices_dtype=torch.int32
    )
    assert len(seen) == 1
    assert seen[0].shape == (TOKENS, TOP_K)
    assert torch.equal(seen[0].to(used.dtype), used)
    assert all(len(set(row)) == TOP_K for row in used.tolist()) or "Simulator" in name


@pytest.mark.usefixtures("kernels")
def test_the_hook_sees_the_experts_of_a_hash_layer() -> None:
    """Goal: layers that choose by the token alone (DeepSeek-V4's ``num_hash_layers``) have rows, too. Method: vLLM's
    class with a table, asked with the tokens."""
    table = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(100)]).int()
    router = fused_topk_bias_router.FusedTopKBiasRouter(**SHAPE, scoring_func="softmax", hash_indices_table=table)
    seen, tokens = bound(router), torch.randint(100, (TOKENS,))
    _, used = router.select_experts(
        hidden_states=torch.randn(TOKENS, 8), router_logits=torch.randn(TOKENS, EXPERTS), input_ids=tokens
    )
    assert torch.equal(seen[0].int(), table[tokens])
    assert torch.equal(seen[0].to(used.dtype), used)


def test_the_hook_sees_logical_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the map to physical experts (EPLB) is after the hook, and leaves its tensor alone. Method: a map that
    moves every expert; on a CPU vLLM's own is the identity, so its function is replaced."""

    def moved(topk_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return (topk_ids + 5) % EXPERTS

    monkeypatch.setattr(base_router, "eplb_map_to_physical_and_record", moved)
    fields = {name: torch.zeros(1) for name in ("expert_load_view", "logical_to_physical_map", "logical_replica_count")}
    state = SimpleNamespace(**fields, should_record_tensor=torch.zeros(1), num_unpadded_tokens_tensors=[None])
    router, logits = CPURouter(**SHAPE, eplb_state=state), torch.randn(TOKENS, EXPERTS)
    seen = bound(router)
    _, used = router.select_experts(hidden_states=torch.randn(TOKENS, 8), router_logits=logits)
    assert torch.equal(seen[0].sort().values, logits.topk(TOP_K).indices.sort().values.int())
    assert torch.equal((seen[0] + 5) % EXPERTS, used)


def test_the_hook_sees_logical_ids_after_a_rebalance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the same ids before experts move to other ranks and after it, also of experts with several replicas.
    Method: vLLM's own policy places 16 experts in 24 places by one load and then by another; the map to a replica is
    its kernel's arithmetic, which exists on GPUs alone. The kernel's places lead back to the hook's ids."""

    def replica(topk_ids: Any, logical_to_physical_map: Any, logical_replica_count: Any, **_: Any) -> torch.Tensor:
        tokens = torch.arange(len(topk_ids))[:, None]
        place = (tokens * 2654435769 & 0xFFFFFFFF) % logical_replica_count[topk_ids.long()]
        chosen: torch.Tensor = logical_to_physical_map[topk_ids.long(), place]
        return chosen

    monkeypatch.setattr(base_router, "eplb_map_to_physical_and_record", replica)
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, EXPERTS)
    hooked, used_places = list[torch.Tensor](), list[torch.Tensor]()
    for load in (torch.arange(EXPERTS), torch.arange(EXPERTS).flip(0)):
        experts = DefaultEplbPolicy.rebalance_experts(load[None] + 1, 24, 1, 1, 4)[0]
        assert sorted(set(experts.tolist())) == list(range(EXPERTS))
        places = [(experts == expert).nonzero().flatten() for expert in range(EXPERTS)]
        state = SimpleNamespace(
            expert_load_view=torch.zeros(24),
            logical_to_physical_map=torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1),
            logical_replica_count=torch.tensor([len(each) for each in places]),
            should_record_tensor=torch.zeros(1),
            num_unpadded_tokens_tensors=[None],
        )
        router: Any = CPURouter(**SHAPE, eplb_state=state)
        seen = bound(router)
        _, used = router.select_experts(hidden_states=torch.randn(TOKENS, 8), router_logits=logits)
        assert torch.equal(experts[used.long()].int(), seen[0].int())
        hooked.append(seen[0])
        used_places.append(used)
    assert torch.equal(*hooked)
    assert not torch.equal(*used_places)


@pytest.mark.usefixtures("kernels")
def test_the_hook_sees_experts_that_compute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: no row says 0 for an expert that computes nothing (LongCat). Method: two of vLLM's routers, of which the
    first is hooked, asked in turns and twice; what their kernels get has a 0 for each such expert."""
    monkeypatch.setattr(zero_expert_router, "zero_experts_compute_triton", lambda **_: None)
    torch.manual_seed(0)
    hooked, other = (
        zero_expert_router.ZeroExpertRouter(
            top_k=TOP_K,
            global_num_experts=EXPERTS,
            e_score_correction_bias=bias(),
            num_logical_experts=EXPERTS - 6,
            zero_expert_type="identity",
        )
        for _ in range(2)
    )
    seen = bound(hooked)
    wanted = list[torch.Tensor]()
    for tokens in (TOKENS, 3):
        logits = torch.randn(tokens, EXPERTS)
        other.select_experts(hidden_states=torch.randn(tokens, 8), router_logits=torch.randn(tokens, EXPERTS))
        _, used = hooked.select_experts(hidden_states=torch.randn(tokens, 8), router_logits=logits)
        wanted.append(top(logits.softmax(-1), TOP_K, bias())[1])
        assert torch.equal(used, torch.where(wanted[-1] < EXPERTS - 6, wanted[-1], 0))
        assert not torch.equal(used, wanted[-1])
    assert [each.tolist() for each in seen] == [each.tolist() for each in wanted]


def test_every_class_that_routes_is_in_the_table() -> None:
    """Goal: a class of a new release does not come unseen. Method: vLLM's whole source; its routers, experts that do
    without its runner, and models with a router of their own."""
    classes = set[str]()
    for path in HOME.rglob("*.py"):
        text = path.read_text()
        if "capture_fn" not in text and "Router)" not in text:
            continue
        for made in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
            stores = {ast.unparse(node) for node in ast.walk(made) if isinstance(node, ast.Attribute)}
            bases = {ast.unparse(base) for base in made.bases}
            if "self.capture_fn" in stores or bases & ABSTRACT:
                classes.add(made.name)
    assert classes - ABSTRACT - {"RoutedExpertsSink"} == set(ROUTERS)

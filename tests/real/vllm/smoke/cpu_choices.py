"""vLLM 0.24 to 0.26 on a CPU: experts are chosen by the layer's router, as on a GPU.

There a kernel for CPUs chooses inside and tells nobody, so that kvroute refuses it by name. Here the router that a GPU
uses is asked, with the arithmetic of that kernel, and the kernel is given its choice.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe import cpu_fused_moe, unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.router import fused_topk_router

_choose = cpu_fused_moe.select_experts
_inside = False


def _compute_routing(self: Any, hidden_states: Any, router_logits: Any, *_: Any, **__: Any) -> Any:
    return _choose(hidden_states, router_logits, self.top_k, use_grouped_topk=False, renormalize=self.renormalize)


def _apply(self: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, *_: Any, **__: Any) -> Any:
    global _inside
    cpu_fused_moe.select_experts = lambda **_: (topk_weights, topk_ids)
    _inside = True
    try:
        return self.apply_monolithic(layer, x, topk_weights)
    finally:
        _inside = False


fused_topk_router.FusedTopKRouter._compute_routing = _compute_routing
unquantized_fused_moe_method.UnquantizedFusedMoEMethod.is_monolithic = property(lambda _: _inside)
unquantized_fused_moe_method.UnquantizedFusedMoEMethod.apply = _apply

"""The routers of SGLang: what its capture of routed experts sees of each, beside what the experts' kernel uses.

A model with a router that is not in this table, or whose way is not known to be right, is refused when it starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from cache_manager.errors import ConfigError
from kvroute.integrations.sglang import versions


class Router(NamedTuple):
    sees: str  # what the capture sees, beside what the kernel uses
    judged: str
    accepted: bool = True


TOPK: Final = "TopK"
FORMATS: Final[Mapping[str, Router]] = {
    "STANDARD": Router("the ids before shared experts and physical numbers; the kernel uses them", "tests"),
    "TRITON_KERNEL": Router("nothing: the ids stay in the kernel's own format", "by reading", accepted=False),
    "BYPASSED": Router(
        "nothing where the kernel chooses by itself; the ids where it does not. Which, the kernel decides",
        "by reading",
        accepted=False,
    ),
    "PACKED": Router("what STANDARD shows: it is made of it", "by reading", accepted=False),
}
"""The forms in which a ``TopK`` hands out its choice."""

ROUTERS: Final[Mapping[str, Router]] = {
    TOPK: Router("by its form: see there", "tests"),
    "InklingGate": Router("its ids, outside the fused gate, which SGLang leaves while it captures", "by reading"),
    "MuseSpark1xMoE": Router("its ids, gathered from all ranks", "by reading"),
    "HashTopK": Router("nothing: SGLang does not capture it", "test on a CPU", accepted=False),
}
"""The classes of modules that capture their choice, or ought to."""

PATHS: Final[Mapping[str, str]] = {
    "select_experts": "plain, grouped, biased, sigmoid and custom routing: the ids that each returns; tests on a CPU",
    "select_experts, dynamic_expert_bias": "the ids; test on a CPU",
    "select_experts, LongCat's zero experts": "ids of experts that compute nothing, too; test on a CPU",
    "select_experts, simulated routing (SGLANG_SIMULATE_*)": "the simulated ids, which the kernel uses; by reading",
    "fused shared experts": "columns beyond the routed ones, which SGLang cuts off; test on a CPU",
    "physical ids (EPLB)": "the checkpoint's numbers: capture comes first; test on a CPU. EPLB is refused all the same",
    "build_precomputed_topk_output (Kimi K3)": "the router's own ids; test on a CPU",
    "fused_topk_npu": "the ids without shared experts; by reading",
    "block routing (LLaDA 2)": "the ids; but dllm_algorithm is refused",
    "mega_gate": "its gate is asked for ids while SGLang captures; moe_a2a_backend 'megamoe' is refused",
    "a draft model's routers": "nothing, as it should be: what they choose in a draft model's pass is dropped; tests",
    "the model of transformers (--model-impl)": "nothing: its layers have no router of SGLang, so it is refused",
    "fused_moe_bypassed (piecewise CUDA graph)": "what BYPASSED shows, which is refused",
}
"""Ways to a choice, and what the capture sees; how that was judged."""

CAPTURES: Final = frozenset(
    {
        "hardware_backend/npu/moe/topk.py",
        "layers/moe/fused_moe_triton/layer.py",
        "layers/moe/mega_gate.py",
        "layers/moe/topk.py",
        "models/inkling_common/moe.py",
        "models/llada2.py",
        "models/muse_spark.py",
    }
)
"""SGLang's files that capture a choice, or choose by whether it is captured. A test finds a new one."""


def routed_layers(model: Any, layers: Sequence[int]) -> int:
    """How many of these layers of ``model`` have a router whose capture is right: all, or :class:`ConfigError`."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        kind = type(module).__name__
        router = ROUTERS.get(kind)
        if router is None:
            continue
        form = None
        if kind == TOPK:
            output_format = getattr(getattr(module, "topk_config", None), "output_format", None)
            form = versions.undecided_format() if output_format is None else output_format.name
            router, kind = FORMATS.get(form, Router("unknown", "", accepted=False)), f"{kind} ({form})"
        if not router.accepted:
            remedy = "" if form is None else "; try --moe-runner-backend triton"
            raise ConfigError(
                "SGLang with kvroute: router", f"one whose choice is captured{remedy}", f"{kind} in {name}"
            )
        seen.add(getattr(module, "layer_idx", getattr(module, "layer_id", -1)))
    if unknown := sorted(set(layers) - seen):
        raise ConfigError(
            "SGLang with kvroute: router", f"one of {', '.join(ROUTERS)} in each MoE layer", f"none in {unknown}"
        )
    return len(layers)


__all__ = ["CAPTURES", "FORMATS", "PATHS", "ROUTERS", "TOPK", "Router", "routed_layers"]

"""What SGLang's capture of routed experts sees, with SGLang's own functions; and that no way to a choice is unknown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
import torch
from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo
from sglang.srt.layers.moe import topk
from sglang.srt.layers.moe.hash_topk import HashTopK
from sglang.srt.layers.moe.topk import TopK, TopKConfig, TopKOutputFormat, select_experts
from sglang.srt.runtime_context import get_context, get_resources

from kvroute import ConfigError
from kvroute.integrations.sglang.routers import CAPTURES, FORMATS, routed_layers

SOURCE = Path(sglang.__file__).parent / "srt"
CAPTURE = re.compile(r"allow_routed_experts_capture|capture_routed_experts_if_allowed|get_global_experts_capturer")
READERS = {  # of what was captured
    "managers/scheduler_components/batch_result_processor.py",
    "model_executor/model_runner.py",
    "state_capturer/routed_experts.py",
}
CHOOSERS = {  # functions of topk.py that choose; select_experts calls each
    "biased_grouped_topk_cpu",
    "biased_grouped_topk_gpu",
    "biased_grouped_topk_impl",
    "biased_topk_impl",
    "biased_topk_jit_kernel_impl",
    "biased_topk_xpu",
    "build_precomputed_topk_output",
    "fused_topk",
    "fused_topk_cpu",
    "fused_topk_softmax_torch_raw_logits",
    "fused_topk_torch_native",
    "grouped_topk_cpu",
    "grouped_topk_gpu",
    "grouped_topk_xpu",
    "kimi_k2_biased_topk_impl",
    "select_experts",
}
CLASSES = {"layers/moe/hash_topk.py HashTopK", "layers/moe/topk.py TopK"}

torch.manual_seed(0)
TOKENS, EXPERTS, TOP = 6, 16, 4
STATES, LOGITS, BIAS = torch.randn(TOKENS, 8), torch.randn(TOKENS, EXPERTS), torch.randn(EXPERTS)


@pytest.fixture
def captured() -> Iterator[list[torch.Tensor]]:
    """Ids that SGLang has captured, in a process with its configuration."""
    ids: list[torch.Tensor] = []

    def capture(*, topk_indices: torch.Tensor, **_: Any) -> None:
        ids.append(topk_indices.clone())

    with get_context().override_server_args(device="cpu"):
        before, get_resources().experts_capturer = get_resources().experts_capturer, SimpleNamespace(capture=capture)
        yield ids
        get_resources().experts_capturer = before


def custom(*, gating_output: torch.Tensor, topk: int, **_: Any) -> Any:
    weights, ids = gating_output.topk(topk)
    return weights, ids.int()


GROUPED = {"use_grouped_topk": True, "topk_group": 2, "num_expert_group": 4}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"torch_native": True}, {}),
        ({"torch_native": True, "scoring_func": "sigmoid", "correction_bias": BIAS}, {}),
        (GROUPED, {}),
        (GROUPED | {"correction_bias": BIAS}, {}),
        ({"custom_routing_function": custom}, {}),
        (
            {"scoring_func": "sigmoid", "correction_bias": BIAS},
            {"dynamic_expert_bias": torch.randn(TOKENS, EXPERTS)},
        ),
    ],
    ids=["softmax", "sigmoid", "grouped", "biased grouped", "custom", "bias of a token"],
)
def test_the_capture_sees_what_the_kernel_uses(captured: Any, config: Any, named: Any) -> None:
    chosen = select_experts(STATES, LOGITS, TopKConfig(top_k=TOP, **config), layer_id=0, **named)
    (ids,) = captured
    assert torch.equal(ids, chosen.topk_ids)
    assert all(len(set(row)) == TOP for row in ids.tolist())


def test_zero_computation_experts_are_captured_as_they_were_chosen(captured: Any) -> None:
    """LongCat: the last experts compute nothing. The router of its model is SGLang's ``TopK`` over all of them."""
    zero = EXPERTS // 2
    logits = LOGITS.clone()
    logits[:, zero:] += 1  # so that some are chosen
    config = TopKConfig(top_k=TOP, torch_native=True, correction_bias=BIAS, scoring_func="softmax")
    select_experts(STATES, logits, config, layer_id=0)
    (ids,) = captured
    assert (ids >= zero).any()
    assert torch.equal(ids.sort().values, (logits.softmax(-1) + BIAS).topk(TOP).indices.int().sort().values)


def test_physical_numbers_of_experts_come_behind_the_capture(captured: Any) -> None:
    """EPLB: the kernel has the experts' places, the capture their numbers in the checkpoint."""
    places = torch.randperm(EXPERTS).int()
    info = ExpertLocationDispatchInfo(
        ep_dispatch_algorithm="static",
        partial_logical_to_rank_dispatch_physical_map=places,
        partial_logical_to_all_physical_map=places[:, None],
        partial_logical_to_all_physical_map_num_valid=torch.ones(EXPERTS, dtype=torch.int32),
        num_physical_experts=EXPERTS,
    )
    with get_context().override_server_args(device="cpu", enable_eplb=True):
        config = TopKConfig(top_k=TOP, torch_native=True)
        chosen = select_experts(STATES, LOGITS, config, layer_id=0, expert_location_dispatch_info=info)
    (ids,) = captured
    assert torch.equal(places[ids.long()], chosen.topk_ids.int())


def test_a_router_with_its_own_choice_is_captured(captured: Any) -> None:
    """Kimi K3's gate chooses in its own kernel."""
    ids = LOGITS.topk(TOP).indices.int()
    topk.build_precomputed_topk_output(torch.ones(TOKENS, TOP), ids, TopKConfig(top_k=TOP), 0)
    assert torch.equal(captured[0], ids)


def test_a_router_by_token_id_is_not_captured_and_refused_by_name(captured: Any) -> None:
    router = HashTopK(TOP, EXPERTS, vocab_size=64, layer_id=0)
    model = torch.nn.ModuleDict({"topk": router})
    with pytest.raises(ConfigError, match=r"router: wanted one whose choice is captured, got .*HashTopK in topk"):
        routed_layers(model, [0])
    assert not captured


@pytest.mark.usefixtures("captured")
def test_a_router_is_refused_by_the_form_of_its_choice() -> None:
    """Method: SGLang's own router in each form; and a model without one in a layer."""
    for form in TopKOutputFormat:
        model = torch.nn.ModuleDict({"topk": TopK(TOP, layer_id=2, output_format=form)})
        if FORMATS[form.name].accepted:
            routed_layers(model, [2])
        else:
            with pytest.raises(
                ConfigError, match=rf"try --moe-runner-backend triton, got .*TopK \({form.name}\) in topk"
            ):
                routed_layers(model, [2])
    with pytest.raises(ConfigError, match=r"in each MoE layer, got .*none in \[3\]"):
        routed_layers(torch.nn.ModuleDict({"topk": TopK(TOP, layer_id=2)}), [2, 3])


def test_every_way_to_a_choice_is_in_the_table() -> None:
    """Goal: a new version's new routers are noticed. Method: SGLang's source: files that capture a choice, classes
    of routers, functions that choose, and forms of a choice."""
    files = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    assert {name for name, text in files.items() if CAPTURE.search(text)} - READERS == CAPTURES
    declared = re.compile(r"^class (\w*Top[kK])\(", re.MULTILINE)
    assert {f"{name} {kind}" for name, text in files.items() for kind in declared.findall(text)} == CLASSES
    functions = re.findall(r"^def ((?:\w+_)?topk(?:_\w+)?|select_experts)\(", files["layers/moe/topk.py"], re.MULTILINE)
    helpers = ("_", "apply_", "is_", "remap_", "precomputed_")
    assert {name for name in functions if not name.startswith(helpers)} == CHOOSERS
    assert {form.name for form in TopKOutputFormat} == FORMATS.keys()

"""Routing specs from configurations, against what the real transformers classes build."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_manager.errors import SpecError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.routing import routing_spec_from_hf

ROUTER = re.compile(r"(Top[kK]Router|TokenChoiceRouter|TextRouter|MoEV1Gate)$")


def facts(spec: AuxBlockDataSpec) -> tuple[Any, ...]:
    return (*spec.row_shape, spec.attrs["num_experts"], spec.attrs["layer_ids"], spec.attrs["num_layers"])


def test_the_spec_says_what_the_model_has(tiny_moe: Any) -> None:
    """Goal: layer ids, experts and top-k of every family. Method: look through each decoder layer for its router."""
    layers = tiny_moe.model.model.layers
    routed = [i for i, layer in enumerate(layers) if any(ROUTER.search(type(m).__name__) for m in layer.modules())]
    seen = {}

    def look(_module: Any, _inputs: Any, output: Any) -> None:
        seen["experts"], seen["top_k"] = output[0].shape[-1], output[2].shape[-1]

    routers = [m for m in layers.modules() if ROUTER.search(type(m).__name__)]
    hooks = [m.register_forward_hook(look) for m in routers]
    tiny_moe.forward(torch.arange(3, 9)[None])
    for hook in hooks:
        hook.remove()

    spec = routing_spec_from_hf(tiny_moe.config, block_tokens=16)
    assert facts(spec) == (len(routed), seen["top_k"], seen["experts"], tuple(routed), len(layers))
    assert (spec.name, spec.dtype, spec.block_tokens) == ("routing", "uint8", 16)


@pytest.mark.parametrize(
    ("family", "changes", "layer_ids"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [0, 2]}, (1, 3)),
        ("qwen3_moe", {"decoder_sparse_step": 3, "num_hidden_layers": 7}, (2, 5)),
        ("deepseek_v3", {"first_k_dense_replace": 0}, (0, 1, 2, 3)),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}, (0, 3)),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 1}, (0, 1, 2)),
        ("llama4_text", {"interleave_moe_layer_step": 2, "num_local_experts": 4}, (1, 3)),
        ("llama4_text", {"moe_layers": [0, 3], "num_local_experts": 4}, (0, 3)),
    ],
)
def test_every_way_to_say_which_layers(build_moe: Any, family: str, changes: Any, layer_ids: tuple[int, ...]) -> None:
    """Goal: each rule's corners. Method: the built model's own decoder layers agree."""
    tiny = build_moe(family, **changes)
    layers = tiny.model.model.layers
    built = tuple(i for i, layer in enumerate(layers) if any(n.endswith("experts") for n, _ in layer.named_modules()))
    assert routing_spec_from_hf(tiny.config, 16).attrs["layer_ids"] == layer_ids == built


# Configurations as they are published, with the names that transformers renames when it reads them.
PUBLISHED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "DeepSeek-V3": (
        """{"num_hidden_layers": 61, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_nextn_predict_layers": 1}""",
        (58, 8, 256, tuple(range(3, 61)), 61),
    ),
    "GLM-4.5-Air": (
        """{"num_hidden_layers": 46, "n_routed_experts": 128, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}""",
        (45, 8, 128, tuple(range(1, 46)), 46),
    ),
    "Qwen3-30B-A3B": (
        """{"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
        "mlp_only_layers": []}""",
        (48, 8, 128, tuple(range(48)), 48),
    ),
    "ERNIE-4.5-VL": (
        """{"num_hidden_layers": 28, "moe_num_experts": [64, 64], "moe_k": 6, "moe_layer_start_index": 1,
        "moe_layer_end_index": -1, "moe_layer_interval": 1}""",
        (27, 6, 64, tuple(range(1, 28)), 28),
    ),
    "Step-3": (
        '{"text_config": {"num_hidden_layers": 6, "moe_num_experts": 48, "moe_top_k": 3, "moe_layers_enum": "4,5"}}',
        (2, 3, 48, (4, 5), 6),
    ),
    "MiMo-V2": (
        '{"num_hidden_layers": 4, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_layer_freq": [0, 1, 1, 0]}',
        (2, 8, 256, (1, 2), 4),
    ),
    "Nemotron-H": (
        """{"num_hidden_layers": 52, "hybrid_override_pattern": "ME*E-", "n_routed_experts": 128,
        "num_experts_per_tok": 6}""",
        (2, 6, 128, (1, 3), 5),
    ),
    "Kimi-Linear": (
        """{"num_hidden_layers": 3, "num_experts": 256, "num_experts_per_token": 8, "first_k_dense_replace": 1,
        "moe_layer_freq": 1}""",
        (2, 8, 256, (1, 2), 3),
    ),
    "DBRX": (
        '{"n_layers": 40, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}}',
        (40, 4, 16, tuple(range(40)), 40),
    ),
    "Qwen3-Omni": (
        '{"thinker_config": {"text_config": {"num_hidden_layers": 2, "num_experts": 128, "num_experts_per_tok": 8}}}',
        (2, 8, 128, (0, 1), 2),
    ),
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_configurations(name: str) -> None:
    config, expected = PUBLISHED[name]
    assert facts(routing_spec_from_hf(json.loads(config), block_tokens=64)) == expected


MIXTRAL = {"num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 4, "hidden_size": 64}, "number of experts.*not a Mixture-of-Experts"),
        ({"num_hidden_layers": 4, "num_local_experts": 8}, "top-k: wanted one of num_experts_per_tok"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, r"top_k: wanted an integer in \[1, 8\], got 9"),
        ({**MIXTRAL, "num_experts": 16}, "one value, got num_experts=16, num_local_experts=8"),
        ({**MIXTRAL, "num_experts_per_tok": [2, 3, 2, 2]}, "the same value for every layer"),
        ({**MIXTRAL, "mlp_layer_types": ["sparse", "dense", "dense", "expert"]}, "mlp_layer_types.*got expert"),
        ({**MIXTRAL, "moe_layers_enum": "1,x"}, "moe_layers_enum"),
        ({**MIXTRAL, "moe_layers": [4]}, r"MoE layer: wanted an integer in \[0, 3\]"),
        ({**MIXTRAL, "first_k_dense_replace": 4}, "at least one layer with routed experts"),
        ({**MIXTRAL, "moe_layer_freq": 0}, "moe_layer_freq"),
        ({**MIXTRAL, "enable_moe_block": False}, "enable_moe_block"),
        ("/nowhere/config.json", "readable JSON file at /nowhere/config.json"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        routing_spec_from_hf(config, block_tokens=16)


@pytest.mark.parametrize(("text", "message"), [("{", "readable JSON"), ("[1]", "a JSON object.*got list")])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecError, match=message):
        routing_spec_from_hf(tmp_path, 16)

"""DeepSeek-V4's layers with experts, of which the first ones choose by the token alone (``num_hash_layers``).

No CPU of ours serves the model, whose attention keeps one state for several tokens. So its own modules for experts
are made as vLLM makes them, and are fed by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from modules import configured
from transformers.models.deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.models.deepseek_v4.cpu.model import DeepseekV4MoE

from bench.vllm_families import make
from kvroute.capture.step_ids import StepIds
from kvroute.integrations.vllm.routers import ROUTERS, bind
from kvroute.routing import routing_spec_from_hf

pytestmark = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's kernels for these routers")

LAYERS = 4
EXPERTS = 256  # with six of them for a token: vLLM's kernels for CPUs take few numbers


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    """vLLM's configuration of a tiny checkpoint, with one hash layer of four."""
    home = tmp_path_factory.mktemp("deepseek-v4") / "model"
    make("deepseek_v4", home)
    given = {"topk_method": "noaux_tc", "n_routed_experts": EXPERTS, "num_experts_per_tok": 6}
    with configured(home, dtype="float32", block_size=256, hf_overrides=given) as made:
        yield made


class Layer(NamedTuple):
    """One of vLLM's modules, and the weight of its router, which vLLM packs."""

    module: Any
    router: torch.Tensor


@pytest.fixture(scope="module")
def layers(config: VllmConfig) -> list[Layer]:
    """With seeded weights; no token has an expert twice."""
    random = torch.Generator().manual_seed(0)
    found = list[Layer]()
    made = [DeepseekV4MoE(config, prefix=f"model.layers.{layer}.ffn") for layer in range(LAYERS)]
    for layer in made:
        for name, parameter in layer.named_parameters():
            if parameter.is_floating_point():
                parameter.data.normal_(0, 0.3 if name == "gate.weight" else 0.08, generator=random)
        if (table := layer.gate.tid2eid) is not None:
            distinct = torch.rand(len(table), layer.n_routed_experts, generator=random).argsort(-1)
            table.data.copy_(distinct[:, : table.shape[1]])
        else:
            layer.gate.e_score_correction_bias.data.normal_(0, 0.2, generator=random)
        found.append(Layer(layer, layer.gate.weight.detach().clone()))
        for module in layer.modules():
            if (method := getattr(module, "quant_method", None)) is not None:
                method.process_weights_after_loading(module)
    return found


def by_transformers(config: VllmConfig, layer: Layer, hidden: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
    """What transformers' router of this layer chooses with the same weights: ``[tokens, top_k]``, sorted."""
    theirs = config.model_config.hf_config
    fields = ("hidden_size", "num_experts_per_tok", "n_routed_experts", "vocab_size", "scoring_func")
    known = DeepseekV4Config(**{name: getattr(theirs, name) for name in fields})
    router: Any
    gate = layer.module.gate
    if gate.tid2eid is None:
        router = DeepseekV4TopKRouter(known)
        router.e_score_correction_bias.copy_(gate.e_score_correction_bias)
        given: tuple[torch.Tensor, ...] = (hidden,)
    else:
        router = DeepseekV4HashRouter(known)
        router.tid2eid.copy_(gate.tid2eid)
        given = (hidden, tokens)
    router.weight.data.copy_(layer.router)
    return np.sort(router(*given)[2].numpy(), axis=-1)


def test_layers_that_choose_by_the_token_have_rows_too(config: VllmConfig, layers: list[Layer]) -> None:
    """Goal: every layer with experts has a router that kvroute hooks, and hash layers have the experts of their tokens'
    entries in the table, which is what they compute with. Method: two steps through kvroute's own hooks; the same
    tokens with other hidden values; transformers' routers of the same weights."""
    model = config.model_config.hf_config
    spec = routing_spec_from_hf(model, block_tokens=4)
    assert spec.attrs["layer_ids"] == tuple(range(LAYERS))
    assert [layer.module.gate.tid2eid is not None for layer in layers] == [True, False, False, False]
    assert {type(layer.module.experts.router).__name__ for layer in layers} <= set(ROUTERS)
    ids = StepIds(spec, 64, torch.device("cpu"))
    modules = config.compilation_config.static_forward_context
    assert bind(modules, spec, ids.hook, "model.layers.0.attn") == LAYERS
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.vocab_size, (23,), generator=random)
    rows = []
    for _ in range(2):
        hidden = torch.randn(len(tokens), model.hidden_size, generator=random)
        ids.begin()
        with torch.no_grad(), set_forward_context(None, config, num_tokens=len(tokens)):
            for layer in layers:
                layer.module(hidden, tokens)
        taken = ids.take(len(tokens))
        assert not isinstance(taken, str), taken
        for number, layer in enumerate(layers):
            expected = by_transformers(config, layer, hidden, tokens)
            assert (np.sort(taken[:, number].numpy(), axis=-1) == expected).all()
        rows.append(np.sort(taken.numpy(), axis=-1))
    assert (rows[0][:, 0] == rows[1][:, 0]).all()
    assert (rows[0][:, 1:] != rows[1][:, 1:]).any()

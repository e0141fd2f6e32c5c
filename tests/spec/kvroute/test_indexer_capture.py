"""What a sparse attention's indexers choose, captured in real transformers models, through blocks, and packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_moe import COMMON, LATENT

from kvroute import AuxBlocks, Namespace
from kvroute.capture.errors import CaptureError
from kvroute.capture.indexer import IndexerCapture
from kvroute.indexer import indexer_spec, indexer_spec_from_hf, of_layers, pack, unpack

TOP_K, BLOCK = 6, 4
TOKENS = torch.tensor([[5, 9, 13, 21, 33, 47, 8, 60, 3, 17, 22, 41, 2, 7]])
SPARSE = {**COMMON, **LATENT, "index_topk": TOP_K, "index_n_heads": 2, "index_head_dim": 16}
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1}
FAMILIES: dict[str, Any] = {
    "deepseek_v32": (transformers.DeepseekV32Config, transformers.DeepseekV32ForCausalLM, {}),
    "glm_moe_dsa": (
        transformers.GlmMoeDsaConfig,
        transformers.GlmMoeDsaForCausalLM,
        {"indexer_types": ["full", "shared", "full", "shared"]},
    ),
}


@pytest.fixture(params=list(FAMILIES))
def model(request: pytest.FixtureRequest) -> Any:
    config_class, model_class, more = FAMILIES[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = config_class(**SPARSE, **MOE, **more, attn_implementation="eager")
        return model_class._from_config(config).eval()


def test_rows_are_what_attention_attended_to(model: Any) -> None:
    """Goal: a row is the positions that its layer used, shared layers too, through blocks and bytes. Method: the
    same passes' attention weights that are not zero; a prompt in chunks behind a cache."""
    due = np.zeros((14, 4, 14), np.bool_)  # [tokens, layers, positions]
    spec = indexer_spec_from_hf(model.config, block_tokens=BLOCK)
    aux = AuxBlocks([spec], blocks=8, namespace=Namespace("m", weights_version=1))
    lives = aux.renew([1, 2, 3, 4])
    cache = transformers.DynamicCache(config=model.config)
    with IndexerCapture(model, spec) as capture, torch.no_grad():
        for start, stop in ((0, 9), (9, 10), (10, 14)):
            tokens = TOKENS[:, start:stop]
            answer = model(tokens, past_key_values=cache, use_cache=True, output_attentions=True)
            for layer, weights in enumerate(answer.attentions):
                due[start:stop, layer, :stop] = (weights[0] > 0).any(dim=0).numpy()
            aux.write_step(np.arange(BLOCK + start, BLOCK + stop), {spec.name: capture.rows(range(start, stop))})
            capture.clear()
    rows = aux.read(spec.name, [1, 2, 3, 4], stop=14, generations=lives)
    aux.close()
    assert rows.valid.all()
    packed = unpack(pack(rows.values))
    assert packed.tobytes() == rows.values.tobytes()
    layers = of_layers(spec, packed, range(model.config.num_hidden_layers))
    found = np.zeros_like(due)
    for token, layer, place in np.argwhere(layers >= 0).tolist():
        found[token, layer, layers[token, layer, place]] = True
    assert (found == due).all()
    assert (layers[: TOP_K - 1, :, -1] == -1).all()
    assert not (layers[-1] == np.arange(14 - TOP_K, 14)).all(), "something was chosen"


def test_a_pass_without_each_layers_choice_has_no_rows(model: Any) -> None:
    spec = indexer_spec_from_hf(model.config, block_tokens=BLOCK)
    with IndexerCapture(model, spec) as capture, torch.no_grad():
        with pytest.raises(CaptureError, match="indexer of layer 0: wanted one call a pass, got 0 calls"):
            capture.rows([])
        model(TOKENS, use_cache=False)
        assert len(capture.rows(range(14))) == 14
        model(TOKENS, use_cache=False)
        with pytest.raises(CaptureError, match="got 2 calls"):
            capture.rows(range(14))
    with pytest.raises(CaptureError, match=r"layers with an indexer: wanted \[0\]"):
        IndexerCapture(model, indexer_spec(TOP_K, [0, 0, 0, 0], BLOCK))
    dense = transformers.LlamaModel(transformers.LlamaConfig(**{**COMMON, "num_hidden_layers": 1}))
    with pytest.raises(CaptureError, match="wanted layers with a child indexer, got none in LlamaModel"):
        IndexerCapture(dense, spec)

"""The KV cache groups of families whose kernels no CPU has: sparse and compressed attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modules import configured
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)
from vllm.v1.worker import workspace

from bench.vllm_families import config_of
from cache_manager.errors import ConfigError
from kvroute.connector.witness import by_layer
from kvroute.integrations.vllm.config import kv_group_of
from kvroute.integrations.vllm.layers import own_layers
from kvroute.integrations.vllm.routers import bind
from kvroute.routing import routing_spec_from_hf


def latent(**more: Any) -> MLAAttentionSpec:
    sizes = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    return MLAAttentionSpec(**{**sizes, **more})


def indexer() -> MLAAttentionSpec:
    return latent(head_size=132, dtype=torch.uint8, max_tp_shards=1, cache_role=SparseCacheRole.INDEXER)


KV: dict[str, Callable[[], Any]] = {
    "latent (DeepSeek-V3.2, GLM-5)": latent,
    "full (MiniMax-M3)": lambda: FullAttentionSpec(block_size=64, num_kv_heads=4, head_size=128, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", KV)
def test_the_group_of_sparse_attention(kind: str) -> None:
    """Goal: an indexer's cache is no reason to refuse. Method: vLLM's own groups of layers that have one beside their
    KV, which it makes without a kernel."""
    layers = dict[str, Any]()
    for number in range(4):
        layers |= {f"layers.{number}.indexer.k_cache": indexer(), f"layers.{number}.attn": KV[kind]()}
    groups = get_kv_cache_groups(VllmConfig(), layers)
    assert [sorted(group.layer_names) for group in groups] == [sorted(layers)]
    assert kv_group_of(SimpleNamespace(kv_cache_groups=groups), tokens_max=4096, layers=4) == 0


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_the_group_of_a_sparse_models_own_layers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: rows go with the blocks of the KV that attention computes with, and its KV is the witness, not the
    indexer's. Method: vLLM's own model of the family, made but never called, with a GPU's backend for sparse attention
    named where its platform for CPUs has none; the specs that its layers give, vLLM's groups and its caches' sizes."""
    named = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", lambda *_, **__: named)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    config_of(family).save_pretrained(tmp_path / "model")
    with configured(tmp_path / "model", dtype="bfloat16") as config:
        monkeypatch.setattr(workspace, "_manager", None)
        workspace.init_workspace_manager(torch.device("cpu"))
        with set_default_torch_dtype(torch.bfloat16):
            initialize_model(vllm_config=config)
        modules = config.compilation_config.static_forward_context
        caches = {name: each for name, each in modules.items() if isinstance(each, AttentionLayerBase)}
        specs = {name: each.get_kv_cache_spec(config) for name, each in caches.items()}
        groups = get_kv_cache_groups(config, dict(specs))
        assert len(groups) == 1
        assert sorted(groups[0].layer_names) == sorted(
            f"model.layers.{number}.self_attn.{cache}" for number in range(4) for cache in ("attn", "indexer.k_cache")
        )
        assert kv_group_of(SimpleNamespace(kv_cache_groups=groups), config.model_config.max_model_len, 4) == 0
        kv = {name: torch.zeros(2, spec.page_size_bytes, dtype=torch.uint8) for name, spec in specs.items()}
        assert list(by_layer(kv).values()) == [f"model.layers.{number}.self_attn.attn" for number in range(4)]
        spec = routing_spec_from_hf(config.model_config.hf_config, block_tokens=groups[0].kv_cache_spec.block_size)
        assert bind(modules, spec, lambda _: list[Any]().append, own_layers(kv, 4)[0]) == 3


def test_compressed_attention_is_refused() -> None:
    """Goal: DeepSeek-V4, whose caches have a state for 4 or 128 tokens, or a window alone, is refused by their names.
    Method: specs as its layers make them."""
    window = SlidingWindowMLASpec(
        block_size=64, num_kv_heads=1, head_size=512, dtype=torch.bfloat16, sliding_window=128
    )
    compressed = [latent(block_size=256, head_size=512, tokens_per_state=ratio) for ratio in (4, 128)]
    groups = [KVCacheGroupSpec([f"layers.{number}"], spec) for number, spec in enumerate((*compressed, window))]
    named = "MLAAttentionSpec of 4 tokens a state, MLAAttentionSpec of 128 tokens a state, SlidingWindowMLASpec"
    with pytest.raises(ConfigError, match=named):
        kv_group_of(SimpleNamespace(kv_cache_groups=groups), tokens_max=4096, layers=3)


def test_a_window_as_long_as_a_request_keeps_all_kv() -> None:
    """Goal: a window is refused only where it gives KV up. Method: windows of the longest request's tokens, and of one
    token fewer."""
    for window, refused in ((4096, False), (4095, True)):
        kv = SlidingWindowSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=window)
        groups = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["model.layers.0.attn"], kv)])
        with pytest.raises(ConfigError, match="not SlidingWindowSpec") if refused else nullcontext():
            assert kv_group_of(groups, tokens_max=4096, layers=1) == 0


def test_the_group_beside_drafts() -> None:
    """Goal: rows go with the model's own blocks. Method: groups as vLLM makes and marks them beside MTP: that of full
    attention has a draft's layer too; and one that has nothing but a draft's."""
    full = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    window = SlidingWindowMLASpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=128)
    first = KVCacheGroupSpec(["model.layers.0.attn"], window)
    both = KVCacheGroupSpec(["model.layers.1.attn", "mtp.layers.0.attn"], full, is_eagle_group=True)
    draft = KVCacheGroupSpec(["model.layers.2.attn"], full)
    assert kv_group_of(SimpleNamespace(kv_cache_groups=[first, draft, both]), tokens_max=4096, layers=2) == 2
    with pytest.raises(ConfigError, match="not SlidingWindowMLASpec"):
        kv_group_of(SimpleNamespace(kv_cache_groups=[first, draft]), tokens_max=4096, layers=2)

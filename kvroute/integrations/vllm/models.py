"""vLLM's own models with one more layer of KV for rows; see :mod:`kvroute.connector.pages`.

vLLM asks a model for its layers before it knows of any connector, so the layer is the model's. ``register`` is the
entry point that vLLM calls in each of its processes (``vllm.general_plugins``); a class here is vLLM's own, and adds
the layer when the connector's settings say so. Attribute access makes the class: vLLM's models are imported no earlier.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from cache_manager.errors import ConfigError
from kvroute.connector.pages import page_name, token_nbytes
from kvroute.connector.settings import Settings
from kvroute.integrations.vllm.config import settings_of
from kvroute.routing import routing_spec_from_hf

ARCHITECTURES: Final = {
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
    "DeepseekV3ForCausalLM": "deepseek_v2",
}
"""Architectures with one uniform group of full or latent attention, and vLLM's modules that have them."""


def register() -> None:
    """Put the classes of this module in the place of vLLM's own; harmless when called again."""
    from vllm import ModelRegistry  # type: ignore[import-not-found]

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{__name__}:{architecture}")


def __getattr__(name: str) -> Any:
    if name not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = getattr(import_module(f"vllm.model_executor.models.{ARCHITECTURES[name]}"), name)
    globals()[name] = made = type(name, (base,), {"__init__": _init(base), "__module__": __name__})
    return made


def _init(base: Any) -> Any:
    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:  # noqa: N807 - it becomes a class's
        base.__init__(self, vllm_config=vllm_config, prefix=prefix)
        if (transfer := vllm_config.kv_transfer_config) is not None and wants_pages(settings_of(transfer), vllm_config):
            self.kvroute_rows = _layer(vllm_config)

    return __init__


def wants_pages(settings: Settings, config: Any) -> bool:
    """Whether rows go into pages: because the operator says so, or because nothing else carries them.

    Raises :class:`ConfigError` where the operator says so and a draft model runs beside.
    """
    if config.speculative_config is not None:
        if settings.carrier == "layer":
            raise ConfigError("settings.carrier 'layer'", "no draft model, which would have the layer too", "one")
        return False
    moved = config.kv_transfer_config.kv_connector != "KvrouteConnector"
    return settings.carrier == "layer" or (settings.carrier == "auto" and moved and not settings.store)


def _layer(config: Any) -> Any:
    """The layer, known to vLLM by its name; it computes nothing."""
    import torch
    from torch import nn
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # type: ignore[import-not-found]
    from vllm.model_executor.models import extract_hidden_states  # type: ignore[import-not-found]
    from vllm.v1.kv_cache_interface import MLAAttentionSpec  # type: ignore[import-not-found]

    spec = routing_spec_from_hf(config.model_config.hf_text_config, block_tokens=config.cache_config.block_size)

    class RowsLayer(nn.Module, AttentionLayerBase):  # type: ignore[misc]  # vLLM's
        def __init__(self) -> None:
            super().__init__()
            self.kv_cache = torch.tensor([])
            config.compilation_config.static_forward_context[page_name(spec)] = self

        def get_attn_backend(self) -> Any:
            return extract_hidden_states.CacheOnlyAttentionBackend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return MLAAttentionSpec(
                block_size=vllm_config.cache_config.block_size,
                num_kv_heads=1,
                head_size=token_nbytes(spec),
                dtype=torch.uint8,
            )

    return RowsLayer()


__all__ = ["ARCHITECTURES", "register", "wants_pages"]

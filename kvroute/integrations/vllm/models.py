"""vLLM's own models with one more layer of KV for rows; see :mod:`kvroute.connector.pages`.

vLLM asks a model for its layers before it makes any connector, so the layer belongs to the model. ``register`` is the
entry point that vLLM calls in each of its processes (``vllm.general_plugins``), before there is a configuration. When a
worker builds a model whose configuration asks for the layer, the class is one that extends vLLM's own: it adds the
layer, and tells the layer the tokens that the model gets. In every other process vLLM's classes are vLLM's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, Final

from cache_manager.errors import ConfigError
from cache_manager.spec import AuxBlockDataSpec
from kvroute.connector.answers import FIELD
from kvroute.connector.pages import Pages, StepTokens, page_name, token_nbytes
from kvroute.connector.settings import Settings
from kvroute.connector.witness import by_layer
from kvroute.integrations.vllm.config import settings_of
from kvroute.integrations.vllm.field import take_over
from kvroute.routing import routing_spec_from_hf

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows informations below its own name alone

PACKAGE: Final = "kvroute.integrations.vllm"
"""``kv_connector_module_path`` of an engine with a connector of kvroute."""
ARCHITECTURES: Final = {
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
    "DeepseekV3ForCausalLM": "deepseek_v2",
}
"""Architectures with one uniform group of full or latent attention, and their modules in vLLM."""

LAYERED: Final = ("KvrouteExampleConnector",)
"""Connectors, by the beginning of their names, that are known to move the layer like any other."""


def register() -> None:
    """Let vLLM's loader ask :func:`with_layer` for the class of each model that it builds; a second call is harmless.

    This, and a look at each configuration that is made (:func:`take_over`), are the only changes to vLLM in a process
    whose configuration does not name kvroute.
    """
    take_over()
    from vllm.model_executor.model_loader import utils  # type: ignore[import-not-found]

    resolve = getattr(utils, "get_model_architecture", None)
    if resolve is None:
        logger.warning("this vLLM's loader is unknown: no model gets a layer of rows (carrier 'layer')")
    elif not hasattr(resolve, FIELD):
        utils.get_model_architecture = resolving = _resolving(resolve)
        setattr(resolving, FIELD, True)


def _resolving(resolve: Callable[..., tuple[type, str]]) -> Callable[..., tuple[type, str]]:
    @wraps(resolve)
    def resolved(model_config: Any) -> tuple[type, str]:
        from vllm.config import get_current_vllm_config_or_none  # type: ignore[import-not-found]

        kind, architecture = resolve(model_config)
        config = get_current_vllm_config_or_none()
        return (kind if config is None else with_layer(kind, config)), architecture

    return resolved


def with_layer(kind: type, config: Any) -> type:
    """The class ``kind`` of a model with a layer of rows, if ``config`` asks for one; otherwise ``kind`` itself.

    To ask is to name a connector of kvroute, or settings of kvroute for a connector inside another, and what
    :func:`wants_pages` adds. The log has a line either way.
    """
    transfer, name = config.kv_transfer_config, kind.__name__
    if transfer is None or not (
        transfer.kv_connector_module_path == PACKAGE or "kvroute" in transfer.kv_connector_extra_config
    ):
        logger.info("kvroute does nothing here: the configuration names no connector of kvroute")
        return kind
    if ARCHITECTURES.get(name) != kind.__module__.rpartition(".")[2] or not wants_pages(settings_of(transfer), config):
        return kind
    logger.info("kvroute gives %s a layer of KV for rows", name)
    return _layered(kind)


@cache
def _layered(kind: Any) -> type:
    return type(kind.__name__, (kind,), {"__init__": _init(kind), "forward": _forward(kind), "__module__": __name__})


def _init(base: Any) -> Any:
    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:  # noqa: N807 - becomes a class's method
        base.__init__(self, vllm_config=vllm_config, prefix=prefix)
        self.kvroute_rows = _layer(vllm_config)

    return __init__


def _forward(base: Any) -> Any:
    @wraps(base.forward)
    def forward(self: Any, input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        self.kvroute_rows.seen.saw(input_ids, positions)
        return base.forward(self, input_ids, positions, *args, **kwargs)

    return forward


def wants_pages(settings: Settings, config: Any) -> bool:
    """Whether rows go into pages: because the operator says so, or because they have no other carrier.

    Raises :class:`ConfigError` if the operator says so and a draft model runs beside the model.
    """
    transfer = config.kv_transfer_config
    if settings.carrier in ("transfer", "connector") or (settings.carrier == "auto" and settings.store):
        return False
    if config.speculative_config is not None:
        if settings.carrier == "layer":
            raise ConfigError("settings.carrier 'layer'", "no draft model: it would have the layer, too", "one")
        return False
    if settings.carrier == "auto":  # nothing else about the engine may change
        return transfer.kv_connector.startswith(LAYERED) and config.model_config.get_sliding_window() is None
    return True


def _layer(config: Any) -> Any:
    """The layer, registered with vLLM by its name; it computes nothing."""
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
            self.seen = StepTokens(config.scheduler_config.max_num_batched_tokens)
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


def pages_of(config: Any, kv_caches: Mapping[str, Any], spec: AuxBlockDataSpec) -> Pages | None:
    """The pages among a worker's layers of KV, each ``[blocks, heads, tokens, values]``, beside the last KV layer;
    ``None`` where the model has no layer of rows.

    The first head proves enough, and is in the first rank however many ranks divide the heads. For KV of eight bits a
    value all heads of the rank are used.
    """
    layers, name = config.compilation_config.static_forward_context, page_name(spec)
    if name not in kv_caches:
        return None
    *_, last = by_layer({layer: kv for layer, kv in kv_caches.items() if layer != name}).values()
    kv, places = kv_caches[last], None
    kv = kv if kv.element_size() == 1 else kv[:, :1]
    if kv.device.type == "cpu" and not config.model_config.use_mla:
        places = _token_places(layers[last], kv, config.model_config.dtype)
    return Pages(kv_caches[name], spec, kv, layers[name].seen, places)


def _token_places(layer: Any, kv: Any, dtype: Any) -> Any:
    """Each token's places in a block, int64 ``[tokens, values]``: the layer itself writes one token after the other.

    Attention on a CPU keeps K transposed or packed, depending on the processor.
    """
    import torch

    _, heads, tokens, values = kv.shape
    ones, places = torch.ones(1, heads, values // 2, dtype=dtype), []
    for token in range(tokens):
        block = torch.zeros_like(kv[:1])
        layer.impl.do_kv_cache_update(layer, ones, ones, block, torch.tensor([token]))
        places.append(block[0, 0].flatten().nonzero().flatten())
    return torch.stack(places)


__all__ = ["ARCHITECTURES", "pages_of", "register", "wants_pages", "with_layer"]

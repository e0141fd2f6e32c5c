"""When vLLM's models have a layer of rows: the default without settings, and the settings that are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cache_manager.errors import ConfigError
from kvroute.connector import Settings
from kvroute.connector.pages import StepTokens, page_name, token_nbytes
from kvroute.integrations.vllm.models import pages_of, wants_pages, with_layer
from kvroute.routing import routing_spec


def engine(connector: str, *, drafts: bool = False, window: int | None = None) -> Any:
    """The fields that are read from vLLM's configuration."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=connector),
        speculative_config=SimpleNamespace() if drafts else None,
        model_config=SimpleNamespace(get_sliding_window=lambda: window),
    )


@pytest.mark.parametrize(
    ("connector", "layer"),
    [
        ("KvrouteExampleConnector", True),
        ("KvrouteOffloadingConnector", False),  # says itself what it copies where
        ("KvrouteNixlConnector", False),  # rows cross beside the KV
        ("KvrouteConnector", False),  # moves no KV
        ("KvrouteLMCacheConnectorV1", False),  # not seen to move it
        ("NixlConnector", False),  # an engine without kvroute's connector
        ("OffloadingConnector", False),
    ],
)
def test_by_default_the_layer_is_used_with_connectors_known_to_move_it(connector: str, layer: bool) -> None:
    """Goal: the default loses least and changes no engine that could break by it. Method: connectors, with and without
    a store, drafts, a sliding window; an explicit setting is followed with any connector."""
    said = Settings()
    assert wants_pages(said, engine(connector)) == layer
    assert not wants_pages(said, engine(connector, drafts=True))
    assert not wants_pages(said, engine(connector, window=4096))
    assert not wants_pages(Settings(store="file:///rows"), engine(connector))
    assert not wants_pages(Settings(carrier="connector"), engine(connector))
    assert wants_pages(Settings(carrier="layer"), engine(connector))
    with pytest.raises(ConfigError, match="no draft model"):
        wants_pages(Settings(carrier="layer"), engine(connector, drafts=True))


class Qwen3MoeForCausalLM:
    """Under the name and module of vLLM's."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None: ...

    def forward(self, input_ids: Any, positions: Any) -> Any: ...


Qwen3MoeForCausalLM.__module__ = "vllm.model_executor.models.qwen3_moe"
OURS = "kvroute.integrations.vllm"


@pytest.mark.parametrize(
    ("module", "settings", "connector", "layered"),
    [
        (OURS, {}, "KvrouteExampleConnector", True),
        (OURS, {"kvroute": {"carrier": "connector"}}, "KvrouteExampleConnector", False),
        (OURS, {}, "KvrouteConnector", False),
        (None, {"kvroute": {"carrier": "layer"}}, "MultiConnector", True),  # kvroute's is inside
        (None, {}, "KvrouteExampleConnector", False),  # of somebody else
        (None, {}, "ExampleConnector", False),
    ],
)
def test_a_models_class_is_vllms_own_unless_a_connector_asks(
    module: str | None, settings: dict[str, Any], connector: str, layered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: nothing of vLLM is replaced that nobody asked for, and the log says which it is. Method: the class before
    and after; one that is not known is never replaced."""
    config = engine(connector)
    config.kv_transfer_config.kv_connector_module_path = module
    config.kv_transfer_config.kv_connector_extra_config = settings
    with caplog.at_level("INFO", "vllm.kvroute"):
        found = with_layer(Qwen3MoeForCausalLM, config)
    assert (found is not Qwen3MoeForCausalLM) == layered
    assert issubclass(found, Qwen3MoeForCausalLM)
    asked = bool(module or settings)
    assert ["does nothing" in line for line in caplog.messages] == ([False] * layered if asked else [True])
    assert with_layer(SimpleNamespace, config) is SimpleNamespace


def test_a_process_without_a_connector_keeps_vllms_classes() -> None:
    config = SimpleNamespace(kv_transfer_config=None)
    assert with_layer(Qwen3MoeForCausalLM, config) is Qwen3MoeForCausalLM


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_a_rank_with_fewer_heads_knows_the_rows_of_one_with_more(dtype: torch.dtype) -> None:
    """Goal: prefill and decode may divide the heads differently. Method: an engine writes pages beside four heads; one
    that has the first two of them, and the same pages, finds every row, but for KV of eight bits, of which all heads of
    a rank are taken. KV of the layer before is not looked at.
    """
    spec = routing_spec(num_experts=8, top_k=2, layer_ids=[0, 1], num_layers=2, block_tokens=4)
    last = torch.randint(1, 100, (3, 4, 4, 16)).to(dtype)
    name, at = page_name(spec), torch.arange(12)
    cache, seen = torch.zeros(3, 1, 4, token_nbytes(spec), dtype=torch.uint8), StepTokens(12)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={name: SimpleNamespace(seen=seen)}),
        model_config=SimpleNamespace(use_mla=True),
    )

    def pages(heads: int) -> Any:
        before = torch.rand(3, heads, 4, 16).to(dtype)
        return pages_of(config, {"layers.1": last[:, :heads].clone(), "layers.0": before, name: cache}, spec)

    seen.saw(at + 100, at)
    pages(4).put(at, torch.tensor([[[3, 5], [0, 1]]] * 12), b"weights!")
    for heads, sound in ((4, True), (2, dtype != torch.uint8)):
        held = pages(heads)
        ids, good, _ = held.rows(held.get(at.numpy(), at.numpy() + 100, at.numpy()), b"weights!")
        assert (good == np.full(12, sound)).all()
        assert (ids == [[3, 5], [0, 1]]).all()

"""Where vLLM's models have a layer of rows: what an operator gets who says nothing, and what is said no to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cache_manager.errors import ConfigError
from kvroute.connector import Settings
from kvroute.integrations.vllm.models import wants_pages


def engine(connector: str, *, drafts: bool = False, window: int | None = None) -> Any:
    """What is asked of vLLM's configuration."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=connector),
        speculative_config=SimpleNamespace() if drafts else None,
        model_config=SimpleNamespace(get_sliding_window=lambda: window),
    )


@pytest.mark.parametrize(
    ("connector", "layer"),
    [
        ("KvrouteExampleConnector", True),
        ("KvrouteOffloadingConnector", True),
        ("KvrouteNixlConnector", True),
        ("KvrouteNixlPullConnector", True),
        ("KvrouteConnector", False),  # moves no KV
        ("KvrouteLMCacheConnectorV1", False),  # not seen to move it
        ("NixlConnector", False),  # an engine without kvroute's connector
        ("OffloadingConnector", False),
    ],
)
def test_an_operator_who_says_nothing_gets_the_layer_where_it_was_seen_to_work(connector: str, layer: bool) -> None:
    """Goal: the default loses least and changes no engine that could break by it. Method: connectors, with and without
    a store, drafts, a sliding window; what is said aloud is done with any connector.
    """
    said = Settings()
    assert wants_pages(said, engine(connector)) == layer
    assert not wants_pages(said, engine(connector, drafts=True))
    assert not wants_pages(said, engine(connector, window=4096))
    assert not wants_pages(Settings(store="file:///rows"), engine(connector))
    assert not wants_pages(Settings(carrier="connector"), engine(connector))
    assert wants_pages(Settings(carrier="layer"), engine(connector))
    with pytest.raises(ConfigError, match="no draft model"):
        wants_pages(Settings(carrier="layer"), engine(connector, drafts=True))

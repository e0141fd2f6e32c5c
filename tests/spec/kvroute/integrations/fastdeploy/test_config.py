"""The routing replay configuration: FastDeploy's JSON in, one frozen object or a clear refusal out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cache_manager.errors import ConfigError
from kvroute.integrations.fastdeploy.config import RoutingReplayConfig
from kvroute.routing import routing_spec

FASTDEPLOY = {
    "enable_routing_replay": True,
    "routing_store_type": "rdma",
    "local_store_dir": "/data/routes",
    "rdma_store_server": "10.0.0.1:50051/routes",
    "only_last_turn": True,
    "use_fused_put": True,
    "debug_mode": False,
    "routing_dtype": "uint16",
    "num_moe_layers": 58,
    "moe_top_k": 8,
}

NULLS = dict.fromkeys(RoutingReplayConfig.__struct_fields__)


def test_fastdeploys_json_is_read_as_it_is() -> None:
    config = RoutingReplayConfig.from_json(json.dumps(FASTDEPLOY))
    assert {name: getattr(config, name) for name in FASTDEPLOY} == FASTDEPLOY
    assert config.rollout_store == ""
    assert RoutingReplayConfig.from_json(FASTDEPLOY) == config


@pytest.mark.parametrize(
    "nothing", [None, "", "  ", "None", "null", "{}", {}, dict.fromkeys(FASTDEPLOY, "None"), NULLS]
)
def test_nothing_given_is_off(nothing: Any) -> None:
    """Goal: launchers that pass an option that was not set keep working. Method: every spelling they use."""
    config = RoutingReplayConfig.from_json(nothing)
    assert config == RoutingReplayConfig()
    assert (config.enable_routing_replay, config.routing_store_type) == (False, "local")
    assert config.local_store_dir == "./routing_replay_output"


ON = {"enable_routing_replay": True}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"zzz": 1}, "wanted a JSON object with the keys enable_routing_replay, .* unknown field `zzz`$"),
        ({"enable_routing_replay": "true"}, r"Expected `bool`, got `str` - at `\$.enable_routing_replay`"),
        ({"routing_store_type": "redis"}, r"'redis' - at `\$.routing_store_type`"),
        ({"local_store_dir": ""}, r"length >= 1 - at `\$.local_store_dir`"),
        ({"routing_dtype": "int8"}, r"'int8' - at `\$.routing_dtype`"),
        ({"num_moe_layers": 0}, r"`int` >= 1 - at `\$.num_moe_layers`"),
        (ON | {"debug_mode": True}, "^debug_mode: wanted false: ids are checked at capture"),
        (ON | {"routing_store_type": "rdma"}, "^rdma_store_server: wanted HOST:PORT.* of a Mooncake master"),
        ({"routing_store_type": "response"}, r"'response' - at `\$.routing_store_type`"),
        (ON | {"rollout_store": "file:///x", "use_fused_put": True}, "^use_fused_put: wanted no value beside"),
        (ON | {"rollout_store": "file:///x", "local_store_dir": "y"}, "^local_store_dir: wanted no value beside"),
        (ON | {"rollout_store": "nothing"}, "^store: wanted a URL"),
        ("{", "routing replay config: wanted a JSON object .*got Input data was truncated"),
        ("true", "got Expected `object`, got `bool`"),
    ],
)
def test_invalid_configurations_are_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoutingReplayConfig.from_json(value)


@pytest.mark.parametrize(
    ("keys", "url"),
    [
        ({"local_store_dir": "/data/a b"}, "file:///data/a%20b"),
        ({"local_store_dir": "/data", "use_fused_put": True}, "file:///data?layers=all"),
        ({"routing_store_type": "rdma", "rdma_store_server": "h:1/p"}, "mooncake://h:1/p"),
        ({"routing_store_type": "rdma", "rdma_store_server": "mooncake://h:1"}, "mooncake://h:1"),
        ({"rollout_store": "mine://somewhere?x=1"}, "mine://somewhere?x=1"),
    ],
)
def test_the_keys_name_a_rollout_store(keys: dict[str, Any], url: str) -> None:
    assert RoutingReplayConfig(**ON, **keys).rollout_url == url


def test_what_follows_from_the_model_is_filled_in_or_refused() -> None:
    spec = routing_spec(num_experts=256, top_k=8, layer_ids=range(3, 61), num_layers=61, block_tokens=64)
    fitted = RoutingReplayConfig().fitted(spec)
    assert (fitted.routing_dtype, fitted.num_moe_layers, fitted.moe_top_k) == ("uint8", 58, 8)
    assert fitted.fitted(spec) == fitted
    # FastDeploy stores 256 experts in uint16, because it counts a shared expert and a sentinel.
    assert RoutingReplayConfig.from_json(FASTDEPLOY).fitted(spec).routing_dtype == "uint8"
    wider = routing_spec(num_experts=300, top_k=8, layer_ids=range(3, 61), num_layers=61, block_tokens=64)
    for key, value, message in (
        ("num_moe_layers", 61, "num_moe_layers: wanted 58, as the model has, got 61"),
        ("moe_top_k", 4, "moe_top_k: wanted 8, as the model has, got 4"),
        ("routing_dtype", "uint8", "routing_dtype: wanted uint16 or wider for this model, got uint8"),
    ):
        with pytest.raises(ConfigError, match=message):
            RoutingReplayConfig.from_json({key: value}).fitted(wider)

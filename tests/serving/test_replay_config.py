"""``--routing-replay-config`` of `kvroute prefill` and ``decode``: decode stores rollouts, prefill does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serving import ask, completion, served

from kvroute.rollout.local import LocalRollouts
from kvroute.rollout.shard import fetch_routes
from kvroute.routes import Routes
from paged_engine.serving.config import DecodeConfig, PrefillConfig
from paged_engine.serving.decode import DecodeServer
from paged_engine.serving.prefill import PrefillServer

SIZES: dict[str, Any] = {"device_blocks": 24, "memory": "heap", "port": 0}
ID = "chatcmpl-task:3:0:0-d9f16c5c-65f6-4815-b44d-14e2c581907c_0"


def answered(replay: dict[str, object]) -> dict[str, Any]:
    """What decode answers to a prompt that prefill has computed, both with this configuration; both have ended."""
    given = json.dumps(replay)
    prefill = PrefillServer(
        PrefillConfig(name="p0", transfer_address="tcp://127.0.0.1:*", routing_replay_config=given, **SIZES)
    )
    prefills = {"p0": prefill.node.address}
    decodes = DecodeServer(DecodeConfig(name="d0", prefills=prefills, routing_replay_config=given, **SIZES))
    body = completion(1)
    asked = {"id": ID, "prompt": body["prompt"], "sampling": {"max_tokens": 6, "temperature": 0.8, "seed": 1}}
    with served(prefill) as p, served(decodes) as d:
        status, offered = ask(p, "/v1/prefill", asked)
        assert status == 200, offered
        status, answer = ask(d, "/v1/decode", asked | {"kv_transfer": offered["kv_transfer"]})
        assert status == 200, answer
        assert decodes.engine.decode_counters.prefill_recomputed_tokens == 0
    return dict(answer)


def test_decode_stores_what_it_answers_and_prefill_stores_nothing(tmp_path: Path) -> None:
    """Goal: one rollout a sample. Method: one directory for both; what lies there is what decode answered, once."""
    answer = answered({"enable_routing_replay": True, "local_store_dir": str(tmp_path / "rollouts"), "required": []})
    store = LocalRollouts(tmp_path / "rollouts")
    handle = store.find("task:3:0:0")
    assert handle is not None
    routes = Routes.from_json(answer["samples"][0]["routed_experts"])
    assert routes.complete
    assert fetch_routes(store, handle) == routes


def test_off_crosses_without_rows(tmp_path: Path) -> None:
    """Goal: off is off on both sides, and KV crosses all the same."""
    answer = answered({"enable_routing_replay": False, "local_store_dir": str(tmp_path / "rollouts")})
    assert len(Routes.from_json(answer["samples"][0]["routed_experts"])) == 0
    assert not (tmp_path / "rollouts").exists()


@pytest.mark.parametrize("text", ['{"enable_routing_replay": true, "use_fused_put": true, "only_last_turn": true}'])
def test_prefill_keeps_what_is_not_about_a_store(text: str) -> None:
    """Goal: prefill's engine captures as decode's does. Method: the configurations that both make of one text."""
    prefill = PrefillConfig(name="p", port=0, transfer_address="ipc:///p", routing_replay_config=text).replay
    decodes = DecodeConfig(name="d", port=0, routing_replay_config=text).replay
    assert prefill is not None
    assert decodes is not None
    assert prefill.rollout_url == "response:"
    assert decodes.without_store() == prefill
    assert PrefillConfig(name="p", port=0, transfer_address="ipc:///p").replay is None

"""The small engine does what a routing replay configuration says, key by key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from cache_manager.errors import ConfigError, InvalidInputError, StorageError
from cache_manager.keys import Namespace
from cache_manager.storage import open_store
from kvroute.config import RoutingReplayConfig
from kvroute.rollout.local import LocalRollouts
from kvroute.testing.rollouts import fetch_routes
from paged_engine import text
from paged_engine.engine import Engine
from paged_engine.request import EngineConfig, Output, Request

CONFIG = EngineConfig(device_blocks=60, host_blocks=20)
NAMESPACE = Namespace("tests", weights_version=3)
UUID4 = "d9f16c5c-65f6-4815-b44d-14e2c581907c"


def on(directory: Path, **keys: Any) -> RoutingReplayConfig:
    """As an operator gives it: JSON."""
    given = {"enable_routing_replay": True, "local_store_dir": str(directory / "rollouts"), **keys}
    return RoutingReplayConfig.from_json(json.dumps(given))


def requests(n: int = 2) -> list[Request]:
    prompts = [tuple(text.opening(text.paragraphs()[i]) + text.turn(text.questions()[i])) for i in range(2)]
    return [
        Request(f"chatcmpl-task:{i}:0:0-{UUID4}_0", prompt, 6, n=n, temperature=0.8) for i, prompt in enumerate(prompts)
    ]


def run(engine: Engine, asked: list[Request]) -> list[Output]:
    for request in asked:
        engine.add(request)
    return sorted(engine.run(), key=lambda output: (output.request.id, output.sample))


def test_finished_samples_are_in_the_store(qwen: nn.Module, tmp_path: Path) -> None:
    """Goal: ``enable_routing_replay`` with a local store. Method: what another reader of the directory gets, beside the
    outputs' routes, after the engine has closed."""
    with Engine(qwen, CONFIG, NAMESPACE, replay=on(tmp_path)) as engine:
        outputs = run(engine, requests())
    store = LocalRollouts(tmp_path / "rollouts")
    assert len(outputs) == 4
    for output in outputs:
        assert output.rollout is not None
        name = f"task:{output.request.id[14]}:0:0" + ("_1" if output.sample else "")
        handle = store.find(name)
        assert handle == output.rollout.result(0)
        assert fetch_routes(store, handle) == output.routes
        assert output.routes.complete


def test_off_captures_nothing(qwen: nn.Module, tmp_path: Path) -> None:
    """Goal: ``enable_routing_replay: false`` is off. Method: the same tokens, no rows, no hooks, no directory."""
    with Engine(qwen, CONFIG, NAMESPACE) as engine:
        wanted = run(engine, requests())
    off = RoutingReplayConfig(local_store_dir=str(tmp_path / "rollouts"))
    with Engine(qwen, CONFIG, NAMESPACE, replay=off) as engine:
        assert not any(module._forward_hooks for module in qwen.modules())
        outputs = run(engine, requests())
    assert [output.tokens for output in outputs] == [output.tokens for output in wanted]
    assert all(len(output.routes) == 0 and output.rollout is None for output in outputs)
    assert not (tmp_path / "rollouts").exists()


def test_required_says_which_rows_a_hit_needs(qwen: nn.Module, tmp_path: Path) -> None:
    """Goal: ``required`` decides. Method: engines whose rows are forgotten in mid-run store what they are allowed to,
    and the next engines continue from that store. With nothing required, KV without rows is stored and is a hit whose
    rows are missing. Otherwise it is neither stored nor a hit, and such records of an engine that requires less are
    replaced by whole blocks."""

    def served(required: list[str] | None, *, forgets: bool = False) -> tuple[int, bool, tuple[int, ...]]:
        replay = on(tmp_path, required=required, block_store=f"file://{tmp_path}/blocks")
        with Engine(qwen, CONFIG, NAMESPACE, replay=replay) as engine:
            engine.add(replace(requests(n=1)[0], max_tokens=2))
            while engine.busy:
                outputs = engine.step()
                if forgets and engine.steps == 1:
                    engine.aux.forget()
            return engine.computed_tokens, outputs[0].routes.complete, outputs[0].tokens

    computed, complete, tokens = served(None, forgets=True)
    assert not complete
    assert served([], forgets=True) == (computed, False, tokens), "nothing had been stored"
    again, complete, tokens_again = served([])
    assert (again < computed / 2, complete, tokens_again) == (True, False, tokens)
    assert served(None) == (computed, True, tokens), "rows are missing: no hit"
    again, complete, tokens_again = served(None)
    assert (again < computed / 2, complete, tokens_again) == (True, True, tokens)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_moe_layers": 99}, "num_moe_layers: wanted"),
        ({"moe_top_k": 99}, "moe_top_k: wanted"),
        ({"block_store": "nowhere:"}, "store scheme"),
        ({"rollout_store": "nowhere:", "local_store_dir": None}, "rollout store scheme"),
        ({"block_store": "memory:"}, "block_store: wanted '', as the engine was given a store"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_and_leaves_no_hook(
    qwen: nn.Module, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    store = open_store("memory:") if "given a store" in message else None
    with pytest.raises(ConfigError, match=message):
        Engine(qwen, CONFIG, NAMESPACE, store=store, replay=on(tmp_path, **keys))
    assert not any(module._forward_hooks for module in qwen.modules())


def test_a_request_that_names_no_rollout_is_refused_at_once(qwen: nn.Module, tmp_path: Path) -> None:
    with Engine(qwen, CONFIG, NAMESPACE, replay=on(tmp_path)) as engine:
        with pytest.raises(InvalidInputError, match="request id: wanted chatcmpl-<user>-<uuid4>"):
            engine.add(Request(f"chatcmpl-{UUID4}", (1, 2, 3), 2))
        assert not engine.busy


def test_a_closed_store_costs_no_answer(qwen: nn.Module, tmp_path: Path) -> None:
    """Goal: a sample that ends is answered, and its blocks are given back once. Method: the manager of a running engine
    is closed; its requests end, with their routes, and their tickets report what happened to the rollouts."""
    with Engine(qwen, CONFIG, NAMESPACE, replay=on(tmp_path)) as engine:
        assert engine.rollouts is not None
        engine.rollouts.close()
        outputs = run(engine, requests())
        assert not engine.busy
    assert [output.routes.complete for output in outputs] == [True] * 4
    for output in outputs:
        assert output.rollout is not None
        with pytest.raises(StorageError, match="the routing replay manager is closed"):
            output.rollout.result(0)

"""The client of the vLLM integration, without vLLM: objects and JSON, handles and stores."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kvroute
from kvroute.integrations.vllm import routes
from kvroute.rollout import open_rollouts

FOUND = kvroute.Routes(
    np.tile(np.array([[1, 0], [2, 3]]), (9, 1, 1)), np.ones(9, np.bool_), layer_ids=(0, 1), num_experts=4, num_layers=2
)
PROMPT, ANSWER = [5, 6, 7], [8, 9, 10, 11]


def test_a_response_brings_its_routes() -> None:
    """Goal: cut to the tokens that were answered and bound to them. Method: an object and the server's JSON."""
    with closing(open_rollouts("response:")) as store:
        told = {"kvroute": {"0": store.put("r", FOUND).to_json()}}
    output = SimpleNamespace(
        request_id="r",
        prompt_token_ids=PROMPT,
        outputs=[SimpleNamespace(index=0, token_ids=ANSWER)],
        kv_transfer_params=told,
    )
    answer = {
        "id": "r",
        "choices": [{"index": 0, "token_ids": ANSWER, "prompt_token_ids": PROMPT}],
        "kv_transfer_params": told,
    }
    assert routes(output) == routes(answer) == FOUND.slice(0, 6).bind([*PROMPT, *ANSWER])
    assert len(routes({"kv_transfer_params": told})) == 9  # without tokens there is nothing to bind to
    with pytest.raises(kvroute.RowError, match="rollouts="):
        routes(output, index=1)


def test_routes_that_were_left_are_waited_for(tmp_path: Path) -> None:
    """Goal: the engine puts a request's routes when its front end has answered already. Method: they come late."""
    answer = {
        "id": "cmpl-1",
        "choices": [{"index": i, "token_ids": ANSWER} for i in (0, 1)],
        "prompt_token_ids": PROMPT,
    }
    with closing(open_rollouts(f"file://{tmp_path}")) as store:
        put = threading.Thread(target=lambda: (time.sleep(0.2), store.put("1_cmpl-1-0", FOUND)), daemon=True)
        put.start()
        try:
            assert len(routes(answer, 1, rollouts=store, wait_s=60)) == 6
        finally:
            put.join(60)
        with pytest.raises(kvroute.RowError, match="neither"):
            routes(answer, 0, rollouts=store, wait_s=0)
        handle = store.find("1_cmpl-1-0")
        assert handle is not None
        with pytest.raises(kvroute.RowError, match="kind file"):
            routes({"kv_transfer_params": {"kvroute": {"0": handle.to_json()}}})
        store.delete(handle)
        with pytest.raises(kvroute.RowError, match="there and sound"):
            routes({"kv_transfer_params": {"kvroute": {"0": handle.to_json()}}}, rollouts=store)

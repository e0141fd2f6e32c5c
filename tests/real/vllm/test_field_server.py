"""vLLM's own field in the answers of its server: every row of every answer equals transformers' own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from engines import prompts
from test_server import STOPS, running, word_of
from transformers import AutoConfig

import kvroute
from bench.vllm_peers import plugin
from kvroute.integrations.vllm import missing, routes

CONNECTOR = {
    "kv_connector": "KvrouteConnector",
    "kv_connector_module_path": "kvroute.integrations.vllm",
    "kv_role": "kv_both",
}


@pytest.mark.timeout(900)
def test_the_flag_is_all_that_a_client_needs(model: Callable[..., Path], tmp_path: Path) -> None:
    """Goal: base64 fields of completions, chats and tokens in and out. Method: vLLM's own flag and a connector without
    settings; prefix hits, several completions, stop strings, a first position; fields of another form."""
    home = model("qwen3_moe")
    spec = kvroute.routing_spec_from_hf(AutoConfig.from_pretrained(home), block_tokens=1)

    def right(answer: dict[str, Any], start: int = 0, sent: list[int] | None = None) -> int:
        """Every row that is due is there, and right; how many. ``sent``: a prompt that the answer does not repeat."""
        rows = 0
        for choice in answer["choices"]:
            found = routes(answer, choice["index"], spec=spec)
            prompt = sent or answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
            tokens = [*prompt, *choice["token_ids"]]
            assert (found.start, found.stop) == (start, len(tokens) - 1)
            found.validate(tokens, rows=None if start else len(tokens) - 1)
            ids = np.sort(found.ids.astype(np.int64), axis=-1)
            np.testing.assert_array_equal(ids, models.routing(home, tokens)[start:-1])
            rows += len(found)
        return rows

    arguments = ["--enforce-eager", "--enable-return-routed-experts", "--kv-transfer-config", json.dumps(CONNECTOR)]
    arguments.append("--enable-scale-out")  # for tokens in and out
    search = f"{plugin(tmp_path / 'plugin')}:{os.environ.get('PYTHONPATH', '')}"  # as an installed kvroute
    with running(home, tmp_path / "server.log", *arguments, environment={"PYTHONPATH": search}) as server:
        (asked,) = prompts(91, 100)
        whole = server.post("/v1/completions", prompt=asked, max_tokens=20)
        assert right(whole) == 119
        assert whole["kv_transfer_params"] is None, "rows go once"
        body: dict[str, Any] = {"prompt": asked, "max_tokens": 20}
        assert right(server.post("/v1/completions", **body)) == 119
        assert right(server.post("/v1/completions", **body, routed_experts_prompt_start=90), 90) == 29
        assert right(server.post("/v1/completions", **body, stop=[word_of(whole, 5)])) <= 105
        several = server.post("/v1/completions", **body, n=3, temperature=1.0, stop=STOPS)
        assert len(several["choices"]) == 3
        assert right(several) > 300
        said = [{"role": "user", "content": " ".join(f"t{i}" for i in asked)}]
        assert right(server.post("/v1/chat/completions", messages=said, max_tokens=16)) > 100
        sampling = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
        for n in (1, 2):
            in_and_out = {"token_ids": asked, "sampling_params": {**sampling, "n": n}}
            assert right(server.post("/inference/v1/generate", **in_and_out), sent=asked) == 119 * n
        wrong = {**whole, "choices": [{**whole["choices"][0], "routed_experts": "bm8="}]}
        with pytest.raises(kvroute.RowError, match="npy"):
            routes(wrong, spec=spec)
        with pytest.raises(kvroute.RowError, match="spec="):
            routes(whole)
        assert missing(whole) == ()
        metrics = server.metrics()
    assert "kvroute:answers_without_field_total{" not in metrics, "no answer was without"

"""Rows in a layer of the KV: an inner connector that knows nothing of rows moves them, the last router's too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import LATENT, prompts

from bench.vllm_peers import plugin
from cache_manager.errors import ConfigError
from kvroute.integrations.vllm import routes, unseen

Start = Any  # conftest's Engines
Model = Callable[..., Path]
ASKED = prompts(41, 150, 98, 66)
FULL = [128, 96, 64]


def start(engine: Start, home: Path, kv: Path, **arguments: Any) -> Any:
    """An engine that says nothing of how rows are carried: with this connector and no store, in the KV."""
    kv.mkdir(exist_ok=True)
    made = engine(home, "KvrouteExampleConnector", {}, {"shared_storage_path": str(kv)}, **arguments)
    assert made.kept.carrier.layer is not None
    return made


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_kv_that_comes_back_brings_its_rows(engine: Start, model: Model, tmp_path: Path, family: str) -> None:
    """Goal: without a store of rows, a second engine has every row of KV that the first one's connector left. Method:
    two engines over one directory; the second has 15 blocks, so that later prompts take those of the first.
    """
    first = start(engine, model(family), tmp_path / "kv")
    first.assert_right(first.ask(ASKED))
    second = start(engine, model(family), tmp_path / "kv", num_gpu_blocks_override=16, max_model_len=256)
    found = [second.ask([prompt])[0] for prompt in ASKED]
    assert [output.num_cached_tokens for output in found] == FULL
    second.assert_right(found)
    assert not any(unseen(output) for output in found)
    assert second.kept.missing.total() == 0
    for prompt in prompts(42, *[150] * 5):
        second.assert_right(second.ask([prompt]))
    again = second.ask([ASKED[0]])
    assert [output.num_cached_tokens for output in again] == FULL[:1], "after the pool was filled with others"
    second.assert_right(again)


def test_latent_attention(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: the layer stands beside MLA's. Method: as above for DeepSeek-V3, whose bfloat16 flips some choices beside
    the reference: what was loaded has to be what the first engine computed, the last layer's choices too.
    """
    arguments = {"dtype": "bfloat16", "block_size": 16, "num_gpu_blocks_override": 128, **LATENT}
    first = start(engine, model("deepseek_v3"), tmp_path / "kv", **arguments)
    before = [routes(first.ask([prompt])[0]) for prompt in ASKED]
    second = start(engine, model("deepseek_v3"), tmp_path / "kv", **arguments)
    for rows, prompt in zip(before, ASKED, strict=True):
        (output,) = second.ask([prompt])
        again, hit = routes(output), output.num_cached_tokens
        assert hit > 0
        assert rows.complete
        assert again.complete
        assert again.layer_ids == rows.layer_ids == (1, 2)
        assert (rows.ids[:hit] == again.ids[:hit]).all()


STOCK = """
import sys
from vllm import LLM, ModelRegistry, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, block_size=32, max_model_len=256, seed=0)
    from vllm.model_executor.model_loader import utils

    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.get_model()
    known = ModelRegistry.models["Qwen3MoeForCausalLM"]
    prompt = {"prompt_token_ids": list(range(5, 105))}
    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True), use_tqdm=False)
    wrapped = hasattr(utils.get_model_architecture, "kvroute")
    print("STOCK", wrapped, type(model).__module__, known.module_name, *answer.outputs[0].token_ids)
"""


def test_without_a_connector_vllm_is_stock(model: Model, tmp_path: Path) -> None:
    """Goal: an engine beside which kvroute is only installed has vLLM's own classes and its answers. Method: two
    processes, the plugin loaded by vLLM in one of them alone."""
    script = tmp_path / "stock.py"
    script.write_text(STOCK)
    lines = list[list[str]]()
    for plugins in ("kvroute", ""):
        search = f"{plugin(tmp_path / f'plugin-{plugins}')}:{os.environ.get('PYTHONPATH', '')}"  # as an installed one
        environment = {**os.environ, "VLLM_PLUGINS": plugins, "VLLM_LOGGING_LEVEL": "INFO", "PYTHONPATH": search}
        command = [sys.executable, str(script), str(model("qwen3_moe"))]
        done = subprocess.run(command, env=environment, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr[-3000:]
        lines += [line.split() for line in done.stdout.splitlines() if line.startswith("STOCK")]
        assert ("kvroute does nothing here" in done.stdout + done.stderr) == bool(plugins)
    (_, with_plugin, *mine), (_, without, *theirs) = lines
    assert (with_plugin, without) == ("True", "False")
    assert mine == theirs
    assert mine[:2] == ["vllm.model_executor.models.qwen3_moe"] * 2


def test_a_model_without_the_layer_is_refused(engine: Start, model: Model, tmp_path: Path) -> None:
    """Goal: an operator who requests a layer gets an error when there can be none. Method: a store beside the layer;
    the error names both conditions."""
    with pytest.raises(ConfigError, match="no store, and a model with a layer of rows"):
        engine(
            model("qwen3_moe"),
            "KvrouteExampleConnector",
            {"carrier": "layer", "store": f"file://{tmp_path / 'rows'}"},
            {"shared_storage_path": str(tmp_path)},
        )

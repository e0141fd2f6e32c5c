"""The plugin in a process whose configuration names no connector of kvroute."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bench.vllm_peers import plugin

Model = Callable[..., Path]

STOCK = """
import sys
from vllm import LLM, ModelRegistry, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, block_size=32, max_model_len=256, seed=0)
    from vllm.engine.arg_utils import EngineArgs

    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.get_model()
    known = ModelRegistry.models["Qwen3MoeForCausalLM"]
    prompt = {"prompt_token_ids": list(range(5, 105))}
    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True), use_tqdm=False)
    wrapped = hasattr(EngineArgs.create_engine_config, "_kvroute_field")
    print("STOCK", wrapped, type(model).__module__, known.module_name, *answer.outputs[0].token_ids)
"""


def test_without_a_connector_vllm_is_stock(model: Model, tmp_path: Path) -> None:
    """Goal: an engine beside which kvroute is only installed has vLLM's own classes and its model's answers. Method: a
    process that loads the plugin; the tokens are those of transformers."""
    script = tmp_path / "stock.py"
    script.write_text(STOCK)
    search = f"{plugin(tmp_path / 'plugin')}:{os.environ.get('PYTHONPATH', '')}"  # as an installed one
    environment = {**os.environ, "VLLM_PLUGINS": "kvroute", "VLLM_LOGGING_LEVEL": "INFO", "PYTHONPATH": search}
    home = model("qwen3_moe")
    done = subprocess.run([sys.executable, str(script), str(home)], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    ((_, plugin_is_loaded, of_model, of_registry, *tokens),) = (
        line.split() for line in done.stdout.splitlines() if line.startswith("STOCK")
    )
    assert plugin_is_loaded == "True"
    assert of_model == of_registry == "vllm.model_executor.models.qwen3_moe"
    by_transformers = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32)
    answer = by_transformers.generate(torch.arange(5, 105)[None], max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert [int(token) for token in tokens] == answer[0, 100:].tolist()

"""The plugin in a process whose configuration names no connector of kvroute."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
    (_, with_plugin, *mine), (_, without, *theirs) = lines
    assert (with_plugin, without) == ("True", "False")
    assert mine == theirs
    assert mine[:2] == ["vllm.model_executor.models.qwen3_moe"] * 2

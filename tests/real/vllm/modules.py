"""vLLM's own modules without an engine: a configuration of a tiny checkpoint in force, in a group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs


@contextmanager
def configured(home: Path, **arguments: Any) -> Iterator[VllmConfig]:
    """vLLM's configuration of the model in ``home``, while its modules may be made."""
    defaults: dict[str, Any] = {"enforce_eager": True, "max_model_len": 256, "skip_tokenizer_init": True}
    made = EngineArgs(str(home), **{**defaults, **arguments}).create_engine_config()
    with set_current_vllm_config(made):
        init_distributed_environment(1, 0, f"file://{home}.meeting", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        try:
            yield made
        finally:
            cleanup_dist_env_and_memory()

"""The imports of a nursery of vLLM's front ends."""

from __future__ import annotations

import forked  # noqa: F401
import vllm.entrypoints.openai.api_server
import vllm.model_executor.models.qwen3_moe
import vllm.v1.engine.async_llm
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401

import kvroute.integrations.vllm  # noqa: F401

"""The benchmarks' peers; vLLM runs in a separate environment that the Makefile makes."""

from __future__ import annotations

from bench.harness import ROOT

VENVS = ROOT / "bench" / ".venvs"
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

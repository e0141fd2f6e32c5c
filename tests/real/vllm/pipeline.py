"""Engines of several pipeline stages on a CPU, each in a process of its own.

A stage but the first receives into a buffer that vLLM makes when it profiles a model. On a CPU vLLM 0.32 profiles
compiled models alone, and an engine with ``enforce_eager`` ends with its first step; here it has the buffer.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from kvroute.connector import worker

STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}


def receives(patch: pytest.MonkeyPatch) -> None:
    """Every engine that is forked from this process has the buffer, until ``patch`` is undone."""
    initialize = CPUModelRunner.initialize_kv_cache

    def initialized(self: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **named)
        if self.intermediate_tensors is None and not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    patch.setattr(CPUModelRunner, "initialize_kv_cache", initialized)


class Slow(worker.WorkerRows):
    """Rows that are written behind the steps, as beside a device, and those of one stage late."""

    def __init__(self, slow: int, wait_s: float, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "late": True})
        self._wait_s = wait_s if get_pp_group().rank_in_group == slow else 0.0

    def _end_on_host(self, *arguments: Any) -> None:
        time.sleep(self._wait_s)
        super()._end_on_host(*arguments)


def slow(patch: pytest.MonkeyPatch, stage: int, wait_s: float) -> None:
    """In every engine that is forked from this process this stage writes its rows so much later."""
    patch.setattr(worker, "WorkerRows", partial(Slow, stage, wait_s))


__all__ = ["STAGES", "receives", "slow"]

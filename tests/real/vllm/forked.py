"""Engines and workers of vLLM are forked, as beside a GPU, where they are processes.

On a CPU vLLM spawns them: each is an interpreter that imports everything, for ten seconds. One server of the tests is
left as it is installed.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.platforms.cpu import CpuPlatform

_decide = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]


def _forks(cls: type, config: Any) -> None:
    _decide(cls, config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


CpuPlatform.check_and_update_config = classmethod(_forks)  # type: ignore[assignment]

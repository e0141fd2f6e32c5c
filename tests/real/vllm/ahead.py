"""Engines that schedule ahead of their worker, which writes rows behind its steps, as beside a device.

vLLM turns asynchronous scheduling off where the device is a CPU. Here it is turned on again after vLLM has decided,
with streams and events that have nothing to wait for, as everything on a CPU is done when the call returns.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401 - puts its own Event in torch's place, which is there again at the end
from vllm.platforms.cpu import CpuPlatform

from kvroute.connector import worker


class Done:
    """A stream or an event of a device whose work is done when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...


def schedule(patch: pytest.MonkeyPatch | None = None) -> None:
    """Every engine of this process, and of those that are forked from it, schedules ahead until ``patch`` is undone."""
    decide = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def forced(cls: type, config: Any) -> None:
        decide(cls, config)
        config.scheduler_config.async_scheduling = True

    patch = patch or pytest.MonkeyPatch()
    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(forced))
    for name in ("Event", "Stream", "current_stream"):
        patch.setattr(torch.cuda, name, Done)
    patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    patch.setattr(worker, "WorkerRows", partial(worker.WorkerRows, late=True))


__all__ = ["schedule"]

"""What a user adds to verl, by verl's own ways: a platform, an agent loop and a parser of calls.

``VERL_USE_EXTERNAL_MODULES`` names this module: each of verl's processes imports it. verl has no platform for CPUs.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from live import STOPS
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.plugin.platform import PlatformBase, PlatformRegistry

DEVICE = SimpleNamespace(synchronize=lambda *_: None, empty_cache=lambda: None, is_available=lambda: True)


@PlatformRegistry.register(platform="cpu")
class OnCpu(PlatformBase):
    """Device names for a host without an accelerator."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


class Stopping(SingleTurnAgentLoop):
    """verl's loop of one turn, whose answers end at a string."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return await super().run({**sampling_params, "stop": STOPS}, **kwargs)


@ToolParser.register("always")
class Always(ToolParser):
    """Takes every answer for a call of the tool: a model of random weights would never write one."""

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        return " ".join(f"t{i}" for i in responses_ids), [FunctionCall(name="look", arguments="{}")]

"""Lets vLLM's Model Runner V2 run on a CPU, through Triton's interpreter: only it has vLLM's own routed experts.

vLLM takes Triton for usable on a CPU when it has a backend of that name; the interpreter needs none. So the backend
that is written here can be found but does nothing. Use it for answers, never for timings.
"""

from __future__ import annotations

from pathlib import Path

ENVIRONMENT = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

_COMPILER = """
from triton.backends.compiler import BaseBackend


class Backend(BaseBackend):
    binary_ext = "none"

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"


Backend.__abstractmethods__ = frozenset()
"""

_DRIVER = """
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class Driver(DriverBase):
    def __init__(self):
        pass

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cpu", "x86_64", 1)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_device_interface(self):
        return torch.cpu


Driver.__abstractmethods__ = frozenset()
"""


def written(directory: Path) -> Path:
    """A directory for ``PYTHONPATH`` that has the backend and the metadata by which it is found."""
    package = directory / "interpreted_triton"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "compiler.py").write_text(_COMPILER)
    (package / "driver.py").write_text(_DRIVER)
    about = directory / "interpreted_triton-0.0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: interpreted-triton\nVersion: 0.0.1\n")
    (about / "entry_points.txt").write_text("[triton.backends]\ncpu = interpreted_triton\n")
    return directory


__all__ = ["ENVIRONMENT", "written"]

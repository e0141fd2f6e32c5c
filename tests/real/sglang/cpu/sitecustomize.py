"""Stand-ins for parts of packages that SGLang's text path needs and a CPU lacks: its own kernels, and operators of
torchvision."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class _Anything(type):
    """A class whose attributes are such classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Kernels(types.ModuleType):
    """In the place of ``sgl_kernel``, whose wheel is for CUDA, and of ``soundfile``, which its HTTP server imports.

    Names can be imported, but the imported objects do nothing, except those of ``sgl_kernel_on_cpu``.
    """

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        import sgl_kernel_on_cpu

        return getattr(sgl_kernel_on_cpu, name, None) or _Anything(name, (), {"__iter__": lambda _: iter(())})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ("sgl_kernel", "soundfile"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if (
            name == "torchvision" and self.library is None
        ):  # its library of operators asks for CUDA's: they are named here
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None

    def create_module(self, spec: Any) -> Any:
        made = _Kernels(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: Any) -> None: ...


sys.meta_path.insert(0, _Finder())

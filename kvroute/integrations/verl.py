"""A module of SGLang under the name by which verl 0.9.1 asks for it.

verl reads SGLang's rows with a function of ``sglang.srt.layers.moe.routed_experts_capturer``. SGLang 0.5.12, which it
pins, and later releases have that function elsewhere, so that each request with rows would end with
``ModuleNotFoundError``. verl loads this module by its entry points, in each of its processes. Where an SGLang has the
name itself, its own module is found; nothing else changes.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

MOVED: Final = "sglang.srt.layers.moe.routed_experts_capturer"
READER: Final = "sglang.srt.state_capturer.routed_experts"
READS: Final = "extract_routed_experts_from_meta_info"
"""What verl takes of it: the rows of an answer, int32, flat."""


class _Moved(MetaPathFinder, Loader):
    """The last of the finders, which is asked when no other one has the name."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, READS, getattr(import_module(READER), READS))


if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
    sys.meta_path.append(_Moved())

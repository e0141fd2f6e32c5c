"""What SGLang up to 0.5.16 needs to run over newer packages without CUDA; imported before it.

It registers configurations that transformers has by now, and wants page-locked memory for its routed experts.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

_register, _zeros = transformers.AutoConfig.register, torch.zeros


def _registered(kind: str, config: Any, **_: Any) -> None:
    _register(kind, config, exist_ok=True)


def _pageable(*shape: Any, **named: Any) -> torch.Tensor:
    named.pop("pin_memory", None)
    return _zeros(*shape, **named)


transformers.AutoConfig.register = staticmethod(_registered)
torch.zeros = _pageable

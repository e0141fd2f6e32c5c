"""The inputs of a model's experts, watched independently of capture and replay."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn


class Seen:
    """The arguments of each layer's ``experts`` module, in the order in which the layers run."""

    def __init__(self, model: nn.Module) -> None:
        self.ids: list[torch.Tensor] = []
        self.hooks = [
            module.register_forward_pre_hook(self._look)
            for name, module in model.named_modules()
            if name.endswith(".experts")
        ]

    def _look(self, _module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.ids.append(next(t for t in inputs if not t.is_floating_point()).clone())

    def rows(self) -> NDArray[Any]:
        """Of the one pass since the last call: ``[tokens, layers, top_k]``."""
        rows: NDArray[Any] = torch.stack([t.reshape(-1, t.shape[-1]) for t in self.ids], dim=1).numpy()
        self.ids.clear()
        return rows

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


def experts_of(model: Any, tokens: torch.Tensor) -> NDArray[Any]:
    """The experts that compute a plain pass over ``tokens`` ``[1, n]``: ``[n, layers, top_k]``."""
    seen = Seen(model)
    with torch.no_grad():
        model(tokens, use_cache=False)
    seen.close()
    return seen.rows()

"""The ids of one step of an engine whose routers call back with them, checked for what was not recorded.

For engines that give every router one hook (vLLM's ``set_capture_fn``), on any device and without Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.spec import AuxBlockDataSpec

NOTHING = -1  # no expert has this id


class StepIds:
    """What the routers of ``spec``'s layers chose in the step at hand.

    On a CPU the hooks keep references. Elsewhere they copy into a buffer of their own on the device, which a CUDA graph
    replays without Python; it is emptied after each step, so that a layer that nobody recorded is seen as such: its ids
    are :data:`NOTHING`.
    """

    def __init__(self, spec: AuxBlockDataSpec, max_tokens: int, device: torch.device) -> None:
        self._layers: tuple[int, ...] = spec.attrs["layer_ids"]
        self._top_k = spec.row_shape[1]
        self._kept: list[torch.Tensor | None] = [None] * len(self._layers)
        self._calls = [0] * len(self._layers)
        self._buffer: torch.Tensor | None = None
        if device.type != "cpu":
            self._buffer = torch.full((max_tokens, *spec.row_shape), NOTHING, dtype=torch.int32, device=device)

    def hook(self, layer_id: int) -> Callable[[torch.Tensor], None]:
        """The callback for the router of a layer, which hands it ``[tokens, top_k]``."""
        column, kept, calls, buffer = self._layers.index(layer_id), self._kept, self._calls, self._buffer

        def keep(ids: torch.Tensor) -> None:
            kept[column] = ids
            calls[column] += 1

        def copy(ids: torch.Tensor) -> None:
            assert buffer is not None
            buffer[: ids.shape[0], column] = ids
            calls[column] += 1

        return keep if buffer is None else copy

    def take(self, tokens: int) -> NDArray[Any] | str:
        """The ids ``[tokens, layers, top_k]`` of the step, whose device is waited for; or why there are none.

        The hooks are ready for the next step.
        """
        kept, calls = list(self._kept), list(self._calls)
        self._kept[:] = [None] * len(kept)
        self._calls[:] = [0] * len(calls)
        if max(calls) > 1:
            return "a router was called twice in a step"
        if self._buffer is not None:
            if tokens > len(self._buffer):
                return "the step has more tokens than the engine said"
            ids: NDArray[Any] = self._buffer[:tokens].to("cpu", copy=True).numpy()
            self._buffer[:tokens] = NOTHING
            return ids
        found = [each for each in kept if each is not None]
        if len(found) != len(kept):
            return "a router's hook was not called: the model was compiled before it was bound"
        if any(each.shape != (tokens, self._top_k) for each in found):
            return "a router had other tokens than the step"
        if len({each.data_ptr() for each in found}) != len(found):
            return "a router uses the memory of another's ids"
        return np.stack([each.numpy() for each in found], axis=1)


__all__ = ["NOTHING", "StepIds"]

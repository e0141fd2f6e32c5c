"""The ids of one step of an engine whose routers call back with them, checked for what was not recorded.

For engines that give every router one hook (vLLM's ``set_capture_fn``), on any device and without Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from cache_manager.spec import AuxBlockDataSpec

NOTHING = -1  # no expert has this id
OTHERS = "a router had other tokens than the step"


class StepIds:
    """What the routers of ``spec``'s layers chose in the step at hand.

    On a CPU the hooks keep references. Elsewhere they copy into a buffer of their own on the device, which a CUDA graph
    replays without Python; it is emptied after each step, so that a layer that nobody recorded is seen as such: its ids
    are :data:`NOTHING`.
    """

    def __init__(self, spec: AuxBlockDataSpec, max_tokens: int, device: torch.device) -> None:
        self._layers: tuple[int, ...] = spec.attrs["layer_ids"]
        self._row_shape = spec.row_shape
        self._nothing: list[Any] = [None] * len(self._layers)
        self._kept = self._nothing.copy()  # of each layer that was called: its tensor, or that it was copied
        self._twice: list[int] = []  # layers that were called once too often
        self._buffer: torch.Tensor | None = None
        if device.type != "cpu":
            self._buffer = torch.full((max_tokens, *spec.row_shape), NOTHING, dtype=torch.int32, device=device)

    def hook(self, layer_id: int) -> Callable[[torch.Tensor], None]:
        """The callback for the router of a layer, which hands it ``[tokens, top_k]``."""
        column, kept, twice, buffer = self._layers.index(layer_id), self._kept, self._twice, self._buffer

        def keep(ids: Any) -> None:
            if kept[column] is not None:
                twice.append(layer_id)
            kept[column] = ids

        def copy(ids: torch.Tensor) -> None:
            assert buffer is not None
            buffer[: ids.shape[0], column] = ids
            keep(True)

        return keep if buffer is None else copy

    def take(self, tokens: int) -> NDArray[Any] | str:
        """The ids ``[tokens, layers, top_k]`` of the step, whose device is waited for; or why there are none.

        The hooks are ready for the next step.
        """
        kept, again = self._kept.copy(), bool(self._twice)
        self._kept[:] = self._nothing
        self._twice.clear()
        if again:
            return "a router was called twice in a step"
        if self._buffer is not None:
            return self._copied(self._buffer, tokens)
        try:
            ids: NDArray[Any] = torch.stack(kept, 1).numpy()
        except (TypeError, RuntimeError):  # not only tensors, not of one shape
            absent = any(each is None for each in kept)
            return "a router's hook was not called: the model was compiled before it was bound" if absent else OTHERS
        if ids.shape != (tokens, *self._row_shape):
            return OTHERS
        if len(set(map(torch.Tensor.data_ptr, kept))) != len(kept):
            return "a router uses the memory of another's ids"
        return ids

    def _copied(self, buffer: torch.Tensor, tokens: int) -> NDArray[Any] | str:
        if tokens > len(buffer):
            return "the step has more tokens than the engine said"
        ids: NDArray[Any] = buffer[:tokens].to("cpu", copy=True).numpy()
        buffer[:tokens] = NOTHING
        return ids


__all__ = ["NOTHING", "StepIds"]

"""The ids of one step of an engine whose routers call back with them, checked for what was not recorded.

For engines that give every router one hook (vLLM's ``set_capture_fn``), on any device and without Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cache_manager.spec import AuxBlockDataSpec

NOTHING = -1  # no expert has this id
TWICE = "a router was called twice in a step"
OTHERS = "a router had other tokens than the step"


class StepIds:
    """What the routers of ``spec``'s layers chose in the step at hand.

    The hooks keep references. Beside a device, the last one of a pass brings them together in a buffer on that device:
    one launch, which a CUDA graph replays without Python. The buffer is emptied when a step begins, so that a pass that
    nobody recorded is seen as such: its ids are :data:`NOTHING`.
    """

    def __init__(self, spec: AuxBlockDataSpec, max_tokens: int, device: torch.device) -> None:
        self._layers: tuple[int, ...] = spec.attrs["layer_ids"]
        self._row_shape = spec.row_shape
        self._kept: dict[int, Any] = {}  # by layer, in the order of the calls
        self._twice = False
        self._passes = 0  # that a hook of this step has brought together in the buffer
        self._buffer: torch.Tensor | None = None
        if device.type != "cpu":
            self._buffer = torch.full((max_tokens, *spec.row_shape), NOTHING, dtype=torch.int32, device=device)

    def begin(self) -> None:
        """A step begins: what was recorded before, to warm an engine up say, is nobody's."""
        self._forget()
        self._passes = 0
        if self._buffer is not None:
            self._buffer.fill_(NOTHING)

    def hook(self, layer_id: int) -> Callable[[torch.Tensor], None]:
        """The callback for the router of a layer, which hands it ``[tokens, top_k]``."""
        assert layer_id in self._layers
        kept, last, buffer = self._kept, len(self._layers), self._buffer

        def keep(ids: torch.Tensor) -> None:
            self._twice |= layer_id in kept
            kept[layer_id] = ids
            if buffer is not None and len(kept) == last:
                if isinstance(found := self._joined(None), list):
                    torch.stack(found, 1, out=buffer[: len(found[0])])
                self._forget()
                self._passes += 1

        return keep

    def take(self, tokens: int) -> torch.Tensor | str:
        """The ids ``[tokens, layers, top_k]`` of the step, or why there are none.

        Beside a device they are the buffer's, there once that is done with what was launched, until the next step
        begins. Otherwise the hooks are ready for the next step.
        """
        if self._buffer is not None:
            if self._passes > 1 or (self._passes and self._kept):
                return TWICE  # the buffer has some of one pass and some of another
            return self._buffer[:tokens] if tokens <= len(self._buffer) else "the step has more tokens than were said"
        found = self._joined(tokens)
        self._forget()
        return found if isinstance(found, str) else torch.stack(found, 1)

    def _joined(self, tokens: int | None) -> list[torch.Tensor] | str:
        """Each layer's ids of a pass, of ``tokens`` tokens where that is known, or why there are none."""
        if self._twice:
            return TWICE
        if len(self._kept) < len(self._layers):
            return "a router's hook was not called: the model was compiled before it was bound"
        found = [self._kept[layer] for layer in self._layers]
        wanted = (len(found[0]) if tokens is None else tokens, self._row_shape[1])
        if any(ids.shape != wanted for ids in found) or (self._buffer is not None and wanted[0] > len(self._buffer)):
            return OTHERS
        if len(set(map(torch.Tensor.data_ptr, found))) != len(found):
            return "a router uses the memory of another's ids"
        return found if self._buffer is None else [_narrow(ids) for ids in found]

    def _forget(self) -> None:
        self._kept.clear()
        self._twice = False


def _narrow(ids: torch.Tensor) -> torch.Tensor:
    """Ids as int32; those that are none stay such."""
    return (ids.clamp(NOTHING, torch.iinfo(torch.int32).max) if ids.dtype == torch.int64 else ids).to(torch.int32)


__all__ = ["NOTHING", "StepIds"]

"""The ids of one step of an engine whose routers call back with them, checked for what was not recorded.

For engines that give every router one hook (vLLM's ``set_capture_fn``), on any device and without Triton.
"""

from __future__ import annotations

from typing import Final

import torch

from cache_manager.spec import AuxBlockDataSpec
from kvroute.capture.errors import CaptureError
from kvroute.capture.hooks import MISSED, ONCE, OWN, Hooks, Values

NOTHING = -1  # no expert has this id
OTHERS = "a router had other tokens than the step"
NONE = "a router's ids are no integers"
INTEGERS: Final = (torch.int32, torch.int64, torch.int16, torch.uint16, torch.uint8, torch.int8, torch.uint32)
REASONS: Final = {
    MISSED: "a router's hook was not called: the model was compiled before it was bound",
    ONCE: "a router was called twice in a step",
    OWN: "a router uses the memory of another's ids",
}


class StepIds:
    """What the routers of ``spec``'s layers chose in the step at hand; ``hook(layer_id)`` is a router's callback.

    The hooks keep references. Beside a device, the last one of a pass brings them together in a buffer on that device:
    one launch, which a CUDA graph replays without Python. The buffer is emptied when a step begins, so that a pass that
    nobody recorded is seen as such: its ids are :data:`NOTHING`.
    """

    def __init__(self, spec: AuxBlockDataSpec, max_tokens: int, device: torch.device) -> None:
        values = Values(spec.name, spec.attrs["layer_ids"], spec.row_shape[1], INTEGERS)
        self._passes = 0  # that a hook of this step has brought together in the buffer
        self._buffer: torch.Tensor | None = None
        if device.type != "cpu":
            self._buffer = torch.full((max_tokens, *spec.row_shape), NOTHING, dtype=torch.int32, device=device)
        self._hooks = Hooks([values], self._bring_together)
        self.hook = self._hooks.hook

    def begin(self) -> None:
        """A step begins: what was recorded before, by a warm-up say, is discarded."""
        self._hooks.clear()
        self._passes = 0
        if self._buffer is not None:
            self._buffer.fill_(NOTHING)

    def take(self, tokens: int) -> torch.Tensor | str:
        """The ids ``[tokens, layers, top_k]`` of the step, or why there are none.

        Beside a device they are the buffer's, there once that is done with what was launched, until the next step
        begins. Otherwise the hooks are ready for the next step.
        """
        if self._buffer is not None:
            if self._passes > 1 or (self._passes and any(self._hooks.calls)):
                return REASONS[ONCE]  # the buffer has some of one pass and some of another
            return self._buffer[:tokens] if tokens <= len(self._buffer) else "the step has more tokens than were said"
        try:
            found, *_ = self._hooks.taken()
        except CaptureError as error:
            wanted = str(error.wanted)
            return REASONS.get(wanted, NONE if wanted.startswith("a dtype") else OTHERS)
        finally:
            self._hooks.clear()
        return torch.stack(found, 1) if len(found[0]) == tokens else OTHERS

    def _bring_together(self) -> None:
        if self._buffer is None:
            return
        self._passes += 1
        try:
            found, *_ = self._hooks.taken()
        except CaptureError:
            return  # the buffer says so
        finally:
            self._hooks.clear()
        if len(found[0]) <= len(self._buffer):
            torch.stack([_narrow(ids) for ids in found], 1, out=self._buffer[: len(found[0])])


def _narrow(ids: torch.Tensor) -> torch.Tensor:
    """Ids as int32; those that are none stay such."""
    return (ids.clamp(NOTHING, torch.iinfo(torch.int32).max) if ids.dtype == torch.int64 else ids).to(torch.int32)


__all__ = ["NOTHING", "StepIds"]

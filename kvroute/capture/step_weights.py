"""The weights of one step of an engine whose routers tell them beside their ids.

For engines on a CPU: the weights are taken from where the router left them, once the step is over.
"""

from __future__ import annotations

from typing import Final

import torch

from cache_manager.spec import AuxBlockDataSpec
from kvroute.capture.errors import CaptureError
from kvroute.capture.hooks import MISSED, ONCE, OWN, Hooks, Values
from kvroute.routing import routing_weights_spec

NO_WEIGHTS: Final = {
    MISSED: "a router told no weights: the model was compiled before it was bound",
    ONCE: "a router told weights twice in a step",
    OWN: "a router uses the memory of another's weights",
}
FORM: Final = "a router's weights are not float32, or not one for each of its ids"
OTHER_TOKENS: Final = "a router had weights of other tokens than the step"


class StepWeights:
    """The weights by which the routers of ``routing``'s layers count their experts in the current step.

    ``hook(layer_id)`` is called with a router's weights, float32 ``[tokens, top_k]``, in the order of its ids, and
    keeps a reference.
    """

    def __init__(self, routing: AuxBlockDataSpec) -> None:
        self.spec = routing_weights_spec(routing)
        values = Values(self.spec.name, self.spec.attrs["layer_ids"], self.spec.row_shape[1], (torch.float32,))
        self._hooks = Hooks([values])
        self.hook = self._hooks.hook

    def begin(self) -> None:
        """A step begins: what a router told before, for example in a warm-up, is discarded."""
        self._hooks.clear()

    def take(self, tokens: int) -> torch.Tensor | str:
        """The weights ``[tokens, layers, top_k]`` of the step, copied, or why there are none. The hooks are then ready
        for the next step."""
        try:
            sources, *_ = self._hooks.taken()
        except CaptureError as error:
            return NO_WEIGHTS.get(str(error.wanted), FORM)
        finally:
            self._hooks.clear()
        return torch.stack(sources, 1) if len(sources[0]) == tokens else OTHER_TOKENS


class NoStepWeights:
    """The weights of an engine that keeps none."""

    def begin(self) -> None:
        """A step begins."""

    def take(self, tokens: int) -> None:
        """No weights."""


__all__ = ["NoStepWeights", "StepWeights"]

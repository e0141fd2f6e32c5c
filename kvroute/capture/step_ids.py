"""The ids of one step of an engine whose routers call back with them, and their weights; gaps are recognised.

For engines that give every router one hook (vLLM's ``set_capture_fn``), on any device and without Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from cache_manager.spec import AuxBlockDataSpec
from kvroute.capture.errors import CaptureError
from kvroute.capture.hooks import MISSED, ONCE, OWN, Hooks, Values
from kvroute.routing import ROUTING_WEIGHTS

NO_ID = -1  # no expert has this id
OTHERS = "a router had other tokens than the step"
WIDTH = "a router chose another number of experts than the model's configuration says"
TYPE = "a router's ids are not integers, or not of the type of the other routers'"
INTEGERS: Final = (torch.int32, torch.int64, torch.int16, torch.uint16, torch.uint8, torch.int8, torch.uint32)
REASONS: Final = {
    MISSED: "a router's hook was not called: the model was compiled before it was bound",
    ONCE: "a router was called twice in a step",
    OWN: "a router uses the memory of another's ids",
}


class StepIds:
    """The choices of the routers of ``spec``'s layers in the current step; ``hook(layer_id)`` is a router's callback.

    The hooks keep references. Beside a device, the last one of a pass stacks them into a buffer on that device: one
    launch, which a CUDA graph replays without Python. The buffer is emptied when a step begins, so that a pass without
    a recording is recognised: its ids are :data:`NO_ID`.

    ``join``: the routers of this rank choose for a shard of the step's tokens. It is called once in each pass, in all
    ranks, with the shard's ids ``[tokens, layers, top_k]``, and returns those of all shards in order.

    ``weights``: beside a device, :meth:`hook_weights` is called with a layer's weights, float32 ``[tokens, top_k]``, in
    the order of its ids. The same launch stacks their bits behind the ids of all layers, in the same rows of the buffer
    ``[max_tokens, 2 * layers, top_k]``: a pass has both, or the buffer stays as it was emptied. See :meth:`split`. On a
    CPU weights are in a buffer, too.
    """

    def __init__(
        self,
        spec: AuxBlockDataSpec,
        max_tokens: int,
        device: torch.device,
        join: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        weights: bool = False,
    ) -> None:
        assert join is None or not weights, "shards of ids have no weights"
        layers, top_k = spec.row_shape
        values = [Values(spec.name, spec.attrs["layer_ids"], top_k, INTEGERS)]
        if weights:
            values.append(Values(ROUTING_WEIGHTS, spec.attrs["layer_ids"], top_k, (torch.float32,)))
        self._row_shape = layers * len(values), top_k
        self._layers = layers
        self._passes = 0  # of this step, stacked into the buffer
        self.buffer: torch.Tensor | None = None
        """Where the passes of a step come together beside a device, int32 ``[max_tokens, layers, top_k]``."""
        self._join = join
        if join is not None or weights or device.type != "cpu":
            self.buffer = torch.full((max_tokens, *self._row_shape), NO_ID, dtype=torch.int32, device=device)
        self._hooks = Hooks(values, self._bring_together)
        self.hook = self._hooks.hook

    def hook_weights(self, layer_id: int) -> Callable[..., None]:
        """The callback for a layer's weights; :class:`CaptureError` without ``weights``."""
        return self._hooks.hook(layer_id, ROUTING_WEIGHTS)

    def split(self, rows: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The ids and the weights ``[tokens, layers, top_k]`` of ``rows``, which :meth:`take` has given: views, both on
        the host."""
        return rows[:, : self._layers], rows[:, self._layers :].view(np.float32)

    def begin(self) -> None:
        """A step begins: earlier recordings, for example of a warm-up, are discarded."""
        self._hooks.clear()
        self._passes = 0
        if self.buffer is not None:
            self.buffer.fill_(NO_ID)

    def take(self, tokens: int) -> torch.Tensor | str:
        """The ids ``[tokens, layers, top_k]`` of the step, with ``weights`` also their bits, or why there are none.

        Beside a device they are in the buffer, complete when the device has done the launched work, until the next step
        begins. On a CPU the hooks are then ready for the next step.
        """
        if self.buffer is not None:
            if self._passes > 1 or (self._passes and any(self._hooks.calls)):
                return REASONS[ONCE]  # the buffer mixes two passes
            if tokens > len(self.buffer):
                return "the step has more tokens than were said"
            stacked = self.buffer[:tokens]
            return stacked.clone() if stacked.device.type == "cpu" else stacked  # a device's are copied in time
        try:
            ids = self._plain(tokens)
            if ids is not None:
                return ids
            sources, *_ = self._hooks.taken()
        except CaptureError as error:
            return self._reason(str(error.wanted))
        finally:
            self._hooks.clear()
        return torch.stack(sources, 1) if len(sources[0]) == tokens else OTHERS

    def _reason(self, wanted: str) -> str:
        """Why a pass has no ids whose hooks wanted this and got something else. The hooks still keep what they got."""
        if wanted in REASONS:
            return REASONS[wanted]
        kept = self._hooks.once()
        assert kept is not None, "each router was called once"
        dtypes = {ids.dtype for ids in kept}
        if len(dtypes) > 1 or not dtypes.issubset(INTEGERS):
            return TYPE
        if any(ids.shape[1:] != self._row_shape[1:] for ids in kept):
            return WIDTH
        return OTHERS

    def _plain(self, tokens: int) -> torch.Tensor | None:
        """The ids of a pass in which all is as usual: one call of each router, with integers ``[tokens, top_k]`` that
        lie apart, each in one piece. ``None``: look closer."""
        kept = self._hooks.once()
        if kept is None:
            return None
        try:
            ids = torch.stack(kept, 1)
        except (RuntimeError, TypeError):
            return None
        nbytes = tokens * self._row_shape[1] * ids.element_size()
        places = sorted([source.data_ptr() for source in kept if source.is_contiguous() and source.dtype is ids.dtype])
        apart = len(places) == len(kept) and all(after - place >= nbytes for place, after in pairwise(places))
        return ids if apart and ids.shape == (tokens, *self._row_shape) and ids.dtype in INTEGERS else None

    def _bring_together(self) -> None:
        if self.buffer is None:
            return
        self._passes += 1
        tokens = self._hooks.most_tokens()
        try:
            sources, *_ = self._hooks.taken()
        except CaptureError:
            sources = []  # then the buffer stays NO_ID
        finally:
            self._hooks.clear()
        if self._join is not None:
            self._join_shards(sources, tokens)
        elif sources and len(sources[0]) <= len(self.buffer):
            torch.stack([_words(values) for values in sources], 1, out=self.buffer[: len(sources[0])])

    def _join_shards(self, sources: list[torch.Tensor], tokens: int) -> None:
        """Join this rank's shard, of so many ``tokens``, with those of the others, which wait for it even if it has no
        ``sources``. The last shard may end with padding."""
        assert self.buffer is not None
        assert self._join is not None
        if not tokens:  # in all ranks: shards are of one size
            return
        if sources:
            shard = torch.stack([_words(ids) for ids in sources], 1)
        else:
            shard = torch.full((tokens, *self._row_shape), NO_ID, dtype=torch.int32, device=self.buffer.device)
        joined = self._join(shard)[: len(self.buffer)]
        self.buffer[: len(joined)] = joined


def _words(values: torch.Tensor) -> torch.Tensor:
    """Ids as int32, invalid ones stay invalid; of weights, which are float32, the bits."""
    if values.dtype == torch.float32:
        return values.view(torch.int32)
    ids = values
    return (ids.clamp(NO_ID, torch.iinfo(torch.int32).max) if ids.dtype == torch.int64 else ids).to(torch.int32)


__all__ = ["NO_ID", "StepIds"]

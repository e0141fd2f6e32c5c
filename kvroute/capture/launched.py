"""Captures each pass of a transformers model by one launch at its end, in CUDA graphs too. Needs Triton."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cache_manager.ports import Region
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.step import Step
from kvroute.capture.capture import check_weights, find_routers, hook_routers
from kvroute.capture.errors import CaptureError
from kvroute.capture.layers import LayerCapture

logger = logging.getLogger(__name__)


class LaunchedCapture:
    """Stores the rows of each forward pass of ``model`` in ``region``, of at most ``max_tokens`` tokens.

    Hooks on the routers keep references; a hook on the model launches when the forward is over, at slots that the
    device reads in the host's memory. A CUDA graph of the forward holds that launch, so each replay stores rows, at the
    slots of its own :meth:`step`. A bad row is missing and counted in ``bad_rows``; the first of a pass is logged by
    name. Close it before the region. ``stream`` is the one that passes run on; without it each step waits for the whole
    device. With ``weights``, a spec of ``region``, too, the same launch stores the routers' weights beside their ids; a
    model whose weights are not float32 has passes without rows. Raises what :class:`LayerCapture` raises.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: AuxBlockDataSpec,
        region: Region,
        max_tokens: int,
        *,
        stream: torch.cuda.Stream | None = None,
        weights: AuxBlockDataSpec | None = None,
    ) -> None:
        self.bad_rows = 0
        if weights is not None:
            check_weights(spec, weights)
        self._names = [spec.name] if weights is None else [spec.name, weights.name]
        self._device = next(model.parameters()).device
        self._layers = LayerCapture(region, max_tokens, self._device, names=self._names)
        self._stream = stream
        self._slots = torch.full((max_tokens,), -1, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._slots_words = self._slots.numpy()
        self._used = 0
        self._failed: Exception | None = None
        self.handles = hook_routers(find_routers(model), self._layers.hook, weights)
        self.handles.append(model.register_forward_hook(self._launch, with_kwargs=True))
        """Torch's handles of the hooks, the routers' and then the model's: one that is removed calls back no more."""

    @contextmanager
    def step(
        self,
        begin: Callable[..., Step],
        slots: NDArray[np.int64],
    ) -> Iterator[Step]:
        """A step of ``begin``, a ``begin_step``, at ``slots [tokens]`` (negative: padding), around one forward pass.

        Tokens of the pass beyond ``slots`` are padding. Leaving waits for the device and commits; an exception commits
        nothing. Raises :class:`CaptureError`, and commits nothing, for a pass that was not captured.
        """
        step = begin(slots, in_place=True)
        try:
            self._begin(slots)
            yield step
            self._wait()
            if self._failed is not None:
                raise self._failed
            if self._layers.launched < len(slots):  # for example a graph captured before the hooks
                wanted = f"a launch of {len(slots)} tokens or more at the end of the pass"
                raise CaptureError("pass", wanted, self._layers.launched or "none")
            verdict = self._layers.verdict(len(slots))
        except BaseException:
            self._wait()  # the device must not write into the blocks' next life
            step.abort()
            raise
        if verdict.keep is not None:
            self.bad_rows += int(np.count_nonzero(~verdict.keep))
            logger.warning("rows are missing: %s", verdict.first)
        for name in self._names:
            step.wrote(name)
        step.commit(None if verdict.keep is None else dict.fromkeys(self._names, verdict.keep))

    def close(self) -> None:
        """Take the hooks off the model and release the region; a second call is harmless."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._layers.close()

    def _begin(self, slots: NDArray[np.int64]) -> None:
        if len(slots) > len(self._slots):
            wanted = f"at most {len(self._slots)} tokens"
            raise CaptureError("slots", wanted, len(slots))
        self._failed = None
        self._layers.clear()
        self._layers.ready()
        self._layers.expect()
        self._slots_words[len(slots) : self._used] = -1
        self._slots_words[: len(slots)] = slots
        self._used = len(slots)

    def _launch(
        self,
        _model: nn.Module,
        given: tuple[Any, ...],
        named: dict[str, Any],
        _output: Any,
    ) -> None:
        """The forward is over. An error here must not fail the pass: its rows are then missing."""
        tokens = named["input_ids"] if "input_ids" in named else given[0]
        try:
            self._layers.commit(self._slots[: tokens.numel()])
        except CaptureError as error:
            self._failed = error

    def _wait(self) -> None:
        if self._device.type != "cuda":
            return
        if self._stream is None:
            torch.cuda.synchronize(self._device)
        elif not self._stream.query():  # mostly engines wait for logits or tokens themselves
            self._stream.synchronize()


__all__ = ["LaunchedCapture"]

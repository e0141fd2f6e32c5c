"""How the engine captures the rows of a pass: by hooks that bring them to the host, or by one launch on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.step import Step
from kvroute.capture.canary import CANARY_OF
from kvroute.capture.capture import RoutingCapture, find_routers

logger = logging.getLogger(__name__)


class PassCapture(Protocol):
    """Captures the rows of one pass at a time.

    ``step`` begins a step at ``slots [tokens]``; the pass runs inside it. ``write`` takes the pass's rows, of tokens at
    ``positions [1, tokens]``; leaving ``step`` commits them, an exception leaves none. ``clear`` forgets the last pass.
    """

    def step(self, aux: AuxBlocks, slots: torch.Tensor, /) -> AbstractContextManager[Step]: ...

    def write(self, step: Step, slots: torch.Tensor, positions: torch.Tensor, /) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class HookedCapture:
    """Rows are checked and copied on the host: on a CPU, and for canaries."""

    def __init__(self, model: nn.Module, spec: AuxBlockDataSpec) -> None:
        self._capture = RoutingCapture(model, spec)
        self._name = spec.name
        self._canaries = CANARY_OF in spec.attrs

    @contextmanager
    def step(self, aux: AuxBlocks, slots: torch.Tensor) -> Iterator[Step]:
        with aux.step(slots.numpy()) as step:
            yield step

    def write(self, step: Step, _slots: torch.Tensor, positions: torch.Tensor) -> None:
        at: NDArray[np.int64] | None = positions.reshape(-1).cpu().numpy() if self._canaries else None
        step.write(self._name, self._capture.rows(at))
        self._capture.clear()

    def clear(self) -> None:
        self._capture.clear()

    def close(self) -> None:
        self._capture.close()


class LaunchedCapture:
    """One launch a pass stores rows where they belong, and checks them. Needs Triton.

    A bad row is missing and counted in ``bad_rows``; the first of a pass is logged by name.
    """

    def __init__(self, model: nn.Module, spec: AuxBlockDataSpec, aux: AuxBlocks, tokens_max: int) -> None:
        from kvroute.capture.layers import LayerCapture

        self._device = next(model.parameters()).device
        self._name = spec.name
        self._layers = LayerCapture(aux.region("device"), tokens_max, self._device, names=[spec.name])
        self._hooks = [
            router.register_forward_hook(self._layers.hook(layer)) for layer, router in find_routers(model).items()
        ]
        self.bad_rows = 0

    @contextmanager
    def step(self, aux: AuxBlocks, slots: torch.Tensor) -> Iterator[Step]:
        step = aux.begin_step(slots.numpy(), in_place=True)
        try:
            yield step
            self._wait()
            verdict = self._layers.verdict(len(slots))
        except BaseException:
            self._wait()  # a device that still writes must not meet the blocks' next life
            step.abort()
            raise
        if verdict.keep is not None:
            self.bad_rows += int(np.count_nonzero(~verdict.keep))
            logger.warning("rows are missing: %s", verdict.first)
        step.commit(None if verdict.keep is None else {self._name: verdict.keep})

    def write(self, step: Step, slots: torch.Tensor, _positions: torch.Tensor) -> None:
        self._layers.commit(slots.to(self._device))
        step.wrote(self._name)

    def clear(self) -> None:
        self._layers.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._layers.close()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class NoCapture:
    """Rows are not wanted."""

    @contextmanager
    def step(self, aux: AuxBlocks, slots: torch.Tensor) -> Iterator[Step]:
        with aux.step(slots.numpy()) as step:
            yield step

    def write(self, _step: Step, _slots: torch.Tensor, _positions: torch.Tensor) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


def launches(model: nn.Module, spec: AuxBlockDataSpec) -> bool:
    """Whether the rows of ``model`` are captured by a launch."""
    return next(model.parameters()).device.type == "cuda" and CANARY_OF not in spec.attrs


__all__ = ["HookedCapture", "LaunchedCapture", "NoCapture", "PassCapture", "launches"]

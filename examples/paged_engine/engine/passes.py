"""How the engine captures the rows of a pass: by hooks that bring them to the host, or by one launch on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cache_manager.blocks import AuxBlocks
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.step import Step
from kvroute.capture.canary import CANARY_OF
from kvroute.capture.capture import RoutingCapture


class PassCapture(Protocol):
    """Captures the rows of one pass at a time.

    ``step`` begins a step at ``slots [tokens]``, of tokens at ``positions [tokens]``; the pass runs inside it. Leaving
    it commits the pass's rows, an exception leaves none.
    """

    def step(
        self, begin: Callable[..., Step], slots: NDArray[np.int64], positions: NDArray[np.int64], /
    ) -> AbstractContextManager[Step]: ...

    def close(self) -> None: ...


class NoCapture:
    """Rows are not wanted."""

    @contextmanager
    def step(
        self, begin: Callable[..., Step], slots: NDArray[np.int64], _positions: NDArray[np.int64]
    ) -> Iterator[Step]:
        with begin(slots) as step:
            yield step

    def close(self) -> None: ...


def launches(model: nn.Module, spec: AuxBlockDataSpec) -> bool:
    """Whether the rows of ``model`` are captured by a launch: on a GPU, but for canaries."""
    return next(model.parameters()).device.type == "cuda" and CANARY_OF not in spec.attrs


def capture_of(model: nn.Module, spec: AuxBlockDataSpec, aux: AuxBlocks, max_tokens: int) -> PassCapture:
    """How the rows of ``model`` are captured, in passes of at most ``max_tokens`` tokens."""
    if not launches(model, spec):
        return RoutingCapture(model, spec)
    from kvroute.capture.launched import LaunchedCapture  # needs Triton

    device = next(model.parameters()).device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return LaunchedCapture(model, spec, aux.region("device"), max_tokens, stream=stream)


__all__ = ["NoCapture", "PassCapture", "capture_of", "launches"]

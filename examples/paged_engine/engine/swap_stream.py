"""Copies of KV blocks between a GPU and pinned host memory, beside the passes that follow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

STAGED_NBYTES: Final = 128 << 20
"""Device memory of each of the two buffers through which blocks leave, at most; one block at least.

So much is out of the passes' way; of a larger swap the rest is waited for, on the device.
"""


class SwapStream:
    """Copies whole blocks in the order of the stream at hand; the host waits for none.

    What goes to the host is copied on the device first and leaves from there by a stream of its own: the block may be
    written again at once, and passes go on meanwhile. What comes back waits, on the device, for what has left. Errors
    of a copy are the stream's: torch raises them at the next wait.
    """

    def __init__(self, device_blocks: torch.Tensor, host_blocks: torch.Tensor) -> None:
        self._device, self._host = device_blocks, host_blocks
        self._staged = max(1, min(len(host_blocks), STAGED_NBYTES // device_blocks[0].nbytes))  # blocks of a buffer
        self._buffers = device_blocks.new_empty((2, self._staged, *device_blocks.shape[1:]))
        streams: Any = torch.cuda  # its Stream is untyped
        self._leaving: torch.cuda.Stream = streams.Stream(device_blocks.device)
        self._left: list[torch.cuda.Event | None] = [None, None]  # of each buffer: when it can be filled again
        self._turn = 0

    def leave(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Device blocks to host blocks."""
        waiting = list(pairs)
        here = torch.cuda.current_stream(self._device.device)
        for start in range(0, len(waiting), self._staged):
            some, buffer = waiting[start : start + self._staged], self._buffers[self._turn]
            if (left := self._left[self._turn]) is not None:
                here.wait_event(left)
            for at, (source, _) in enumerate(some):
                buffer[at].copy_(self._device[source], non_blocking=True)
            self._leaving.wait_stream(here)
            with torch.cuda.stream(self._leaving):
                for at, (_, target) in enumerate(some):
                    self._host[target].copy_(buffer[at], non_blocking=True)
            self._left[self._turn] = self._leaving.record_event()
            self._turn ^= 1

    def come(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Host blocks to device blocks."""
        torch.cuda.current_stream(self._device.device).wait_stream(self._leaving)
        for source, target in pairs:
            self._device[target].copy_(self._host[source], non_blocking=True)


__all__ = ["SwapStream"]

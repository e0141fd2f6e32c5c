"""Where the capture launch stores rows: in the region itself, registered with the driver, or staged on the device.

Registration needs a CUDA torch to do anything; on a CPU the rows are there already.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

import numpy as np
import torch

from cache_manager.errors import KVRouteError
from cache_manager.ports import Region
from cache_manager.publish import places
from kvroute.capture.plan import Plan

logger = logging.getLogger(__name__)
PAGE_NBYTES: Final = 4096
PORTABLE_AND_MAPPED: Final = 3


def _cudart() -> Any:
    untyped: Any = torch.cuda
    return untyped.cudart()


class RegistrationError(KVRouteError):
    """The driver refused to register host memory: a small memlock limit, or a container that forbids it."""


_users: dict[tuple[int, int], int] = {}
"""Captures that use a registered range, by its start and end: the last one gives it back."""
_using: Final = threading.Lock()


def _register(start: int, end: int) -> None:
    with _using:
        users = _users.get((start, end), 0)
        if not users and (code := int(_cudart().cudaHostRegister(start, end - start, PORTABLE_AND_MAPPED))):
            raise RegistrationError(f"cudaHostRegister of {end - start} bytes: error {code}; see ulimit -l")
        _users[start, end] = users + 1


def _unregister(start: int, end: int) -> None:
    with _using:
        if users := _users.pop((start, end)) - 1:
            _users[start, end] = users
        elif code := int(_cudart().cudaHostUnregister(start)):
            raise RegistrationError(f"cudaHostUnregister: error {code}")


class HostRows:
    """The rows ``[blocks, record_nbytes]`` uint8 of ``region`` as a tensor that ``device`` reaches.

    Close it before the region. Raises :class:`RegistrationError` where the driver refuses.
    """

    def __init__(self, region: Region, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self._registered: tuple[int, int] | None = None
        if device.type == "cuda":
            address, nbytes = region.rows.ctypes.data, region.rows.nbytes
            start = address - address % PAGE_NBYTES
            end = address + nbytes + (-(address + nbytes)) % PAGE_NBYTES
            with torch.cuda.device(device):
                _register(start, end)
            self._registered = start, end
            logger.info("registered %d bytes of host rows with %s", end - start, device)
        self.tensor: torch.Tensor | None = torch.from_numpy(region.rows)

    def send(self, tokens: int) -> None:
        """Nothing: the launch stored the rows where they belong."""

    def land(self, tokens: int) -> None:
        """Nothing, as above."""

    def close(self) -> None:
        """Take the registration back, once the device is done; again is harmless."""
        self.tensor = None
        if self._registered:
            torch.cuda.synchronize()
            given, self._registered = self._registered, None
            _unregister(*given)


class StagedRows:
    """Rows that the launch stores in device memory, one behind the other; one copy brings them, the host scatters them.

    For launches of at most ``max_tokens`` tokens, one at a time.
    """

    def __init__(self, region: Region, plan: Plan, max_tokens: int, device: torch.device) -> None:
        self.plan = plan.packed()
        self.tensor: torch.Tensor | None = torch.zeros(
            max_tokens, self.plan.record_nbytes, dtype=torch.uint8, device=device
        )
        self._sent = self.tensor if device.type == "cpu" else torch.zeros_like(self.tensor, device="cpu").pin_memory()
        self._sent.numpy()[:, :8] = 0xFF  # no slot
        of_specs = places(region)
        self._places = [of_specs[region.layout.index(spec.name)] for spec in plan.specs]

    def send(self, tokens: int) -> None:
        """Copy the launch's records to the host, behind it on the stream at hand."""
        if self.tensor is not None and self._sent is not self.tensor:
            self._sent[:tokens].copy_(self.tensor[:tokens], non_blocking=True)

    def land(self, tokens: int) -> None:
        """Store the first ``tokens`` rows of the completed launch at their slots; none of them a second time."""
        records = self._sent.numpy()[:tokens]
        heads = records[:, :8].view("<i8")[:, 0]
        at = heads >= 0
        blocks, offsets = np.divmod(heads[at], self.plan.block_tokens)
        for spec, place in zip(self.plan.specs, self._places, strict=True):
            place[blocks, offsets] = records[at, spec.offset : spec.offset + spec.row_nbytes]
        heads[:] = -1

    def close(self) -> None:
        """Let go of the region and the device's memory; again is harmless."""
        self.tensor = None
        self._places = []


def rows_of(
    region: Region, plan: Plan, max_tokens: int, device: torch.device, staged: bool | None
) -> HostRows | StagedRows:
    """The way of ``staged``; ``None``: registered, or staged where the driver refuses, which the log says."""
    if not staged:
        try:
            return HostRows(region, plan, device)
        except RegistrationError as error:
            if staged is not None:
                raise
            logger.warning("rows are staged on %s and scattered by the host: %s", device, error)
    return StagedRows(region, plan, max_tokens, device)


__all__ = ["HostRows", "RegistrationError", "StagedRows", "rows_of"]

"""The region's rows as memory that a device stores into, registered with the driver; a CPU has them already."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

from cache_manager.errors import KVRouteError
from cache_manager.ports import Region

PAGE_NBYTES: Final = 4096
PORTABLE_AND_MAPPED: Final = 3


class RegistrationError(KVRouteError):
    """The driver refused to register host memory: a small memlock limit, or a container that forbids it.

    ``RoutingCapture`` needs no registration: it copies the same rows.
    """


_users: dict[tuple[int, int], int] = {}
"""Numbers of captures that use a registered range, by its start and end: the last one ends the registration."""
_using: Final = threading.Lock()


class HostRows:
    """The rows ``[blocks, record_nbytes]`` uint8 of ``region`` as a ``tensor`` that ``device`` can write.

    Close it before the region. Raises :class:`RegistrationError` if the driver refuses.
    """

    def __init__(self, region: Region, device: torch.device) -> None:
        untyped: Any = torch.cuda
        self._cudart = untyped.cudart
        self._registered = (0, 0)
        if device.type == "cuda":
            address = region.rows.ctypes.data
            nbytes = region.rows.nbytes
            start = address - address % PAGE_NBYTES
            end = address + nbytes + (-(address + nbytes)) % PAGE_NBYTES
            with torch.cuda.device(device), _using:
                users = _users.get((start, end), 0)
                if not users:
                    code = int(self._cudart().cudaHostRegister(start, end - start, PORTABLE_AND_MAPPED))
                    if code:
                        raise RegistrationError(f"cudaHostRegister of {end - start} bytes: error {code}; see ulimit -l")
                _users[start, end] = users + 1
            self._registered = start, end
        self.tensor: torch.Tensor | None = torch.from_numpy(region.rows)

    def close(self) -> None:
        """Wait for the device and end the registration; a second call is harmless."""
        self.tensor = None
        memory = self._registered
        self._registered = (0, 0)
        if memory == (0, 0):
            return
        torch.cuda.synchronize()
        with _using:
            users = _users.pop(memory) - 1
            if users:
                _users[memory] = users
            elif code := int(self._cudart().cudaHostUnregister(memory[0])):
                raise RegistrationError(f"cudaHostUnregister: error {code}")


__all__ = ["HostRows", "RegistrationError"]

"""Host memory that a GPU writes by itself: the rows of a region, registered with the driver.

Needs a CUDA torch to do anything; on a CPU the rows are there already.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any, Final, Self

import torch

from cache_manager.errors import KVRouteError
from cache_manager.ports import Region

logger = logging.getLogger(__name__)
PAGE_NBYTES: Final = 4096
PORTABLE_AND_MAPPED: Final = 3


def _cudart() -> Any:
    untyped: Any = torch.cuda
    return untyped.cudart()


class RegistrationError(KVRouteError):
    """The driver refused to register host memory: a small memlock limit, or a container that forbids it."""


class HostRows:
    """The rows ``[blocks, record_nbytes]`` uint8 of ``region`` as a tensor that ``device`` reaches.

    Close it before the region. Raises :class:`RegistrationError` where the driver refuses.
    """

    def __init__(self, region: Region, device: torch.device) -> None:
        self.tensor: torch.Tensor | None = torch.from_numpy(region.rows)
        self._registered = 0
        if device.type != "cuda":
            return
        address, nbytes = self.tensor.data_ptr(), self.tensor.numel()
        start = address - address % PAGE_NBYTES
        end = address + nbytes + (-(address + nbytes)) % PAGE_NBYTES
        with torch.cuda.device(device):
            if code := int(_cudart().cudaHostRegister(start, end - start, PORTABLE_AND_MAPPED)):
                self.tensor = None
                raise RegistrationError(f"cudaHostRegister of {end - start} bytes: error {code}; see ulimit -l")
        self._registered = start
        logger.info("registered %d bytes of host rows with %s", end - start, device)

    def close(self) -> None:
        """Take the registration back, once the device is done; again is harmless."""
        self.tensor = None
        if self._registered:
            torch.cuda.synchronize()
            start, self._registered = self._registered, 0
            if code := int(_cudart().cudaHostUnregister(start)):
                raise RegistrationError(f"cudaHostUnregister: error {code}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


__all__ = ["HostRows", "RegistrationError"]

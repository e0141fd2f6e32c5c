"""The engine's end of the cache-transfer process."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final, Self

from cache_manager.errors import KVRouteError, StoreClosedError, TransferProcessError
from cache_manager.numbers import Ints
from cache_manager.regions import SharedRegion
from cache_manager.storage.apart import Apart, ApartSettings, ApartStore
from cache_manager.storage.apart_process import Move

MODULE: Final = "cache_manager.transfer_manager.process"
LOOK_S: Final = 0.05


class CacheTransferManager:
    """A process beside the engine that copies blocks between shared regions, and has the engine's store.

    It is started here, with the store at ``url`` ("" for none): raises what opening the store raises, and
    :class:`StorageError` where no process can be. One that is lost is killed and reaped; the next call after a pause
    starts another. The regions are the engine's and stay. Safe from several threads; :meth:`close` it last.
    """

    def __init__(self, url: str = "", settings: ApartSettings | None = None) -> None:
        self._apart = Apart(url, settings, MODULE)
        self.store = ApartStore(self._apart) if url else None
        """The store; a process that is lost is a :class:`StoreUnavailableError`."""

    @property
    def pid(self) -> int | None:
        """The process of the moment; ``None`` while there is none."""
        return self._apart.pid

    def copy(self, source: SharedRegion, target: SharedRegion, sources: Ints, targets: Ints) -> None:
        """Copy whole records, pairwise; a source may serve several targets. Every byte is in place on return.

        Raises :class:`TransferProcessError` when the process failed it, is lost or is not there. The targets' bytes
        mean nothing then, and nobody touches either region for it any more.
        """
        move = Move(source.name, target.name, sources.tolist(), targets.tolist())
        try:
            self._apart.call(move, reaped=True)
        except KVRouteError as error:
            raise TransferProcessError(f"the cache-transfer process: {error}") from error

    def wait(self, timeout_s: float) -> bool:
        """Wait until calls are taken, starting a process when it is time for one; ``False`` after ``timeout_s``."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            with suppress(StoreClosedError):
                if self._apart.ready():
                    return True
            if time.monotonic() >= give_up_s:
                return False
            time.sleep(LOOK_S)

    def close(self) -> None:
        """End the process: properly within ``close_s``, by force after. Calls in flight end first. Idempotent."""
        self._apart.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

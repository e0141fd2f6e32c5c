"""The cache-transfer process: copies of blocks between shared regions, beside the engine."""

from __future__ import annotations

from typing import Final

from cache_manager.errors import KVRouteError, TransferProcessError
from cache_manager.regions import SharedRegion
from cache_manager.slots import Ints
from cache_manager.storage.apart import ApartSettings, ApartStore
from cache_manager.storage.guard import ClosingStore

MODULE: Final = "cache_manager.transfer_manager.process"


class CacheTransferManager(ClosingStore):
    """A process beside the engine that copies blocks between shared regions.

    The constructor starts it; :class:`StorageError` if no process can be started. A lost process is killed and reaped,
    and another is started after a pause. The regions belong to the engine and stay. Safe from several threads.
    """

    def __init__(self, settings: ApartSettings | None = None) -> None:
        self._apart = ApartStore("", settings, MODULE)

    @property
    def pid(self) -> int | None:
        """The current process's id; ``None`` while there is none."""
        return self._apart.pid

    def copy(self, source: SharedRegion, target: SharedRegion, sources: Ints, targets: Ints) -> None:
        """Copy whole records, pairwise; a source may serve several targets. Every byte is in place on return.

        Raises :class:`TransferProcessError` if the process failed, is lost or is not there. The targets' bytes then
        mean nothing, and the process touches neither region for this call any more.
        """
        try:
            self._apart.ask("copy", source.name, target.name, sources.tolist(), targets.tolist(), until_reaped=True)
        except KVRouteError as error:
            raise TransferProcessError(f"the cache-transfer process: {error}") from error

    def close(self) -> None:
        """End the process. Idempotent."""
        self._apart.close()


__all__ = ["ApartSettings", "CacheTransferManager"]

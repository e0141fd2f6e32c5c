"""A cache-transfer process as the :class:`Mover` of an :class:`AuxBlocks`: rows and KV of a block by one command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import ConfigError, StoreUnavailableError, TransferProcessError
from cache_manager.keys import BlockKey
from cache_manager.memory import GENERATION_SHIFT
from cache_manager.mover import one_each
from cache_manager.ports import Absence, BlockRecords, Found, HitPolicy, RecordCounters, Region, TierName
from cache_manager.regions import SharedRegion
from cache_manager.transfer_manager.commands import Answer, Command, Contains, Flush, Move, Persist, Restore
from cache_manager.transfer_manager.manager import CacheTransferManager, SharedPart, TransferSettings


class ProcessMover:
    """A cache-transfer process that moves and stores the rows of one :class:`AuxBlocks` and, with ``kv``, its KV.

    ``AuxBlocks(..., memory="shared", mover=mover.start)`` starts the process, with ``store`` as the URL of the rows'
    store, if there is one; :meth:`close` ends it, after the ``AuxBlocks``. ``policy`` and ``required`` (indices of the
    rows' specs) are the law of pairs, which the process keeps. A process that is lost fails moves with
    :class:`TransferProcessError`, and persists and restores with :class:`StoreUnavailableError`. Safe from several
    threads.
    """

    def __init__(
        self,
        kv: SharedPart | None = None,
        *,
        store: str = "",
        policy: HitPolicy = "gate",
        required: Sequence[int] = (),
        settings: TransferSettings | None = None,
    ) -> None:
        self._kv = kv
        self._store = store
        self._policy: HitPolicy = policy
        self._required = required
        self._settings = settings
        self._counters = RecordCounters()
        self._process: CacheTransferManager | None = None

    def start(self, device: Region, host: Region | None) -> ProcessMover:
        """Start the process for these regions of the rows; they have to be shared ones."""
        if not isinstance(device, SharedRegion) or not isinstance(host, SharedRegion | None):
            raise ConfigError("memory", "'shared', to be seen by the cache-transfer process", "'heap'")
        self._regions: dict[TierName, SharedRegion | None] = {"device": device, "host": host}
        rows = SharedPart("rows", device, host, self._store)
        parts = [rows] if self._kv is None else [rows, self._kv]
        required = list(self._required) or list(range(len(device.layout.specs)))
        self._process = CacheTransferManager(parts, self._settings, policy=self._policy, required=required)
        return self

    @property
    def process(self) -> CacheTransferManager:
        assert self._process is not None, "it was not started"
        return self._process

    def close(self) -> None:
        """End the process; harmless when it was not started, and the second time."""
        if self._process is not None:
            self._process.close()

    @property
    def stores(self) -> bool:
        return bool(self._store)

    @property
    def counters(self) -> RecordCounters:
        """Of the rows' store, as the process told last."""
        return self._counters

    def copy(self, source: TierName, target: TierName, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copy every part of blocks, in the generations that the targets are in now."""
        wanted = self._generations(target, targets.tolist())
        self.process.call(Move(source, target, sources.tolist(), targets.tolist(), wanted))

    def put(self, records: BlockRecords, *, replace: bool = False) -> list[Found | None]:
        assert not replace, "the process itself knows when a pair is to be replaced"
        return one_each(self._ask(Persist(records)).stored, records.keys)

    def get_into(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> list[Found | Absence]:
        asked = Restore(list(keys), list(blocks), self._generations("device", blocks))
        restored = one_each(self._ask(asked).restored, keys)
        return [_ABSENCES[each] if isinstance(each, str) else each for each in restored]

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return one_each(self._ask(Contains(list(keys))).there, keys)

    def flush(self) -> None:
        self._ask(Flush())

    def _ask(self, command: Command) -> Answer:
        try:
            answer = self.process.call(command)
        except TransferProcessError as error:
            raise StoreUnavailableError(str(error)) from error
        self._counters = RecordCounters(*answer.counters)
        return answer

    def _generations(self, tier: TierName, blocks: Sequence[int]) -> list[int]:
        region = self._regions[tier]
        assert region is not None, f"{tier}: a tier that there is"
        found: list[int] = (region.words[list(blocks)] >> np.uint64(GENERATION_SHIFT)).tolist()
        return found


_ABSENCES: Final = {absence.value: absence for absence in Absence}

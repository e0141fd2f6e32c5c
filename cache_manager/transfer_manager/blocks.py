"""A cache-transfer process behind the ports of :class:`AuxBlocks`: rows and KV of a block by one command.

``AuxBlocks`` asks its copier and its carrier to move rows; these send a command that moves *every* part of the blocks.
What is left for the engine's own :class:`BlockMover` to move is nothing: :class:`FollowingMover` says whether the KV of
what it is given came along.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np

from cache_manager.carrier import Transport
from cache_manager.errors import ConfigError, StoreUnavailableError, TransferProcessError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, Region
from cache_manager.record import RecordHeader, unpack_header
from cache_manager.regions import SharedRegion
from cache_manager.regions.reader import SEQUENCE_BITS
from cache_manager.spec import RecordLayout
from cache_manager.storage.records import RecordCounters
from cache_manager.transfer_manager.commands import (
    Answer,
    Command,
    Contains,
    Flush,
    Move,
    Persist,
    Restore,
    TierName,
)
from cache_manager.transfer_manager.manager import CacheTransferManager, SharedPart, TransferSettings


class ProcessBlocks:
    """The transport of one :class:`AuxBlocks`: a cache-transfer process that moves ``further`` parts along.

    ``AuxBlocks(..., memory="shared", transport=blocks.start)`` starts the process, with the rows as the first part and
    ``store`` as their store's URL, if there is one; :meth:`close` ends it, after the ``AuxBlocks``. A process that is
    lost fails moves with :class:`TransferProcessError`, and persists and restores with :class:`StoreUnavailableError`.
    Safe from several threads.
    """

    def __init__(
        self, further: Sequence[SharedPart], *, store: str = "", settings: TransferSettings | None = None
    ) -> None:
        self._further = list(further)
        self._store = store
        self._settings = settings
        self._lock = threading.Lock()  # guards what follows
        self._counters = RecordCounters()
        self._stored: dict[int, BlockKey] = {}  # device block -> the key under which all of it was stored last
        self._restored: dict[int, BlockKey] = {}  # device block -> the key with whose records all of it was filled last
        self._process: CacheTransferManager | None = None

    def start(self, device: Region, host: Region | None) -> Transport:
        """Start the process for these regions of the rows; they have to be shared ones."""
        for region in (device, host):
            if region is not None and not isinstance(region, SharedRegion):
                raise ConfigError("memory", "'shared', to be seen by the cache-transfer process", "'heap'")
        assert isinstance(device, SharedRegion)
        assert host is None or isinstance(host, SharedRegion)
        rows = SharedPart("rows", device, host, self._store)
        self._tiers: dict[int, TierName] = {id(device): "device", id(host): "host"}
        self._device = device
        self._full_valid = [_whole(part.device.layout) for part in self._further]
        self._process = CacheTransferManager([rows, *self._further], self._settings)
        return Transport(self, self if self._store else None)

    @property
    def process(self) -> CacheTransferManager:
        assert self._process is not None, "it was not started"
        return self._process

    def close(self) -> None:
        """End the process; harmless when it was not started, and the second time."""
        if self._process is not None:
            self._process.close()

    def copy(self, source: Region, target: Region, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy every part of blocks, in the generations that the targets are in now."""
        if not targets:
            return
        wanted = _generations(target, targets)
        tiers = self._tiers[id(source)], self._tiers[id(target)]
        answer = self.process.call(Move(*tiers, list(sources), list(targets), wanted))
        assert answer.generations == wanted

    @property
    def counters(self) -> RecordCounters:
        """Of the rows' store, as the process told last."""
        with self._lock:
            return self._counters

    def put(
        self, keys: Sequence[BlockKey], blocks: Sequence[int], valid: Sequence[bytes], generations: Sequence[int]
    ) -> list[bool]:
        further = [[bits] * len(keys) for bits in self._full_valid]
        stored = self._ask(Persist(list(keys), list(blocks), list(generations), [list(valid), *further])).stored
        assert len(stored) == len(keys)
        self._remember(self._stored, keys, blocks, stored)
        return stored

    def get_into(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> list[RecordHeader | Absence]:
        answer = self._ask(Restore(list(keys), list(blocks), _generations(self._device, blocks)))
        assert len(answer.restored) == len(keys)
        found = [_ABSENCES.get(head) or unpack_header(head) for head in answer.restored]
        for key, header in zip(keys, found, strict=True):
            assert isinstance(header, Absence) or header.key == key
        self._remember(self._restored, keys, blocks, [isinstance(header, RecordHeader) for header in found])
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._ask(Contains(list(keys))).stored

    def flush(self) -> None:
        self._ask(Flush())

    def came_along(self, what: Literal["stored", "restored"], key: BlockKey, block: int) -> bool:
        """Whether the last command of that kind for ``block`` was for ``key`` and did all of its parts; asked once."""
        with self._lock:
            table = self._stored if what == "stored" else self._restored
            return table.pop(block, None) == key

    def _remember(
        self, table: dict[int, BlockKey], keys: Sequence[BlockKey], blocks: Sequence[int], done: Sequence[bool]
    ) -> None:
        with self._lock:
            for key, block, good in zip(keys, blocks, done, strict=True):
                if good:
                    table[block] = key
                else:
                    table.pop(block, None)

    def _ask(self, command: Command) -> Answer:
        try:
            answer = self.process.call(command)
        except TransferProcessError as error:
            raise StoreUnavailableError(str(error)) from error
        with self._lock:
            self._counters = RecordCounters(*answer.counters)
        return answer


class FollowingMover:
    """The engine's ``BlockMover`` where KV is a part of ``blocks``: what the rows' command moved, it need not move.

    For the policy ``gate``: it asks for rows first. With ``mask``, where KV comes first, nothing would come back.
    """

    def __init__(self, blocks: ProcessBlocks) -> None:
        self._blocks = blocks

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The copier has moved every part of these pairs, or it has raised."""

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As :meth:`swap_out`."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As :meth:`swap_out`."""

    def persist(self, blocks: Mapping[BlockKey, int]) -> dict[BlockKey, bool]:
        return {key: self._blocks.came_along("stored", key, block) for key, block in blocks.items()}

    def restore(self, blocks: Mapping[BlockKey, int]) -> dict[BlockKey, bool]:
        return {key: self._blocks.came_along("restored", key, block) for key, block in blocks.items()}


_ABSENCES: Final = {absence.value.encode(): absence for absence in Absence}


def _whole(layout: RecordLayout) -> bytes:
    """The validity bitmap of a block that has every row."""
    bits = (1 << layout.block_tokens) - 1
    return bits.to_bytes(8 * layout.valid_words, "little") * len(layout.specs)


def _generations(region: Region, blocks: Sequence[int]) -> list[int]:
    found: list[int] = (region.words[list(blocks)] >> np.uint64(SEQUENCE_BITS)).tolist()
    return found


__all__ = ["FollowingMover", "ProcessBlocks"]

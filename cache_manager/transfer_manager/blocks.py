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

from cache_manager.errors import StoreUnavailableError, TransferProcessError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, Region
from cache_manager.record import RecordHeader, unpack_header
from cache_manager.regions.reader import SEQUENCE_BITS
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
from cache_manager.transfer_manager.manager import CacheTransferManager


class ProcessBlocks:
    """The ``Copier`` and the ``RecordCarrier`` of one :class:`AuxBlocks`, over a cache-transfer ``process``.

    ``device`` and ``host`` are the regions of the first part, the rows; ``full_valid`` has, for each further part, the
    validity bitmap of a whole block. A process that is lost fails moves with :class:`TransferProcessError`, and
    persists and restores with :class:`StorageError`, as any store that fails. Safe from several threads.
    """

    def __init__(
        self, process: CacheTransferManager, device: Region, host: Region | None, full_valid: Sequence[bytes]
    ) -> None:
        self._process = process
        self._tiers: dict[int, TierName] = {id(device): "device"}
        if host is not None:
            self._tiers[id(host)] = "host"
        self._device = device
        self._full_valid = list(full_valid)
        self._counters = RecordCounters()
        self._lock = threading.Lock()  # guards what follows
        self._stored: dict[int, BlockKey] = {}  # device block -> the key under which all of it was stored last
        self._restored: dict[int, BlockKey] = {}  # device block -> the key with whose records all of it was filled last

    def copy(self, source: Region, target: Region, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy every part of blocks, in the generations that the targets are in now."""
        if not targets:
            return
        wanted = _generations(target, targets)
        tiers = self._tiers[id(source)], self._tiers[id(target)]
        answer = self._process.call(Move(*tiers, list(sources), list(targets), wanted))
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
            answer = self._process.call(command)
        except TransferProcessError as error:
            raise StoreUnavailableError(str(error)) from error
        with self._lock:
            self._counters = RecordCounters(*answer.counters)
        return answer


class FollowingMover:
    """The engine's ``BlockMover`` where KV is a part of ``blocks``: what the rows' command moved, it need not move."""

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


def _generations(region: Region, blocks: Sequence[int]) -> list[int]:
    found: list[int] = (region.words[list(blocks)] >> np.uint64(SEQUENCE_BITS)).tolist()
    return found


__all__ = ["FollowingMover", "ProcessBlocks"]

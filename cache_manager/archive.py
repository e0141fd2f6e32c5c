"""Blocks to the store and back, with the lock let go while the store is at work."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cache_manager.keys import BlockKey
from cache_manager.ledger import Ledger
from cache_manager.lifecycle import Event
from cache_manager.ports import Absence, RecordCarrier
from cache_manager.record import RecordHeader
from cache_manager.tier import Tier


class Archive:
    """Persists and restores the device blocks of one :class:`AuxBlocks`; ``required`` are spec indices."""

    __slots__ = ("_device", "_ledger", "_required", "carrier")

    def __init__(self, carrier: RecordCarrier, device: Tier, ledger: Ledger, required: tuple[int, ...]) -> None:
        self.carrier = carrier
        self._device = device
        self._ledger = ledger
        self._required = required

    def persist(self, blocks: Mapping[BlockKey, int]) -> dict[BlockKey, bool]:
        """See :meth:`AuxBlocks.persist`."""
        device, ledger, done = self._device, self._ledger, dict.fromkeys(blocks, False)
        with ledger.lock:
            keys, ids = self._own(blocks)
            complete = device.complete(ids, self._required)
            ledger.count("incomplete_blocks_not_persisted", int(np.count_nonzero(~complete)))
            keys, ids = [k for k, c in zip(keys, complete.tolist(), strict=True) if c], ids[complete]
            if not keys:
                return done
            device.check_no_step(ids, "store it")
            valid = [v.astype("<u8").tobytes() for v in device.region.valid[ids]]
            generations = device.life.generations[ids].tolist()
            device.life.begin_departure(ids)
            ledger.moves += 1
        try:
            done.update(zip(keys, self.carrier.put(keys, ids.tolist(), valid, generations), strict=True))
        finally:
            with ledger.lock:
                ledger.moves -= 1
                device.life.end_departure(ids)
                ledger.count("persisted_blocks", sum(done.values()))
        return done

    def restore(self, blocks: Mapping[BlockKey, int]) -> dict[BlockKey, bool]:
        """See :meth:`AuxBlocks.restore`."""
        device, ledger, done = self._device, self._ledger, dict.fromkeys(blocks, False)
        with ledger.lock:
            keys, ids = self._own(blocks)
            if not keys:
                return done
            device.check_no_step(ids, "restore it")
            device.life.check(Event.BEGIN_ARRIVAL, ids)
            device.check_empty(ids)
            device.begin_life(device.life.begin_arrival(ids))
            generations = device.life.generations[ids]
            ledger.moves += 1
        found: list[RecordHeader | Absence] = [Absence.MISS] * len(keys)
        try:
            found = self.carrier.get_into(keys, ids.tolist())
        finally:
            arrived = np.zeros(len(keys), dtype=np.bool_)
            with ledger.lock:
                ledger.moves -= 1
                try:
                    arrived = self._land(ids, generations, found)
                finally:
                    device.life.end_arrival(ids[arrived], arrived=True)
                    device.life.end_arrival(ids[~arrived], arrived=False)
            done.update(zip(keys, arrived.tolist(), strict=True))
        return done

    def _land(
        self, ids: NDArray[np.int64], generations: NDArray[np.int64], found: list[RecordHeader | Absence]
    ) -> NDArray[np.bool_]:
        """Make readable what was read for blocks still in the life it was read for; which blocks. The lock is held."""
        region = self._device.region
        headers = [h if isinstance(h, RecordHeader) else None for h in found]
        read = np.array([h is not None for h in headers], dtype=np.bool_)
        live = self._device.life.generations[ids] == generations
        bits = np.zeros((len(ids), *region.valid.shape[1:]), dtype=np.uint64)
        for i, header in enumerate(headers):
            if header is not None:
                bits[i] = np.frombuffer(header.valid, "<u8").reshape(bits.shape[1:])
        whole = (bits[:, self._required, :] == self._device.full).all(axis=(1, 2))
        arrived: NDArray[np.bool_] = read & live & whole
        region.valid[ids[arrived]] = bits[arrived]
        self._ledger.count("restored_blocks", int(np.count_nonzero(arrived)))
        self._ledger.count("late_restores_dropped", int(np.count_nonzero(read & ~live)))
        self._ledger.count("incomplete_blocks_not_restored", int(np.count_nonzero(read & live & ~whole)))
        return arrived

    def _own(self, blocks: Mapping[BlockKey, int]) -> tuple[list[BlockKey], NDArray[np.int64]]:
        """The keys of the current namespace and their blocks; the others are counted. The lock is held."""
        ids = self._device.life.ids(list(blocks.values()))
        own = [self._ledger.keys.owns(key) for key in blocks]
        self._ledger.count("stale_keys", own.count(False))
        return [key for key, ours in zip(blocks, own, strict=True) if ours], ids[own]

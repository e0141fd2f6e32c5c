"""Blocks to the store and back, with the lock let go while the store is at work."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cache_manager.keys import BlockKey
from cache_manager.ledger import Ledger
from cache_manager.lifecycle import Event
from cache_manager.record import RecordHeader
from cache_manager.storage.records import RecordStore
from cache_manager.tier import Tier


class Archive:
    """Persists and restores the device blocks of one :class:`AuxBlocks`; ``required`` are spec indices."""

    __slots__ = ("_device", "_ledger", "_required", "store")

    def __init__(self, store: RecordStore, device: Tier, ledger: Ledger, required: tuple[int, ...]) -> None:
        self.store = store
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
            device.life.begin_departure(ids)
            ledger.moves += 1
            valid = [v.astype("<u8").tobytes() for v in device.region.valid[ids]]
            generations = device.life.generations[ids].tolist()
        try:
            payloads = [device.region.rows[b].data for b in ids.tolist()]
            done.update(zip(keys, self.store.put(keys, payloads, valid, generations), strict=True))
        finally:
            with ledger.lock:
                ledger.moves -= 1
                ledger.count("persisted_blocks", sum(done.values()))
                device.life.end_departure(ids)
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
        found: list[RecordHeader | None] = [None] * len(keys)
        try:
            buffers = [device.region.rows[b].data for b in ids.tolist()]
            found = [h if isinstance(h, RecordHeader) else None for h in self.store.get_into(keys, buffers)]
        finally:
            with ledger.lock:
                ledger.moves -= 1
                read = np.array([h is not None for h in found], dtype=np.bool_)
                arrived = read & (device.life.generations[ids] == generations)
                for key, block, header, there in zip(keys, ids.tolist(), found, arrived.tolist(), strict=True):
                    if header is not None and there:
                        device.region.valid[block] = np.frombuffer(header.valid, "<u8").reshape(
                            device.region.valid.shape[1:]
                        )
                        done[key] = True
                ledger.count("restored_blocks", int(np.count_nonzero(arrived)))
                ledger.count("late_restores_dropped", int(np.count_nonzero(read & ~arrived)))
                device.life.end_arrival(ids[arrived], arrived=True)
                device.life.end_arrival(ids[~arrived], arrived=False)
        return done

    def _own(self, blocks: Mapping[BlockKey, int]) -> tuple[list[BlockKey], NDArray[np.int64]]:
        """The keys of the current namespace and their blocks; the others are counted. The lock is held."""
        ids = self._device.life.ids(list(blocks.values()))
        own = [self._ledger.keys.owns(key) for key in blocks]
        self._ledger.count("stale_keys", own.count(False))
        return [key for key, ours in zip(blocks, own, strict=True) if ours], ids[own]

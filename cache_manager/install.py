"""Rows that come from or go to another process: records of blocks that somebody holds.

A block's rows may come in while steps write its later rows: a record's row lands only where no row is readable and no
step in flight will put one. So the rows of the KV that is really used win, and a row lands at most once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cache_manager.checks import integers
from cache_manager.errors import BlockBusyError, InvalidInputError, RecordError
from cache_manager.keys import BlockKey
from cache_manager.ledger import Ledger
from cache_manager.lifecycle import IN_MOTION, State
from cache_manager.record import Buffer, OfferedRecord, RecordHeader
from cache_manager.tier import Tier, prefix_bits, unpack_bits


def export_records(
    device: Tier, ledger: Ledger, blocks: Mapping[BlockKey, int], rows: Sequence[int] | None
) -> list[OfferedRecord | None]:
    """See :meth:`AuxBlocks.export`."""
    layout, found = device.layout, list[OfferedRecord | None]()
    with ledger.lock:
        ids = device.life.ids(list(blocks.values()))
        limit = None if rows is None else prefix_bits(integers(rows, "rows", "a row count for each block"), device)
        if limit is not None and len(limit) != len(ids):
            raise InvalidInputError("rows", f"{len(ids)} row counts, one for each block", len(limit))
        valid = device.region.valid[ids] if limit is None else device.region.valid[ids] & limit
        whole = (valid == device.full).all(axis=(1, 2)).tolist()
        for i, (key, block) in enumerate(blocks.items()):
            if not ledger.keys.owns(key) or not valid[i].any():
                found.append(None)
                continue
            payload: Buffer = device.region.rows[block].data
            if not whole[i]:  # its other rows may be written, and are nobody's business
                payload = _only(device, block, valid[i])
            generation = int(device.life.generations[block])
            bits = valid[i].astype("<u8").tobytes()
            found.append(OfferedRecord(key, layout.fingerprint, generation, bits, payload))
            ledger.count("rows_exported", int(np.bitwise_count(np.bitwise_or.reduce(valid[i], axis=0)).sum()))
        ledger.count("stale_keys", sum(not ledger.keys.owns(key) for key in blocks))
    return found


def _only(device: Tier, block: int, valid: NDArray[np.uint64]) -> bytes:
    """A copy of the block's record with nothing in it but the ``valid`` rows."""
    layout = device.layout
    record = np.zeros(layout.nbytes, dtype=np.uint8)
    keep = unpack_bits(valid, layout.block_tokens)
    for i, (spec, offset) in enumerate(zip(layout.specs, layout.offsets, strict=True)):
        copy = record[offset : offset + spec.block_nbytes].reshape(spec.block_tokens, spec.row_nbytes)
        copy[keep[i]] = device.rows_of(i, block)[keep[i]]
    return record.tobytes()


def install_record(
    device: Tier, ledger: Ledger, block: int, generation: int, header: RecordHeader, payload: Buffer
) -> bool:
    """See :meth:`AuxBlocks.install`."""
    bits = _bits(device, header, payload)
    life, region = device.life, device.region
    with ledger.lock:
        (index,) = life.ids([block]).tolist()
        if life.generations[index] != generation or not ledger.keys.owns(header.key):
            ledger.count("late_installs_dropped")
            return False
        state = State(int(life.states[index]))
        if state in IN_MOTION:
            raise BlockBusyError(f"device block {index}", "HELD to install into it", state.name)
        if state is not State.HELD:
            ledger.count("late_installs_dropped")
            return False
        source = np.frombuffer(payload, dtype=np.uint8)
        taken = region.valid[index]  # a view
        if not device.pending[index] and not taken.any():
            region.rows[index] = source
            region.valid[index] = bits
            landed = bits
        else:
            landed = bits & ~taken & ~_pending_bits(device, ledger, index)
            keep = unpack_bits(landed, device.layout.block_tokens)
            for i, (spec, offset) in enumerate(zip(device.layout.specs, device.layout.offsets, strict=True)):
                rows = source[offset : offset + spec.block_nbytes].reshape(spec.block_tokens, spec.row_nbytes)
                device.rows_of(i, index)[keep[i]] = rows[keep[i]]
            region.valid[index] = taken | landed
        ledger.count("rows_installed", int(np.bitwise_count(np.bitwise_or.reduce(landed, axis=0)).sum()))
        return True


def _bits(device: Tier, header: RecordHeader, payload: Buffer) -> NDArray[np.uint64]:
    """The record's validity words ``[specs, words]``; :class:`RecordError` unless it is one of this layout."""
    layout = device.layout
    if header.fingerprint != layout.fingerprint:
        raise RecordError("fingerprint", layout.fingerprint.hex(), header.fingerprint.hex())
    nbytes = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    if nbytes != layout.nbytes:
        raise RecordError("payload size", layout.nbytes, nbytes)
    if len(header.valid) != 8 * layout.valid_words * len(layout.specs):
        raise RecordError("bitmap size", 8 * layout.valid_words * len(layout.specs), len(header.valid))
    bits = np.frombuffer(header.valid, "<u8").astype(np.uint64).reshape(len(layout.specs), layout.valid_words)
    if (bits & ~device.full).any():
        raise RecordError("bitmap", f"bits for {layout.block_tokens} rows of each spec", "others")
    return bits


def _pending_bits(device: Tier, ledger: Ledger, block: int) -> NDArray[np.uint64]:
    """Rows ``[words]`` of the block that steps in flight will write; the lock is held."""
    bits = np.zeros(device.layout.valid_words, dtype=np.uint64)
    if device.pending[block]:
        for step in ledger.steps:
            step.add_pending(block, bits)
    return bits

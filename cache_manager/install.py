"""Records for other processes, and where rows and KV from other processes land in device blocks.

A record's row lands only where no row is readable, in a block in which nothing has been computed here, and only beside
KV of its own origin. So a row computed here always wins over a record's, and a row lands at most once. The functions
take their table's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import BlockBusyError, InvalidInputError, RecordError
from cache_manager.own_keys import Keyed, OwnKeys
from cache_manager.ports import KVBlocks
from cache_manager.publish import Copies, bits_of, copies_of
from cache_manager.record import Buffer, OfferedRecord, RecordHeader
from cache_manager.slots import Bits, Blocks, integers, prefix_bits, rows_in
from cache_manager.table import BlockTable


def export(
    table: BlockTable, keys: OwnKeys, blocks: Keyed, generations: Blocks, rows: Sequence[int] | None
) -> list[OfferedRecord | None]:
    """Records of blocks in these generations, in their order, with their readable rows among the first ``rows``.

    ``None`` where no row is readable, the block is in another life or the key is of another namespace; the latter two
    are counted.
    """
    limits = table.full
    if rows is not None:
        counts = integers(rows, "rows", "one count for each block", n=len(blocks))
        limits = prefix_bits(counts, table.tokens)
    with table.lock:
        ids, lives, current, others = keys.resolve(table, blocks, generations)
        keys.count(others)
        valid = bits_of(table.region, ids) & limits
        current &= (valid != 0).any(axis=(1, 2))
        ids = ids[current]
        valid = valid[current]
        table.fix_origins(ids)
        table.lock.count("rows_exported", rows_in(valid))
        origins = table.origin.take(ids)
        copies = copies_of(table.region, ids, valid)
    table.lock.log()
    fingerprint = table.layout.fingerprint
    bitmaps = valid.astype("<u8")
    records: list[OfferedRecord | None] = [None] * len(blocks)
    keys_of_blocks = list(blocks)
    for i, at in enumerate(np.flatnonzero(current).tolist()):
        key = keys_of_blocks[at]
        bitmap = bitmaps[i].tobytes()
        payload = copies[i].tobytes()
        records[at] = OfferedRecord(key, fingerprint, int(lives[at]), int(origins[i]), bitmap, payload)
    return records


def bind_origin(table: BlockTable, block: int, generation: int, origin: int) -> bool:
    """The block's KV has come from another place, where it had this ``origin``: rows of another are dropped.

    ``False``: the block is in another life than ``generation``. Raises ``BlockBusyError`` while bytes are copied into
    it.
    """
    _check_origin(origin)
    (index,) = table.slots.ids([block]).tolist()
    with table.lock:
        if not _in_life(table, index, generation):
            return False
        _check_not_copied_into(table, index)
        table.bind(index, origin)
        return True


def take_kv(
    table: BlockTable, kv: KVBlocks, blocks: Blocks, generations: Blocks
) -> tuple[NDArray[np.uint8], list[int]]:
    """The KV ``[n, kv.spec.block_nbytes]`` of blocks, and the origins under which it leaves; 0 for a block that is in
    another life, or into which bytes are copied, whose KV counts for nothing."""
    ids = table.slots.ids(blocks)
    lives = integers(generations, "generations", "one integer for each block", n=ids.size)
    taken = np.zeros((ids.size, kv.spec.block_nbytes), np.uint8)
    with table.lock:
        kv.take(ids, taken)
        current = (table.generations.take(ids) == lives) & table.writable(ids)
        origins = np.zeros(ids.size, np.uint64)
        origins[current] = table.hand_out(ids[current])
    return taken, origins.tolist()


def fill_kv(table: BlockTable, kv: KVBlocks, block: int, generation: int, origin: int, content: Buffer) -> bool:
    """:func:`bind_origin`, and the KV of that origin comes into the block with it: ``kv.spec.block_nbytes`` bytes.

    Raises ``BlockBusyError``, too, while a step writes the block, and what ``kv.fill`` raises: then its rows are
    missing and none of another origin land, because KV that is half written is of no origin that others know.
    """
    _check_origin(origin)
    ids = table.slots.ids([block])
    given = np.frombuffer(content, np.uint8, kv.spec.block_nbytes)[None]
    with table.lock:
        (index,) = ids.tolist()
        if not _in_life(table, index, generation):
            return False
        _check_not_copied_into(table, index)
        _check_not_written(table, index)
        table.bind(index, origin)
        try:
            kv.fill(ids, given)
        except BaseException:
            table.lose(ids)
            raise
        return True


def install(
    table: BlockTable, keys: OwnKeys, block: int, generation: int, header: RecordHeader, payload: Buffer
) -> int:
    """Put the rows of a record into a block where no row is readable; how many landed.

    No row lands where the block takes none of the record's origin, or is in another life, or where the record is of
    another namespace; each case is counted. Raises ``BlockBusyError`` while a step writes the block, and
    :class:`RecordError`, before anything has changed.
    """
    bits = _bits_in(table, header, payload)
    record = Copies(table.layout, np.frombuffer(payload, np.uint8)[None])
    (index,) = table.slots.ids([block]).tolist()
    with table.lock:
        if not _in_life(table, index, generation, ours=keys.owns(header.key)):
            return 0
        _check_not_copied_into(table, index)
        if not table.takes(index, header.origin):
            table.lock.count("installs_of_another_origin_dropped")
            return 0
        _check_not_written(table, index)
        landed = rows_in(table.install(index, header.origin, bits, record))
        table.lock.count("rows_installed", landed)
        return landed


def _in_life(table: BlockTable, block: int, generation: int, *, ours: bool = True) -> bool:
    """Whether the block is in that life, and the record ``ours``; what is not is counted."""
    if not ours or not generation or int(table.generations[block]) != generation:
        table.lock.count("late_installs_dropped")
        return False
    return True


def _check_not_copied_into(table: BlockTable, block: int) -> None:
    if table.fenced(np.array([block]))[0]:
        raise BlockBusyError(f"{table.tier} block {block}", "one that nothing else fills", "one being copied into")


def _check_not_written(table: BlockTable, block: int) -> None:
    if table.writing(np.array([block]))[0]:
        raise BlockBusyError(f"{table.tier} block {block}", "one that no device writes", "a step of before")


def _check_origin(origin: int) -> None:
    if not isinstance(origin, int) or isinstance(origin, bool) or not 0 < origin < 1 << 64:
        raise InvalidInputError("origin", "an integer in [1, 2**64)", repr(origin))


def _bits_in(table: BlockTable, header: RecordHeader, payload: Buffer) -> Bits:
    """The record's validity words ``[specs, W]``; :class:`RecordError` unless it is one of the table's layout."""
    layout = table.layout
    if header.fingerprint != layout.fingerprint:
        raise RecordError("fingerprint", layout.fingerprint.hex(), header.fingerprint.hex())
    nbytes = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    if nbytes != layout.nbytes:
        raise RecordError("payload size", layout.nbytes, nbytes)
    if len(header.valid) != layout.valid_nbytes:
        raise RecordError("bitmap size", layout.valid_nbytes, len(header.valid))
    words = np.frombuffer(header.valid, "<u8").astype(np.uint64)
    bits = words.reshape(len(layout.specs), layout.valid_words)
    if (bits & ~table.full).any():
        raise RecordError("bitmap", f"bits for {layout.block_tokens} rows of each spec", "others")
    return bits

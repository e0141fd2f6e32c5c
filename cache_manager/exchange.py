"""Rows and KV of device blocks for other processes, and where those of other processes land.

A record's row lands only where no row is readable, in a block in which nothing has been computed here, and only beside
KV of its own origin. So a row computed here always wins over a record's, and a row lands at most once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cache_manager.errors import BlockBusyError, InvalidInputError, RecordError
from cache_manager.own_keys import Keyed, OwnKeys
from cache_manager.ports import KVBlocks
from cache_manager.publish import Copies, bits_in, bits_of, copies_of
from cache_manager.record import Buffer, OfferedRecord, RecordHeader, nbytes_of
from cache_manager.slots import Bits, Blocks, Bytes, Ints, integers, is_integer, prefix_bits, rows_in, unsigned
from cache_manager.table import BlockTable


class Exchange:
    """What crosses between the device blocks of a set and other places, as ``AuxBlocks.exchange``.

    A block is always meant in one life, its ``generation``: in another one nothing leaves it and nothing lands. Every
    method may be called from any thread; it takes the blocks' lock.
    """

    def __init__(self, table: BlockTable, keys: OwnKeys) -> None:
        self._table = table
        self._keys = keys

    def export(
        self, blocks: Keyed, generations: Blocks, rows: Sequence[int] | None = None
    ) -> list[OfferedRecord | None]:
        """Records of device blocks in these generations, for another process; at most the first ``rows`` of each.

        Copies, in the order of the call, with readable rows only; they hold no block. ``None`` if no row is readable,
        the block is in another life or the key is of another namespace; the latter two are counted.
        """
        table = self._table
        limits = table.full
        if rows is not None:
            counts = integers(rows, "rows", "one count for each block", n=len(blocks))
            limits = prefix_bits(counts, table.tokens)
        with table.lock:
            ids, lives, current, unresolved = self._keys.resolve(table, blocks, generations)
            self._keys.count(unresolved)
            valid = bits_of(table.region, ids)
            valid &= limits
            have_rows = valid != 0
            current &= have_rows.any(axis=(1, 2))
            ids = ids[current]
            valid = valid[current]
            table.origins.fix(ids)
            table.lock.count("rows_exported", rows_in(valid))
            origins = table.origins.names.take(ids)
            copies = copies_of(table.region, ids, valid)
        table.lock.log()
        fingerprint = table.layout.fingerprint
        bitmaps = valid.astype("<u8")
        records: list[OfferedRecord | None] = [None] * len(blocks)
        keys_of_blocks = list(blocks)
        for i, place in enumerate(np.flatnonzero(current).tolist()):
            key = keys_of_blocks[place]
            bitmap = bitmaps[i].tobytes()
            payload = copies[i].tobytes()
            life = int(lives[place])
            origin = int(origins[i])
            records[place] = OfferedRecord(key, fingerprint, life, origin, bitmap, payload)
        return records

    def install(self, block: int, generation: int, header: RecordHeader, payload: Buffer) -> int:
        """Put the rows of a record into a device block, where no row is readable.

        Returns how many rows landed. The caller has verified the record's sum and key. No row lands in a block that a
        step has written, or will write, in this life, beside KV that came under another origin (:meth:`bind_origin`),
        in a block in another life than ``generation``, or from a record of another namespace, or where rows have no
        memory (``memory="sparse"``); each case is counted.
        Raises ``BlockBusyError`` while bytes are copied into the block, or a device writes it for an earlier life, and
        :class:`RecordError` for a record that does not fit the layout; then nothing has changed.
        """
        table = self._table
        bits = _bits_that_fit(table, header, payload)
        flat = np.frombuffer(payload, np.uint8)
        content = flat.reshape(1, -1)
        record = Copies(table.layout, content)
        ids = table.slots.ids([block])
        with table.lock:
            ours = self._keys.chain.owns(header.key)
            if not _in_life(table, ids, generation, ours=ours):
                return 0
            _check_not_copied_into(table, ids)
            if table.lacks_memory(ids):
                table.lock.count("installs_without_memory_dropped")
                return 0
            if not table.origins.takes(ids, header.origin):
                table.lock.count("installs_of_another_origin_dropped")
                return 0
            _check_not_written(table, ids)
            landed = table.install(ids, header.origin, bits, record)
            n = rows_in(landed)
            table.lock.count("rows_installed", n)
            return n

    def origins(self, blocks: Blocks) -> list[int]:
        """The origin of each device block's content, to be kept beside its KV; 0 where nothing was written. Asking ends
        it: rows that a step writes, or commits, from now on get another one. So ask after the pass has committed."""
        table = self._table
        with table.lock:
            return table.origins.hand_out(table.slots.ids(blocks))

    def name_origins(self, blocks: Blocks, generations: Blocks, origins: Bits) -> None:
        """What these device blocks hold is known outside under these ``origins [n]``, which their KV itself says."""
        table = self._table
        with table.lock:
            ids, good = table.slots.known(blocks)
            lives = integers(generations, "generations", "one integer for each block", n=ids.size)
            named = unsigned(origins, "origins", "one uint64 for each block", n=ids.size)
            present = table.generations.take(ids, mode="clip")
            good &= present == lives
            good &= named != 0
            table.origins.carry(ids[good], named[good])

    def bind_origin(self, block: int, generation: int, origin: int) -> bool:
        """The block's KV has come from another place, where it had this ``origin``.

        Rows of another origin, of those computed here too, are dropped. ``False``: the block is in another life than
        ``generation``. Raises ``BlockBusyError`` while bytes are copied into it.
        """
        table = self._table
        _check_origin(origin)
        ids = table.slots.ids([block])
        with table.lock:
            if not _in_life(table, ids, generation):
                return False
            _check_not_copied_into(table, ids)
            table.bind(ids, origin)
            return True

    def take_kv(self, kv: KVBlocks, blocks: Blocks, generations: Blocks) -> tuple[Bytes, list[int]]:
        """A copy of the KV ``[n, kv.spec.block_nbytes]`` of device blocks in these generations, and the origins under
        which it leaves; 0, and the bytes count for nothing, for a block in another life or one into which bytes are
        copied."""
        table = self._table
        ids = table.slots.ids(blocks)
        lives = integers(generations, "generations", "one integer for each block", n=ids.size)
        shape = (ids.size, kv.spec.block_nbytes)
        taken = np.zeros(shape, np.uint8)
        with table.lock:
            kv.take(ids, taken)
            current = table.generations.take(ids) == lives
            current &= table.writable(ids)
            origins = np.zeros(ids.size, np.uint64)
            origins[current] = table.origins.hand_out(ids[current])
        return taken, origins.tolist()

    def fill_kv(self, kv: KVBlocks, block: int, generation: int, origin: int, content: Buffer) -> bool:
        """:meth:`bind_origin`, and put KV of that ``origin`` into the block: ``kv.spec.block_nbytes`` bytes.

        Raises ``BlockBusyError``, too, while a step writes the block, :class:`RecordError` for another number of bytes,
        and what ``kv.fill`` raises: then its rows are missing and none of another origin land, because KV that is half
        written is of no origin that others know.
        """
        table = self._table
        _check_origin(origin)
        ids = table.slots.ids([block])
        flat = np.frombuffer(content, np.uint8)
        kv_bytes = flat.reshape(1, -1)
        if kv_bytes.size != kv.spec.block_nbytes:
            raise RecordError("KV size", kv.spec.block_nbytes, kv_bytes.size)
        with table.lock:
            if not _in_life(table, ids, generation):
                return False
            _check_not_copied_into(table, ids)
            _check_not_written(table, ids)
            table.bind(ids, origin)
            try:
                kv.fill(ids, kv_bytes)
            except BaseException:
                table.lose(ids)
                raise
            return True


def _in_life(table: BlockTable, ids: Ints, generation: int, *, ours: bool = True) -> bool:
    """Whether the block is in that life, and the record ``ours``; what is not is counted."""
    life = int(table.generations[ids].item())
    if ours and generation and life == generation:
        return True
    table.lock.count("late_installs_dropped")
    return False


def _check_not_copied_into(table: BlockTable, ids: Ints) -> None:
    if table.fenced(ids)[0]:
        raise _busy(table, ids, "one that nothing else fills", "one being copied into")


def _check_not_written(table: BlockTable, ids: Ints) -> None:
    if table.writing(ids)[0]:
        raise _busy(table, ids, "one that no device writes", "a step of before")


def _busy(table: BlockTable, ids: Ints, wanted: str, got: str) -> BlockBusyError:
    return BlockBusyError(f"{table.tier} block {ids.item()}", wanted, got)


def _check_origin(origin: int) -> None:
    if not is_integer(origin, 1, 1 << 64):
        raise InvalidInputError("origin", "an integer in [1, 2**64)", repr(origin))


def _bits_that_fit(table: BlockTable, header: RecordHeader, payload: Buffer) -> Bits:
    """The record's validity words ``[specs, W]``; :class:`RecordError` unless it is one of the table's layout."""
    layout = table.layout
    wanted = layout.fingerprint
    got = header.fingerprint
    if got != wanted:
        raise RecordError("fingerprint", wanted.hex(), got.hex())
    nbytes = nbytes_of(payload)
    if nbytes != layout.nbytes:
        raise RecordError("payload size", layout.nbytes, nbytes)
    if len(header.valid) != layout.valid_nbytes:
        raise RecordError("bitmap size", layout.valid_nbytes, len(header.valid))
    bits = bits_in(header.valid, table.region)
    if (bits & ~table.full).any():
        raise RecordError("bitmap", f"bits for {layout.block_tokens} rows of each spec", "others")
    return bits

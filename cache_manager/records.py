"""Records of rows that go to another process: whose blocks, for how long, and which rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.bits import rows_in, unpack_bits
from cache_manager.books import Books, InFlight
from cache_manager.checks import integers
from cache_manager.errors import InvalidInputError
from cache_manager.keys import BlockKey
from cache_manager.lifecycle import Event
from cache_manager.memory import Copies, bits_of, places
from cache_manager.record import Buffer, OfferedRecord
from cache_manager.table import Blocks, BlockTable, Ints


class Claim(NamedTuple):
    """Keys for blocks, and for which life: that of ``owner``, who must hold them all, or of ``generations``, one each.

    One that says neither is refused: whoever has decided to store a block and comes when it has become somebody else's
    must not store the other's rows under the first one's key.
    """

    blocks: Mapping[BlockKey, int]
    owner: Hashable | None
    generations: Blocks | None


def claimed(table: BlockTable, books: Books, claim: Claim) -> tuple[Ints, NDArray[np.bool_]]:
    """The ids of a claim's blocks, and which are in the life that is meant with a key of this namespace; lock held.

    What is of another life or namespace is counted. :class:`BlockStateError` for a block that the owner lacks.
    """
    blocks, owner, generations = claim
    if (owner is None) == (generations is None):
        got = "neither" if owner is None else "both"
        raise InvalidInputError("owner, generations", "one of them, to say for which life", got)
    ids = (table.ids_often if table.by_engine else table.ids)(list(blocks.values()))
    live: NDArray[np.bool_] = np.ones(ids.size, np.bool_)
    if generations is None:
        table.check_holder(owner, ids)
    else:
        given = integers(generations, "generations", "one integer for each block", n=ids.size)
        live = table.generations.take(ids) == given
    ours = np.array([books.keys.owns(key) for key in blocks], np.bool_)
    books.count("stale_keys", int(count(~ours)))
    books.count("stale_blocks", int(count(~live)))
    return ids, live & ours


class Export(InFlight):
    """Records of blocks that another process may read, in the order of the call; ``None``: nothing to offer.

    A block with every row is offered as a view of its memory and stays as it is, neither freed nor given away nor
    written, until :meth:`commit` or :meth:`abort`, which here do the same: drop the records first. Any other block is
    offered as a snapshot and is not kept. An export that is dropped keeps its blocks: somebody may still read them.
    """

    __slots__ = ("_pinned", "_table", "records")

    def __init__(self, table: BlockTable, books: Books, claim: Claim, rows: Sequence[int] | None) -> None:
        self._ended = True  # until it has begun
        self._table, self._books = table, books
        self.records: list[OfferedRecord | None] = []
        limit = table.full if rows is None else table.first_rows(rows, len(claim.blocks), "block")
        with books.guard:
            ids, live = claimed(table, books, claim)
            valid = bits_of(table.region, ids) & limit
            offered = live & (valid != 0).any(axis=(1, 2))
            whole = offered & (valid == table.full).all(axis=(1, 2))
            table.check_no_step(ids[whole], "offer it")
            table.check(Event.BEGIN_DEPARTURE, ids[whole])
            self._pinned = ids[whole]
            table.begin_departure(self._pinned)
            table.seal(ids[offered & ~whole])
            for i, (key, block) in enumerate(claim.blocks.items()):
                self.records.append(self._record(key, block, valid[i], whole=bool(whole[i])) if offered[i] else None)
            self._ended = not self._pinned.size
            if not self._ended:
                books.moves[id(self)] = lambda: self  # kept: the records are views

    def _record(self, key: BlockKey, block: int, valid: NDArray[np.uint64], *, whole: bool) -> OfferedRecord:
        table = self._table
        payload: Buffer = table.region.rows[block].data if whole else _only(table, block, valid)
        self._books.count("rows_exported", rows_in(valid))
        generation, origin = int(table.generations[block]), int(table.origin[block])
        bits = valid.astype("<u8").tobytes()
        return OfferedRecord(key, table.layout.fingerprint, generation, origin, bits, payload)

    def commit(self) -> None:
        """Let the blocks go. Harmless the second time."""
        self.abort()

    def _give_up(self, _how: str, /) -> None:
        if not self._ended:
            self._ended = True
            self.records = []  # views of blocks that may be given away from here on
            del self._books.moves[id(self)]
            self._table.end_departure(self._pinned)


def _only(table: BlockTable, block: int, valid: NDArray[np.uint64]) -> bytes:
    """A copy of the block's record with nothing in it but the ``valid`` rows; the others may be written."""
    layout = table.layout
    record = np.zeros((1, layout.nbytes), np.uint8)
    keep = unpack_bits(valid, layout.block_tokens)
    for i, (copy, rows) in enumerate(zip(places(Copies(layout, record)), places(table.region), strict=True)):
        copy[0][keep[i]] = rows[block][keep[i]]
    return record.tobytes()

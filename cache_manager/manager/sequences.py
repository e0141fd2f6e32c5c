"""The sequences of a block manager, as arrays: one row of a matrix of blocks for each.

An owner's name becomes the number of a row once, where the sequence begins; the calls of a decode step name sequences
by these numbers. A row that has ended is given to a later sequence. Rows and columns are added as they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.checks import integers
from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError
from cache_manager.keys import BlockKey, KeyChain
from cache_manager.ports import TierName

if TYPE_CHECKING:
    from cache_manager.store_jobs import RestoreJob

Ints = NDArray[np.int64]
Extra = bytes | Mapping[int, bytes]
"""What decides content besides tokens, such as the digest of an image: of the prompt, or by index of a block."""


_NOTHING: Final[tuple[bytes | None, Ints]] = (None, np.empty(0, np.int64))


class Phase(IntEnum):
    """Where a sequence is; only a READY one is written, forked, stored or swapped out."""

    NONE = 0
    READY = 1
    PENDING = 2  # the store is being asked for more of it
    SWAPPED = 3
    HOLDER = 4  # keeps device blocks and reads nothing


_READY: Final = int(Phase.READY)


@dataclass(slots=True, eq=False)
class SequenceKeys:
    """Whose a sequence is, and what its blocks are found by. ``base`` is the key chain that was current when it began,
    ``chain`` the same under its salt: after a reset they are old ones, and its blocks are found by no key any more."""

    owner: str
    base: KeyChain
    chain: KeyChain
    extra: dict[int, bytes] = field(default_factory=dict)
    keys: list[BlockKey] = field(default_factory=list)  # of its first full blocks
    errand: RestoreJob | None = None  # which it waits for
    asked: tuple[list[BlockKey], bytes] = ([], b"")  # keys by which it was admitted, and the token ids they are of

    def of(self, ids: Ints) -> list[BlockKey]:
        """The keys of the blocks of these tokens, from the first block on, that of a partial last one too."""
        size, keys = self.chain.block_tokens, [] if self.extra else self.chain.keys(ids)
        for at in range(len(keys) * size, ids.size, size):
            extra = self.extra.get(len(keys), b"")
            keys.append(self.chain.key(keys[-1] if keys else None, ids[at : at + size], extra))
        return keys

    def add(self, index: int, ids: bytes) -> BlockKey:
        """Add the key of its full block ``index``, the next one, with these token ids (little-endian int64)."""
        asked, prompt = self.asked
        same = index < len(asked) and prompt[index * len(ids) : (index + 1) * len(ids)] == ids
        if same and self.keys[-1:] == asked[max(0, index - 1) : index]:
            key = asked[index]
            if index == len(asked) - 1:
                self.asked = [], b""
        else:
            self.asked = [], b""
            extra = self.extra.get(index, b"") if self.extra else b""
            key = self.chain.following(self.keys[-1] if index else None, ids, extra)
        self.keys.append(key)
        return key


class Sequences:
    """Up to ``rows_max`` sequences.

    ``blocks[row, i]`` means something below ``length[row]``; ``computed`` tokens have KV and rows; ``filling`` has the
    ids of the computed tokens of a block that is not full. ``..._at`` are the same arrays for one element at a time.
    """

    def __init__(self, block_tokens: int, *, rows_max: int) -> None:
        self.tokens, self.rows_max = block_tokens, rows_max
        self.by_owner: dict[str, int] = {}
        self.records: list[SequenceKeys | None] = []
        self._free: list[int] = []
        self._last = _NOTHING  # the rows that ready_rows() has found READY, and what it answered
        self.rows = self.width = 0
        self.blocks: Ints = np.empty((0, 0), np.int64)
        self.phase: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.length, self.computed = np.empty(0, np.int64), np.empty(0, np.int64)
        self.filling: Ints = np.empty((0, block_tokens), "<i8")
        self._resize(1, 1)  # the arrays of every manager grow early, so that its tests live through it

    def _resize(self, rows: int, width: int) -> None:
        """Make room for ``rows`` of ``width``, no fewer than there were. Every array is another one from here on:
        none that was looked up before is written to."""
        before = self.rows
        blocks = np.zeros((rows, width), np.int64)
        blocks[:before, : self.width] = self.blocks
        grown = [
            np.concatenate((array, np.zeros((rows - before, *array.shape[1:]), array.dtype)))
            for array in (self.phase, self.length, self.computed, self.filling)
        ]
        self.blocks, self.rows, self.width = blocks, rows, width
        self.phase, self.length, self.computed, self.filling = grown
        self.flat, self.flat_filling = self.blocks.reshape(-1), self.filling.reshape(-1)
        self.block_at, self.filling_at = self.flat.data, self.flat_filling.data
        self.phase_at, self.length_at, self.computed_at = self.phase.data, self.length.data, self.computed.data
        self.records += [None] * (rows - before)
        self._free += range(rows - 1, before - 1, -1)

    # ---------------------------------------------------------------- which there are

    @property
    def full(self) -> bool:
        return len(self.by_owner) >= self.rows_max

    def check_new(self, owner: str) -> None:
        """:class:`InvalidInputError` for what names no owner, :class:`BlockStateError` for one that has a sequence."""
        if not isinstance(owner, str) or not owner:
            raise InvalidInputError("owner", "a non-empty string", repr(owner))
        if owner in self.by_owner:
            raise BlockStateError(f"owner {owner!r}", "an owner without a sequence", "one that has one")

    def add(self, sequence: SequenceKeys, blocks: list[int] | Ints, computed: int, phase: Phase = Phase.READY) -> int:
        """A row for a new sequence; the caller has checked that there is one. What fails has added nothing."""
        assert sequence.owner not in self.by_owner, "check_new() comes first"
        self.make_wide(len(blocks))
        if not self._free:
            self._resize(min(2 * self.rows, self.rows_max), self.width)
        row = self._free.pop()
        self.by_owner[sequence.owner] = row
        self.records[row] = sequence
        self.set_blocks(row, blocks)
        self.computed[row] = computed
        self.set_phase(row, phase)
        return row

    def remove(self, owner: str) -> None:
        row = self.by_owner.pop(owner)
        self.records[row] = None
        self.set_phase(row, Phase.NONE)
        self.length[row] = self.computed[row] = 0
        self._free.append(row)

    def row(self, owner: str) -> int:
        """:class:`BlockStateError` for an owner without a sequence."""
        row = self.by_owner.get(owner)
        if row is None:
            raise BlockStateError(f"owner {owner!r}", "an owner with a sequence", "one without")
        return row

    def ready(self, owner: str) -> int:
        """The row of a sequence that is on the device and waits for nothing; raises otherwise."""
        row = self.by_owner.get(owner, -1)
        if row < 0 or self.phase_at[row] != _READY:
            self._refuse(self.row(owner))
        return row

    def ready_rows(self, rows: Any) -> Ints:
        """``rows`` as an array: sequences that are on the device and wait for nothing, each once; raises otherwise.

        A decode step asks three times for the same ones, and the next step mostly too: the last answer is kept.
        """
        given = isinstance(rows, np.ndarray) and rows.ndim == 1 and rows.dtype == np.int64
        if given and rows.tobytes() == self._last[0]:
            return self._last[1]
        found = integers(rows, "seqs", "a flat sequence of sequence ids")
        if count(outside := found.view(np.uint64) >= np.uint64(self.rows)):
            raise InvalidInputError("seqs", "ids that sequence() answered", int(found[int(np.argmax(outside))]))
        if count(other := self.phase.take(found) != _READY):
            self._refuse(int(found[int(np.argmax(other))]))
        seen: NDArray[np.bool_] = np.zeros(self.rows, np.bool_)
        seen[found] = True
        if count(seen) != found.size:
            raise InvalidInputError("seqs", "each sequence once", f"{found.size - int(count(seen))} of them again")
        self._last = found.tobytes(), found
        return found

    def set_phase(self, row: int, phase: Phase) -> None:
        self.phase_at[row] = phase
        self._last = _NOTHING

    def _refuse(self, row: int) -> None:
        record, phase = self.records[row], self.phase[row]
        if record is None:
            raise BlockStateError(f"sequence {row}", "a sequence", "one that has ended")
        owner = f"owner {record.owner!r}"
        if phase == Phase.SWAPPED:
            raise BlockStateError(owner, "a sequence on the device", "one that is swapped out")
        if phase == Phase.PENDING:
            raise BlockBusyError(owner, "a sequence that waits for nothing", "one whose store is asked")
        raise BlockStateError(owner, "a sequence", "a holder, which keeps blocks and reads nothing")

    def record(self, row: int) -> SequenceKeys:
        record = self.records[row]
        assert record is not None, f"row {row} has ended"
        return record

    def __iter__(self) -> Iterator[SequenceKeys]:
        return (record for record in self.records if record is not None)

    # ---------------------------------------------------------------- their blocks

    def tier(self, row: int) -> TierName:
        return "host" if self.phase_at[row] == Phase.SWAPPED else "device"

    def table(self, row: int) -> Ints:
        """The row's blocks, in token order: a view."""
        return self.blocks[row, : self.length_at[row]]

    def set_blocks(self, row: int, blocks: list[int] | Ints) -> None:
        n = len(blocks)
        self.make_wide(n)
        self.blocks[row, :n] = blocks
        self.length[row] = n

    def make_wide(self, n: int) -> None:
        """Rows have at least ``n`` columns from here on."""
        if n > self.width:
            self._resize(self.rows, max(2 * self.width, n))

    def of_tier(self, tier: TierName) -> list[int]:
        """All blocks of all sequences and holders in the tier; a shared one as often as it is shared."""
        rows = [row for row in self.by_owner.values() if self.tier(row) == tier]
        return [block for row in rows for block in self.table(row).tolist()]


def digests(extra: Extra) -> dict[int, bytes]:
    """``extra`` by index of a block; a prompt's is its first block's, and so in every key after that."""
    by_block = {0: extra} if isinstance(extra, bytes) else extra
    if not isinstance(by_block, Mapping):
        raise InvalidInputError("extra", "bytes, or bytes by index of a block", repr(extra))
    for index, digest in by_block.items():
        if not isinstance(index, int) or index < 0 or not isinstance(digest, bytes):
            raise InvalidInputError("extra", "bytes, or bytes by index of a block", f"{digest!r} at {index!r}")
    return {index: digest for index, digest in by_block.items() if digest}

"""The sequences of a block manager: their blocks, where they are, and by which keys their blocks are found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError
from cache_manager.jobs import RestoreJob
from cache_manager.keys import BlockKey, KeyChain
from cache_manager.numbers import count_in_range, integers

Ints = NDArray[np.int64]
NOTHING: Final[tuple[bytes, Ints, Ints]] = b"", np.empty(0, np.int64), np.empty(0, np.int64)
UNKNOWN: Final = -(1 << 62)


class Phase(Enum):
    """Where a sequence is; only a READY one is written, forked, stored or swapped out."""

    READY = "a sequence on the device that waits for nothing"
    PENDING = "one whose store is asked"
    SWAPPED = "one that is swapped out"


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence. ``row`` is its number, and its index in the arrays of :class:`Sequences`.

    ``base`` is the key chain that was current when it began, ``chain`` the same under its salt: after a reset both are
    old, and no key finds its blocks any more.
    """

    owner: str
    base: KeyChain
    chain: KeyChain
    blocks: list[int] = field(default_factory=list)  # in token order, in the tier that it is in
    phase: Phase = Phase.READY
    keys: list[BlockKey] = field(default_factory=list)  # of its first full blocks
    asked: tuple[list[BlockKey], bytes] = ([], b"")  # keys by which it was admitted, and the token ids they are of
    job: RestoreJob | None = None  # the job that it waits for
    row: int = -1
    offset: int = 0  # of the slot of its next token, where that is known, from how many are computed

    def ready(self) -> Sequence:
        if self.phase is not Phase.READY:
            error = BlockBusyError if self.phase is Phase.PENDING else BlockStateError
            raise error(f"owner {self.owner!r}", Phase.READY.value, self.phase.value)
        return self

    def of(self, ids: Ints) -> list[BlockKey]:
        """The keys of the blocks of these tokens, from the first block on, with that of a partial last block."""
        keys = self.chain.keys(ids)
        if (rest := ids[len(keys) * self.chain.block_tokens :]).size:
            keys.append(self.chain.key(keys[-1] if keys else None, rest))
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
            key = self.chain.following(self.keys[-1] if index else None, ids)
        self.keys.append(key)
        return key


class Sequences:
    """Up to ``rows_max`` sequences, by owner and by number.

    By number, so that a decode step costs no Python for each: ``next`` is the slot of the next token in a block that is
    known to be the sequence's alone and ends at ``edge``. Where none is known, both are negative: ``next`` is then
    ``UNKNOWN`` and how many of its tokens are computed.
    ``filled`` has the ids of the tokens in a block that is not full, ``block_tokens`` places for each sequence.
    """

    def __init__(self, block_tokens: int, rows_max: int) -> None:
        self.rows_max = count_in_range(rows_max, "sequences_max", 1)
        self.by_owner: dict[str, Sequence] = {}
        self.by_row: dict[int, Sequence] = {}
        self.free_rows = list(range(rows_max - 1, -1, -1))
        self.next, self.edge = np.zeros(rows_max, np.int64), np.zeros(rows_max, np.int64)
        self.filling = np.zeros((rows_max, block_tokens), "<i8")
        self.filled = self.filling.reshape(-1)
        self._last = NOTHING  # what ready_rows() was asked, and answered

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.by_owner.values())

    def __getitem__(self, owner: str) -> Sequence:
        if (found := self.by_owner.get(owner)) is None:
            raise BlockStateError(f"owner {owner!r}", "an owner with a sequence", "one without")
        return found

    def ready(self, owner: str) -> Sequence:
        """The sequence, on the device and waiting for nothing; raises otherwise."""
        return self[owner].ready()

    def ready_rows(self, rows: Any) -> tuple[Ints, Ints]:
        """``rows`` as an array: numbers of sequences that are :meth:`ready`, each once; raises otherwise.

        And the ends of their places in ``filled``.
        A decode step asks twice for the same ones, and the next step mostly too: the last answer is kept.
        """
        if type(rows) is np.ndarray and rows.dtype == np.int64 and rows.ndim == 1 and rows.tobytes() == self._last[0]:
            return self._last[1:]
        found = integers(rows, "seqs", "a flat sequence of numbers")
        for row in (each := found.tolist()):
            if (s := self.by_row.get(row)) is None:
                raise BlockStateError("seqs", "numbers of sequences that have not ended", row)
            s.ready()
        if (n := len(set(each))) != len(each):
            raise InvalidInputError("seqs", "each sequence once", f"{len(each) - n} of them again")
        self._last = found.tobytes(), found, (found + 1) * self.filling.shape[1]
        return self._last[1:]

    def check_new(self, owner: str) -> None:
        """:class:`InvalidInputError` for an invalid owner, :class:`BlockStateError` for one that has a sequence."""
        if not isinstance(owner, str) or not owner:
            raise InvalidInputError("owner", "a non-empty string", repr(owner))
        if owner in self.by_owner:
            raise BlockStateError(f"owner {owner!r}", "an owner without a sequence", "one that has one")

    def add(self, s: Sequence, computed: int, like: Sequence | None = None) -> None:
        """Add the sequence, whose tokens are so far those of another one, if any.

        The caller has checked that a number is left.
        """
        s.row = self.free_rows.pop()
        if like is not None:
            self.filling[s.row] = self.filling[like.row]
        self.place(s, computed)
        self.by_owner[s.owner] = self.by_row[s.row] = s

    def remove(self, s: Sequence) -> None:
        self._last = NOTHING
        del self.by_owner[s.owner], self.by_row[s.row]
        self.free_rows.append(s.row)

    def computed(self, s: Sequence) -> int:
        """How many of its tokens have KV and rows."""
        slot = self.next.item(s.row)
        return slot - (s.offset if slot >= 0 else UNKNOWN)

    def place(self, s: Sequence, computed: int) -> None:
        """So many of its tokens are computed; nothing is known of the next slot."""
        self.next[s.row], self.edge[s.row] = UNKNOWN + computed, UNKNOWN

    def enter(self, s: Sequence, phase: Phase, blocks: list[int]) -> None:
        """The sequence is in another phase, with other ``blocks``: nothing is known of its next slot."""
        s.phase, s.blocks, self._last = phase, blocks, NOTHING
        self.place(s, self.computed(s))

    def settle(self, s: Sequence, keys: list[BlockKey], computed: int) -> None:
        """The sequence waits for the store no more: so many of its tokens are computed, with these ``keys``."""
        s.phase, s.job, s.keys, self._last = Phase.READY, None, keys, NOTHING
        self.next[s.row], self.edge[s.row] = UNKNOWN + computed, UNKNOWN  # no call between: see whole()

    def rebuild(self) -> None:
        """After a call that did not come to its end: ``by_owner`` and each sequence hold, all else follows."""
        self._last = NOTHING
        self.by_row = {s.row: s for s in self}
        self.free_rows = [row for row in range(self.rows_max - 1, -1, -1) if row not in self.by_row]
        for s in self:
            self.place(s, self.computed(s))

"""The sequences of a block manager: their blocks, where they are, and by which keys their blocks are found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np

from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError
from cache_manager.job import RestoreJob
from cache_manager.keys import BlockKey, KeyChain
from cache_manager.slots import Ints, integers

NOTHING: Final[tuple[bytes, Ints, Ints]] = b"", np.empty(0, np.int64), np.empty(0, np.int64)
UNKNOWN: Final = -(1 << 62)


class Phase(Enum):
    """Where a sequence is; only a READY one is written, forked, stored or swapped out."""

    READY = "a sequence on the device that waits for nothing"
    PENDING = "one whose store is asked"
    SWAPPED = "one that is swapped out"


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence. ``number`` is its index in the arrays of :class:`Sequences`.

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
    number: int = -1
    offset: int = 0  # slot of the next token minus number of computed tokens; while the slot is known

    def ready(self) -> Sequence:
        if self.phase is not Phase.READY:
            error = BlockBusyError if self.phase is Phase.PENDING else BlockStateError
            raise error(f"owner {self.owner!r}", Phase.READY.value, self.phase.value)
        return self

    def keys_of(self, ids: Ints) -> list[BlockKey]:
        """The keys of the blocks of these tokens, from the first block on, with that of a partial last block."""
        keys = self.chain.keys(ids)
        rest = ids[len(keys) * self.chain.block_tokens :]
        if rest.size:
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
    """Up to ``sequences_max`` sequences, by owner and by number.

    By number, so that a decode step costs no Python for each: ``next`` is the slot of the next token in a block that is
    known to be the sequence's alone and ends at ``edge``. Where none is known, both are negative: ``next`` is then
    ``UNKNOWN`` plus the number of its computed tokens.
    ``filled`` has the ids of the tokens in a block that is not full, ``block_tokens`` places for each sequence.
    """

    def __init__(self, block_tokens: int, sequences_max: int) -> None:
        self.sequences_max = sequences_max
        self.by_owner: dict[str, Sequence] = {}
        self.by_number: dict[int, Sequence] = {}
        self.free_numbers = list(range(sequences_max - 1, -1, -1))
        self.next = np.zeros(sequences_max, np.int64)
        self.edge = np.zeros(sequences_max, np.int64)
        self.filling = np.zeros((sequences_max, block_tokens), "<i8")
        self.filled = self.filling.reshape(-1)
        self._last = NOTHING  # what ready_numbers() was asked, and answered

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.by_owner.values())

    def find(self, owner: str) -> Sequence | None:
        """The owner's sequence; :class:`InvalidInputError` for anything but a name."""
        if not isinstance(owner, str):
            raise InvalidInputError("owner", "a string", repr(owner))
        return self.by_owner.get(owner)

    def __getitem__(self, owner: str) -> Sequence:
        sequence = self.find(owner)
        if sequence is None:
            raise BlockStateError(f"owner {owner!r}", "an owner with a sequence", "one without")
        return sequence

    def ready(self, owner: str) -> Sequence:
        """The sequence, on the device and waiting for nothing; raises otherwise."""
        return self[owner].ready()

    def ready_numbers(self, seqs: Any) -> tuple[Ints, Ints]:
        """``seqs`` as an array: numbers of sequences that are :meth:`ready`, each once; raises otherwise.

        And the ends of their places in ``filled``.
        A decode step asks twice for the same ones, and the next step mostly too: the last answer is kept.
        """
        if type(seqs) is np.ndarray and seqs.dtype == np.int64 and seqs.ndim == 1 and seqs.tobytes() == self._last[0]:
            return self._last[1:]
        numbers = integers(seqs, "seqs", "a flat sequence of numbers")
        distinct = set()
        for number in numbers.tolist():
            sequence = self.by_number.get(number)
            if sequence is None:
                raise BlockStateError("seqs", "numbers of sequences that have not ended", number)
            sequence.ready()
            distinct.add(number)
        if len(distinct) != numbers.size:
            raise InvalidInputError("seqs", "each sequence once", f"{numbers.size - len(distinct)} of them again")
        self._last = numbers.tobytes(), numbers, (numbers + 1) * self.filling.shape[1]
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
        s.number = self.free_numbers.pop()
        if like is not None:
            self.filling[s.number] = self.filling[like.number]
        self.place(s, computed)
        self.by_owner[s.owner] = s
        self.by_number[s.number] = s

    def remove(self, s: Sequence) -> None:
        self._last = NOTHING
        del self.by_owner[s.owner]
        del self.by_number[s.number]
        self.free_numbers.append(s.number)

    def computed(self, s: Sequence) -> int:
        """How many of its tokens have KV and rows."""
        slot = self.next.item(s.number)
        return slot - (s.offset if slot >= 0 else UNKNOWN)

    def place(self, s: Sequence, computed: int) -> None:
        """So many of its tokens are computed; nothing is known of the next slot."""
        self.next[s.number] = UNKNOWN + computed
        self.edge[s.number] = UNKNOWN

    def enter(self, s: Sequence, phase: Phase, blocks: list[int]) -> None:
        """The sequence is in another phase, with other ``blocks``: nothing is known of its next slot."""
        s.phase = phase
        s.blocks = blocks
        self._last = NOTHING
        self.place(s, self.computed(s))

    def settle(self, s: Sequence, keys: list[BlockKey], computed: int) -> None:
        """The sequence waits for the store no more: so many of its tokens are computed, with these ``keys``."""
        s.phase = Phase.READY
        s.job = None
        s.keys = keys
        self._last = NOTHING
        self.place(s, computed)

    def forget_keys(self) -> None:
        """After a reset: no key finds the sequences' blocks."""
        for s in self:
            s.keys.clear()

"""Who has which blocks of a block manager: sequences, and holders, which keep blocks and read nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cache_manager.errands import Errand
from cache_manager.errors import BlockBusyError, BlockStateError
from cache_manager.keys import BlockKey, KeyChain
from cache_manager.tiers import TierName


@dataclass(slots=True)
class Sequence:
    """One owner's blocks, in token order; ``computed`` tokens of them have KV and rows."""

    blocks: list[int]
    computed: int
    chain: KeyChain  # of the namespace that its KV was computed in; after a reset its blocks are not found by key
    keys: list[BlockKey] = field(default_factory=list)
    tier: TierName = "device"
    errand: Errand | None = None  # by which the store is asked for more
    reads: bool = True  # False for a holder: it does not keep others from writing its blocks in place


class Sequences:
    """The sequences of one block manager, by owner."""

    __slots__ = ("_holders", "_sequences")

    def __init__(self) -> None:
        self._sequences: dict[str, Sequence] = {}
        self._holders = 0

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __getitem__(self, owner: str) -> Sequence:
        """:class:`BlockStateError` for an owner without a sequence."""
        try:
            return self._sequences[owner]
        except KeyError:
            raise BlockStateError(f"owner {owner!r}", "an owner with a sequence", "one without") from None

    def get(self, owner: str) -> Sequence | None:
        return self._sequences.get(owner)

    @property
    def owners(self) -> frozenset[str]:
        return frozenset(self._sequences)

    def check_new(self, owner: str) -> None:
        """:class:`BlockStateError` for an owner that has a sequence."""
        if owner in self._sequences:
            raise BlockStateError(f"owner {owner!r}", "an owner without a sequence", "one that has one")

    def add(self, owner: str, sequence: Sequence) -> None:
        assert owner not in self._sequences, "check_new() comes first"
        self._sequences[owner] = sequence
        self._holders += not sequence.reads

    def remove(self, owner: str) -> Sequence | None:
        """The owner's sequence, which is forgotten; ``None`` if there was none."""
        sequence = self._sequences.pop(owner, None)
        self._holders -= sequence is not None and not sequence.reads
        return sequence

    def on_device(self, owner: str) -> Sequence:
        """The owner's sequence, if it is on the device and waits for nothing; raises otherwise."""
        sequence = self[owner]
        if sequence.tier != "device":
            raise BlockStateError(f"owner {owner!r}", "a sequence on the device", "one that is swapped out")
        if sequence.errand is not None:
            raise BlockBusyError(f"owner {owner!r}", "a sequence that waits for nothing", "one whose store is asked")
        return sequence

    @property
    def has_holders(self) -> bool:
        return self._holders > 0

    def readers(self, block: int) -> int:
        """How many sequences have the device block, holders not counted."""
        return sum(block in s.blocks for s in self if s.reads and s.tier == "device")

    def blocks(self, tier: TierName) -> list[int]:
        """All blocks of all sequences in the tier; a shared one as often as it is shared."""
        return [block for s in self if s.tier == tier for block in s.blocks]


__all__ = ["Sequence", "Sequences"]

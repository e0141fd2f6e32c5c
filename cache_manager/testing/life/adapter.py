"""The port: what the kit asks of a block manager. Six methods, and more for the manager's other capabilities.

An adapter is a subclass of :class:`BlockManagerAdapter` for one manager. The kit makes a fresh one for every example
and calls it as an engine's scheduler would; in between it plays the forward pass itself, by writing canaries at the
slots that the manager names (:mod:`cache_manager.testing.life.canary`). The manager never sees them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Final

from cache_manager.testing.life.canary import CanaryKV

CAPABILITIES: Final[Mapping[str, str]] = {
    "prefix": "admit() shares cached blocks: its answer may be more than 0",
    "salt": "equal tokens under different salts share nothing",
    "fork": "fork(): a child begins with the blocks of its parent; a shared block is copied before a write",
    "swap": "preempt() and resume(): a sequence moves to host blocks and back",
    "store": "persist(): full blocks go to an outside tier, and admit() may bring them back",
    "reset": "reset(): new weights; nothing that was computed before is found again",
    "restart": "restart(): the process begins anew, with only the store's content",
    "abort": "free() while the sequence's step runs: the step's KV is still written, before any other write",
    "lost_step": "free() of a sequence whose step never runs: the KV of its new slots is never written",
    "drafts": "grow() for draft tokens, commit() of the accepted ones only; the others' slots are written again",
    "rows": "write_rows() and read_rows(): auxiliary rows go wherever their KV goes",
    "background": "admit() and persist() may leave work behind, which settle() advances",
    "failing_moves": "a copy of blocks may raise MoveFailed, and then the operation has changed nothing",
}
"""Optional capabilities of a manager, by the names that an adapter lists in ``capabilities``."""

METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("admit", "grow", "commit", "free", "table", "free_blocks"),
    "fork": ("fork",),
    "swap": ("preempt", "resume", "free_host_blocks"),
    "store": ("persist",),
    "reset": ("reset",),
    "restart": ("restart",),
    "rows": ("write_rows", "read_rows"),
    "background": ("settle",),
}
"""The methods that every adapter has, and those of a capability."""


class BlockManagerAdapter:
    """One manager under test. Make it in ``__init__``, small, so that it runs out of blocks.

    A *sequence* has a name and tokens, and its first ``computed`` tokens have KV. The kit calls :meth:`admit`, or
    :meth:`grow`, writes canaries at :meth:`slots` of the positions that are computed next, gives their rows to
    :meth:`write_rows`, and calls :meth:`commit`. Pass every copy of blocks that the manager asks for to ``self.kv``, in
    the order in which a device would do it. If a scheduler would evict a block and try again, the adapter does so too.

    "No room" (``None`` or ``False``) and an exception caused by ``MoveFailed`` both mean that nothing has changed. Any
    other exception is a finding.
    """

    capabilities: ClassVar[Collection[str]] = ()
    block_tokens: ClassVar[int] = 2
    blocks: ClassVar[Collection[int]] = range(8)
    """The ids that the manager may hand out, without a null block."""
    host_blocks: ClassVar[Collection[int]] = ()
    window: ClassVar[int | None] = None
    """Sliding window, in tokens: the kit does not check older KV, and its entry of the table may be ``None``."""
    finds_held: ClassVar[bool] = True
    """Whether a full block that a running sequence holds is found by an equal prefix."""
    hits_need_rows: ClassVar[bool] = False
    """Whether a block that lacks a row does not count as a hit."""
    unclaimed: ClassVar[Mapping[str, str]] = {}
    """Invariants that the manager does not claim, by name, with the reason; breaks are counted and fail no test."""

    def __init__(self, kv: CanaryKV) -> None:
        self.kv = kv

    # ---------------------------------------------------------------- every manager

    def admit(self, seq: str, tokens: Sequence[int], chunk: int, salt: str) -> int | None:
        """Begin ``seq``; how many of its first tokens need no computing, at most all but one.

        There is room then for ``chunk`` tokens after these, or for all that are left. ``None``: no room.
        """
        raise NotImplementedError

    def grow(self, seq: str, tokens: Sequence[int], upto: int) -> bool:
        """Make the slots of ``tokens[computed:upto]`` writable by new blocks and copies; ``False``: no room."""
        raise NotImplementedError

    def commit(self, seq: str, tokens: Sequence[int]) -> None:
        """The KV of ``tokens``, all that are computed so far, is in place: full blocks may be found."""
        raise NotImplementedError

    def free(self, seq: str) -> None:
        """End ``seq``: it has finished, was aborted, or is to be computed again. Ignores an unknown name."""
        raise NotImplementedError

    def table(self, seq: str) -> Sequence[int | None]:
        """The blocks of ``seq`` in token order, in its present tier; ``None`` for a block that the window has left."""
        raise NotImplementedError

    def free_blocks(self) -> int:
        """How many blocks a sequence could get now: free ones, and cached ones without a holder."""
        raise NotImplementedError

    # ---------------------------------------------------------------- with a default

    def slots(self, seq: str, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """(block, offset) to write for each position in ``[start, stop)``. Override it if the manager computes them."""
        table = self.table(seq)
        size = self.block_tokens
        blocks = [table[position // size] if position // size < len(table) else None for position in range(start, stop)]
        return [(-1 if block is None else block, at % size) for at, block in enumerate(blocks, start)]

    def grow_batch(self, tokens: Mapping[str, Sequence[int]]) -> Sequence[bool]:
        """A decode step: :meth:`grow` by the last of the ``tokens`` of each sequence; the answers in their order."""
        return [self.grow(seq, given, len(given)) for seq, given in tokens.items()]

    def commit_batch(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """:meth:`commit` of each sequence of a decode step."""
        for seq, given in tokens.items():
            self.commit(seq, given)

    # ---------------------------------------------------------------- with the capability of that name

    def fork(self, parent: str, child: str) -> bool:
        """``fork``: ``child`` begins with the computed tokens of ``parent``. ``False``: no room."""
        raise NotImplementedError

    def preempt(self, seq: str) -> bool:
        """``swap``: to host blocks; the copies go to ``self.kv.swap_out``. ``False``: no room."""
        raise NotImplementedError

    def resume(self, seq: str) -> bool:
        """``swap``: back to device blocks; the copies go to ``self.kv.swap_in``. ``False``: no room."""
        raise NotImplementedError

    def free_host_blocks(self) -> int:
        """``swap``: how many host blocks :meth:`preempt` could have now."""
        raise NotImplementedError

    def persist(self, seq: str) -> None:
        """``store``: store full blocks, with ``self.kv.put``. :meth:`admit` brings them back with ``self.kv.get``."""
        raise NotImplementedError

    def reset(self) -> bool:
        """``reset``: new weights. ``False``: refused, as some managers do while a sequence is there."""
        raise NotImplementedError

    def restart(self) -> None:
        """``restart``: begin anew with what the store has. No sequence is left, and the blocks' contents are lost."""
        raise NotImplementedError

    def write_rows(self, seq: str, start: int, rows: Sequence[int | None]) -> None:
        """``rows``: before a commit. ``rows[i] > 0`` is the row of position ``start + i``; ``None``: the pass made
        none."""
        raise NotImplementedError

    def read_rows(self, seq: str, start: int, stop: int) -> Sequence[int | None]:
        """``rows``: the rows of the positions ``[start, stop)``, in whichever tier; ``None`` for a missing one."""
        raise NotImplementedError

    def waits(self, seq: str) -> bool:  # noqa: ARG002 - a default
        """``background``: whether ``seq`` was admitted and still waits: it can only be freed."""
        return False

    def settle(self) -> Mapping[str, int]:
        """``background``: finish one piece of work. Returns the sequences that stopped waiting, with how many of their
        first tokens need no computing now."""
        raise NotImplementedError

    # ---------------------------------------------------------------- more to look at, if you can

    def ref_counts(self) -> Mapping[int, int] | None:
        """How many sequences hold each device block; blocks without a holder may be left out."""
        return None

    def free_ids(self) -> Sequence[int] | None:
        """The device blocks without a holder, cached ones included."""
        return None

    def check(self) -> None:
        """The manager's own consistency check; may raise any exception."""

    def close(self) -> None:
        """The example has ended."""

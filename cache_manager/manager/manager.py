"""Allocation, prefix reuse, copy-on-write, preemption and storage for engines without a block manager of their own.

It decides which block serves which tokens; :class:`AuxBlocks` moves rows and KV together, so that both arrive or
neither. Its methods belong to one thread, the scheduler's; rows may be read from another (:meth:`AuxBlocks.read`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache_manager.aux_blocks import AuxBlocks
from cache_manager.checks import integers
from cache_manager.errors import BlockBusyError, InvalidInputError, TransferProcessError
from cache_manager.keys import BlockKey, Tokens
from cache_manager.manager.growth import not_moved
from cache_manager.manager.sequences import Extra, Ints, Phase, SequenceKeys, digests
from cache_manager.manager.storing import Admission, StoredSequences
from cache_manager.rows import MISSING_BYTE, Rows


@dataclass(frozen=True, slots=True)
class ManagerCounters:
    """What happened since the start; every number only grows."""

    sequences: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    restored_tokens: int = 0
    persisted_blocks: int = 0
    evicted_blocks: int = 0
    preemptions: int = 0
    swapped_out_tokens: int = 0
    swapped_in_tokens: int = 0
    cow_blocks: int = 0
    cow_tokens: int = 0
    hits_cut_for_missing_rows: int = 0
    store_failures: int = 0
    errands_refused: int = 0
    errands_cut: int = 0
    restores_abandoned: int = 0
    moves_failed: int = 0


class BlockManager(StoredSequences):
    """Blocks for sequences, over ``aux.device_blocks`` on the device and ``aux.host_blocks`` to swap to.

    A sequence has a name, its owner, for the calls that concern it alone, and a number, :meth:`sequence`, for the calls
    of a decode step, which take those of many (``..._batch``). There are at most ``sequences_max``; no room for one
    more is no room.

    With the policy ``gate`` of ``aux`` a cached block counts as a hit only if its rows are complete too; with ``mask``
    the KV decides, and missing rows are reported when they are read. ``caching=False`` turns off prefix reuse and the
    store. A move that fails with :class:`TransferProcessError` counts as one for which there is no room now.
    """

    def __init__(self, aux: AuxBlocks, *, caching: bool = True, sequences_max: int = 4096) -> None:
        super().__init__(aux, caching=caching, sequences_max=sequences_max)
        self._tokens_max = aux.device_blocks * aux.block_tokens
        self._keys = aux.keys  # whose blocks the pool finds

    # ---------------------------------------------------------------- looking

    @property
    def counters(self) -> ManagerCounters:
        return ManagerCounters(**self._counts)

    @property
    def free_device_blocks(self) -> int:
        """Blocks that a sequence could get now: free ones and cached ones that nobody holds."""
        return self._pool.device_room

    @property
    def free_host_blocks(self) -> int:
        return self._pool.host.room

    @property
    def owners(self) -> frozenset[str]:
        return frozenset(self._sequences.by_owner)

    def sequence(self, owner: str) -> int:
        """The sequence's number, for the calls of a decode step, until it is freed."""
        return self._sequences.row(owner)

    def table(self, owner: str) -> list[int]:
        """The sequence's blocks, in token order, in the tier it is in."""
        found: list[int] = self._sequences.table(self._sequences.row(owner)).tolist()
        return found

    def computed(self, owner: str) -> int:
        """How many of the sequence's tokens have KV."""
        return int(self._sequences.computed[self._sequences.row(owner)])

    def is_swapped(self, owner: str) -> bool:
        return self._sequences.tier(self._sequences.row(owner)) == "host"

    def keys(self, owner: str, tokens: Tokens) -> list[BlockKey]:
        """The keys of the sequence's blocks with ``tokens`` in them, the partial last one too.

        They are of the namespace that the sequence began in: after a reset nothing is found under them.
        """
        record = self._sequences.record(self._sequences.row(owner))
        return record.of(integers(tokens, "tokens", "a flat sequence of integers"))

    def read(self, name: str, owner: str, start: int, stop: int) -> Rows:
        """Rows of the tokens ``[start, stop)`` from whichever tier it is in; those not computed yet are missing."""
        sequences = self._sequences
        row = sequences.row(owner)
        computed, tier = int(sequences.computed[row]), sequences.tier(row)
        rows = self.aux.read(name, sequences.table(row), start, stop, owner=owner, tier=tier)
        if stop > computed:  # bytes of another owner's, or of tokens that were taken back
            beyond = max(0, computed - start)
            rows.valid[beyond:] = False
            rows.values[beyond:].view(np.uint8)[...] = MISSING_BYTE
        return rows

    # ---------------------------------------------------------------- a sequence's life

    def allocate(
        self, owner: str, tokens: Tokens, *, salt: bytes = b"", extra: Extra = b"", restore: bool = True
    ) -> Admission | None:
        """:meth:`begin_allocate`, waiting for the store: the admission is final."""
        return self.begin_allocate(owner, tokens, salt=salt, extra=extra, restore=restore, queued=False)

    def begin_allocate(
        self,
        owner: str,
        tokens: Tokens,
        *,
        salt: bytes = b"",
        extra: Extra = b"",
        restore: bool = True,
        queued: bool = True,
    ) -> Admission | None:
        """Blocks for a new sequence of ``tokens``; ``None`` when there is no room now, and then nothing has changed.

        The longest run of cached full blocks is shared, what the store has after it is restored, the rest is fresh. At
        least one token is left to compute. Content is found only by requests of the same ``salt`` (a tenant, an
        adapter) and with the same ``extra``: the digest of an image, say, of the prompt or by index of the block that
        it begins to matter in. The store is never waited for: while the admission is pending, the sequence can be
        freed, and nothing else be done with it; without ``queued`` it is final. A store that fails, or that has too
        much to do already, counts as one that has nothing, and so does any with ``restore=False``.
        """
        self._sequences.check_new(owner)
        total = len(tokens)
        if not 1 <= total <= self._tokens_max:
            raise InvalidInputError("tokens", f"1 to {self._tokens_max} tokens, all that its blocks hold", total)
        base = self.aux.keys
        if base is not self._keys:  # a reset around the manager
            self._forget()
        record = SequenceKeys(owner, base, base.salted(salt), digests(extra))
        ids = integers(tokens, "tokens", "a flat sequence of integers")
        if self._sequences.full:
            return None
        full = (total - 1) // self._tokens * self._tokens  # at least one token is left to compute
        keys = record.of(ids[:full]) if self._caching else []
        shared = self._pool.match(keys)
        fresh = self._pool.take([owner] * (-(-total // self._tokens) - len(shared)), whole=True, without=shared)
        if not fresh:
            return None
        try:
            self._pool.share(shared, owner)
        except BaseException:
            self.aux.free(owner, fresh)
            self._pool.let_go(np.asarray(fresh))
            raise
        row = self._sequences.add(record, [*shared, *fresh], len(shared) * self._tokens)
        record.keys = keys[: len(shared)]
        if len(keys) > len(shared):
            record.asked = keys, ids.astype("<i8", copy=False).tobytes()
        try:
            wanted = dict(zip(keys[len(shared) :] if restore else [], fresh, strict=False))
            restored = self._restore(row, wanted, queued=queued)
        except BaseException:
            self.free(owner)
            raise
        self._counts["sequences"] += 1
        self._counts["prefix_queried_tokens"] += total
        self._counts["prefix_hit_tokens"] += len(shared) * self._tokens
        pending = record.errand is not None
        return Admission((*shared, *fresh), len(shared) * self._tokens + restored, restored, pending=pending)

    def fork(self, parent: str, child: str) -> None:
        """The child shares every block of the parent, the partial last one too, until one of them appends.

        Raises ``BlockBusyError`` while a step that writes them is in flight, and when there are ``sequences_max``.
        """
        sequences, row = self._sequences, self._sequences.ready(parent)
        sequences.check_new(child)
        blocks = sequences.table(row)[: -(-int(sequences.computed[row]) // self._tokens)].tolist()
        self._check_no_step(parent, blocks, "fork")
        record, computed = sequences.record(row), int(sequences.computed[row])
        twin = SequenceKeys(child, record.base, record.chain, dict(record.extra), list(record.keys))
        new = self._add_beside(twin, blocks, computed, Phase.READY)
        sequences.filling[new] = sequences.filling[row]  # arrays that have grown by now

    def hold(self, owner: str, holder: str, first: int = 0) -> None:
        """Keep the sequence's blocks from index ``first`` on from being given away until ``free(holder)``.

        The holder reads nothing: unlike a fork it does not keep the sequence from writing its blocks in place. For
        blocks that something outside writes to and that must not get another owner before it has stopped.
        """
        blocks = self._sequences.table(self._sequences.ready(owner))[first:].tolist()
        self._sequences.check_new(holder)
        self._add_beside(SequenceKeys(holder, self.aux.keys, self.aux.keys), blocks, 0, Phase.HOLDER)

    def _add_beside(self, sequence: SequenceKeys, blocks: list[int], computed: int, phase: Phase) -> int:
        """The number of a new sequence that has ``blocks`` of another's too; what fails leaves nothing of it."""
        sequences = self._sequences
        if sequences.full:
            raise BlockBusyError("sequences", f"fewer than {sequences.rows_max}", sequences.rows_max)
        row = sequences.add(sequence, blocks, computed, phase)
        try:
            self._pool.share(blocks, sequence.owner, keeps=phase is Phase.HOLDER)
        except BaseException:
            sequences.remove(sequence.owner)
            self.aux.free(sequence.owner)
            raise
        return row

    def free(self, owner: str) -> None:
        """End the sequence; idempotent. Blocks that can be found by key stay cached until they are evicted.

        Blocks that something else still keeps, such as the store, come back when that has ended.
        """
        sequences = self._sequences
        row = sequences.by_owner.get(owner)
        if row is None:
            return
        blocks, tier, keeps = sequences.table(row).copy(), sequences.tier(row), sequences.phase[row] == Phase.HOLDER
        errand = sequences.record(row).errand
        sequences.remove(owner)
        self.aux.free(owner)
        if tier == "host":
            self._pool.host.let_go(blocks.tolist())
        else:
            self._pool.let_go(blocks, keeps=bool(keeps))
        self._abandon(owner, errand)

    def _check_no_step(self, owner: str, blocks: Sequence[int], event: str) -> None:
        if self.aux.has_step(blocks):
            raise BlockBusyError(f"owner {owner!r}", f"no step in flight to {event} it", "a step")

    # ---------------------------------------------------------------- swapping

    def preempt(self, owner: str) -> bool:
        """Swap the sequence out to host blocks; ``False`` when they do not suffice, and then nothing has changed.

        Raises ``BlockBusyError`` while a step that writes any of its blocks is in flight.
        """
        sequences, row = self._sequences, self._sequences.ready(owner)
        self._check_no_step(owner, self.table(owner), "preempt")
        blocks, computed = sequences.table(row).copy(), int(sequences.computed[row])
        written = -(-computed // self._tokens)
        if not self.aux.host_blocks or written > self._pool.host.room:
            return False
        targets = self._pool.host.next(written)  # they stay free if the move fails
        try:
            self.aux.swap_out(np.column_stack((blocks[:written], np.asarray(targets, np.int64))), owner)
        except TransferProcessError as error:
            not_moved(self._counts, error)
            return False
        self._pool.host.remove(targets)
        sequences.set_blocks(row, targets)
        sequences.set_phase(row, Phase.SWAPPED)
        if written < blocks.size:
            self.aux.free(owner, blocks[written:])
        self._pool.let_go(blocks)
        self._counts["preemptions"] += 1
        self._counts["swapped_out_tokens"] += computed
        return True

    def resume(self, owner: str) -> bool:
        """Swap the sequence back in; ``False`` when device blocks do not suffice, and then nothing has changed.

        Free blocks are filled before cached ones, so that a mover that fails overwrites nothing that could be found;
        where none is free, one cached block is tried first and lost if that fails.
        """
        sequences, row = self._sequences, self._sequences.row(owner)
        if sequences.phase[row] != Phase.SWAPPED:
            return True
        sources = sequences.table(row).copy()
        targets, free = self._pool.choose(sources.size)
        if len(targets) < sources.size:
            return False
        try:
            self._swap_in(owner, np.column_stack((sources, np.asarray(targets, np.int64))), free)
        except TransferProcessError as error:
            not_moved(self._counts, error)
            return False
        self._pool.take_out(targets)
        sequences.set_blocks(row, targets)
        sequences.set_phase(row, Phase.READY)
        self._pool.host.let_go(sources.tolist())
        for key, block in zip(sequences.record(row).keys, targets, strict=False):  # none of one from before a reset
            self._pool.publish(key, block)
        self._counts["swapped_in_tokens"] += int(sequences.computed[row])
        return True

    def _swap_in(self, owner: str, pairs: Ints, free: int) -> None:
        """Swap ``pairs`` in, first those to the ``free`` blocks, or to one cached block where there are none.

        If the mover fails, cached blocks that it has not overwritten stay cached.
        """
        first, cached = free or 1, pairs[free:, 1]
        lives = self.aux.generations(cached)
        try:
            with self.aux.begin_swap_in(pairs[:first], owner):
                if first < len(pairs):
                    self.aux.swap_in(pairs[first:], owner)
        except BaseException:
            lost = cached[self.aux.generations(cached) != lives]
            self._pool.forget_cached(lost.tolist())
            raise

    # ---------------------------------------------------------------- resetting

    def reset(self, *, weights_version: int) -> None:
        """A weight update: nothing from before is found or read again. Sequences keep their blocks, without rows."""
        self.aux.reset(weights_version=weights_version)
        self._forget()

    def _forget(self) -> None:
        self._keys = self.aux.keys
        self._pool.forget()
        for record in self._sequences:
            record.keys.clear()

    def assert_consistent(self) -> None:
        """Raise ``AssertionError`` unless every block is free, cached or held, once, in each tier."""
        self.aux.assert_consistent()
        self._pool.assert_consistent(self._sequences.of_tier("device"), self._sequences.of_tier("host"))

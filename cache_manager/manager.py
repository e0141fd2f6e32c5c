"""A complete block manager for engines that have none: allocation, prefix reuse, copy-on-write, preemption, storage.

It decides which block serves which tokens and hands the same pairs to :class:`AuxBlocks` (rows) and to the engine's own
:class:`BlockMover` (KV), so that both arrive or neither. Its methods belong to one thread, the scheduler's; rows may be
read from another (:meth:`AuxBlocks.read`).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cache_manager.archive import Companion, PersistJob
from cache_manager.aux_blocks import AuxBlocks, Rows
from cache_manager.block_pool import BlockPool
from cache_manager.checks import integers
from cache_manager.errands import Errand, Errands, check_owner
from cache_manager.errors import (
    BlockBusyError,
    BlockStateError,
    ConfigError,
    InvalidInputError,
    StorageError,
    TransferProcessError,
)
from cache_manager.keys import BlockKey, Tokens
from cache_manager.manager_counters import ManagerCounters, ManagerCounts
from cache_manager.ports import BlockMover, HitPolicy
from cache_manager.sequences import Sequence, Sequences

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admission:
    """What a new sequence got: its blocks, and how many of its first tokens need no forward pass.

    ``cached_tokens`` counts those whose KV was on the device or came from the store, ``restored_tokens`` the latter.
    While it is ``pending`` the store is being asked for more, and :meth:`BlockManager.poll` will answer a final one.
    """

    blocks: tuple[int, ...]
    cached_tokens: int
    restored_tokens: int
    pending: bool = False


class BlockManager:
    """Blocks for sequences, over ``aux.device_blocks`` on the device and ``aux.host_blocks`` to swap to.

    With ``policy="gate"`` a cached block counts as a hit only if its rows are complete too; with ``"mask"`` the KV
    decides and missing rows are reported when they are read. ``caching=False`` turns off prefix reuse and the store.
    A move that fails with :class:`TransferProcessError` counts as one for which there is no room now.
    """

    def __init__(self, aux: AuxBlocks, mover: BlockMover, *, caching: bool = True, policy: HitPolicy = "gate") -> None:
        if policy not in ("gate", "mask"):
            raise ConfigError("policy", "'gate' or 'mask'", repr(policy))
        self.aux = aux
        self._mover = mover
        self._caching = caching
        self._counts = ManagerCounts()
        self._pool = BlockPool(aux, policy, self._counts)
        self._errands = Errands(aux, Companion(mover, policy), self._counts, pinned_max=aux.device_blocks // 2)
        self._settled: dict[str, Admission] = {}
        self._tokens = aux.block_tokens
        self._sequences = Sequences()

    # ---------------------------------------------------------------- looking

    @property
    def counters(self) -> ManagerCounters:
        return self._counts.snapshot()

    @property
    def free_device_blocks(self) -> int:
        """Blocks that a sequence could get now: free ones and cached ones that nobody holds."""
        return self._pool.device_room

    @property
    def free_host_blocks(self) -> int:
        return self._pool.host_room

    @property
    def owners(self) -> frozenset[str]:
        return self._sequences.owners

    def table(self, owner: str) -> list[int]:
        """The sequence's blocks, in token order, in the tier it is in."""
        return list(self._sequences[owner].blocks)

    def computed(self, owner: str) -> int:
        """How many of the sequence's tokens have KV."""
        return self._sequences[owner].computed

    def is_swapped(self, owner: str) -> bool:
        return self._sequences[owner].tier == "host"

    def keys(self, owner: str, tokens: Tokens) -> list[BlockKey]:
        """The keys of the sequence's blocks with ``tokens`` in them, the partial last one too.

        They are of the namespace that the sequence began in: after a reset nothing is found under them.
        """
        chain = self._sequences[owner].chain
        keys = chain.keys(tokens)
        if tail := len(tokens) % self._tokens:
            keys.append(chain.key(keys[-1] if keys else None, tokens[-tail:]))
        return keys

    def slots(self, owner: str, start: int, stop: int) -> NDArray[np.int64]:
        """Device slots of the tokens ``[start, stop)``."""
        sequence = self._sequences.on_device(owner)
        if not 0 <= start <= stop <= len(sequence.blocks) * self._tokens:
            raise InvalidInputError(
                "start, stop", f"0 <= start <= stop <= {len(sequence.blocks) * self._tokens}", f"{start}, {stop}"
            )
        first, positions = start // self._tokens, np.arange(start, stop)
        for block in sequence.blocks[max(first, sequence.computed // self._tokens) : -(-stop // self._tokens)]:
            if stop > sequence.computed and self._others_use(block):
                raise BlockStateError(
                    f"device block {block}", "append() before it is written", "one that others use too"
                )
        blocks = np.asarray(sequence.blocks[first : -(-stop // self._tokens)], dtype=np.int64)
        slots: NDArray[np.int64] = blocks[positions // self._tokens - first] * self._tokens + positions % self._tokens
        return slots

    def read(self, name: str, owner: str, start: int, stop: int) -> Rows:
        """Rows of the tokens ``[start, stop)`` from whichever tier it is in; those not computed yet are missing."""
        sequence = self._sequences[owner]
        rows = self.aux.read(name, sequence.blocks, start, stop, owner=owner, tier=sequence.tier)
        if stop > sequence.computed:  # bytes of another owner's, or of tokens that were taken back
            beyond = max(0, sequence.computed - start)
            rows.valid[beyond:] = False
            rows.ids[beyond:].view(np.uint8)[...] = 0xFF
        return rows

    # ---------------------------------------------------------------- a sequence's life

    def allocate(self, owner: str, tokens: Tokens) -> Admission | None:
        """:meth:`begin_allocate`, waiting for the store: the admission is final."""
        return self._allocate(owner, tokens, queued=False)

    def begin_allocate(self, owner: str, tokens: Tokens, *, restore: bool = True) -> Admission | None:
        """Blocks for a new sequence of ``tokens``; ``None`` when there is no room now, and then nothing has changed.

        The longest run of cached full blocks is shared, what the store has after it is restored, the rest is fresh. At
        least one token is left to compute. The store is never waited for: while the admission is pending, the sequence
        can be freed, and nothing else be done with it. A store that fails, or that has too much to do already, counts
        as one that has nothing, and so does any with ``restore=False``.
        """
        return self._allocate(owner, tokens, queued=True, restore=restore)

    def _allocate(self, owner: str, tokens: Tokens, *, queued: bool, restore: bool = True) -> Admission | None:
        check_owner(owner)
        self._sequences.check_new(owner)
        total = len(tokens)
        if not 1 <= total <= self.aux.device_blocks * self._tokens:
            room = self.aux.device_blocks * self._tokens
            raise InvalidInputError("tokens", f"1 to {room} tokens, all that the device blocks hold", total)
        chain = self.aux.keys
        tokens = integers(tokens, "tokens", "a flat sequence of integers")
        keys = chain.keys(tokens[: (total - 1) // self._tokens * self._tokens]) if self._caching else []
        shared = self._pool.match(keys)
        fresh_needed = -(-total // self._tokens) - len(shared)
        if fresh_needed > self.free_device_blocks - len(self.aux.unheld(shared)):
            return None
        self._pool.share(shared, owner)
        sequence = Sequence(list(shared), len(shared) * self._tokens, chain, keys[: len(shared)])
        self._sequences.add(owner, sequence)
        try:
            fresh = self._pool.take(fresh_needed, owner)
            sequence.blocks += fresh
            wanted = keys[len(shared) :] if restore else []
            restored = self._restore(owner, wanted, fresh, queued=queued)
        except BaseException:
            self.free(owner)
            raise
        self._counts.count("sequences")
        self._counts.count("prefix_queried_tokens", total)
        self._counts.count("prefix_hit_tokens", len(shared) * self._tokens)
        return Admission(tuple(sequence.blocks), sequence.computed, restored, pending=sequence.errand is not None)

    def append(self, owner: str, total_tokens: int) -> bool:
        """Make room so that the sequence can hold ``total_tokens``; ``False`` when there is none, nothing changed.

        A block that would be written and that another owner holds too is copied first (copy-on-write).
        """
        sequence = self._sequences.on_device(owner)
        blocks, first = sequence.blocks, sequence.computed // self._tokens
        wanted = -(-total_tokens // self._tokens)
        written = range(first, min(wanted, len(blocks)))
        shared = [i for i in written if self._others_use(blocks[i])]
        more = max(0, wanted - len(blocks))
        if not shared and not more:
            return True
        if len(shared) + more > self.free_device_blocks:
            return False
        fresh = self._pool.take(len(shared) + more, owner)
        copies = fresh[: len(shared)]
        if shared:
            pairs = [(blocks[i], copy) for i, copy in zip(shared, copies, strict=True)]
            rows = [min(self._tokens, max(0, sequence.computed - i * self._tokens)) for i in shared]
            try:
                with self._pool.giving_back(owner, fresh), self.aux.begin_copy(pairs, rows):
                    self._mover.copy(pairs)
            except TransferProcessError as error:
                return self._not_moved(error)
            self._counts.count("cow_blocks", len(shared))
            for i, copy in zip(shared, copies, strict=True):
                self._counts.count("cow_tokens", min(self._tokens, sequence.computed - i * self._tokens))
                left, blocks[i] = blocks[i], copy
                self.aux.free(owner, [left])
                self._pool.retire([left], "device")
        blocks.extend(fresh[len(shared) :])
        return True

    def publish(self, owner: str, tokens: Tokens) -> None:
        """The KV and the committed rows of ``tokens``, all that the sequence has computed so far, are in place.

        Full blocks among them can be found by later sequences from here on.
        """
        sequence = self._sequences.on_device(owner)
        if not sequence.computed <= len(tokens) <= len(sequence.blocks) * self._tokens:
            room = len(sequence.blocks) * self._tokens
            raise InvalidInputError("tokens", f"{sequence.computed} to {room} tokens", len(tokens))
        found = []
        if self._caching and sequence.chain is self.aux.keys:
            last = sequence.keys[-1] if sequence.keys else None
            for i in range(len(sequence.keys), len(tokens) // self._tokens):
                last = sequence.chain.key(last, tokens[i * self._tokens : (i + 1) * self._tokens])
                found.append((last, sequence.blocks[i]))
        sequence.computed = len(tokens)
        for key, block in found:
            sequence.keys.append(key)
            self._pool.publish(key, block)

    def fork(self, parent: str, child: str) -> None:
        """The child shares every block of the parent, the partial last one too, until one of them appends."""
        check_owner(child)
        sequence = self._sequences.on_device(parent)
        self._sequences.check_new(child)
        blocks = sequence.blocks[: -(-sequence.computed // self._tokens)]
        if self.aux.has_step(blocks):
            raise BlockBusyError(f"owner {parent!r}", "no step in flight to fork it", "a step")
        self.aux.share(blocks, child)
        self._sequences.add(child, Sequence(blocks, sequence.computed, sequence.chain, list(sequence.keys)))

    def hold(self, owner: str, holder: str, first: int = 0) -> None:
        """Keep the sequence's blocks from index ``first`` on from being given away until ``free(holder)``.

        The holder reads nothing: unlike a fork it does not keep the sequence from writing its blocks in place. For
        blocks that something outside writes to and that must not get another owner before it has stopped.
        """
        blocks = self._sequences.on_device(owner).blocks[first:]
        self._sequences.check_new(holder)
        self.aux.share(blocks, holder)
        self._sequences.add(holder, Sequence(blocks, 0, self.aux.keys, reads=False))

    def free(self, owner: str) -> None:
        """End the sequence; idempotent. Blocks that can be found by key stay cached until they are evicted.

        Blocks that the store is still reading or filling come back when it has done that, in a later :meth:`poll`.
        """
        sequence = self._sequences.remove(owner)
        if sequence is None:
            return
        self._settled.pop(owner, None)
        self.aux.free(owner)
        self._pool.retire(sequence.blocks, sequence.tier)
        if (errand := sequence.errand) is not None:
            sequence.errand = None
            self._counts.count("restores_abandoned")
            errand.job.cancel()
            if errand.over:
                self._end(errand)

    # ---------------------------------------------------------------- swapping

    def preempt(self, owner: str) -> bool:
        """Swap the sequence out to host blocks; ``False`` when they do not suffice, and then nothing has changed."""
        sequence = self._sequences.on_device(owner)
        full = -(-sequence.computed // self._tokens)
        if full > self._pool.host_room:
            return False
        pairs = list(zip(sequence.blocks[:full], self._pool.next_host(full), strict=True))
        try:
            with self.aux.begin_swap_out(pairs, owner):
                self._mover.swap_out(pairs)
        except TransferProcessError as error:
            return self._not_moved(error)
        self._pool.take_host(full)
        left, sequence.blocks = sequence.blocks, [target for _, target in pairs]
        sequence.tier = "host"
        self.aux.free(owner, left[full:])
        self._pool.retire(left, "device")
        self._counts.count("preemptions")
        self._counts.count("swapped_out_tokens", sequence.computed)
        return True

    def resume(self, owner: str) -> bool:
        """Swap the sequence back in; ``False`` when device blocks do not suffice, and then nothing has changed."""
        sequence = self._sequences[owner]
        if sequence.tier == "device":
            return True
        if len(sequence.blocks) > self.free_device_blocks:
            return False
        targets = self._pool.take(len(sequence.blocks), None)
        pairs = list(zip(sequence.blocks, targets, strict=True))
        try:
            with self._pool.giving_back(None, targets), self.aux.begin_swap_in(pairs, owner):
                self._mover.swap_in(pairs)
        except TransferProcessError as error:
            return self._not_moved(error)
        left, sequence.blocks, sequence.tier = sequence.blocks, targets, "device"
        self._pool.retire(left, "host")
        for key, block in zip(sequence.keys, targets, strict=False):
            self._pool.index.insert(key, block)
        self._counts.count("swapped_in_tokens", sequence.computed)
        return True

    def _not_moved(self, error: TransferProcessError) -> Literal[False]:
        """A process that moves blocks for this one is lost: there is no room for now, and nothing has changed."""
        self._counts.count("moves_failed")
        logger.warning("blocks were not moved, going on without that: %s", str(error))
        return False

    # ---------------------------------------------------------------- storing

    def persist(self, owner: str) -> int:
        """:meth:`begin_persist`, waiting for the store; how many blocks are stored now. A failing store stores none."""
        errand = self._persist(owner, queued=False)
        if errand is None:
            return 0
        self._end(errand)
        return sum(errand.job.done().values())

    def begin_persist(self, owner: str) -> bool:
        """Begin to store the sequence's full blocks, rows and KV; whether there was anything to do, and room for it.

        The store is never waited for, and the sequence may go on or end meanwhile: the blocks are kept for the store
        until :meth:`poll` has found that it is done.
        """
        return self._persist(owner, queued=True) is not None

    def poll(self) -> dict[str, Admission]:
        """Take in what the store has done; the final admissions of sequences that were pending. Waits for nothing."""
        for errand in self._errands.over():
            self._end(errand)
        settled, self._settled = self._settled, {}
        return settled

    @property
    def errands(self) -> int:
        """How many restores and persists have begun and were not found done by :meth:`poll`."""
        return len(self._errands)

    def drain(self, timeout_s: float) -> bool:
        """Wait until the store has done everything; ``False`` when ``timeout_s`` was over before."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            for errand in self._errands.over():
                self._end(errand)
            left_s = give_up_s - time.monotonic()
            if not len(self._errands) or left_s <= 0:
                return not len(self._errands)
            self.aux.wait(left_s)

    def _persist(self, owner: str, *, queued: bool) -> Errand | None:
        sequence = self._sequences.on_device(owner)
        if not self._caching or not self.aux.has_store or sequence.chain is not self.aux.keys or not sequence.keys:
            return None
        wanted = dict(zip(sequence.keys, sequence.blocks, strict=False))
        return self._errands.persist(owner, wanted, queued=queued)

    def _restore(self, owner: str, keys: list[BlockKey], blocks: list[int], *, queued: bool) -> int:
        """Fill ``blocks`` with the longest run of ``keys`` that the store has; how many tokens that are by now."""
        if not keys or not self.aux.has_store:
            return 0
        errand = self._errands.restore(owner, dict(zip(keys, blocks, strict=False)), queued=queued)
        if errand is None:
            return 0
        self._sequences[owner].errand = errand
        if queued:
            return 0
        self._end(errand)
        return self._settled.pop(owner).restored_tokens

    def _end(self, errand: Errand) -> None:
        """The store is done: its blocks are let go, and a sequence that waited for them can go on."""
        self._errands.end(errand)
        sequence = self._sequences.get(errand.owner)
        if sequence is not None and sequence.errand is errand:
            sequence.errand = None
            # After a reset what landed before it is gone, and what its sequence has is found by no key any more.
            run = errand.run() if sequence.chain is self.aux.keys else []
            for key, block in run:
                sequence.keys.append(key)
                self._pool.publish(key, block)
            restored = len(run) * self._tokens
            sequence.computed += restored
            self._counts.count("restored_tokens", restored)
            self._settled[errand.owner] = Admission(tuple(sequence.blocks), sequence.computed, restored)
        elif isinstance(errand.job, PersistJob):
            self._counts.count("persisted_blocks", sum(errand.job.done().values()))
        self._pool.retire(list(errand.wanted.values()), "device")
        failure = errand.job.failure
        if isinstance(failure, StorageError):
            self._counts.count("store_failures")
            # As text: a log record that keeps the exception keeps its frames, and with them views of the rows.
            logger.warning("store failed, going on without it: %s", str(failure))
        elif failure is not None:
            raise failure

    # ---------------------------------------------------------------- resetting

    def reset(self, *, weights_version: int) -> None:
        """A weight update: nothing from before is found or read again. Sequences keep their blocks, without rows."""
        self.aux.reset(weights_version=weights_version)
        self._pool.forget()
        for sequence in self._sequences:
            sequence.keys.clear()

    def assert_consistent(self) -> None:
        """Raise ``AssertionError`` unless every block is free, cached or held, once, in each tier."""
        self.aux.assert_consistent()
        held = set(self._sequences.blocks("device")) | self._errands.blocks
        self._pool.assert_consistent(held, self._sequences.blocks("host"))

    # ---------------------------------------------------------------- inside

    def _others_use(self, block: int) -> bool:
        """Whether another sequence may read the block, now or when it finds it by key: then it is not written."""
        if self._pool.index.key(block) is not None:
            return True
        if not self._sequences.has_holders or not self.aux.shared(block):
            return self.aux.shared(block)
        return self._sequences.readers(block) > 1


__all__ = ["Admission", "BlockManager", "ManagerCounters"]

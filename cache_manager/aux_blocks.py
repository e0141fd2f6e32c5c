"""The embedder's surface: rows that follow KV blocks through one process.

Lock contract. One lock guards states, generations, leases and validity. It is held for bookkeeping and for placing the
rows of a step, never while a store is read or written, nor while rows are gathered or moved: those go on beside the
scheduler, protected by the blocks' states and generations. Every method may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache_manager.archive import Archive, Companion, PersistJob, RestoreJob
from cache_manager.carrier import Transport, local_transport
from cache_manager.checks import owner_name
from cache_manager.errors import BlockStateError, ConfigError, SpecError
from cache_manager.install import export_records, install_record
from cache_manager.jobs import Job, JobLimits, JobRunner
from cache_manager.keys import BlockKey, KeyChain, Namespace
from cache_manager.ledger import AuxCounters, Ledger
from cache_manager.lifecycle import Blocks, State
from cache_manager.move import Followers, Move, Pairs
from cache_manager.ports import Lookup, Region, StorageBackend
from cache_manager.record import Buffer, OfferedRecord, RecordHeader
from cache_manager.rows import Rows, read_rows
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.step import SlotTable, Step
from cache_manager.storage.records import RecordCounters
from cache_manager.tiers import Memory, TierName, Tiers


class AuxBlocks:
    """Auxiliary rows for ``device_blocks`` KV blocks on the device and ``host_blocks`` on the CPU.

    ``required`` names the specs whose rows a block must have in full to be persisted or counted as complete (all, if
    not given). With ``memory="shared"`` the rows lie in SharedMemory regions that other processes can attach. At most
    ``steps_max`` steps may be in flight.

    The thread that asks moves the bytes, to and from ``store``, unless somebody else does: ``transport``, called once
    with the device and the host region, answers what copies the rows of moves, and stores and restores in
    place of ``store``. Store and transport stay the caller's to close. ``jobs`` bounds what the store is
    asked to do in the background.

    Methods that take blocks succeed for all of them or raise and change nothing.
    """

    def __init__(
        self,
        specs: Sequence[AuxBlockDataSpec],
        *,
        device_blocks: int,
        namespace: Namespace,
        host_blocks: int = 0,
        store: StorageBackend | None = None,
        transport: Callable[[Region, Region | None], Transport] | None = None,
        required: Sequence[str] | None = None,
        memory: Memory = "heap",
        steps_max: int = 64,
        jobs: JobLimits | None = None,
    ) -> None:
        if isinstance(specs, AuxBlockDataSpec):
            raise SpecError("specs", "a sequence of AuxBlockDataSpec", "a single one")
        self.layout = RecordLayout(tuple(specs))
        if store is not None and transport is not None:
            raise ConfigError("transport", "a store or a transport", "both")
        names = [s.name for s in self.layout.specs] if required is None else list(required)
        if not names:
            raise ConfigError("required", "at least one spec's name", "none")
        self._required = tuple(self.layout.index(name) for name in names)
        self._ledger = Ledger(KeyChain(namespace, self.layout), steps_max)
        self._lock = self._ledger.lock
        self._runner = JobRunner(jobs or JobLimits())
        self._tiers = Tiers(self.layout, namespace, device_blocks=device_blocks, host_blocks=host_blocks, memory=memory)
        device, host = self._tiers.device, self._tiers.host
        try:
            if transport is None:
                moved_by = local_transport(device.region, self.layout, store)
            else:
                moved_by = transport(device.region, host.region if host else None)
        except BaseException:
            self._tiers.close()
            raise
        self._copier = moved_by.copier
        self._archive = None
        if moved_by.carrier is not None:
            self._archive = Archive(moved_by.carrier, device, self._ledger, self._required, self._runner)

    # ---------------------------------------------------------------- what it is

    @property
    def namespace(self) -> Namespace:
        return self._ledger.keys.namespace

    @property
    def keys(self) -> KeyChain:
        """Derives block keys in the current namespace; take it anew after :meth:`reset`."""
        return self._ledger.keys

    @property
    def block_tokens(self) -> int:
        return self.layout.block_tokens

    @property
    def device_blocks(self) -> int:
        return self._tiers.device.life.blocks

    @property
    def host_blocks(self) -> int:
        return host.life.blocks if (host := self._tiers.host) else 0

    @property
    def has_store(self) -> bool:
        return self._archive is not None

    @property
    def counters(self) -> AuxCounters:
        return self._ledger.snapshot()

    @property
    def store_counters(self) -> RecordCounters | None:
        """What the store has answered so far, corrupt records included; ``None`` without a store."""
        return self._archive.carrier.counters if self._archive else None

    @property
    def in_flight(self) -> int:
        """Steps, moves and jobs that have begun and not ended."""
        with self._lock:
            return len(self._ledger.steps) + self._ledger.moves + self._ledger.jobs

    def region(self, tier: TierName) -> Region:
        """The memory of a tier, for readers in other processes and for capture on the device."""
        return self._tiers.named(tier).region

    def blocks_in(self, state: State, tier: TierName = "device") -> int:
        """How many blocks of a tier are in ``state``."""
        with self._lock:
            return self._tiers.named(tier).life.count(state)

    def holds(self, owner: str, block: int, tier: TierName = "device") -> bool:
        with self._lock:
            return self._tiers.named(tier).life.leases.holds(owner, block)

    def shared(self, block: int, tier: TierName = "device") -> bool:
        """Whether more than one owner holds the block."""
        with self._lock:
            return self._tiers.named(tier).life.leases.count(block) > 1

    def has_step(self, blocks: Blocks) -> bool:
        """Whether a step in flight writes one of the device blocks."""
        with self._lock:
            return bool((self._tiers.device.pending[self._tiers.device.life.ids(blocks)] > 0).any())

    def unheld(self, blocks: Blocks, tier: TierName = "device") -> list[int]:
        """Those of ``blocks`` that nobody holds, in the order given."""
        with self._lock:
            chosen = self._tiers.named(tier)
            return [b for b in chosen.life.ids(blocks).tolist() if not chosen.life.leases.count(b)]

    def complete(self, blocks: Blocks, tier: TierName = "device") -> NDArray[np.bool_]:
        """Which blocks have every required row."""
        with self._lock:
            chosen = self._tiers.named(tier)
            return chosen.complete(chosen.life.ids(blocks), self._required)

    # ---------------------------------------------------------------- owning

    def allocate(self, blocks: Blocks, owner: str) -> None:
        """Give unheld device blocks to ``owner``: new generations, no readable row.

        Raises :class:`BlockStateError` when somebody holds one of them, ``BlockBusyError`` when one is in motion.
        """
        with self._lock:
            ids = self._tiers.device.life.ids(blocks)
            self._tiers.device.life.allocate(ids, owner_name(owner))
            self._tiers.device.begin_life(ids)

    def share(self, blocks: Blocks, owner: str) -> None:
        """Let a further owner hold device blocks whose rows it will use: a prefix hit or a fork."""
        with self._lock:
            self._tiers.device.life.share(self._tiers.device.life.ids(blocks), owner_name(owner))

    def free(self, owner: str, blocks: Blocks | None = None, tier: TierName | None = None) -> None:
        """End the owner's leases, all or those on ``blocks`` of ``tier``; idempotent.

        Blocks that nobody holds any more keep their rows until they are allocated again or evicted.
        """
        with self._lock:
            if blocks is not None:
                chosen = self._tiers.named(tier or "device")
                chosen.life.release(owner_name(owner), chosen.life.ids(blocks))
                return
            for each in self._tiers if tier is None else (self._tiers.named(tier),):
                each.life.release(owner_name(owner))

    def evict(self, blocks: Blocks, tier: TierName = "device") -> None:
        """Forget the rows of blocks that nobody holds."""
        with self._lock:
            chosen = self._tiers.named(tier)
            ids = chosen.life.ids(blocks)
            chosen.life.evict(ids)
            chosen.begin_life(ids)

    # ---------------------------------------------------------------- writing

    def begin_step(self, slots: NDArray[Any] | Sequence[int]) -> Step:
        """Begin a forward pass that writes rows at ``slots``: ``block * block_tokens + offset``; -1 is padding.

        Rows at these slots are unreadable until the step commits. Steps may overlap in time; of two that write one
        slot, the later one counts. Raises :class:`SlotError` for slots outside the pool or given twice,
        :class:`BlockStateError` for a block that nobody holds.
        """
        table = SlotTable(slots, self.device_blocks, self.block_tokens)
        return Step(self._tiers.device, self._ledger, table)

    def step(self, slots: NDArray[Any] | Sequence[int]) -> Step:
        """:meth:`begin_step` for a ``with`` statement: leaving commits, an exception commits nothing."""
        return self.begin_step(slots)

    # ---------------------------------------------------------------- moving

    def begin_swap_out(self, pairs: Pairs, owner: str | None = None) -> Move:
        """Copy the rows of device blocks to unheld host blocks; ``pairs`` are (device, host), one target a source.

        The leases of all owners, or only of ``owner``, follow when the move commits. A failed move changes nothing;
        its targets are then without rows.
        """
        follow = Followers.EVERYBODY if owner is None else owner_name(owner)
        device, host = self._tiers.device, self._tiers.named("host")
        counter, copier = "swapped_out_rows", self._copier
        return Move(device, host, self._ledger, pairs, leases_of=follow, counter=counter, copier=copier)

    def begin_swap_in(self, pairs: Pairs, owner: str | None = None) -> Move:
        """Copy the rows of host blocks to unheld device blocks; ``pairs`` are (host, device). See above."""
        follow = Followers.EVERYBODY if owner is None else owner_name(owner)
        host, device = self._tiers.named("host"), self._tiers.device
        counter, copier = "swapped_in_rows", self._copier
        return Move(host, device, self._ledger, pairs, leases_of=follow, counter=counter, copier=copier)

    def begin_copy(self, pairs: Pairs, rows: Sequence[int] | None = None) -> Move:
        """Copy the rows of device blocks to device blocks without rows; ``pairs`` are (source, target).

        Leases stay as they are: allocate the targets first. A partial block's rows are copied as far as they go, or as
        far as ``rows``, one count for each pair, says.
        """
        device, nobody = self._tiers.device, Followers.NOBODY
        counter, copier = "copied_rows", self._copier
        return Move(device, device, self._ledger, pairs, leases_of=nobody, counter=counter, copier=copier, rows=rows)

    def swap_out(self, pairs: Pairs, owner: str | None = None) -> None:
        """:meth:`begin_swap_out` and commit."""
        with self.begin_swap_out(pairs, owner):
            pass

    def swap_in(self, pairs: Pairs, owner: str | None = None) -> None:
        """:meth:`begin_swap_in` and commit."""
        with self.begin_swap_in(pairs, owner):
            pass

    def copy(self, pairs: Pairs, rows: Sequence[int] | None = None) -> None:
        """:meth:`begin_copy` and commit."""
        with self.begin_copy(pairs, rows):
            pass

    # ---------------------------------------------------------------- storing

    def persist(self, blocks: Mapping[BlockKey, int]) -> dict[BlockKey, bool]:
        """:meth:`begin_persist`, done by the calling thread. Raises ``StorageError`` when the store fails."""
        job = self.begin_persist(blocks, queued=False)
        assert job is not None, "nothing but the queue is ever full"
        return job.result()

    def restore(self, blocks: Mapping[BlockKey, int]) -> dict[BlockKey, bool]:
        """:meth:`begin_restore`, done by the calling thread. Raises ``StorageError`` when the store fails."""
        job = self.begin_restore(blocks, queued=False)
        assert job is not None, "nothing but the queue is ever full"
        return job.result()

    def begin_persist(
        self, blocks: Mapping[BlockKey, int], companion: Companion | None = None, *, queued: bool = True
    ) -> PersistJob | None:
        """Store the rows of device blocks under their keys; ``True`` where they are stored now or were already.

        ``False``: the block misses a required row, the key is of another namespace (a reset came between), or the
        store has no room. The blocks cannot be given away or written until the job has landed. ``None`` when there is
        no room for a further job: nothing has changed. A job that is not ``queued`` is over when it is returned, and
        there is always room for it. Raises :class:`ConfigError` when there is no store.
        """
        return self._need_archive().begin_persist(blocks, companion, queued=queued)

    def begin_restore(
        self, blocks: Mapping[BlockKey, int], companion: Companion | None = None, *, queued: bool = True
    ) -> RestoreJob | None:
        """Fill device blocks without rows with what is stored under their keys; ``True`` where rows are there now.

        What is read is verified first: bytes that are not sound, or not of this key, layout and namespace, are a miss
        and are counted. What was read is dropped when a reset came between or the job was cancelled. A ``False`` block
        has no rows. The blocks can be neither read, written nor given away until the job has landed. ``None`` and
        ``queued`` are as above.
        """
        return self._need_archive().begin_restore(blocks, companion, queued=queued)

    def lookup(self, keys: Sequence[BlockKey]) -> list[Lookup]:
        """Which keys the store seems to have, without ever waiting for it.

        A key that was not asked for before is ``PENDING``, as is one that a job in flight stores, restores or looks up:
        ask again after a :meth:`poll`. An answer is given once. Asking a store that fails counts as a ``MISS``.
        """
        return self._need_archive().lookup(keys)

    @property
    def job_limits(self) -> JobLimits:
        return self._runner.limits

    @property
    def jobs(self) -> list[Job]:
        """Those that have begun and not landed, the earliest first."""
        return self._runner.jobs

    def poll(self) -> list[Job]:
        """Land the jobs that the store has done its part of; those jobs. Waits for nothing."""
        return self._runner.poll()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until :meth:`poll` has something to land, or no job is left; ``False`` after ``timeout_s``."""
        return self._runner.wait_any(timeout_s)

    def stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which keys the store seems to have; only :meth:`restore` verifies."""
        return self._need_archive().carrier.contains(keys)

    def flush(self) -> None:
        """Return when what was persisted is on stable storage."""
        self._need_archive().carrier.flush()

    def _need_archive(self) -> Archive:
        if self._archive is None:
            raise ConfigError("store", "a storage backend", "none was given to AuxBlocks")
        return self._archive

    # ---------------------------------------------------------------- crossing

    def export(self, blocks: Mapping[BlockKey, int], rows: Sequence[int] | None = None) -> list[OfferedRecord | None]:
        """The records of device blocks, for another process; at most the first ``rows`` of each, where given.

        Give ``rows`` for a partial block: its key names so many tokens, and rows beyond them belong to other keys.
        ``None``: the block has no readable row there, or the key is of another namespace. A block with every row is
        given as a view of its memory, which a caller holds and nobody writes until the view is dropped; any other as
        a snapshot, so that later rows may be written meanwhile.
        """
        return export_records(self._tiers.device, self._ledger, blocks, rows)

    def generations(self, blocks: Blocks) -> list[int]:
        """Which life each device block is in; :meth:`install` wants to be told."""
        with self._lock:
            return [int(g) for g in self._tiers.device.life.generations[self._tiers.device.life.ids(blocks)]]

    def install(self, block: int, generation: int, header: RecordHeader, payload: Buffer) -> bool:
        """Put the rows of a record into a held device block, where no row is readable and no step will write one.

        The record's sum and key were verified by the caller. ``False``: the block is in another life than
        ``generation``, nobody holds it, or the record is of another namespace; it was dropped and counted. Steps may
        write other rows of the block meanwhile. Raises ``BlockBusyError`` while the block is in motion and
        ``RecordError`` for a record that does not fit the layout.
        """
        return install_record(self._tiers.device, self._ledger, block, generation, header, payload)

    # ---------------------------------------------------------------- reading

    def read(
        self,
        name: str,
        blocks: Blocks,
        start: int = 0,
        stop: int | None = None,
        *,
        owner: str | None = None,
        tier: TierName = "device",
    ) -> Rows:
        """Rows ``[start, stop)`` of the tokens in ``blocks``, taken as one sequence; what is not readable is masked.

        With ``owner``, blocks that the owner does not hold count as missing; without, the caller must know that they
        are its own. Takes no lock while it copies: a block that is given away meanwhile comes out missing.
        """
        return read_rows(self._tiers.named(tier), self._ledger, name, blocks, start, stop, owner)

    # ---------------------------------------------------------------- ending

    def reset(self, *, weights_version: int) -> None:
        """A weight update: every row from before becomes unreadable in every tier, in-flight work included.

        Leases stay. Keys are derived in the new namespace from here on; keys from before are refused. With the version
        unchanged, memory is forgotten and the store is not: what it holds was made by these very weights.
        """
        tiers = list(self._tiers)
        with self._lock:
            keys = KeyChain(replace(self.namespace, weights_version=weights_version), self.layout)
            for tier in tiers:
                tier.reset()
            self._ledger.keys = keys
            self._ledger.count("resets")
            for tier in tiers:
                tier.region.renew(keys.namespace.fingerprint)

    def close(self) -> None:
        """Give the memory back; harmless the second time. The store stays open: it is the caller's.

        Waits for jobs, up to ``close_s`` of their limits. Raises :class:`BlockStateError` while a step, a move or a job
        is in flight, naming the jobs, and ``BufferError`` while somebody keeps a view of a region: call it again when
        the view is gone. Every other method raises from the first call that closed it on.
        """
        with self._lock:  # in a forked child it raises, before anything is waited for
            self._check_still()
        self._runner.close()
        with self._lock:
            self._check_still(self._ledger.jobs)  # those that other threads carry themselves
            self._tiers.close()

    def _check_still(self, jobs: int = 0) -> None:
        if in_flight := len(self._ledger.steps) + self._ledger.moves:
            raise BlockStateError("close", "nothing in flight", f"{in_flight} steps or moves")
        if jobs:
            raise BlockStateError("close", "nothing in flight", f"{jobs} jobs of other threads")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def assert_consistent(self) -> None:
        """Raise ``AssertionError`` unless every invariant that can be seen from inside holds."""
        with self._lock:
            pending = np.zeros(self.device_blocks, dtype=np.int32)
            for step in self._ledger.steps:
                pending[step.blocks_still_owed()] += 1
            assert (pending == self._tiers.device.pending).all(), "steps in flight and pending blocks disagree"
            for tier in self._tiers:
                tier.assert_consistent()


__all__ = ["AuxBlocks", "Rows", "TierName"]

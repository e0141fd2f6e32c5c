"""What every set of blocks has, whoever owns them: tiers, keys, counters, and what is in flight."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache_manager.books import AuxCounters, Books
from cache_manager.checks import count_in_range, integers
from cache_manager.errors import BlockStateError, ConfigError, InvalidInputError, SpecError
from cache_manager.jobs import AnyJob, Archive, JobLimits
from cache_manager.keys import BlockKey, KeyChain, Namespace
from cache_manager.landing import Landing
from cache_manager.memory import gather
from cache_manager.move import Move
from cache_manager.mover import PairMover, RowsMover
from cache_manager.ports import HitPolicy, Mover, RecordCounters, Region, StorageBackend, TierName
from cache_manager.records import Claim, Export
from cache_manager.regions.choice import Memory, region_in
from cache_manager.rows import Rows, window_of
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.step import Step
from cache_manager.storage.records import RecordStore
from cache_manager.store_jobs import PersistJob, RestoreJob
from cache_manager.table import Blocks, BlockTable, Ints

_T = TypeVar("_T")


class BlockSet(Landing):
    """Tables, books and jobs of one set of blocks. Not for callers: :class:`AuxBlocks` or :class:`EngineBlocks`.

    Every method may be called from any thread. One lock (:mod:`cache_manager.books`, which also says what a finaliser
    or a signal handler may do) is held for bookkeeping and for placing the rows of a step, never while a store is read
    or written, nor while rows are gathered or moved: those are protected by the blocks' states and generations.
    """

    _by_engine: ClassVar = False  # whether an engine owns the blocks

    def __init__(
        self,
        specs: Sequence[AuxBlockDataSpec],
        *,
        device_blocks: int,
        namespace: Namespace,
        host_blocks: int = 0,
        store: StorageBackend | None = None,
        kv: Mover | None = None,
        policy: HitPolicy = "gate",
        mover: Callable[[Region, Region | None], Mover] | None = None,
        required: Sequence[str] | None = None,
        memory: Memory = "heap",
        steps_max: int = 64,
        jobs: JobLimits | None = None,
    ) -> None:
        if mover is not None and (store is not None or kv is not None):
            raise ConfigError("mover", "a mover, or a store and the KV's mover", "both")
        if policy not in ("gate", "mask"):
            raise ConfigError("policy", "'gate' or 'mask'", repr(policy))
        if isinstance(specs, AuxBlockDataSpec):
            raise SpecError("specs", "a sequence of AuxBlockDataSpec", "a single one")
        self.layout = RecordLayout(tuple(specs))
        names = [s.name for s in self.layout.specs] if required is None else list(required)
        if not names:
            raise ConfigError("required", "at least one spec's name", "none")
        self._required = tuple(self.layout.index(name) for name in names)
        self._steps_max, self._drop_bad = count_in_range(steps_max, "steps_max", 1), False
        self._books = Books(KeyChain(namespace, self.layout))
        self._lock = self._books.guard
        self.job_limits = jobs or JobLimits()
        self._closed = False
        self._lent = isinstance(memory, Mapping)  # the embedder's own regions, which stay the embedder's to close
        self._tables: dict[TierName, BlockTable] = {}
        self.block_tokens = self.layout.block_tokens
        self.device_blocks = count_in_range(device_blocks, "device_blocks", 1)
        self.host_blocks = count_in_range(host_blocks, "host_blocks", 0)
        sizes: dict[TierName, int] = {"device": self.device_blocks, "host": self.host_blocks}
        try:
            for tier, blocks in sizes.items():
                if blocks:
                    region = region_in(memory, self.layout, blocks, tier, namespace)
                    self._tables[tier] = BlockTable(tier, region, owned_by_engine=self._by_engine)
            device, host = self._device, self._tables["host"].region if self.host_blocks else None
            records = None if store is None else RecordStore(store, self.layout)
            self._mover = mover(device.region, host) if mover else RowsMover(device.region, host, records)
            if kv is not None:
                self._mover = PairMover(self._mover, kv, policy, self.layout, self._required)
        except BaseException:
            self._give_back()
            raise
        self.policy: HitPolicy = policy
        self._archive = Archive(device, self._books, self._mover, policy, self._required, self.job_limits)

    @property
    def _open(self) -> dict[TierName, BlockTable]:
        """The tables by tier; :class:`BlockStateError` once they are closed."""
        if self._closed:
            raise BlockStateError("AuxBlocks", "one that is open", "one that was closed")
        return self._tables

    @property
    def _device(self) -> BlockTable:
        return self._open["device"]

    def _table(self, tier: TierName) -> BlockTable:
        """:class:`InvalidInputError` for a host tier that there is not, or for another name."""
        if (table := self._open.get(tier)) is not None:
            return table
        if tier == "host":
            raise InvalidInputError("tier", "host_blocks > 0 for the host tier", 0)
        raise InvalidInputError("tier", "'device' or 'host'", repr(tier))

    # ---------------------------------------------------------------- what it is

    @property
    def namespace(self) -> Namespace:
        return self._books.keys.namespace

    @property
    def keys(self) -> KeyChain:
        """Derives block keys in the current namespace; take it anew after :meth:`reset`."""
        return self._books.keys

    @property
    def counters(self) -> AuxCounters:
        return self._books.snapshot()

    def region(self, tier: TierName) -> Region:
        """The memory of a tier, for readers in other processes and for capture on the device."""
        return self._table(tier).region

    def complete(self, blocks: Blocks, tier: TierName = "device") -> NDArray[np.bool_]:
        """Which blocks have every required row: ``[n]``."""
        return self._ask(blocks, tier, lambda table, ids: table.complete(ids, self._required))

    def generations(self, blocks: Blocks, tier: TierName = "device") -> NDArray[np.int64]:
        """Which life each block is in, ``[n]``; calls that bind a block to something outside want to be told."""
        return self._ask(blocks, tier, lambda table, ids: table.generations.take(ids))

    def origins(self, blocks: Blocks, tier: TierName = "device") -> list[int]:
        """The origin of each block's content, to be kept beside its KV; 0 where nothing was written. It ends here: what
        a step writes, or commits, from now on is of another. So ask when the pass has committed."""
        return self._ask(blocks, tier, BlockTable.hand_out)

    def _ask(self, blocks: Blocks, tier: TierName, question: Callable[[BlockTable, Ints], _T]) -> _T:
        """What a table says of ``blocks``, which may be named several times."""
        with self._lock:
            table = self._table(tier)
            return question(table, table.ids_often(blocks))

    # ---------------------------------------------------------------- what is in flight

    @property
    def in_flight(self) -> int:
        """Steps, moves, exports and jobs that have begun and not ended."""
        with self._lock:
            return len(self._device.steps) + len(self._books.moves) + len(self.jobs)

    @property
    def steps(self) -> list[Step]:
        """The steps in flight, oldest first; any of them may be aborted, one in place when its device is done."""
        with self._lock:
            return [step for entry in self._device.steps.values() if (step := entry.handle())]

    @property
    def moves(self) -> list[Move | Export]:
        """The moves and exports in flight; any of them may be aborted."""
        with self._lock:
            return [move for handle in self._books.moves.values() if (move := handle())]

    @property
    def jobs(self) -> list[AnyJob]:
        """Those that have begun and not landed, the earliest first; any of them may be cancelled."""
        return self._archive.jobs

    def poll(self) -> list[AnyJob]:
        """Land the jobs that the store has done its part of; those jobs. Waits for nothing."""
        return self._archive.poll()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until :meth:`poll` has something to land, or no job is left; ``False`` after ``timeout_s``."""
        return self._archive.wait_any(timeout_s)

    # ---------------------------------------------------------------- writing

    def begin_step(self, slots: NDArray[Any] | Sequence[int], *, in_place: bool = False) -> Step:
        """Begin a forward pass that writes rows at ``slots`` ``[T]``: ``block * block_tokens + offset``; -1 is padding.

        Rows at these slots are unreadable until the step commits. Steps may overlap in time; of two that write one
        slot, the later one counts. With ``in_place`` a device writes the rows into the host buffer by itself: see
        :mod:`cache_manager.step` for what nobody may do with the blocks meanwhile. Raises :class:`SlotError` for slots
        outside the pool or given twice, :class:`BlockStateError` for a block that nobody holds, ``BlockBusyError`` for
        one step too many.
        """
        table = self._device
        return Step(table, self._books, slots, steps_max=self._steps_max, in_place=in_place, drop_bad=self._drop_bad)

    step = begin_step
    """For a ``with`` statement: leaving commits, an exception commits nothing."""

    # ---------------------------------------------------------------- reading

    def read(
        self,
        name: str,
        blocks: Blocks,
        start: int = 0,
        stop: int | None = None,
        *,
        owner: Hashable | None = None,
        generations: Blocks | None = None,
        tier: TierName = "device",
    ) -> Rows:
        """Rows ``[start, stop)`` of the tokens in ``blocks``, taken as one sequence; what is not readable is masked.

        Blocks that ``owner`` does not hold, or that are not in these ``generations``, count as missing; with neither,
        the caller must know that they are its own. A block that is given away meanwhile comes out missing.
        """
        table = self._table(tier)
        index = self.layout.index(name)
        ids = table.ids_often(blocks)
        held, window = window_of(ids.size, start, stop, table.tokens)
        ids = ids[held]
        if generations is not None:
            generations = integers(generations, "generations", "one integer for each block")
            if generations.size < held.stop:
                raise InvalidInputError("generations", f"one for each of {held.stop} blocks", generations.size)
        rows, bits, words = gather(table.region, index, ids)
        with self._lock:
            if owner is not None:
                mine = table.leases.among(ids, table.leases.blocks(owner))
                mine &= table.region.words.take(ids) == words  # else given to this owner after the bytes were copied
                bits[~mine] = 0
            if generations is not None:
                bits[table.generations.take(ids) != generations[held]] = 0
                bits[table.region.words.take(ids) != words] = 0
            found = Rows.of(self.layout.specs[index], rows, bits, window)
            self._books.count("rows_read", found.valid.size)
            self._books.count("rows_missing", found.valid.size - int(np.count_nonzero(found.valid)))
        return found

    # ---------------------------------------------------------------- storing

    def persist(
        self, blocks: Mapping[BlockKey, int], generations: Blocks | None = None, *, owner: Hashable | None = None
    ) -> dict[BlockKey, int]:
        """:meth:`begin_persist`, done by the calling thread: its result. Raises ``StorageError`` if the store fails."""
        job = self.begin_persist(blocks, generations, owner=owner, queued=False)
        assert job is not None, "nothing but the queue is ever full"
        return job.result()

    def restore(
        self,
        blocks: Mapping[BlockKey, int],
        generations: Blocks | None = None,
        origins: Mapping[BlockKey, int] | None = None,
        *,
        owner: Hashable | None = None,
    ) -> dict[BlockKey, bool]:
        """:meth:`begin_restore`, done by the calling thread: its result. Raises ``StorageError`` if the store fails."""
        job = self.begin_restore(blocks, generations, origins, owner=owner, queued=False)
        assert job is not None, "nothing but the queue is ever full"
        return job.result()

    def begin_persist(
        self,
        blocks: Mapping[BlockKey, int],
        generations: Blocks | None = None,
        *,
        owner: Hashable | None = None,
        queued: bool = True,
    ) -> PersistJob | None:
        """Store device blocks under their keys; the job's result is, by key, the origin that is stored now.

        The blocks are those in these ``generations``, one each, or of ``owner``, which must hold them all. Equal to
        :meth:`origins` of the block, the answer says that this very content is stored; another one, that a whole pair
        of another computation was there and stays; 0, that nothing is: the block misses a required row, is in another
        life, the key is of another namespace (a reset came between), or the store has no room. Until the job has landed
        blocks of owners can be neither given away nor written; of an engine's the store has a copy. ``None`` when there
        is no room for a further job: nothing has changed. A job that is not ``queued`` is over when it is returned, and
        there is always room for it. Raises :class:`ConfigError` when there is no store.
        """
        self._check_stores()
        claim = Claim(blocks, owner, generations)
        return self._archive.begin(lambda: PersistJob(self._archive, claim), queued=queued)

    def begin_restore(
        self,
        blocks: Mapping[BlockKey, int],
        generations: Blocks | None = None,
        origins: Mapping[BlockKey, int] | None = None,
        *,
        owner: Hashable | None = None,
        queued: bool = True,
    ) -> RestoreJob | None:
        """Fill device blocks without rows with what is stored under their keys; the result: which have come back.

        ``generations``, ``owner``, ``queued`` and ``None`` are as above. Whoever keeps the KV elsewhere says with
        ``origins``, by key, of which computation it is: rows of another are not restored, and counted. What is read is
        verified: bytes that are not sound, or not of this key, layout and namespace, are a miss, and counted. What was
        read is dropped after a reset or a cancel; a ``False`` block has no rows. Until the job has landed blocks of
        owners can be neither read, written nor given away; an engine's must be in their lives by then, and no step may
        write them.
        """
        self._check_stores()
        claim = Claim(blocks, owner, generations)
        return self._archive.begin(lambda: RestoreJob(self._archive, claim, origins), queued=queued)

    @property
    def store_counters(self) -> RecordCounters | None:
        """What the rows' store has answered so far, corrupt records included; ``None`` without a store."""
        return self._mover.counters if self._mover.stores else None

    def stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which keys the store seems to have; only ``restore`` verifies."""
        self._check_stores()
        return self._mover.contains(keys)

    def flush(self) -> None:
        """Return when what was persisted is on stable storage."""
        self._check_stores()
        self._mover.flush()

    def _check_stores(self) -> None:
        if not (self._open and self._mover.stores):
            raise ConfigError("store", "a storage backend", f"none was given to {type(self).__name__}")

    # ---------------------------------------------------------------- ending

    def reset(self, *, weights_version: int) -> None:
        """A weight update: every row from before becomes unreadable in every tier, in-flight work included.

        Blocks stay whose they are. Keys are derived in the new namespace from here on; keys from before are refused.
        With the version unchanged memory is forgotten and the store is not, which holds what these very weights made.
        """
        with self._lock:
            tables = self._open.values()
            keys = KeyChain(replace(self.namespace, weights_version=weights_version), self.layout)
            for table in tables:
                table.reset()
            self._books.keys = keys
            self._books.count("resets")
            for table in tables:
                table.region.renew(keys.namespace.fingerprint)

    def close(self) -> None:
        """Give the memory back; harmless the second time. The store stays open: it is the caller's.

        Waits for jobs, up to ``close_s`` of their limits. Raises :class:`BlockStateError` while a step, a move or a job
        is in flight, and ``BufferError`` while somebody keeps a view of a region: call it again when that is gone.
        Every other method raises from the first call that closed it on.
        """
        with self._lock:  # in a forked child it raises, before anything is waited for
            self._check_still()
        self._archive.close()
        with self._lock:
            self._check_still()
            if jobs := self.jobs:
                raise BlockStateError("close", "nothing in flight", f"{len(jobs)} jobs of other threads")
            self._closed = True
            self._give_back()

    def _give_back(self) -> None:
        """Close the regions; ``BufferError`` while somebody else sees their memory: it may be called again."""
        for table in reversed(self._tables.values()):
            table.view(drop=True)
            if self._lent:
                continue
            try:
                table.region.close()
            except BufferError:
                # A store that failed leaves its frames, and their views of the rows, in a cycle with the exception.
                gc.collect()
                try:
                    table.region.close()
                except BufferError:
                    table.view()
                    raise

    def _check_still(self) -> None:
        if in_flight := len(self._tables["device"].steps) + len(self._books.moves):
            raise BlockStateError("close", "nothing in flight", f"{in_flight} steps or moves")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def assert_consistent(self) -> None:
        """Raise ``AssertionError`` unless every invariant that can be seen from inside holds."""
        with self._lock:
            for table in self._open.values():
                table.assert_consistent()

"""Auxiliary rows that follow the blocks of an engine.

The engine decides which block serves which sequence, and gives a block out again whenever it likes, without asking.
Each time, the block begins a new life in a *generation* (:meth:`AuxBlocks.renew`); rows are read for the generation
that the reader means. Bookkeeping never raises inside a forward pass: an invalid block, slot or pair is dropped and
counted, and the rows that it would have made readable are missing. With ``strict=True`` it raises, for tests.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Self

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager import moves, publish
from cache_manager.errors import BlockStateError, InvalidInputError, KVRouteError, RowError, SpecError
from cache_manager.feed import Fed
from cache_manager.keys import KeyChain, Namespace
from cache_manager.landing import Landing
from cache_manager.limits import JobLimits
from cache_manager.lock import AuxCounters
from cache_manager.moves import MOVED, Pairs
from cache_manager.numbers import Bits, Blocks, Flags, Ints, count_in_range, integers, readable, unsigned
from cache_manager.ports import KVBlocks, Region, StorageBackend, TierName
from cache_manager.publish import GENERATION_END, Rows, window_of
from cache_manager.regions import Memory, region_in
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.step import Keep, Step
from cache_manager.table import BlockTable

OUTDATED_MAX: Final = 1024
"""Namespaces from before a reset whose keys are known to be outdated; keys of older ones count as foreign."""


class AuxBlocks(Landing, Fed):
    """Rows for ``blocks`` device blocks, and ``host_blocks`` on the CPU, that an engine gives out itself.

    ``required`` names the specs whose rows a block must have in full to be stored and to count as a hit (default: all;
    with an empty list KV without rows counts as a hit, and its rows are missing). With ``memory="shared"`` the rows lie
    in SharedMemory regions that other processes can attach. ``kv`` goes wherever rows go: a block's KV and rows are
    stored as one record, under keys that name the layout of both. Every method may be called from any thread; one lock
    is held for bookkeeping and for placing rows and KV, never while a store is read or written.
    """

    def __init__(
        self,
        specs: Sequence[AuxBlockDataSpec],
        *,
        blocks: int,
        namespace: Namespace,
        host_blocks: int = 0,
        store: StorageBackend | None = None,
        kv: KVBlocks | None = None,
        required: Sequence[str] | None = None,
        memory: Memory = "heap",
        steps_max: int = 64,
        jobs: JobLimits | None = None,
        strict: bool = False,
    ) -> None:
        if isinstance(specs, AuxBlockDataSpec):
            raise SpecError("specs", "a sequence of AuxBlockDataSpec", "a single one")
        self.layout = RecordLayout(tuple(specs))
        self.block_tokens = self.layout.block_tokens
        names = [s.name for s in self.layout.specs] if required is None else list(required)
        self._required = tuple(self.layout.index(name) for name in names)
        self._record = self.layout if kv is None else RecordLayout((*self.layout.specs, kv.spec))
        self._steps_max, self._kv = count_in_range(steps_max, "steps_max", 1), kv
        super().__init__(strict=strict)
        self._lock.mend, self.keys = self._mend, KeyChain(namespace, self._record)
        self._outdated: dict[bytes, None] = {}
        self._open_store(store, jobs or JobLimits())
        sizes: dict[TierName, int] = {
            "device": count_in_range(blocks, "blocks", 1),
            "host": count_in_range(host_blocks, "host_blocks", 0),
        }
        self._tables: dict[TierName, BlockTable] = {}
        try:
            for tier in (tier for tier, n in sizes.items() if n):
                region = region_in(memory, self.layout, sizes[tier], tier, namespace)
                self._tables[tier] = BlockTable(tier, region, self._lock)
        except BaseException:
            self._give_back()
            raise

    @property
    def _device(self) -> BlockTable:
        self._lock.check_open()
        return self._tables["device"]

    def _table(self, tier: TierName) -> BlockTable:
        self._lock.check_open()
        table = self._tables.get(tier) if isinstance(tier, str) else None
        if table is None:
            raise InvalidInputError("tier", "'device', or 'host' with host_blocks > 0", repr(tier))
        return table

    def _mend(self) -> None:
        """Forget all rows: a change was interrupted, or a loss could not be recorded. The lock is held."""
        for table in self._tables.values():
            table.lose(None)
            table.region.renew(self.namespace.fingerprint)
        self._drop("interrupted_calls", 1, "a call was interrupted in the middle: all rows are forgotten")

    # ---------------------------------------------------------------- what it is

    @property
    def device_blocks(self) -> int:
        return self._device.blocks

    @property
    def host_blocks(self) -> int:
        return self._tables["host"].blocks if "host" in self._tables else 0

    @property
    def namespace(self) -> Namespace:
        return self.keys.namespace

    @property
    def counters(self) -> AuxCounters:
        return self._lock.counters()

    @property
    def in_flight(self) -> int:
        """Steps, moves and jobs that have begun and not ended."""
        with self._lock:
            return self._moving() + len(self.jobs)

    def _moving(self) -> int:
        fences = sum(not fence.over for table in self._tables.values() for fence in table.fences)
        return len(self._tables["device"].steps) + fences

    @property
    def steps(self) -> list[Step]:
        """The steps in flight, oldest first. Any may be aborted; a step in place only after its device is done."""
        with self._lock:
            return [claim.step for claim in self._device.steps]

    def region(self, tier: TierName) -> Region:
        """The memory of a tier, for readers in other processes and for capture on the device."""
        return self._table(tier).region

    def generations(self, blocks: Blocks, tier: TierName = "device") -> Ints:
        """Which life each block is in, ``[n]``."""
        with self._lock:
            table = self._table(tier)
            return table.generations.take(table.ids(blocks))

    def complete(self, blocks: Blocks, tier: TierName = "device") -> Flags:
        """Which blocks have every required row: ``[n]``."""
        with self._lock:
            table = self._table(tier)
            return table.complete(table.ids(blocks), self._required)

    def writing(self, blocks: Blocks) -> Flags:
        """Which device blocks a step in flight, and so its forward pass, will write: ``[n]``."""
        with self._lock:
            return self._device.writing(self._device.ids(blocks))

    def origins(self, blocks: Blocks, tier: TierName = "device") -> list[int]:
        """The origin of each block's content, to be kept beside its KV; 0 where nothing was written. Asking ends it:
        rows that a step writes, or commits, from now on get another origin. So ask after the pass has committed."""
        with self._lock:
            table = self._table(tier)
            return table.hand_out(table.ids(blocks))

    # ---------------------------------------------------------------- lives

    def renew(self, blocks: Blocks, generations: Blocks | None = None) -> Ints:
        """The engine has given these blocks out: nothing in them is readable. Returns their new generations ``[n]``.

        A caller that chooses the ``generations`` tells readers of them; each must be larger than the one before. A
        block that cannot be given out is dropped, counted, 0 in the answer; if it is in that generation, its rows go.
        """
        table = self._device
        if generations is None and isinstance(blocks, list) and not blocks:  # engines ask for room for every token
            return np.empty(0, np.int64)
        with self._lock:
            ids, known = table.known(blocks)
            lives, good = table.generations.take(ids, mode="clip") + 1, known.copy()
            if generations is not None:
                least, lives = lives, integers(generations, "generations", "one integer for each block", n=ids.size)
                good &= (lives >= least) & (lives < GENERATION_END)
            if table.fences:
                good[good] = ~table.fenced(ids[good])
            if count(good) != ids.size:
                table.forget(ids[known & (table.generations.take(ids, mode="clip") == lives)])  # another caller's life
                outside, fenced = ids.view(np.uint64) >= np.uint64(table.blocks), ~good & known
                fenced[fenced] = table.fenced(ids[fenced])
                for bad, wanted in (
                    (outside, f"block ids in [0, {table.blocks})"),
                    (~known & ~outside, "each block once"),
                    (fenced, "blocks that are not being copied into"),
                    (known & ~good & ~fenced, f"generations larger than before, and below {GENERATION_END}"),
                ):
                    self._bad("stale_blocks", ids[bad], "renew", wanted)
                table.renew(ids[good], lives[good])
                return np.where(good, lives, 0)
            table.renew(ids, lives)
        return lives

    def forget(self, blocks: Blocks | None = None) -> None:
        """Make all rows written so far unreadable, in every tier or only in these device blocks; generations stay."""
        with self._lock:
            if blocks is not None:
                ids, good = self._device.known(blocks)
                self._device.forget(ids[good])
                return
            for table in self._tables.values():
                table.forget_all()

    def reset(self, *, weights_version: int) -> None:
        """A weight update: every row from before becomes unreadable in every tier, in-flight work included.

        Keys are derived in the new namespace from here on; keys from before are refused.
        """
        with self._lock:
            tables = self._tables.values()
            keys = KeyChain(replace(self.namespace, weights_version=weights_version), self._record)
            self._outdated[self.keys.scope] = None
            if len(self._outdated) > OUTDATED_MAX:
                del self._outdated[next(iter(self._outdated))]
            self._lock.torn += 1  # until keys and regions say the same
            for table in tables:
                table.reset()
            self.keys = keys
            self._lock.count("resets")
            for table in tables:
                table.region.renew(keys.namespace.fingerprint)
            self._lock.torn -= 1

    def name_origins(self, blocks: Blocks, generations: Blocks, origins: NDArray[np.uint64]) -> None:
        """What these device blocks hold is known outside under these ``origins [n]``, which their KV itself says."""
        with self._lock:
            table = self._device
            ids, good = table.known(blocks)
            lives = integers(generations, "generations", "one integer for each block", n=ids.size)
            named = unsigned(origins, "origins", "one uint64 for each block", n=ids.size)
            good &= (table.generations.take(ids, mode="clip") == lives) & (named != 0)
            table.carry_origin(ids[good], named[good])

    # ---------------------------------------------------------------- writing and reading

    def begin_step(self, slots: NDArray[Any] | Sequence[int], *, in_place: bool = False) -> Step:
        """Begin a forward pass that writes rows at ``slots`` ``[T]``: ``block * block_tokens + offset``; -1 is padding.

        Rows at these slots are unreadable until the step commits. Steps may overlap in time; if two write one slot, the
        later one counts. With ``in_place`` a device writes the rows into the device tier's region by itself: see
        :mod:`cache_manager.step`. Bad slots are dropped and counted, unless strict.

        Raises ``BlockBusyError`` for more than ``steps_max`` steps, :class:`SlotError` for slots that are not integers.
        The engine's pass writes KV all the same, so the rows of a refused step's blocks become missing, counted as
        ``bad_writes_dropped``; if the slots cannot be read, those of every device block. No device may write a refused
        step's rows.
        """
        device = self._tables["device"]
        try:
            return Step(device, slots, steps_max=self._steps_max, in_place=in_place, strict=self.strict)
        except KVRouteError as error:
            known, n = readable(slots)
            blocks = None if known is None else known // device.tokens
            self._lost("bad_writes_dropped", n, f"begin_step: {error}", lambda: device.lose(blocks))
            raise

    step = begin_step

    def write_step(self, slots: NDArray[Any], rows: Mapping[str, NDArray[Any]], keep: Keep | None = None) -> int:
        """A whole step with given rows ``[T, *row_shape]``: begin, write, commit. Returns how many became readable.

        Never raises for a mistake of bookkeeping, unless strict: the step's rows are then missing, and counted. So is a
        step after :meth:`close`. Rows are bytes here: whether they can be a router's choice is judged by who writes
        them, or at the end by :meth:`kvroute.Routes.from_rows`.
        """
        try:
            step = self.begin_step(slots)
        except KVRouteError:
            if self.strict:
                raise
            return 0
        try:
            with step:
                if not isinstance(rows, Mapping):
                    raise RowError("rows", "rows by spec's name", repr(type(rows)))
                for name, given in rows.items():
                    step.write(name, given)
                return step.commit(keep)
        except KVRouteError as error:
            self.dropped("bad_writes_dropped", readable(slots)[1], "write_step", error)
            return 0

    def read(
        self,
        name: str,
        blocks: Blocks,
        start: int = 0,
        stop: int | None = None,
        *,
        generations: Blocks | None = None,
        tier: TierName = "device",
    ) -> Rows:
        """Rows ``[start, stop)`` of the tokens in ``blocks``, taken as one sequence; unreadable rows are masked.

        Blocks that are not in these ``generations`` count as missing; without them the caller must know what blocks
        hold.
        """
        table, index = self._table(tier), self.layout.index(name)
        ids = table.ids(blocks)
        held, window = window_of(ids.size, start, stop, table.tokens)
        ids = ids[held]
        if generations is not None:
            generations = integers(generations, "generations", "one integer for each block")
            if generations.size < held.stop:
                raise InvalidInputError("generations", f"one for each of {held.stop} blocks", generations.size)
        unlocked = publish.STORES_ARE_ORDERED and not self._lock.torn  # else the lock may have to be mended first
        copied = self._gathered(table, index, ids) if unlocked else None
        with self._lock:
            rows, bits, words = copied or publish.gather(table.region, index, ids, locked=True)
            if generations is not None:
                bits[(table.generations.take(ids) != generations[held]) | (table.region.words.take(ids) != words)] = 0
            found = Rows.of(self.layout.specs[index], rows, bits, window)
            self._lock.count("rows_read", found.valid.size)
            self._lock.count("rows_missing", found.valid.size - int(count(found.valid)))
        return found

    def _gathered(self, table: BlockTable, spec: int, ids: Ints) -> tuple[NDArray[np.uint8], Bits, Bits]:
        """Gather without the lock; a close may come meanwhile."""
        try:
            return publish.gather(table.region, spec, ids)
        except AttributeError:  # the region's arrays are gone
            self._table(table.tier)
            raise

    # ---------------------------------------------------------------- moving

    def copy(self, pairs: Pairs, rows: Sequence[int] | None = None) -> None:
        """Device blocks were copied to device blocks; ``pairs`` ``[n, 2]`` are (source, target).

        At most the first ``rows`` of each come along. The target's own rows are forgotten: its KV was copied over.
        """
        self.move("device", "device", pairs, rows)

    def swap_out(self, pairs: Pairs) -> None:
        """Device blocks were copied to host blocks, (device, host); the source stays as it is."""
        self.move("device", "host", pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """Host blocks were copied to device blocks that the engine has given out, (host, device)."""
        self.move("host", "device", pairs)

    def move(self, source: TierName, target: TierName, pairs: Pairs, rows: Sequence[int] | None = None) -> None:
        """:meth:`copy`, :meth:`swap_out` or :meth:`swap_in`, by the names of the tiers.

        Where KV moves too, every mistake and every failure is raised, and nothing has arrived.
        """
        if (source, target) not in MOVED:
            raise InvalidInputError("move", "blocks of the device as sources or as targets", f"{source} to {target}")
        tables = self._table(source), self._table(target)
        try:
            moves.move(
                *tables, pairs, rows, self._kv, lambda ids, wanted: self._bad("bad_moves_dropped", ids, "move", wanted)
            )
        except KVRouteError as error:
            if self._kv is not None or self.strict:
                raise
            known, n = readable(pairs)
            lost = None if known is None or n % 2 else known[1::2]
            self._lost("bad_moves_dropped", -(-n // 2), f"move: {error}", lambda: tables[1].lose(lost))

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Give the memory back; harmless the second time. The store stays open: it is the caller's.

        Waits for jobs, up to ``close_s`` of their limits. Raises :class:`BlockStateError` while a step or a job is in
        flight, and ``BufferError`` while a view of a region is alive: call it again after that is gone.
        """
        if not self._lock.closed:
            self._check_still()  # in a forked child this raises before any wait
            self._land_jobs()
            self._check_still(close=True)  # from here on no job begins
        self._end_threads()
        self._give_back()

    def _check_still(self, *, close: bool = False) -> None:
        with self._lock:
            moving, jobs = self._moving(), len(self.jobs) if close else 0
            if moving or jobs:
                raise BlockStateError("close", "nothing in flight", f"{moving} steps and moves, {jobs} jobs")
            self._lock.closed = close

    def _give_back(self) -> None:
        for table in reversed(self._tables.values()):
            table.view(drop=True)
            try:
                table.region.close()
            except BufferError:
                gc.collect()  # a store that failed leaves its frames, and their views, in a cycle with the exception
                table.region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def assert_consistent(self) -> None:
        """Raise ``AssertionError`` unless every invariant that can be seen from inside holds."""
        with self._lock:
            for table in self._tables.values():
                table.assert_consistent()

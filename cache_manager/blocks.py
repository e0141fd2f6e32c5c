"""Auxiliary rows that follow the blocks of an engine.

The engine decides which block serves which sequence, and gives a block out again whenever it likes, without asking.
Each time, the block begins a new life in a *generation* (:meth:`AuxBlocks.renew`); rows are read for the generation
that the reader means. Bookkeeping never raises inside a forward pass: an invalid block, slot or pair is dropped and
counted, and the rows that it would have made readable are missing. With ``strict=True`` it raises, for tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from numpy import count_nonzero as count

from cache_manager import publish
from cache_manager.errors import InvalidInputError, KVRouteError, RowError, SpecError
from cache_manager.exchange import Exchange
from cache_manager.feed import WorkerEnd
from cache_manager.job import PersistJob, RestoreJob
from cache_manager.jobs import JobLimits, Jobs
from cache_manager.keys import BlockKey, KeyChain, Namespace
from cache_manager.lives import begin_lives
from cache_manager.lock import AuxCounters, Lock, Mistakes, ProcessLock
from cache_manager.moves import Pairs, follow
from cache_manager.own_keys import Keyed, OwnKeys
from cache_manager.ports import KVBlocks, Region, StorageBackend, TierName
from cache_manager.publish import Rows, window_of
from cache_manager.regions import Memory
from cache_manager.slots import Blocks, Flags, Ints, Values, count_in_range, integers, readable
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.step import Keep, Step
from cache_manager.storage.records import RecordStore
from cache_manager.tiers import Tiers


class AuxBlocks:
    """Rows for ``blocks`` device blocks, and ``host_blocks`` on the CPU, that an engine gives out itself.

    ``required`` names the specs whose rows a block must have in full to be stored and to count as a hit (default: all;
    with an empty list KV without rows counts as a hit, and its rows are missing). With ``memory="shared"`` the rows lie
    in SharedMemory regions that other processes can attach; with ``memory="sparse"`` rows of blocks that were
    never renewed, or :meth:`retire`d, take none, and no device writes rows in place. ``kv`` goes wherever rows go: a
    block's KV and rows are stored as one record, under keys that name the layout of both. Every method may be called
    from any thread; one lock is held for bookkeeping and for placing rows and KV, never while a store is read or
    written.

    ``jobs`` are those that have begun and not landed (:class:`cache_manager.jobs.Jobs`); ``store`` verifies what the
    given store keeps (:class:`RecordStore`), ``None`` without one; ``exchange`` gives rows and KV to other processes,
    and takes in theirs (:class:`cache_manager.exchange.Exchange`).
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
        self.device_blocks = count_in_range(blocks, "blocks", 1)
        self.host_blocks = count_in_range(host_blocks, "host_blocks", 0)
        if required is None:
            required = [spec.name for spec in self.layout.specs]
        self._required = tuple(self.layout.index(name) for name in required)
        self._steps_max = count_in_range(steps_max, "steps_max", 1)
        self._kv = kv
        self._lock = Lock()
        self._closing = ProcessLock()  # of the thread that closes the set
        self._is_over = False
        self._mistakes = Mistakes(self._lock, strict=strict)
        record = self.layout
        if kv is not None:
            record = RecordLayout((*self.layout.specs, kv.spec))
        self._own_keys = OwnKeys(namespace, record, self._mistakes)
        self.store = None if store is None else RecordStore(store, record)
        sizes: dict[TierName, int] = {"device": self.device_blocks, "host": self.host_blocks}
        self._tiers = Tiers(sizes, memory, self.layout, self._own_keys, self._mistakes)
        self._device = self._tiers["device"]
        self.exchange = Exchange(self._device, self._own_keys)
        self._worker_end = WorkerEnd(self._tiers, self._mistakes)
        self.jobs = Jobs(
            self._device,
            self._own_keys,
            self.store,
            required=self._required,
            kv=kv,
            limits=jobs or JobLimits(),
        )

    # ---------------------------------------------------------------- what it is

    @property
    def keys(self) -> KeyChain:
        """Makes the keys of blocks, in the present namespace; :meth:`reset` begins another one."""
        return self._own_keys.chain

    def __repr__(self) -> str:
        specs = ", ".join(spec.name for spec in self.layout.specs)
        blocks = f"{self.device_blocks} device and {self.host_blocks} host blocks of {self.block_tokens} tokens"
        store = "no store" if self.store is None else "a store"
        version = self.namespace.weights_version
        return f"AuxBlocks({specs}; {blocks}, {store}, {self.namespace.model!r} at weights version {version})"

    @property
    def namespace(self) -> Namespace:
        """Model, weights version and rank of the rows here; :meth:`reset` begins another one."""
        return self.keys.namespace

    @property
    def counters(self) -> AuxCounters:
        """What has happened so far, copied: rows read, missing and moved, and every mistake that was dropped."""
        return self._lock.counters()

    @property
    def in_flight(self) -> int:
        """Steps, moves and jobs that have begun and not ended."""
        with self._lock:
            return self._tiers.in_flight + len(self.jobs)

    @property
    def steps(self) -> list[Step]:
        """The steps in flight, oldest first. Any may be aborted; a step in place only after its device is done."""
        with self._lock:
            return [claim.step for claim in self._device.steps]

    def region(self, tier: TierName) -> Region:
        """The memory of a tier, for readers in other processes and for capture on the device."""
        return self._tiers[tier].region

    def generations(self, blocks: Blocks, tier: TierName = "device") -> Ints:
        """Which life each block is in, ``[n]``."""
        with self._lock:
            table = self._tiers[tier]
            return table.generations.take(table.slots.ids(blocks))

    def complete(self, blocks: Blocks, tier: TierName = "device") -> Flags:
        """Which blocks have every required row: ``[n]``."""
        with self._lock:
            table = self._tiers[tier]
            ids = table.slots.ids(blocks)
            return publish.have_all(table.region, ids, self._required)

    def writing(self, blocks: Blocks) -> Flags:
        """Which device blocks a step in flight, and so its forward pass, will write: ``[n]``."""
        with self._lock:
            return self._device.writing(self._device.slots.ids(blocks))

    # ---------------------------------------------------------------- lives

    def renew(self, blocks: Blocks, generations: Blocks | None = None) -> Ints:
        """The engine has given these blocks out: nothing in them is readable. Returns their new generations ``[n]``.

        A caller that chooses the ``generations`` tells readers of them; each must be larger than the one before. A
        block that cannot be given out is dropped, counted, 0 in the answer; if it is in that generation, its rows go.
        """
        return begin_lives(self._device, blocks, generations, self._mistakes, has_rows=True)

    def retire(self, blocks: Blocks, generations: Blocks | None = None) -> Ints:
        """As :meth:`renew`, of blocks that the engine has given out for something that has no rows: with
        ``memory="sparse"`` their rows' memory is free until the blocks are renewed. Rows written there are missing."""
        return begin_lives(self._device, blocks, generations, self._mistakes, has_rows=False)

    def forget(self, blocks: Blocks | None = None) -> None:
        """Make all rows written so far unreadable, in every tier or only in these device blocks; generations stay."""
        with self._lock:
            if blocks is not None:
                ids, good = self._device.slots.known(blocks)
                self._device.forget(ids[good])
                return
            self._tiers.forget_all()

    def reset(self, *, weights_version: int) -> None:
        """A weight update: every row from before becomes unreadable in every tier, in-flight work included.

        Keys are derived in the new namespace from here on; those of other versions are refused. A version stands for
        its weights: under one that was there before, or is there now, its keys are good again, and what is stored under
        them. So weights that change need a number of their own.
        """
        with self._lock:
            keys = self._own_keys.after_reset(weights_version)
            self._lock.torn += 1  # until keys and regions say the same
            for table in self._tiers:
                table.reset()
            self._own_keys.enter(keys)
            self._lock.count("resets")
            self._tiers.enter()
            self._lock.torn -= 1

    # ---------------------------------------------------------------- writing and reading

    def begin_step(self, slots: Values | Sequence[int], *, in_place: bool = False) -> Step:
        """Begin a forward pass that writes rows at ``slots`` ``[T]``: ``block * block_tokens + offset``; -1 is padding.

        Rows at these slots are unreadable until the step commits. Steps may overlap in time; if two write one slot, the
        later one counts. With ``in_place`` a device writes the rows into the device tier's region by itself: see
        :mod:`cache_manager.step`. Bad slots are dropped and counted, unless strict.

        Raises ``BlockBusyError`` for more than ``steps_max`` steps, :class:`SlotError` for slots that are not integers,
        such as those on a device: they are read here. The engine's pass writes KV all the same, so whatever ends this
        call, the rows of the refused step's blocks become missing, counted as ``bad_writes_dropped``; if the slots
        cannot be read, those of every device block. No device may write a refused step's rows.
        """
        device = self._device
        try:
            return Step(device, slots, self._mistakes, steps_max=self._steps_max, in_place=in_place)
        except BaseException as error:  # whatever refuses the slots: the engine's pass writes at them
            known, n = readable(slots)
            blocks = None if known is None else known // device.tokens

            def lose() -> None:
                device.lose(blocks)

            self._mistakes.report_loss("bad_writes_dropped", n, "begin_step", error, lose)
            raise

    def write_step(self, slots: Values, rows: Mapping[str, Values], keep: Keep | None = None) -> int:
        """A whole step with given rows ``[T, *row_shape]``: begin, write, commit. Returns how many became readable.

        Never raises for a mistake of bookkeeping, unless strict: the step's rows are then missing, and counted. So is a
        step after :meth:`close`. Rows are bytes here: whether they can be a router's choice is judged by who writes
        them, or at the end by :meth:`kvroute.Routes.from_rows`.
        """
        try:
            step = self.begin_step(slots)
        except KVRouteError:
            if self._mistakes.strict:
                raise
            return 0
        try:
            with step:
                if not isinstance(rows, Mapping):
                    raise RowError("rows", "rows by spec's name", repr(type(rows)))
                for name, of_spec in rows.items():
                    step.write(name, of_spec)
                return step.commit(keep)
        except KVRouteError as error:
            _, n = readable(slots)
            self._mistakes.raise_or_report("bad_writes_dropped", n, "write_step", error)
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
        table = self._tiers[tier]
        index = self.layout.index(name)
        ids = table.slots.ids(blocks)
        held, window = window_of(ids.size, start, stop, table.tokens)
        ids = ids[held]
        if generations is not None:
            generations = integers(generations, "generations", "one integer for each block")
            if generations.size < held.stop:
                raise InvalidInputError("generations", f"one for each of {held.stop} blocks", generations.size)
        copied = None
        if publish.STORES_ARE_ORDERED and not self._lock.torn:  # else the lock may have to be mended first
            try:
                copied = publish.gather(table.region, index, ids)
            except AttributeError:  # the region's arrays are gone: a close has come meanwhile
                self._lock.check_open()
                raise
        with self._lock:
            if copied is None:
                copied = publish.gather(table.region, index, ids, locked=True)
            rows, bits, words = copied
            if generations is not None:  # it is in that life, and nothing of it was cleared since the copy
                is_other = table.generations.take(ids) != generations[held]
                is_other |= table.region.words.take(ids) != words
                bits[is_other] = 0
            spec = self.layout.specs[index]
            read = Rows.of(spec, rows, bits, window)
            n = read.valid.size
            present = int(count(read.valid))
            self._lock.count("rows_read", n)
            self._lock.count("rows_missing", n - present)
        return read

    # ---------------------------------------------------------------- moving

    def copy(self, pairs: Pairs, rows: Sequence[int] | None = None) -> None:
        """Device blocks were copied to device blocks; ``pairs`` ``[n, 2]`` are (source, target).

        At most the first ``rows`` of each come along. The target's own rows are forgotten: its KV was copied over.
        Where KV moves too, here and in a swap, pairs that are not possible and failures of the copy are raised, and
        nothing has arrived.
        """
        device = self._tiers["device"]
        follow(device, device, pairs, rows, self._kv, self._mistakes)

    def swap_out(self, pairs: Pairs) -> None:
        """Device blocks were copied to host blocks, (device, host); the source stays as it is."""
        device = self._tiers["device"]
        host = self._tiers["host"]
        follow(device, host, pairs, None, self._kv, self._mistakes)

    def swap_in(self, pairs: Pairs) -> None:
        """Host blocks were copied to device blocks that the engine has given out, (host, device)."""
        host = self._tiers["host"]
        device = self._tiers["device"]
        follow(host, device, pairs, None, self._kv, self._mistakes)

    # ---------------------------------------------------------------- storing

    def begin_persist(self, blocks: Keyed, generations: Blocks) -> PersistJob | None:
        """Store device blocks, in these generations, under their keys; the answers: which origin is stored now.

        Equal to the block's (:meth:`Exchange.origins`): this content is stored; another: content of another computation
        was there and stays; 0: nothing is. ``None`` if there is no room for a further job: nothing has changed.
        """
        return self.jobs.begin(PersistJob, blocks, generations)

    def begin_restore(self, blocks: Keyed, generations: Blocks) -> RestoreJob | None:
        """Fill device blocks without rows from the records under their keys; the answers: which have come back.

        Callers that keep the KV elsewhere first name its origin (:meth:`Exchange.name_origins`): rows of another are
        not restored. A record that was read is dropped after a reset, a cancel, or a write into the block.
        """
        return self.jobs.begin(RestoreJob, blocks, generations)

    def persist(self, blocks: Keyed, generations: Blocks) -> dict[BlockKey, int]:
        """:meth:`begin_persist`, done by the calling thread, without limits on jobs: by key, the origin of what is
        stored under it now; 0 for nothing."""
        return self.jobs.run(PersistJob, blocks, generations).result()

    def restore(self, blocks: Keyed, generations: Blocks) -> dict[BlockKey, bool]:
        """:meth:`begin_restore`, done by the calling thread, without limits on jobs: by key, whether the block's rows
        have come back."""
        return self.jobs.run(RestoreJob, blocks, generations).result()

    def apply(self, operations: bytes) -> None:
        """Do what a scheduler's :class:`BlockFeed` says has become of blocks, in its order.

        A batch that came before is skipped and counted. After a missing batch the state of every block is unknown: all
        rows are forgotten, no device block counts as given out until the feed renews it, the gap is counted, and a
        strict set then raises :class:`FeedGapError`. The same holds after a call that ended with an exception. The
        first batch of another feed means that the scheduler was started anew: this counts as a gap too, generations
        begin anew, and a strict set goes on. Bytes that are not a feed's batch are refused before anything is done.
        Jobs for which there is no room are not begun, and counted (``jobs_refused``).
        """
        self._worker_end.apply(operations, self)

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Give the memory back; harmless the second time, also in two threads at once. The store stays open: it is the
        caller's.

        Waits for jobs, up to ``close_s`` of their limits. Raises :class:`BlockStateError` while a step or a job is in
        flight, and ``BufferError`` while a view of a region is alive: call it again after that is gone.
        """
        if self._is_over:
            return
        with self._closing:
            if not self._lock.closed:
                with self._lock:
                    self._tiers.check_still(jobs=0)
                self.jobs.land_all()
                with self._lock:
                    self._tiers.check_still(jobs=len(self.jobs))
                    self._lock.closed = True  # from here on no job begins
            self.jobs.end_threads()
            self._tiers.close()
            self._is_over = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def assert_consistent(self) -> None:
        """Raise ``AssertionError`` unless every invariant that can be seen from inside holds."""
        with self._lock:
            for table in self._tiers:
                table.assert_consistent()

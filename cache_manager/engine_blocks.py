"""The embedder's surface where an engine owns the blocks: vLLM, SGLang, transformers' continuous batching.

The engine decides which block serves whom, gives it out again when it likes, and never asks. So there are no owners
here, and nothing that an engine does to its blocks is refused. Each time it gives a block out, the block begins a new
life in a *generation* (:meth:`EngineBlocks.renew`); rows are read for the generation that the reader means. Nothing is
pinned: a persist copies the rows first, a restore lands only if the block is still in its life.

Nothing of the bookkeeping raises inside a forward pass. A block, slot or pair that cannot be is dropped and counted;
what it would have made readable is missing. With ``strict=True`` it raises, for tests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.block_set import BlockSet
from cache_manager.checks import integers
from cache_manager.errors import FeedGapError, InvalidInputError, KVRouteError
from cache_manager.feed import Operation, decoded
from cache_manager.jobs import JobLimits
from cache_manager.keys import Namespace
from cache_manager.lifecycle import ALLOWED, Event, State
from cache_manager.move import MOVED, Move, Pairs, split_pairs
from cache_manager.ports import StorageBackend, TierName
from cache_manager.regions.choice import Memory
from cache_manager.spec import AuxBlockDataSpec
from cache_manager.step import Keep, Step, lose
from cache_manager.table import Blocks, BlockTable, Ints

logger = logging.getLogger(__name__)

GENERATION_END = 1 << 47
NAMED_MAX = 8  # blocks that one error names
StepRows = NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]
"""Rows ``[T, *row_shape]``, or rows in another token order with their slots ``[T]``."""


class EngineBlocks(BlockSet):
    """Auxiliary rows for ``blocks`` device blocks, and ``host_blocks`` on the CPU, that an engine gives out itself.

    The arguments are those of :class:`AuxBlocks`; ``strict`` makes mistakes raise. ``bad_writes_dropped``,
    ``bad_moves_dropped`` and ``stale_blocks`` of :attr:`counters` count them otherwise, and the first of each kind is
    logged.
    """

    _by_engine = True

    def __init__(
        self,
        specs: Sequence[AuxBlockDataSpec],
        *,
        blocks: int,
        namespace: Namespace,
        host_blocks: int = 0,
        store: StorageBackend | None = None,
        required: Sequence[str] | None = None,
        memory: Memory = "heap",
        steps_max: int = 64,
        jobs: JobLimits | None = None,
        strict: bool = False,
    ) -> None:
        super().__init__(
            specs,
            device_blocks=blocks,
            host_blocks=host_blocks,
            namespace=namespace,
            store=store,
            required=required,
            memory=memory,
            steps_max=steps_max,
            jobs=jobs,
        )
        self.strict, self._drop_bad = strict, not strict
        self._logged: set[str] = set()
        self._next_batch = 0  # of the feed

    # ---------------------------------------------------------------- lives

    def renew(self, blocks: Blocks, generations: Blocks | None = None) -> Ints:
        """The engine has given these blocks out: nothing in them is readable. The generations they begin, ``[n]``.

        ``generations`` are chosen by whoever tells readers about them, a scheduler in another process say; each must be
        larger than the one before. A block that is not of this tier, or whose generation is not larger, is dropped and
        counted: its generation is 0 in the answer, and its rows stay those of the life that was known.
        """
        table = self._device
        if generations is None and not len(blocks):  # engines ask for room for every token, and mostly have it
            return np.empty(0, np.int64)
        with self._lock:
            ids, good = self._known(table, blocks)
            next_lives = table.generations.take(ids, mode="clip") + 1
            if generations is not None:
                given = integers(generations, "generations", "one integer for each block", n=ids.size)
                good &= (given >= next_lives) & (given < GENERATION_END)
                next_lives = given
            good &= ALLOWED[Event.RENEW].take(table.states.take(ids, mode="clip"))
            if count(good) != ids.size:
                self._bad("stale_blocks", ids[~good], "renew", "block ids, and generations larger than before")
            table.renew(ids[good], next_lives[good])
        return np.where(good, next_lives, 0)

    def _known(self, table: BlockTable, blocks: Blocks) -> tuple[Ints, NDArray[np.bool_]]:
        """``blocks`` as an array, and which are blocks of the table, each the first time it is named. Lock held."""
        ids = np.array(blocks, np.int64).reshape(-1)
        good = ids.view(np.uint64) < np.uint64(table.blocks)
        first = np.zeros(ids.size, np.bool_)
        first[np.unique(ids, return_index=True)[1]] = True
        return ids, good & first

    # ---------------------------------------------------------------- writing

    def begin_step(self, slots: NDArray[Any] | Sequence[int], *, in_place: bool = False) -> Step:
        """As of blocks with owners: :meth:`BlockSet.begin_step`. Bad slots are dropped and counted, unless strict.

        Raises ``BlockBusyError`` for one step too many, :class:`SlotError` for slots that are no integers. The pass
        writes its KV all the same, so what lay at the slots of a step that is refused is missing, and counted as
        ``bad_writes_dropped``; where they cannot be read, what lay in any device block. Let no device write its rows.
        """
        try:
            return super().begin_step(slots, in_place=in_place)
        except KVRouteError as error:
            named, n, why = *_slots_in(slots), str(error)
            self._lock.now_or_later(lambda: self._lose(named, n, why))
            raise

    step = begin_step

    def _lose(self, slots: Ints | None, n: int, why: str) -> None:
        """The step of a pass over these ``n`` slots was refused; ``None`` if they cannot be read. The lock is held."""
        table = self._device
        if slots is None:
            table.forget(np.arange(table.blocks))
        else:
            lose(table, slots[(slots >= 0) & (slots < table.end)])
        self._drop("bad_writes_dropped", n, f"begin_step: {why}")

    def write_step(self, slots: NDArray[Any], rows: Mapping[str, StepRows], keep: Keep | None = None) -> int:
        """A whole step whose rows are here: begin, write, commit. How many tokens' rows became readable.

        ``rows`` are by spec ``[T, *row_shape]`` in the order of ``slots``, or with slots of their own where the worker
        orders tokens in another way than the scheduler. ``keep`` as in :meth:`Step.commit`. Never raises for a mistake
        of bookkeeping, unless strict: the step's rows are then missing, and counted.
        """
        try:
            step = self.begin_step(slots)
        except KVRouteError:
            if self.strict:
                raise
            return 0
        try:
            with step:
                for name, given in rows.items():
                    values, at = given if isinstance(given, tuple) else (given, None)
                    step.write(name, values, at)
                return step.commit(keep)
        except KVRouteError as error:
            self.dropped("bad_writes_dropped", np.size(slots), "write_step", error)
            return 0

    def name_origins(self, blocks: Blocks, generations: Blocks, origins: NDArray[np.uint64]) -> None:
        """What these device blocks hold is known outside under these ``origins [n]``, which their KV itself says.

        For KV that is kept where no origin can lie beside it. Rows stay readable. A block in another life, and an
        origin of 0, are passed over; the next write into a block makes it another computation's.
        """
        with self._lock:
            table = self._device
            ids, good = self._known(table, blocks)
            good &= (table.generations.take(ids, mode="clip") == np.asarray(generations, np.int64)) & (origins != 0)
            table.carry_origin(ids[good], origins[good])

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
        """:meth:`copy`, :meth:`swap_out` or :meth:`swap_in`, by the names of the tiers."""
        tables = self._table(source), self._table(target)
        if (source, target) not in MOVED:
            raise InvalidInputError("move", "blocks of the device as sources or as targets", f"{source} to {target}")
        try:
            with self._lock:
                sources, targets, limits = self._movable(*tables, pairs, rows)
            Move(self._books, *tables, sources, targets, mover=self._mover, rows=limits, beside_steps=True).commit()
        except KVRouteError as error:
            self.dropped("bad_moves_dropped", len(pairs), "move", error)

    def _movable(
        self, source: BlockTable, target: BlockTable, pairs: Pairs, rows: Sequence[int] | None
    ) -> tuple[Ints, Ints, Sequence[int] | None]:
        """Sources and targets that can be moved; whatever else is named as a target has no rows any more. Lock held."""
        sources, targets = split_pairs(pairs, source, target)
        if target.tier == "host":  # what is copied into a host block begins its life
            target.renew(targets, target.generations.take(targets) + 1)
        else:
            target.forget(targets)
        good = ALLOWED[Event.BEGIN_DEPARTURE].take(source.states.take(sources))
        good &= target.states.take(targets) == State.HELD
        good &= ~target.busy(targets)
        if count(good) != targets.size:
            if rows is not None:
                target.first_rows(rows, targets.size, "pair")  # else counts would be dropped with the wrong pairs
            what = "blocks that were given out, and into which no step writes"
            self._bad("bad_moves_dropped", targets[~good], "move", what)
            rows = None if rows is None else [r for r, fine in zip(rows, good.tolist(), strict=True) if fine]
            sources, targets = sources[good], targets[good]
        return sources, targets, rows

    # ---------------------------------------------------------------- feeding

    def apply(self, operations: bytes) -> list[Operation]:
        """Do what a scheduler's :class:`BlockFeed` says has become of blocks, in its order; the operations done.

        A batch that came before is passed over and counted. Where one is missing, nobody knows what has become of any
        block: all rows are forgotten, and counted; a strict set raises :class:`FeedGapError` after that. Bytes that no
        feed has made are refused before anything is done.
        """
        if not operations:
            return []
        batch, calls = decoded(operations)
        if batch.number < self._next_batch:
            again = InvalidInputError("feed", f"batch {self._next_batch}", batch.number)
            self.dropped("feed_repetitions", 1, "apply", again)
            return []
        missing, self._next_batch = batch.number - self._next_batch, batch.number + 1
        if missing:
            self.forget()
            gap = FeedGapError(f"feed: wanted batch {batch.number - missing}, got {batch.number}")
            self.dropped("feed_gaps", 1, "apply", gap)
        for call in calls:
            try:
                call(self)
            except KVRouteError as error:
                self.dropped("feed_operations_failed", 1, "apply", error)
        return batch.operations

    def forget(self, blocks: Blocks | None = None) -> None:
        """Nothing that was written so far is readable, in no tier; blocks stay in their lives.

        With ``blocks``, of these device blocks, whose KV is not what it was said to be. What is none is passed over.
        """
        with self._lock:
            if blocks is not None:
                ids, good = self._known(self._device, blocks)
                self._device.forget(ids[good])
                return
            for table in self._open.values():
                table.forget(np.arange(table.blocks))

    def dropped(self, counter: str, n: int, call: str, error: KVRouteError, *, mistake: bool = True) -> None:
        """So many things were dropped for ``error``: count them, and log the first of the kind; a strict set raises
        what was somebody's ``mistake``."""
        if self.strict and mistake:
            raise error
        with self._lock:
            self._drop(counter, n, f"{call}: {error}")

    def _bad(self, counter: str, bad: Ints, call: str, wanted: str) -> None:
        """The same for blocks, by mistake; the lock is held."""
        error = InvalidInputError(call, wanted, f"{'block' if bad.size == 1 else 'blocks'} {named(bad)}")
        if self.strict:
            raise error
        self._drop(counter, bad.size, str(error))

    def _drop(self, counter: str, n: int, why: str) -> None:
        self._books.count(counter, n)
        if counter not in self._logged:
            self._logged.add(counter)
            logger.warning("%s; %d dropped, further ones are counted as %s", why, n, counter)


def named(blocks: Ints) -> str:
    """The ids of ``blocks``, the first few of many."""
    first = ", ".join(map(str, blocks[:NAMED_MAX].tolist()))
    return first if blocks.size <= NAMED_MAX else f"{first} and {blocks.size - NAMED_MAX} more"


def _slots_in(given: Any) -> tuple[Ints | None, int]:
    """The slots that ``given`` names, or ``None`` where they cannot be read as whole numbers; and how many they are."""
    try:
        array = np.asarray(given).reshape(-1)
        with np.errstate(invalid="ignore"):
            slots = array.astype(np.int64)
    except (TypeError, ValueError, OverflowError):
        return None, 1
    whole = array.dtype.kind in "iuf" and bool((slots == array).all())
    return (slots if whole else None), array.size

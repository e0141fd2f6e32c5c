"""A forward step: the rows it will write, the lives they are for, and what becomes of them.

Two ways to bring rows. :meth:`Step.write` copies them from the caller's array to their places at once, unreadable
still. Or a device writes them by itself (``in_place``): then :meth:`Step.wrote` says so once they are there.

The law of in-place writers. Nobody can tell a device that a block has begun another life. So from the beginning of an
in-place step until its end, whatever lives its blocks begin meanwhile, nobody else may fill those blocks (allocations,
moves, restores and installations are refused), and where the engine gives a block out all the same
(:class:`~cache_manager.engine_blocks.EngineBlocks`), no row at the step's slots becomes readable for the new life
before the step has ended; what another step copies there meanwhile may be written over, and is given up. Slots that
were dropped from the step are among them: a device, or a CUDA graph, has those that the engine gave it. The devices of
one set write in the order in which their steps began. An in-place step is ended when the device has done its writes,
and not before: aborting one earlier breaks the law, and a handle that is dropped therefore ends nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

import numpy as np
from numpy import count_nonzero as count
from numpy.typing import NDArray

from cache_manager.books import Books, InFlight
from cache_manager.checks import integers
from cache_manager.errors import BlockBusyError, BlockStateError, RowError, SlotError
from cache_manager.lifecycle import ALLOWED, Event, State
from cache_manager.memory import add, clear
from cache_manager.table import BlockTable, Ints, extreme

PADDING: Final = -1

Keep = NDArray[np.bool_] | Mapping[str, NDArray[np.bool_]]


def lose(table: BlockTable, slots: Ints) -> None:
    """A pass writes KV at ``slots`` of an engine's blocks, and its rows do not come: what lay there is missing.

    So is what steps in flight have claimed there. Of a block in motion nothing that comes counts. The lock is held.
    """
    blocks = slots // table.tokens
    held = table.states.take(blocks) == State.HELD
    table.forget(np.unique(blocks[~held]))
    at = np.unique(slots[held])
    clear(table.region, *table.cells.of_ordered(at))
    table.write_under_own_origin(np.unique(blocks[held]), at)
    table.writer[at] = 0
    table.turns += bool(table.steps)


@dataclass(slots=True, eq=False)
class StepEntry:
    """What a table knows of a step in flight. ``slots`` ``[n]`` are those that are not padding and were not dropped.

    A device writes at ``reach`` ``[m]``: at slots that were dropped, too. Their blocks are among ``blocks``, in a
    generation that no block has.
    """

    number: int  # stands in ``writer`` where the step will write
    slots: Ints
    reach: Ints
    blocks: Ints  # each once
    generations: Ints  # of ``blocks``, at the beginning
    in_place: bool
    turns: int  # of the table when the slots had been claimed: they are the step's while it stays so
    handle: Callable[[], Step | None]  # a weak reference to the step; a strong one if a device writes


class Step(InFlight):
    """The rows of one forward pass, unreadable until the pass has completed.

    Made by ``begin_step``. Call :meth:`write` or :meth:`wrote` for each spec that the pass produced, then exactly one
    of :meth:`commit` and :meth:`abort`; as a context manager, leaving commits and an exception aborts. A step that is
    dropped is aborted and counted, unless a device writes its rows.
    """

    __slots__ = ("_bits", "_cells", "_entry", "_table", "_tokens", "_total", "_written")

    def __init__(
        self,
        table: BlockTable,
        books: Books,
        slots: NDArray[Any] | Sequence[int],
        *,
        steps_max: int,
        in_place: bool = False,
        drop_bad: bool = False,
    ) -> None:
        """Begin; with ``drop_bad`` slots that are none, that are given twice, or of a block that cannot be written,
        count as padding: what lies there is missing, because the pass writes its KV all the same."""
        self._ended = True  # until it has begun
        self._table, self._books = table, books
        given = kept = integers(slots, "slots", "a flat array of integers", error=SlotError)
        self._total: int = given.size
        self._tokens: Ints | None = None  # places of the tokens that are not padding; None: all
        wanted = given.size
        if wanted and not 0 <= extreme(given) < table.end:
            wanted, kept = self._without_padding(given, drop_bad=drop_bad)
        with books.guard:
            if len(table.steps) >= steps_max:
                raise BlockBusyError("steps in flight", f"fewer than {steps_max}", len(table.steps))
            reach = kept
            try:
                blocks = self._claim(kept)
            except (SlotError, BlockStateError):
                if not drop_bad:
                    raise
                good = self._writable(reach)
                blocks = self._claim(kept := reach[good])
                lose(table, reach[~good])
            if kept.size != wanted:
                books.count("bad_writes_dropped", wanted - kept.size)
            number = table.step_number()
            clear(table.region, self._cells, self._bits)
            table.write_under_own_origin(blocks, kept)
            table.writer[kept] = number
            table.turns += bool(table.steps)
            generations, handle = table.generations.take(blocks), (lambda: self) if in_place else weakref.ref(self)
            if in_place and reach.size != kept.size:
                others = np.setdiff1d(reach // table.tokens, blocks)
                blocks, generations = np.append(blocks, others), np.append(generations, np.full(others.size, -1))
            self._entry = StepEntry(number, kept, reach, blocks, generations, in_place, table.turns, handle)
            table.steps[number] = self._entry
            self._ended = False
        self._written: dict[int, None] = {}

    def _without_padding(self, given: Ints, *, drop_bad: bool) -> tuple[int, Ints]:
        """How many slots are not padding, and those of them that are slots."""
        self._tokens = np.flatnonzero(given != PADDING)
        kept = given[self._tokens]
        wanted = kept.size
        if count(bad := kept.view(np.uint64) >= np.uint64(self._table.end)):
            if not drop_bad:
                slot = int(kept[int(np.argmax(bad))])
                raise SlotError("slots", f"{PADDING} (padding) or a slot in [0, {self._table.end})", slot)
            self._tokens, kept = self._tokens[~bad], kept[~bad]
        return wanted, kept

    def _claim(self, kept: Ints) -> Ints:
        """The blocks of ``kept``, all of which may be written; raises for others. The lock is held."""
        self._cells, self._bits = self._table.cells_of(kept)
        blocks = self._table.cells.blocks(self._cells)
        self._table.check(Event.WRITE, blocks)
        return blocks

    def _writable(self, slots: Ints) -> NDArray[np.bool_]:
        """Which ``slots`` may be written and are one token's: of two, nobody knows whose KV is there. Lock held."""
        good = ALLOWED[Event.WRITE].take(self._table.states.take(slots // self._table.tokens))
        _, which, times = np.unique(slots, return_inverse=True, return_counts=True)
        good &= times[which] == 1
        self._tokens = np.flatnonzero(good) if self._tokens is None else self._tokens[good]
        return good

    @property
    def in_place(self) -> bool:
        """Whether a device writes the rows by itself."""
        return self._entry.in_place

    def write(self, name: str, rows: NDArray[Any], slots: NDArray[Any] | None = None) -> None:
        """Copy ``rows`` ``[T, *row_shape]``, one for each slot the step began with, padding included, to their places.

        ``slots`` ``[T]`` says where each row goes when they come in another order; they must be the step's slots.
        Integers may be wider than the spec's dtype if every value fits. Raises :class:`RowError` for another shape,
        dtype or a value out of range, and then nothing of this call is kept.
        """
        table, index = self._table, self._table.layout.index(name)
        spec = table.layout.specs[index]
        values = np.asarray(rows)
        if values.shape[:1] != (self._total,):
            raise RowError(f"{name} rows", f"shape {(self._total, *spec.row_shape)}", f"shape {values.shape}")
        at = self._entry.slots
        if slots is not None:
            values, at = self._reordered(name, values, slots)
        elif self._tokens is not None:
            values = values[self._tokens]
        values = spec.rows(values, tokens=at.size, copy=False)
        items = np.ascontiguousarray(values).reshape(-1).view(table.items[index].dtype)
        with self._books.guard:
            self._check_open("write")
            self._check_first(index, name)
            if len(table.steps) > 1:
                self._yield_to_devices()
            if table.turns != self._entry.turns:
                mine = table.writer.take(at) == self._entry.number
                at, items = at[mine], items[mine]
            target = table.items[index]
            target[at if target.ndim == 1 else np.divmod(at, table.tokens)] = items
            self._written[index] = None

    def _reordered(self, name: str, values: NDArray[Any], slots: NDArray[Any]) -> tuple[NDArray[Any], Ints]:
        at = integers(slots, f"{name} slots", "one integer for each row", n=self._total, error=SlotError)
        keep = at != PADDING
        if self._tokens is not None and count(keep) > self._entry.slots.size:
            keep &= np.isin(at, self._entry.slots)  # of the step's, without those that it was begun without
        at, values = at[keep], values[keep]
        if at.size != self._entry.slots.size or not np.array_equal(np.sort(at), np.sort(self._entry.slots)):
            raise SlotError(f"{name} slots", "the slots that the step began with, in any order", "others")
        return values, at

    def wrote(self, name: str) -> None:
        """The device has written, or will have written before :meth:`commit`, a row of ``name`` at every slot.

        For steps begun with ``in_place=True``. The rows lie at their slots in the host buffer, in the spec's dtype.
        """
        index = self._table.layout.index(name)
        self._check_open("have been written")
        if not self._entry.in_place:
            raise BlockStateError("step", "one begun with in_place=True", "one that copies its rows")
        self._check_first(index, name)
        self._written[index] = None

    def commit(self, keep: Keep | None = None) -> int:
        """Make the written rows readable; how many tokens' rows that was.

        ``keep`` ``[T]``, or one for each of some specs by name, says which tokens count (rejected speculative ones do
        not). A row whose block has meanwhile begun another life, or whose slot a later step has taken, or which an
        in-place step that began earlier may still overwrite, is dropped and counted.
        """
        chosen = self._chosen(keep)
        table, entry = self._table, self._entry
        with self._books.guard:
            self._check_open("commit")
            if table.turns == entry.turns and len(table.steps) == 1 and not chosen:  # nearly always
                for spec in self._written:
                    add(table.region, spec, self._cells, self._bits)
                landed = entry.slots.size if self._written else 0
            else:
                self._renew_origins()
                landed = self._commit_some(chosen)
            self._books.count("rows_committed", landed)
            self._end()
        return landed

    def _commit_some(self, chosen: dict[int, NDArray[np.bool_]]) -> int:
        """Make readable what is still the step's and counts; how many tokens' rows that is."""
        table, entry = self._table, self._entry
        mine = self._outside_fences(table.writer.take(entry.slots) == entry.number)
        committed: NDArray[np.bool_] = np.zeros(mine.size, np.bool_)
        for spec in self._written:
            wanted = mine & chosen.get(spec, chosen.get(-1, mine))
            if n := int(count(wanted)):
                whole = n == wanted.size
                marks = (self._cells, self._bits) if whole else table.cells.of_ordered(np.sort(entry.slots[wanted]))
                add(table.region, spec, *marks)
            committed |= wanted
        live, landed = int(count(mine)), int(count(committed))
        # Where nothing was written, what was said not to count is what is rejected.
        counted = landed if self._written else int(count(mine & chosen.get(-1, mine)))
        self._books.count("late_writes_dropped", int(entry.slots.size) - live)
        self._books.count("rows_rejected", live - counted)
        return landed

    def _chosen(self, keep: Keep | None) -> dict[int, NDArray[np.bool_]]:
        """By spec, or -1 for all of them: which of the entry's slots count."""
        masks = keep.items() if isinstance(keep, Mapping) else [] if keep is None else [(None, keep)]
        chosen = {}
        for name, given in masks:
            mask = np.asarray(given)
            if mask.dtype != np.bool_ or mask.shape != (self._total,):
                field = "keep" if name is None else f"keep[{name!r}]"
                raise RowError(field, f"bool of shape {(self._total,)}", f"{mask.dtype} of shape {mask.shape}")
            index = -1 if name is None else self._table.layout.index(name)
            chosen[index] = mask if self._tokens is None else mask[self._tokens]
        return chosen

    def _outside_fences(self, mine: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """``mine`` without the slots that an in-place step which began earlier may still write."""
        begun = takewhile(lambda step: step is not self._entry, self._table.steps.values())
        earlier = [step.reach for step in begun if step.in_place]
        return mine & ~np.isin(self._entry.slots, np.concatenate(earlier)) if earlier else mine

    def _yield_to_devices(self) -> None:
        """Give up what would be copied to where an earlier in-place step may still write over it."""
        slots, number = self._entry.slots, self._entry.number
        mine = self._table.writer.take(slots) == number
        if count(lost := mine & ~self._outside_fences(mine)):
            self._table.writer[slots[lost]] = 0
            self._table.turns += 1

    def _renew_origins(self) -> None:
        """Where a block's content has left while the step wrote it, the block is another computation's from now."""
        table, blocks = self._table, self._entry.blocks
        if count(left := ~table.own.take(blocks)):
            blocks = blocks[left & (table.generations.take(blocks) == self._entry.generations)]
            table.origin[blocks] = table.draw(blocks.size)
            table.own[blocks] = True

    def _give_up(self, how: str, /) -> None:
        if not self._ended:
            self._end()
            self._books.count(f"steps_{how}")

    def _end(self) -> None:
        self._ended = True
        del self._table.steps[self._entry.number]

    def _check_open(self, event: str) -> None:
        if self._ended:
            raise BlockStateError("step", f"one that is in flight to {event}", "one that has ended")

    def _check_first(self, index: int, name: str) -> None:
        if index in self._written:
            raise RowError(f"{name} rows", "one write a step", "a second one")

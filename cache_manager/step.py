"""A forward step: the rows it will write, the generations they are for, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_manager.checks import integers
from cache_manager.errors import BlockBusyError, BlockStateError, RowError, SlotError
from cache_manager.ledger import InFlight, Ledger
from cache_manager.lifecycle import Event
from cache_manager.tier import Tier, runs_of

PADDING = -1


class SlotTable:
    """Checked slots of one step: which tokens count, and the block and offset of each.

    ``tokens`` ``[n]`` are the places, in what the caller passed, of the tokens that are not padding; ``None`` when none
    is, so that nothing has to be picked out.
    """

    __slots__ = ("blocks", "offsets", "runs", "slots", "tokens", "total", "unique_blocks")

    def __init__(self, slots: NDArray[Any] | Sequence[int], device_blocks: int, block_tokens: int) -> None:
        slots = integers(slots, "slots", "a flat array of integers", error=SlotError)
        ordered = np.sort(slots)
        end = device_blocks * block_tokens
        if slots.size and (ordered[0] < PADDING or ordered[-1] >= end):
            bad = int(ordered[0]) if ordered[0] < PADDING else int(ordered[-1])
            raise SlotError("slots", f"{PADDING} (padding) or a slot in [0, {end})", bad)
        padding = int(np.searchsorted(ordered, 0))
        ordered = ordered[padding:]
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            raise SlotError("slots", "each slot once in a step", f"slot {int(ordered[np.argmax(twice)])} twice")
        self.total = slots.size
        self.tokens = np.flatnonzero(slots != PADDING) if padding else None
        self.slots = self.kept(slots)
        self.blocks = self.slots // block_tokens
        self.offsets = self.slots - self.blocks * block_tokens
        self.runs = runs_of(ordered, block_tokens)
        self.unique_blocks: NDArray[np.int64] = _without_repeats(self.runs[0])
        assert not self.slots.size or self.slots.min() >= 0, "padding among the slots"

    def kept(self, values: NDArray[Any]) -> NDArray[Any]:
        """``values`` ``[total, ...]`` without those of padding; the same array when there is no padding."""
        return values if self.tokens is None else values[self.tokens]


def _without_repeats(ordered: NDArray[np.int64]) -> NDArray[np.int64]:
    if ordered.size < 2:
        return ordered
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]


class Step(InFlight):
    """The rows of one forward pass, kept aside until the pass has completed.

    Made by :meth:`AuxBlocks.begin_step`. Call :meth:`write` for each spec that the pass produced, then exactly one of
    :meth:`commit` and :meth:`abort`; as a context manager, leaving commits and an exception aborts.
    """

    __slots__ = ("_begun", "_generations", "_ledger", "_live", "_rows", "_table", "_tier")

    def __init__(self, tier: Tier, ledger: Ledger, table: SlotTable) -> None:
        self._tier = tier
        self._ledger = ledger
        self._table = table
        self._live = np.ones(table.slots.size, dtype=np.bool_)  # not superseded by a later step
        self._rows: dict[int, NDArray[np.uint8]] = {}  # by spec: [tokens, row_nbytes]
        self._ended = False
        with ledger.lock:
            if len(ledger.steps) >= ledger.steps_max:
                raise BlockBusyError("steps in flight", f"fewer than {ledger.steps_max}", len(ledger.steps))
            tier.life.check(Event.WRITE, table.unique_blocks)
            for earlier in ledger.steps:
                earlier._yield_to(table)
            tier.invalidate(table.runs)
            tier.pending[table.unique_blocks] += 1
            self._begun = tier.life.generations[table.unique_blocks]
            self._generations = tier.life.generations[table.blocks]
            ledger.steps.append(self)

    @property
    def blocks(self) -> NDArray[np.int64]:
        """The distinct blocks that the step writes."""
        return self._table.unique_blocks

    def blocks_still_owed(self) -> NDArray[np.int64]:
        """Those of :attr:`blocks` that are still in the life the step was begun for; the lock is held."""
        blocks = self._table.unique_blocks
        still: NDArray[np.bool_] = self._tier.life.generations[blocks] == self._begun
        return blocks[still]

    def add_pending(self, block: int, bits: NDArray[np.uint64]) -> None:
        """Set the bits ``[words]`` of the rows of ``block`` that this step may still write; the lock is held."""
        blocks, words, runs = self._table.runs
        if block in self.blocks_still_owed():
            mine = blocks == block
            bits[words[mine]] |= runs[mine]

    def write(self, name: str, rows: NDArray[Any]) -> None:
        """Keep a copy of ``rows`` ``[T, *row_shape]``, one for each slot the step began with, padding included.

        Integers may be wider than the spec's dtype if every value fits. Raises :class:`RowError` for another shape,
        dtype or a value out of range, and then nothing of this call is kept.
        """
        index, table = self._tier.layout.index(name), self._table
        spec = self._tier.layout.specs[index]
        self._check_open("write")
        if index in self._rows:
            raise RowError(f"{name} rows", "one write a step", "a second one")
        values = np.asarray(rows)
        if values.shape[:1] != (table.total,):
            raise RowError(f"{name} rows", f"shape {(table.total, *spec.row_shape)}", f"shape {values.shape}")
        kept = spec.rows(table.kept(values), tokens=table.slots.size)
        self._rows[index] = kept.reshape(-1).view(np.uint8).reshape(table.slots.size, spec.row_nbytes)

    def commit(self, keep: NDArray[np.bool_] | None = None) -> int:
        """Make the written rows readable; how many tokens' rows that was.

        ``keep`` ``[T]`` says which tokens count (rejected speculative ones do not). A row whose block has meanwhile
        begun another life, or whose slot a later step has taken, is dropped and counted.
        """
        self._check_open("commit")
        table = self._table
        if keep is not None:
            keep = np.asarray(keep)
            if keep.dtype != np.bool_ or keep.shape != (table.total,):
                raise RowError("keep", f"bool of shape {(table.total,)}", f"{keep.dtype} of shape {keep.shape}")
            keep = table.kept(keep)
        with self._ledger.lock:
            self._check_open("commit")
            self._end()
            live = self._live & (self._tier.life.generations[table.blocks] == self._generations)
            wanted = live if keep is None else live & keep
            everything = bool(wanted.all())
            blocks, offsets, runs = table.blocks, table.offsets, table.runs
            if not everything:
                blocks, offsets = blocks[wanted], offsets[wanted]
                runs = runs_of(np.sort(table.slots[wanted]), self._tier.layout.block_tokens)
            for spec, rows in self._rows.items():
                self._tier.store(spec, blocks, offsets, rows if everything else rows[wanted], runs)
            committed = int(blocks.size) if self._rows else 0
            self._ledger.count("rows_committed", committed)
            self._ledger.count("late_writes_dropped", int(np.count_nonzero(~live)))
            self._ledger.count("rows_rejected", int(np.count_nonzero(live & ~wanted)))
        return committed

    def abort(self) -> None:
        """Drop the step; the rows at its slots stay missing. Harmless after the step has ended."""
        with self._ledger.lock:
            if not self._ended:
                self._end()
                self._ledger.count("steps_aborted")

    def _yield_to(self, table: SlotTable) -> None:
        """A later step writes ``table``: where both write a slot, the later one counts."""
        if np.isin(self._table.unique_blocks, table.unique_blocks, assume_unique=True).any():
            self._live &= ~np.isin(self._table.slots, table.slots, assume_unique=True)

    def _end(self) -> None:
        self._ended = True
        self._ledger.steps.remove(self)
        self._tier.pending[self.blocks_still_owed()] -= 1

    def _check_open(self, event: str) -> None:
        if self._ended:
            raise BlockStateError("step", f"one that is in flight to {event}", "one that has ended")

"""One tier of blocks as a table of arrays: states, generations, holders, departures, writers, origins.

What is decided about a block is decided here, by :mod:`cache_manager.lifecycle`'s law, for a whole array of blocks at a
time; the rows' bytes and the words that let a reader check them lie in a region (:mod:`cache_manager.memory`).

Four ideas carry the cost of a step:

* Step numbers never come back. ``writer[slot]`` is the step that will write the slot's row; a later step writes its own
  number over it and a new life of the block writes 0, which is how the earlier step finds out that it is late.
* ``stamp[cell]`` takes increasing tickets, which proves a step's cells distinct without a sort, and says of a block
  that no step in flight writes it when its stamps are older than the oldest step. A *cell* is one validity word.
* ``origin[block]`` names the computation that filled the block. ``own[block]`` is set while the next write goes on
  under that name: not before the first write, nor after the content came from elsewhere or has left for elsewhere.
* The arrays of a step or a move are the caller's slots or pairs; no Python object is made for a block or a token.

Not thread-safe by itself: whoever owns a table calls it with the lock of its :class:`~cache_manager.books.Books` taken.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy import count_nonzero as count  # on booleans several times cheaper than .any() and .all()
from numpy.typing import NDArray

from cache_manager.bits import full_bits
from cache_manager.checks import integers
from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError, SlotError
from cache_manager.leases import Leases
from cache_manager.lifecycle import ALLOWED, ILLEGAL, IN_MOTION, NEXT, Event, State
from cache_manager.memory import GENERATION_SHIFT, add, clear, places, publish
from cache_manager.ports import Region

if TYPE_CHECKING:
    from cache_manager.step import StepEntry

Ints = NDArray[np.int64]
Blocks = Sequence[int] | Ints

_ONE: Final = np.uint64(1)
_ALL: Final = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
STEP_END: Final = (1 << 31) - 1  # of the int32 numbers in ``writer``


class Origins:
    """Draws origins: random numbers from 1 to 2**64 - 1, from the system's entropy once and PCG64 after that."""

    __slots__ = ("_draw",)

    def __init__(self, seed: int | None = None) -> None:
        self._draw = np.random.Generator(np.random.PCG64(int.from_bytes(os.urandom(16)) if seed is None else seed))

    def __call__(self, n: int) -> NDArray[np.uint64]:
        return self._draw.integers(1, _ALL, size=n, dtype=np.uint64, endpoint=True)


class BlockTable:
    """The blocks of one tier, named ``tier``, whose rows lie in ``region``.

    Methods that take several blocks succeed for all of them or raise :class:`BlockStateError` (``BlockBusyError`` when
    a motion or a step is what stands in the way) and have changed nothing.
    """

    def __init__(self, tier: str, region: Region, draw: Origins, *, owned_by_engine: bool = False) -> None:
        self.tier, self.region, self.layout, self.blocks = tier, region, region.layout, region.blocks
        self.tokens, self.words_per_block = self.layout.block_tokens, self.layout.valid_words
        self.full = full_bits(self.tokens)
        blocks = self.blocks
        self.states: NDArray[np.uint8] = np.zeros(blocks, np.uint8)
        self.generations: Ints = np.zeros(blocks, np.int64)
        self.leases = Leases(blocks)
        # Where an engine owns the blocks there are no leases; this is whether it has given each block out.
        self.given: NDArray[np.bool_] | None = np.zeros(blocks, np.bool_) if owned_by_engine else None
        self.departures: NDArray[np.int32] = np.zeros(blocks, np.int32)
        self.origin: NDArray[np.uint64] = np.zeros(blocks, np.uint64)
        self.own: NDArray[np.bool_] = np.zeros(blocks, np.bool_)
        self.installed: dict[int, tuple[int, int]] = {}  # block: origin and tokens that an installation brought
        self.awaited = 0  # restores by copy in flight; while there are any:
        self.lapses: Ints = np.zeros(blocks, np.int64)  # how often what was to come for a block has become worthless
        self.writer: NDArray[np.int32] = np.zeros(blocks * self.tokens, np.int32)
        self._stamp: Ints = np.zeros(blocks * self.words_per_block, np.int64)
        self._seen: Ints = np.zeros(blocks, np.int64)
        self._ticket = 1
        self._next_step = 1
        self.steps: dict[int, StepEntry] = {}  # in flight, oldest first
        self.draw = draw
        self.end = np.uint64(blocks * self.tokens)  # of the slots
        # Where a slot says its cell by a shift: one word a block, or whole words.
        unit = 64 if self.tokens % 64 == 0 else self.tokens
        plain = unit & (unit - 1) == 0 and (self.words_per_block == 1 or unit == 64)
        self._shift, self._mask = (unit.bit_length() - 1, unit - 1) if plain else (-1, 0)
        self.view()

    def view(self) -> None:
        """Make the views of the region that the hot paths use."""
        self.items = tuple(_items(rows) for rows in places(self.region))

    def drop_views(self) -> None:
        """Let the region's memory go, so that it can be closed."""
        self.items = ()

    # ---------------------------------------------------------------- checking

    def ids(self, blocks: Blocks, field: str = "blocks") -> Ints:
        """``blocks`` as a new array, or :class:`InvalidInputError`: of this tier, none twice. The lock is held."""
        ids = self.ids_often(blocks, field)
        order = np.arange(ids.size)
        self._seen[ids] = order  # means nothing afterwards
        if count(twice := self._seen.take(ids) != order):
            raise InvalidInputError(field, "each block once", f"block {int(ids[int(np.argmax(twice))])} twice")
        return ids

    def ids_often(self, blocks: Blocks, field: str = "blocks") -> Ints:
        """As :meth:`ids`, of blocks that may be named several times; without the lock, too."""
        ids = integers(blocks, field, "a flat sequence of block ids")
        if count(outside := ids.view(np.uint64) >= np.uint64(self.blocks)):
            bad = int(ids[int(np.argmax(outside))])
            raise InvalidInputError(field, f"{self.tier} block ids in [0, {self.blocks})", bad)
        return ids

    def check(self, event: Event, ids: Ints) -> None:
        """Raise :class:`BlockStateError` unless the law allows ``event`` for every one of ``ids``."""
        if count(allowed := ALLOWED[event].take(self.states.take(ids))) != ids.size:
            block = int(ids[int(np.argmin(allowed))])
            state = State(int(self.states[block]))
            wanted = " or ".join(s.name for s in State if ALLOWED[event][s])
            error = BlockBusyError if state in IN_MOTION else BlockStateError
            raise error(f"{self.tier} block {block}", f"{wanted} to {event.value}", state.name)

    def apply(self, event: Event, ids: Ints) -> None:
        """Change states by the law. That it allows the event was checked before, for all blocks of the call."""
        after = NEXT[event].take(self.states.take(ids))
        assert not count(after == ILLEGAL), f"{event.value}: a state that the law does not allow"
        self.states[ids] = after

    def busy(self, ids: Ints, *, in_place: bool = False) -> NDArray[np.bool_]:
        """Which blocks a step in flight will still write.

        That is one begun in the block's present life; with ``in_place``, one of any life whose rows a device writes by
        itself, because nobody can tell the device that the block has begun another.
        """
        found: NDArray[np.bool_] = np.zeros(ids.size, np.bool_)
        if not self.steps or not ids.size:
            return found
        oldest = next(iter(self.steps.values())).ticket
        recent = self._stamp.reshape(self.blocks, -1)[ids].max(axis=1) >= oldest  # a superset, and mostly empty
        if count(recent):
            for step in self.steps.values():
                if not in_place:
                    found |= np.isin(ids, step.blocks[self.generations.take(step.blocks) == step.generations])
                elif step.in_place:
                    found |= np.isin(ids, step.blocks)
        return found

    def check_no_step(self, ids: Ints, why: str) -> None:
        """Raise :class:`BlockBusyError` if a step in flight may still write one of ``ids``."""
        if not self.steps:
            return
        if count(stuck := self.busy(ids) | self.busy(ids, in_place=True)):
            block = int(ids[int(np.argmax(stuck))])
            raise BlockBusyError(f"{self.tier} block {block}", f"no step in flight to {why}", "a step")

    def check_no_device_write(self, ids: Ints) -> None:
        """Raise :class:`BlockBusyError` if a device may still write one of ``ids`` by itself, for whatever life."""
        if self.steps and count(fenced := self.busy(ids, in_place=True)):
            block = int(ids[int(np.argmax(fenced))])
            raise BlockBusyError(f"{self.tier} block {block}", "no device that still writes it", "a step in place")

    def check_unheld(self, ids: Ints) -> None:
        """Raise :class:`BlockStateError` if somebody holds one of ``ids``."""
        if count(held := self.leases.holders.take(ids) > 0):
            block = int(ids[int(np.argmax(held))])
            raise BlockStateError(f"{self.tier} block {block}", "FREE or CACHED to copy into", "HELD")

    def check_empty(self, ids: Ints) -> None:
        """Raise :class:`BlockStateError` if one of ``ids`` is held and has a readable row."""
        if count(full := ~self.empty(ids) & (self.states.take(ids) == State.HELD)):
            block = int(ids[int(np.argmax(full))])
            raise BlockStateError(f"{self.tier} block {block}", "no readable row to fill it", "readable rows")

    # ---------------------------------------------------------------- lives

    def begin_life(self, ids: Ints, generations: Ints | None = None) -> None:
        """Start a new life of each block: rows unreadable, what steps still write for the old one late, no origin."""
        self.generations[ids] = self.generations.take(ids) + 1 if generations is None else generations
        self._forget(ids)
        publish(self.region, ids, self.generations.take(ids))

    def _forget(self, ids: Ints) -> None:
        if self.steps:  # the number of a step that has ended is nobody's
            self.writer.reshape(self.blocks, -1)[ids] = 0
        self.origin[ids] = 0
        self.own[ids] = False
        if self.awaited:
            self.lapses[ids] += 1
        self._drop_installed(ids)

    def _drop_installed(self, ids: Ints) -> None:
        """No row of what an installation brought for ``ids`` may come any more."""
        if self.installed:
            for block in ids.tolist():
                self.installed.pop(block, None)

    def forget(self, ids: Ints) -> None:
        """Nothing that was written into these blocks before counts any more; their generations stay as they are."""
        self._forget(ids)
        words = self.words_per_block
        cells = (ids[:, None] * words + np.arange(words)).reshape(-1)
        clear(self.region, cells, np.tile(self.full, ids.size))

    def allocate(self, ids: Ints, owner: Hashable) -> None:
        """Give unheld blocks to ``owner``; each starts a new generation."""
        self._give(ids)
        self.leases.acquire(owner, ids)

    def allocate_each(self, ids: Ints, owners: Iterable[Hashable]) -> None:
        """Give each of ``ids`` to the owner at its place."""
        self._give(ids)
        self.leases.acquire_each(owners, ids)

    def _give(self, ids: Ints) -> None:
        self.check(Event.ALLOCATE, ids)
        self.check_no_device_write(ids)
        self.apply(Event.ALLOCATE, ids)
        self.begin_life(ids)

    def share(self, ids: Ints, owner: Hashable) -> None:
        """Let a further owner hold blocks that have rows; their generation stays."""
        self.check(Event.SHARE, ids)
        self.apply(Event.SHARE, ids)
        self.leases.acquire(owner, ids)

    def release(self, owner: Hashable, ids: Ints | None = None) -> Ints:
        """End leases of ``owner``; idempotent. The blocks nobody holds any more become CACHED, once still."""
        unheld = self.leases.release(owner, ids)
        self.apply(Event.LAST_RELEASE, unheld)
        return unheld

    def evict(self, ids: Ints) -> None:
        """Forget what blocks that nobody holds have in them."""
        self.check(Event.EVICT, ids)
        self.apply(Event.EVICT, ids)
        self.begin_life(ids)

    def available(self, ids: Ints) -> NDArray[np.bool_]:
        """Which blocks could be given to an owner now: nobody holds them, and neither motion nor device fences them."""
        unheld: NDArray[np.bool_] = ALLOWED[Event.ALLOCATE].take(self.states.take(ids))
        return unheld & ~self.busy(ids, in_place=True) if self.steps else unheld

    def begin_departure(self, ids: Ints) -> None:
        """Copying from these blocks begins; their next write is another computation's, because this one has left."""
        self.apply(Event.BEGIN_DEPARTURE, ids)
        np.add.at(self.departures, ids, np.int32(1))
        self.seal(ids)

    def end_departure(self, ids: Ints) -> None:
        """A copy from these blocks has ended, well or not; the last one to end lets the block go."""
        np.subtract.at(self.departures, ids, np.int32(1))
        last = ids[self.departures.take(ids) == 0]
        order = np.arange(last.size)
        self._seen[last] = order
        last = last[self._seen.take(last) == order]  # each once
        self._end(last, Event.DEPARTED_HELD, Event.DEPARTED_UNHELD)

    def begin_arrival(self, ids: Ints) -> None:
        """Copying into these blocks begins; nothing in them is readable. Each starts a new generation if unheld."""
        unheld = ids[self.states.take(ids) != State.HELD]
        self.apply(Event.BEGIN_ARRIVAL, ids)
        if unheld.size:
            self.begin_life(unheld)

    def end_arrival(self, ids: Ints, *, arrived: bool) -> None:
        """A copy into these blocks has ended; one that failed leaves an unheld block FREE."""
        self._end(ids, Event.ARRIVED_HELD, Event.ARRIVED_UNHELD if arrived else Event.FAILED_UNHELD)

    def _end(self, ids: Ints, held: Event, unheld: Event) -> None:
        """Motion ends. A block that its engine has given out counts as held; such a tier has no leases."""
        mine = self.leases.holders.take(ids) > 0 if self.given is None else self.given.take(ids)
        self.apply(held, ids[mine])
        self.apply(unheld, ids[~mine])

    def renew(self, ids: Ints, generations: Ints) -> None:
        """An engine that owns the blocks has given these out anew, in the generations that it says."""
        assert self.given is not None, "a table whose engine owns the blocks"
        self.apply(Event.RENEW, ids)
        self.given[ids] = True
        self.begin_life(ids, generations)

    def reset(self) -> None:
        """Every row is unreadable. Each block starts a new generation; unheld ones become FREE, the others stay."""
        self.apply(Event.RESET_UNHELD, np.flatnonzero((self.states == State.FREE) | (self.states == State.CACHED)))
        everything = np.arange(self.blocks)
        if self.given is None:
            self.begin_life(everything)
        else:  # generations are the engine's to choose
            self.forget(everything)

    # ---------------------------------------------------------------- origins

    def write_under_own_origin(self, blocks: Ints, slots: Ints) -> None:
        """A step is about to write ``slots``, which lie in ``blocks``: each block has an origin that is its own."""
        if count(own := self.own.take(blocks)) != blocks.size:
            fresh = blocks[~own]
            self.origin[fresh] = self.draw(fresh.size)
            self.own[fresh] = True
        if self.installed and not self.installed.keys().isdisjoint(touched := blocks.tolist()):
            for block in touched:  # what was installed is written over: late rows of it are of another computation
                origin, tokens = self.installed.get(block, (0, 0))
                first = block * self.tokens
                if origin and count((slots >= first) & (slots < first + tokens)):
                    del self.installed[block]

    def carry_origin(self, ids: Ints, origins: NDArray[np.uint64]) -> None:
        """The content of ``ids`` came from elsewhere, where its origin was ``origins``."""
        self.origin[ids] = origins
        self.own[ids] = False
        self._drop_installed(ids)

    def seal(self, ids: Ints) -> None:
        """The content of ``ids`` leaves under its origin, drawn now where nobody has announced a write of it."""
        unknown = ids[self.origin.take(ids) == 0]
        if unknown.size:
            unknown = np.unique(unknown)
            self.origin[unknown] = self.draw(unknown.size)
        self.own[ids] = False

    # ---------------------------------------------------------------- cells

    def begin_writing(self, slots: Ints) -> tuple[Ints, NDArray[np.uint64], bool, int]:
        """The cells of distinct ``slots``, stamped; the bits in each; whether cells and slots pair up; the ticket.

        Raises :class:`~cache_manager.errors.SlotError` for a slot given twice.
        """
        ticket = self._ticket
        cells, at = self.cells(slots)
        n = slots.size
        runs = n > 1 and slots[1] == slots[0] + 1  # a prefill comes first, or there is none
        if not runs and self._differ(cells):  # one row of each sequence, as decode has them
            return cells, _ONE << at, True, ticket
        if n:
            edge = np.empty(n + 1, np.bool_)
            edge[0] = edge[n] = True
            edge[1:n] = (slots[1:] - slots[:-1] != 1) | (cells[1:] != cells[:-1])
            edges = np.flatnonzero(edge)
            first, length = edges[:-1], (edges[1:] - edges[:-1]).view(np.uint64)
            if self._differ(run_cells := cells[first]):
                return run_cells, (_ALL >> (np.uint64(64) - length)) << at[first], False, ticket
        ordered = np.sort(slots)
        if count(twice := ordered[1:] == ordered[:-1]):
            raise SlotError("slots", "each slot once in a step", f"slot {int(ordered[int(np.argmax(twice))])} twice")
        cells, bits = self.cells_with_bits(ordered)
        self._differ(cells)
        return cells, bits, False, ticket

    def cells(self, slots: Ints) -> tuple[Ints, NDArray[np.uint64]]:
        """The cell of each slot, and the place of its bit there."""
        if self._shift >= 0:
            return slots >> self._shift, (slots & self._mask).view(np.uint64)
        blocks, offsets = np.divmod(slots, self.tokens)
        return blocks * self.words_per_block + (offsets >> 6), (offsets & 63).view(np.uint64)

    def cells_with_bits(self, ordered: Ints) -> tuple[Ints, NDArray[np.uint64]]:
        """The cells of ``ordered`` slots, each once, and the bits in each."""
        if not ordered.size:
            return ordered, ordered.view(np.uint64)
        cells, at = self.cells(ordered)
        start = np.flatnonzero(np.concatenate(([True], cells[1:] != cells[:-1])))
        bits: NDArray[np.uint64] = np.bitwise_or.reduceat(_ONE << at, start)
        return cells[start], bits

    def _differ(self, cells: Ints) -> bool:
        """Stamp ``cells``; whether no two are the same."""
        tickets = np.arange(self._ticket, self._ticket + cells.size)
        self._ticket += cells.size
        self._stamp[cells] = tickets
        return bool(count(self._stamp.take(cells) == tickets) == cells.size)

    def blocks_of(self, cells: Ints) -> Ints:
        """The blocks of cells, each once."""
        return cells if self.words_per_block == 1 else np.unique(cells // self.words_per_block)

    def make_unreadable(self, cells: Ints, bits: NDArray[np.uint64]) -> None:
        """Nobody may read these rows from here on; a reader of a block where somebody could will notice."""
        clear(self.region, cells, bits)

    def make_readable(self, spec: int, cells: Ints, bits: NDArray[np.uint64]) -> None:
        """The bytes of these rows are in place."""
        add(self.region, spec, cells, bits)

    def step_number(self) -> int:
        """A number that no step had before; where they run out, those in flight are numbered anew."""
        if self._next_step == STEP_END:
            writer, self._next_step = np.zeros_like(self.writer), 1
            renumbered: dict[int, StepEntry] = {}
            for step in self.steps.values():
                writer[self.writer == step.number] = self._next_step
                step.number = self._next_step
                renumbered[step.number] = step
                self._next_step += 1
            self.writer, self.steps = writer, renumbered
        number, self._next_step = self._next_step, self._next_step + 1
        self._ticket += 1  # an empty step has a ticket of its own, too
        return number

    # ---------------------------------------------------------------- what is there

    def complete(self, ids: Ints, specs: Sequence[int]) -> NDArray[np.bool_]:
        """Which blocks have every row of every one of ``specs``."""
        complete: NDArray[np.bool_] = (self.region.valid[ids][:, specs, :] == self.full).all(axis=(1, 2))
        return complete

    def empty(self, ids: Ints) -> NDArray[np.bool_]:
        """Which blocks have no readable row at all."""
        empty: NDArray[np.bool_] = (self.region.valid[ids] == 0).all(axis=(1, 2))
        return empty

    def count(self, state: State) -> int:
        return int(count(self.states == state))

    def assert_consistent(self) -> None:
        """Raise ``AssertionError`` unless the arrays, the leases and the region tell the same story."""
        states, holders = self.states, self.leases.holders
        assert (holders == self.leases.counted()).all(), f"{self.tier}: reference counts differ from leases"
        held = holders > 0 if self.given is None else self.given
        moving = np.isin(states, [int(s) for s in IN_MOTION])
        assert not count((states == State.FREE) & held), f"a {self.tier} block is free and owned"
        assert not count((states == State.CACHED) & held), f"a {self.tier} block is cached and owned"
        assert not count((states == State.HELD) & ~held), f"a {self.tier} block is held by nobody"
        assert ((states == State.LEAVING) == (self.departures > 0)).all(), f"{self.tier}: departures differ"
        assert not count(moving & (states == State.ARRIVING) & ~self.empty(np.arange(self.blocks)))
        assert self.empty(np.flatnonzero(states == State.FREE)).all(), f"a free {self.tier} block has readable rows"
        assert not count(self.own & (self.origin == 0)), f"a {self.tier} block is written under no origin"
        readable = ~self.empty(np.arange(self.blocks))
        assert not count(readable & (self.origin == 0)), f"a {self.tier} block has rows of no origin"
        published = (self.region.words >> np.uint64(GENERATION_SHIFT)).astype(np.int64)
        assert (published == self.generations).all(), f"{self.tier}: published generations differ"


def _items(rows: NDArray[np.uint8]) -> NDArray[Any]:
    """Rows ``[blocks, block_tokens, row_nbytes]`` as one item each: by slot where they lie without gaps, else 2-d."""
    items = rows.view(f"V{rows.shape[2]}")[..., 0]
    if items.strides[0] != items.shape[1] * items.strides[1]:
        return items
    flat = items.view()
    flat.shape = (-1,)
    return flat


__all__ = ["BlockTable", "Blocks", "Ints", "Origins"]

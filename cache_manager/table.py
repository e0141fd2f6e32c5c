"""One tier of blocks as a table of arrays: states, generations, holders, departures, writers, origins.

What is decided about a block is decided here, by :mod:`cache_manager.lifecycle`'s law, for a whole array of blocks at a
time; the rows' bytes and the words that let a reader check them lie in a region (:mod:`cache_manager.memory`).

Three ideas carry the cost of a step:

* ``writer[slot]`` is the number of the step that will write the slot's row; a later step writes its own number over it
  and a new life of the block writes 0, which is how the earlier step finds out that it is late.
* ``origin[block]`` names the computation that filled the block. ``own[block]`` is set while the next write goes on
  under that name: not before the first write, nor after the content came from elsewhere or has left for elsewhere.
* The arrays of a step or a move are the caller's slots or pairs; no Python object is made for a block or a token. That
  they are distinct is proved by writing their places in the call at their own, and reading these back: no sort.

A *cell* is one validity word.

Not thread-safe by itself: whoever owns a table calls it with the lock of its :class:`~cache_manager.books.Books` taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy import count_nonzero as count  # on booleans several times cheaper than .any() and .all()
from numpy.typing import NDArray

from cache_manager.bits import Cells, full_bits, prefix_bits
from cache_manager.checks import integers
from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError, SlotError
from cache_manager.leases import Leases
from cache_manager.lifecycle import ALLOWED, ILLEGAL, IN_MOTION, NEXT, Event, State
from cache_manager.memory import GENERATION_SHIFT, bits_of, clear, places, publish
from cache_manager.ports import Region, TierName

if TYPE_CHECKING:
    from cache_manager.step import StepEntry

Ints = NDArray[np.int64]
Blocks = Sequence[int] | Ints

STEP_NUMBERS: Final = (1 << 31) - 1  # of the int32 numbers in ``writer``; 0 is nobody


class BlockTable:
    """The blocks of one tier, named ``tier``, whose rows lie in ``region``.

    Methods that take several blocks succeed for all of them or raise :class:`BlockStateError` (``BlockBusyError`` when
    a motion or a step is what stands in the way) and have changed nothing.
    """

    def __init__(self, tier: TierName, region: Region, *, owned_by_engine: bool = False) -> None:
        self.tier, self.region, self.layout, self.blocks = tier, region, region.layout, (blocks := region.blocks)
        self.tokens, self.words_per_block = self.layout.block_tokens, self.layout.valid_words
        self.full = full_bits(self.tokens)
        self.states: NDArray[np.uint8] = np.zeros(blocks, np.uint8)
        self.generations: Ints = np.zeros(blocks, np.int64)
        self.leases = Leases(blocks)
        self.by_engine = owned_by_engine  # then there are no leases, and a block is held once it was given out
        self.departures: NDArray[np.int32] = np.zeros(blocks, np.int32)
        self.origin: NDArray[np.uint64] = np.zeros(blocks, np.uint64)
        self.own: NDArray[np.bool_] = np.zeros(blocks, np.bool_)
        self.installed: dict[int, tuple[int, int]] = {}  # block: origin and tokens that an installation brought
        self.lapses: Ints = np.zeros(blocks, np.int64)  # how often what was to come for a block has become worthless
        self.writer: NDArray[np.int32] = np.zeros(blocks * self.tokens, np.int32)
        self._order: Ints = np.arange(blocks * self.words_per_block)
        self._seen: Ints = np.zeros(self._order.size, np.int64)  # means nothing between calls
        self._last_step = 0
        self.turns = 0  # changes whenever a slot, or an origin, that a step in flight writes has become another's
        self.steps: dict[int, StepEntry] = {}  # in flight, oldest first
        self._random = np.random.default_rng()  # of the system's entropy
        self.end = blocks * self.tokens  # of the slots
        self.cells = Cells(self.tokens)
        self.view()

    def view(self, *, drop: bool = False) -> None:
        """Make the views of the region that the hot paths use, or let them go, so that it can be closed."""
        self.items = () if drop else tuple(_items(rows) for rows in places(self.region))

    # ---------------------------------------------------------------- checking

    def ids(self, blocks: Blocks, field: str = "blocks") -> Ints:
        """``blocks`` as a new array, or :class:`InvalidInputError`: of this tier, none twice. The lock is held."""
        ids = self.ids_often(blocks, field)
        self.check_once(ids, field)
        return ids

    def ids_often(self, blocks: Blocks, field: str = "blocks") -> Ints:
        """As :meth:`ids`, of blocks that may be named several times; without the lock, too."""
        ids = integers(blocks, field, "a flat sequence of block ids")
        if ids.size and not 0 <= (bad := extreme(ids)) < self.blocks:
            raise InvalidInputError(field, f"{self.tier} block ids in [0, {self.blocks})", bad)
        return ids

    def check_once(self, ids: Ints, field: str) -> None:
        """Raise :class:`InvalidInputError` for a block that is named twice. The lock is held."""
        if not self._differ(ids):
            raise InvalidInputError(field, "each block once", f"block {twice(np.sort(ids))} twice")

    def _differ(self, numbers: Ints) -> bool:
        """Whether no two of ``numbers``, of blocks or of cells, are the same. The lock is held."""
        if numbers.size > self._order.size:
            return False
        order = self._order[: numbers.size]
        self._seen[numbers] = order
        return self._seen.take(numbers).tobytes() == order.tobytes()  # as bytes: == touches more code

    def first_rows(self, rows: Sequence[int], n: int, what: str) -> NDArray[np.uint64]:
        """Validity words ``[n, 1, W]`` of the first ``rows[i]`` rows of a block, for ``n`` things called ``what``."""
        return prefix_bits(integers(rows, "rows", f"one count for each {what}", n=n), self.tokens)

    def check(self, event: Event, ids: Ints) -> None:
        """Raise :class:`BlockStateError` unless the law allows ``event`` for every one of ``ids``."""
        if (at := self._after(event, ids).find(ILLEGAL)) >= 0:
            state = State(int(self.states[ids[at]]))
            wanted = " or ".join(s.name for s in State if ALLOWED[event][s])
            error = BlockBusyError if state in IN_MOTION else BlockStateError
            raise error(f"{self.tier} block {int(ids[at])}", f"{wanted} to {event.value}", state.name)

    def _after(self, event: Event, ids: Ints) -> bytes:
        return self.states.take(ids).tobytes().translate(NEXT[event])

    def refuse(
        self, ids: Ints, bad: NDArray[np.bool_], wanted: str, got: str, error: type[BlockStateError] = BlockBusyError
    ) -> None:
        if count(bad):
            raise error(f"{self.tier} block {int(ids[int(np.argmax(bad))])}", wanted, got)

    def apply(self, event: Event, ids: Ints) -> None:
        """Change states by the law. That it allows the event was checked before, for all blocks of the call."""
        if not ids.size:
            return
        after = self._after(event, ids)
        assert ILLEGAL not in after, f"{event.value}: a state that the law does not allow"
        self.states[ids] = np.frombuffer(after, np.uint8)

    def busy(self, ids: Ints, *, devices_only: bool = False) -> NDArray[np.bool_]:
        """Which blocks a step in flight will still write: one begun in the block's present life, or a device.

        A device that writes rows by itself counts whatever the life, because nobody can tell it that another has begun,
        and whether or not the step has claimed the block, because it has the slots that the engine gave it.
        """
        found: NDArray[np.bool_] = np.zeros(ids.size, np.bool_)
        for step in self.steps.values():
            if step.in_place:
                found |= self.leases.among(ids, step.blocks)
            elif not devices_only:
                present = self.generations.take(step.blocks) == step.generations
                found |= self.leases.among(ids, step.blocks[present])
        return found

    def check_no_step(self, ids: Ints, why: str) -> None:
        """Raise :class:`BlockBusyError` if a step in flight may still write one of ``ids``."""
        if self.steps:
            self.refuse(ids, self.busy(ids), f"no step in flight to {why}", "a step")

    def check_no_device(self, ids: Ints) -> None:
        """Raise :class:`BlockBusyError` if a device may still write one of ``ids`` by itself, for whatever life."""
        if self.steps:
            self.refuse(ids, self.busy(ids, devices_only=True), "no device that still writes it", "a step in place")

    def check_holder(self, owner: Hashable, ids: Ints, held: NDArray[np.bool_] | None = None) -> None:
        """Raise :class:`BlockStateError` unless ``owner`` holds all of ``ids``; ``held`` says which, if it is known."""
        held = self.leases.among(ids, self.leases.blocks(owner)) if held is None else held
        if count(held) != ids.size:
            self.refuse(ids, ~held, f"one that {owner!r} holds", "one it does not", BlockStateError)

    def check_empty(self, ids: Ints) -> None:
        """Raise :class:`BlockStateError` if one of ``ids`` is held and has a readable row."""
        full = ~self.empty(ids) & (self.states.take(ids) == State.HELD)
        self.refuse(ids, full, "no readable row to fill it", "readable rows", BlockStateError)

    # ---------------------------------------------------------------- lives

    def begin_life(self, ids: Ints, generations: Ints | None = None) -> None:
        """Start a new life of each block: rows unreadable, what steps still write for the old one late, no origin."""
        self.generations[ids] = lives = self.generations.take(ids) + 1 if generations is None else generations
        self._forget(ids)
        publish(self.region, ids, lives)

    def _forget(self, ids: Ints) -> None:
        if self.steps:  # the number of a step that has ended is nobody's
            self.writer.reshape(self.blocks, -1)[ids] = 0
            self.turns += 1
        self.origin[ids] = 0
        self.own[ids] = False
        if self.by_engine:  # the others' restores keep their blocks
            self.lapses[ids] += 1
        self._drop_installed(ids)

    def _drop_installed(self, ids: Ints) -> None:
        """No row of what an installation brought for ``ids`` may come any more."""
        for block in ids.tolist() if self.installed else ():
            self.installed.pop(block, None)

    def forget(self, ids: Ints) -> None:
        """Nothing that was written into these blocks before counts any more; their generations stay as they are."""
        self._forget(ids)
        words = self.words_per_block
        cells = (ids[:, None] * words + np.arange(words)).reshape(-1)
        clear(self.region, cells, np.tile(self.full, ids.size))

    def allocate(self, ids: Ints, owner: Hashable = None, *, each: Iterable[Hashable] | None = None) -> None:
        """Give unheld blocks to ``owner``, or to ``each`` the one at its place; they start a new generation."""
        self.check(Event.ALLOCATE, ids)
        self.check_no_device(ids)
        self.apply(Event.ALLOCATE, ids)
        self.begin_life(ids)
        if each is None:
            self.leases.acquire(owner, ids)
        else:
            self.leases.acquire_each(each, ids)

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
        return unheld & ~self.busy(ids, devices_only=True) if self.steps else unheld

    def begin_departure(self, ids: Ints) -> None:
        """Copying from these blocks begins; a block named twice counts once. Their next write has another origin."""
        self.apply(Event.BEGIN_DEPARTURE, ids)
        self.departures[ids] = self.departures.take(ids) + 1
        self.seal(ids)

    def end_departure(self, ids: Ints) -> None:
        """A copy from these blocks has ended, well or not; the last one to end lets the block go."""
        self.departures[ids] = left = self.departures.take(ids) - 1
        self._end(some(ids, left == 0), Event.DEPARTED_HELD, Event.DEPARTED_UNHELD)

    def begin_arrival(self, ids: Ints) -> None:
        """Copying into these blocks begins; nothing in them is readable. Each starts a new generation if unheld."""
        unheld = some(ids, self.states.take(ids) != State.HELD)
        self.apply(Event.BEGIN_ARRIVAL, ids)
        if unheld.size:
            self.begin_life(unheld)

    def end_arrival(self, ids: Ints, *, arrived: bool) -> None:
        """A copy into these blocks has ended; one that failed leaves an unheld block FREE."""
        self._end(ids, Event.ARRIVED_HELD, Event.ARRIVED_UNHELD if arrived else Event.FAILED_UNHELD)

    def _end(self, ids: Ints, held: Event, unheld: Event) -> None:
        mine = np.ones(ids.size, np.bool_) if self.by_engine else self.leases.holders.take(ids) > 0
        for event, which in ((held, mine), (unheld, ~mine)):
            self.apply(event, some(ids, which))

    def renew(self, ids: Ints, generations: Ints) -> None:
        """An engine that owns the blocks has given these out anew, in the generations that it says."""
        assert self.by_engine, "a table whose engine owns the blocks"
        self.apply(Event.RENEW, ids)
        self.begin_life(ids, generations)

    def reset(self) -> None:
        """Every row is unreadable. Each block starts a new generation; unheld ones become FREE, the others stay."""
        self.apply(Event.RESET_UNHELD, np.flatnonzero((self.states == State.FREE) | (self.states == State.CACHED)))
        everything = np.arange(self.blocks)
        if self.by_engine:  # generations are the engine's to choose
            self.forget(everything)
        else:
            self.begin_life(everything)

    # ---------------------------------------------------------------- origins

    def draw(self, n: int) -> NDArray[np.uint64]:
        """New origins ``[n]``: random numbers from 1 to 2**64 - 1."""
        return self._random.integers(1, (1 << 64) - 1, size=n, dtype=np.uint64, endpoint=True)

    def write_under_own_origin(self, blocks: Ints, slots: Ints) -> None:
        """A step is about to write ``slots``, which lie in ``blocks``: each block has an origin that is its own."""
        if False in (own := self.own.take(blocks)).tobytes():
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
        self.end_origin(ids)
        self._drop_installed(ids)

    def seal(self, ids: Ints) -> None:
        """The content of ``ids`` leaves under its origin, drawn now where nobody has announced a write of it."""
        if count(unknown := self.origin.take(ids) == 0):
            self.origin[ids[unknown]] = self.draw(int(count(unknown)))
        self.end_origin(ids)

    def hand_out(self, ids: Ints) -> list[int]:
        """The origins of ``ids``, for something outside; 0 where nobody has announced a write."""
        self.end_origin(ids)
        found: list[int] = self.origin.take(ids).tolist()
        return found

    def end_origin(self, ids: Ints) -> None:
        """What ``ids`` hold is known elsewhere under their origins: what is written or committed next is another's."""
        self.own[ids] = False
        self.turns += bool(self.steps)

    def cells_of(self, slots: Ints) -> tuple[Ints, NDArray[np.uint64]]:
        """The cells of distinct ``slots``, each once, and the bits in each; the lock is held.

        Raises :class:`~cache_manager.errors.SlotError` for a slot given twice.
        """
        cells, bits = self.cells.bit_by_bit(slots)
        runs = slots.size > 1 and slots[1] == slots[0] + 1  # a prefill comes first, or there is none
        if not runs and self._differ(cells):  # one row of each sequence, as decode has them
            return cells, bits
        if self._differ((found := self.cells.run_by_run(slots, cells))[0]):
            return found
        ordered = np.sort(slots)
        if (slot := twice(ordered)) is not None:
            raise SlotError("slots", "each slot once in a step", f"slot {slot} twice")
        return self.cells.of_ordered(ordered)

    def step_number(self) -> int:
        """A number that no step in flight has. Where all have been given, they begin anew: it says nothing of order."""
        while True:
            self._last_step = self._last_step % STEP_NUMBERS + 1
            if self._last_step not in self.steps:
                return self._last_step

    # ---------------------------------------------------------------- what is there

    def complete(self, ids: Ints, specs: Sequence[int]) -> NDArray[np.bool_]:
        """Which blocks have every row of every one of ``specs``."""
        return np.asarray((bits_of(self.region, ids)[:, specs, :] == self.full).all(axis=(1, 2)))

    def empty(self, ids: Ints) -> NDArray[np.bool_]:
        """Which blocks have no readable row at all."""
        return np.asarray((bits_of(self.region, ids) == 0).all(axis=(1, 2)))

    def assert_consistent(self) -> None:
        """Raise ``AssertionError`` unless the arrays, the leases and the region tell the same story."""
        states, holders, tier = self.states, self.leases.holders, self.tier
        empty = self.empty(np.arange(self.blocks))
        assert (holders == self.leases.counted()).all(), f"{tier}: reference counts differ from leases"
        held = states != State.FREE if self.by_engine else holders > 0
        assert not count((states == State.FREE) & held), f"a {tier} block is free and owned"
        assert not count((states == State.CACHED) & held), f"a {tier} block is cached and owned"
        assert not count((states == State.HELD) & ~held), f"a {tier} block is held by nobody"
        assert ((states == State.LEAVING) == (self.departures > 0)).all(), f"{tier}: departures differ"
        assert empty[states == State.ARRIVING].all(), f"an arriving {tier} block has readable rows"
        assert empty[states == State.FREE].all(), f"a free {tier} block has readable rows"
        assert not count((self.own | ~empty) & (self.origin == 0)), f"a {tier} block has rows of no origin"
        published = (self.region.words >> np.uint64(GENERATION_SHIFT)).astype(np.int64)
        assert (published == self.generations).all(), f"{tier}: published generations differ"


def extreme(ids: Ints) -> int:
    """A negative one of ``ids``, or the largest if there is none: quicker than a mask of those that are outside."""
    lowest: int = ids.item(ids.argmin())
    return lowest if lowest < 0 else ids.item(ids.argmax())


def twice(ordered: Ints) -> int | None:
    """One of ``ordered`` numbers that is there twice."""
    again = ordered[1:] == ordered[:-1]
    return int(ordered[int(np.argmax(again))]) if count(again) else None


def some(ids: Ints, which: NDArray[np.bool_]) -> Ints:
    """``ids[which]``, which is all or none of them nearly always."""
    n = count(which)
    return ids if n == ids.size else ids[which] if n else ids[:0]


def _items(rows: NDArray[np.uint8]) -> NDArray[Any]:
    """Rows ``[blocks, block_tokens, row_nbytes]`` as one item each: by slot where they lie without gaps, else 2-d."""
    items = rows.view(f"V{rows.shape[2]}")[..., 0]
    if items.strides[0] != items.shape[1] * items.strides[1]:
        return items
    flat = items.view()
    flat.shape = (-1,)
    return flat

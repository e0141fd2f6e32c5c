"""The life of a block, as a table.

The law: a block's rows may be written only while somebody holds it, may be read in any state but FREE and ARRIVING,
and a block in motion (LEAVING, ARRIVING) can be neither freed, nor given to a new owner, nor written. Every time a
block starts a new life its generation goes up, and whatever was issued for an older generation is dropped.

    FREE ----- nobody's; nothing in it is readable
    HELD ----- at least one owner has a lease
    CACHED --- no owner; the rows stay readable until the block is given away or evicted
    LEAVING -- being copied from (leases may come and go; the block stays)
    ARRIVING - being copied into; not readable until it has arrived

Pure: decides, and moves no bytes. One instance describes one tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache_manager.checks import integers
from cache_manager.errors import BlockBusyError, BlockStateError, InvalidInputError
from cache_manager.leases import Leases


class State(IntEnum):
    FREE = 0
    HELD = 1
    CACHED = 2
    LEAVING = 3
    ARRIVING = 4


class Event(Enum):
    ALLOCATE = "allocate"
    SHARE = "share"
    LAST_RELEASE = "release by the last owner"
    EVICT = "evict"
    WRITE = "write"
    BEGIN_DEPARTURE = "copy from"
    DEPARTED_HELD = "copied from, held"
    DEPARTED_UNHELD = "copied from, unheld"
    BEGIN_ARRIVAL = "copy into"
    ARRIVED_HELD = "arrived, held"
    ARRIVED_UNHELD = "arrived, unheld"
    FAILED_UNHELD = "failed to arrive, unheld"
    RESET_UNHELD = "reset, unheld"


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.FREE: {
        Event.ALLOCATE: State.HELD,
        Event.EVICT: State.FREE,
        Event.BEGIN_ARRIVAL: State.ARRIVING,
        Event.RESET_UNHELD: State.FREE,
    },
    State.HELD: {
        Event.SHARE: State.HELD,
        Event.WRITE: State.HELD,
        Event.LAST_RELEASE: State.CACHED,
        Event.BEGIN_DEPARTURE: State.LEAVING,
        Event.BEGIN_ARRIVAL: State.ARRIVING,
    },
    State.CACHED: {
        Event.ALLOCATE: State.HELD,
        Event.SHARE: State.HELD,
        Event.EVICT: State.FREE,
        Event.BEGIN_DEPARTURE: State.LEAVING,
        Event.BEGIN_ARRIVAL: State.ARRIVING,
        Event.RESET_UNHELD: State.FREE,
    },
    State.LEAVING: {
        Event.SHARE: State.LEAVING,
        Event.LAST_RELEASE: State.LEAVING,
        Event.BEGIN_DEPARTURE: State.LEAVING,
        Event.DEPARTED_HELD: State.HELD,
        Event.DEPARTED_UNHELD: State.CACHED,
    },
    State.ARRIVING: {
        Event.LAST_RELEASE: State.ARRIVING,
        Event.ARRIVED_HELD: State.HELD,
        Event.ARRIVED_UNHELD: State.CACHED,
        Event.FAILED_UNHELD: State.FREE,
    },
}

_ILLEGAL: Final = 255
_NEXT: Final[dict[Event, NDArray[np.uint8]]] = {
    event: np.array([TRANSITIONS[s].get(event, _ILLEGAL) for s in State], dtype=np.uint8) for event in Event
}
IN_MOTION: Final = (State.LEAVING, State.ARRIVING)

Blocks = Sequence[int] | NDArray[np.int64]


class BlockLifecycle:
    """States, generations and leases of the blocks of one tier.

    Each method succeeds for all the blocks it is given or raises :class:`BlockStateError` (``BlockBusyError`` when
    motion is what stands in the way) and has changed nothing.
    """

    __slots__ = ("_departures", "blocks", "generations", "leases", "states", "tier")

    def __init__(self, tier: str, blocks: int) -> None:
        self.tier = tier
        self.blocks = blocks
        self.states: NDArray[np.uint8] = np.zeros(blocks, dtype=np.uint8)
        self.generations: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self.leases = Leases()
        self._departures: NDArray[np.int32] = np.zeros(blocks, dtype=np.int32)

    def ids(self, blocks: Blocks, field: str = "blocks") -> NDArray[np.int64]:
        """``blocks`` as an array, or :class:`InvalidInputError`: integers, in this pool, none twice."""
        ids = integers(blocks, field, "a flat sequence of block ids")
        if ids.size == 0:
            return ids
        low, high = ids.min(), ids.max()
        if low < 0 or high >= self.blocks:
            bad = int(low) if low < 0 else int(high)
            raise InvalidInputError(field, f"{self.tier} block ids in [0, {self.blocks})", bad)
        if len(set(ids.tolist())) != ids.size:
            twice = next(b for b, n in Counter(ids.tolist()).items() if n > 1)
            raise InvalidInputError(field, "each block once", f"block {twice} twice")
        return ids

    def check(self, event: Event, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The states that ``event`` would lead to; raises if it is not allowed for every block."""
        after = _NEXT[event][self.states[ids]]
        if (after == _ILLEGAL).any():
            block = int(ids[int(np.argmax(after == _ILLEGAL))])
            state = State(int(self.states[block]))
            allowed = " or ".join(s.name for s in State if event in TRANSITIONS[s])
            error = BlockBusyError if state in IN_MOTION else BlockStateError
            raise error(f"{self.tier} block {block}", f"{allowed} to {event.value}", state.name)
        return after

    def _apply(self, event: Event, ids: NDArray[np.int64]) -> None:
        self.states[ids] = self.check(event, ids)

    def allocate(self, ids: NDArray[np.int64], owner: str) -> None:
        """Give unheld blocks to ``owner``; each starts a new generation."""
        self._apply(Event.ALLOCATE, ids)
        self.generations[ids] += 1
        self.leases.acquire(owner, ids.tolist())

    def share(self, ids: NDArray[np.int64], owner: str) -> None:
        """Let a further owner hold blocks that have rows; their generation stays."""
        self._apply(Event.SHARE, ids)
        self.leases.acquire(owner, ids.tolist())

    def release(self, owner: str, ids: NDArray[np.int64] | None = None) -> list[int]:
        """End leases of ``owner``; idempotent. The blocks nobody holds any more become CACHED, once still."""
        unheld = self.leases.release(owner, None if ids is None else ids.tolist())
        if unheld:
            self._apply(Event.LAST_RELEASE, np.asarray(unheld, dtype=np.int64))
        return unheld

    def evict(self, ids: NDArray[np.int64]) -> None:
        """Forget what blocks that nobody holds have in them."""
        self._apply(Event.EVICT, ids)
        self.generations[ids] += 1

    def begin_departure(self, ids: NDArray[np.int64]) -> None:
        self._apply(Event.BEGIN_DEPARTURE, ids)
        np.add.at(self._departures, ids, np.int32(1))

    def end_departure(self, ids: NDArray[np.int64]) -> None:
        """A copy from these blocks has ended, well or not; the last one to end lets the block go."""
        np.subtract.at(self._departures, ids, np.int32(1))
        last = ids[self._departures[ids] == 0]
        held, unheld = self._split((last if last.size == ids.size else np.unique(last)).tolist())
        self._apply(Event.DEPARTED_HELD, held)
        self._apply(Event.DEPARTED_UNHELD, unheld)

    def begin_arrival(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Start copying into blocks. Unheld ones start a new generation, and are returned; held ones live on."""
        self._apply(Event.BEGIN_ARRIVAL, ids)
        _, unheld = self._split(ids.tolist())
        self.generations[unheld] += 1
        return unheld

    def end_arrival(self, ids: NDArray[np.int64], *, arrived: bool) -> None:
        """A copy into these blocks has ended; one that failed leaves an unheld block FREE."""
        held, unheld = self._split(ids.tolist())
        self._apply(Event.ARRIVED_HELD, held)
        self._apply(Event.ARRIVED_UNHELD if arrived else Event.FAILED_UNHELD, unheld)

    def _split(self, blocks: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which of ``blocks`` somebody holds, and which nobody does."""
        held, unheld = self.leases.split(blocks)
        return np.array(held, dtype=np.int64), np.array(unheld, dtype=np.int64)

    def reset(self) -> None:
        """A new generation for every block: unheld ones become FREE, held ones and those in motion stay."""
        unheld = np.flatnonzero((self.states == State.FREE) | (self.states == State.CACHED))
        self._apply(Event.RESET_UNHELD, unheld)
        self.generations += 1

    def count(self, state: State) -> int:
        return int(np.count_nonzero(self.states == state))

    def assert_consistent(self) -> None:
        """Raise ``AssertionError`` unless states, leases and departures tell the same story."""
        for block in range(self.blocks):
            state, count = State(int(self.states[block])), self.leases.count(block)
            assert not (state is State.FREE and count), f"{self.tier} block {block} is free and owned"
            assert not (state is State.CACHED and count), f"{self.tier} block {block} is cached and owned"
            assert not (state is State.HELD and not count), f"{self.tier} block {block} is held by nobody"
            assert (state is State.LEAVING) == (self._departures[block] > 0), f"{self.tier} block {block} departures"
        assert sum(self.count(s) for s in State) == self.blocks, f"{self.tier}: a block is lost"
        assert self.leases.held() == len({b for o in self.leases.all_owners() for b in self.leases.blocks(o)})

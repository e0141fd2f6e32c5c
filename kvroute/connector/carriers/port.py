"""The port of a carrier: a value that makes two sides, one in the scheduler's process and one in the worker's.

The law of a carrier: a row is readable beside KV from outside only if the carrier has proved that it is of that KV. A
side by itself does nothing; each carrier defines the calls that it needs. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvroute.connector.tickets import UNNAMED
from kvroute.witness import Run

if TYPE_CHECKING:
    import torch

    from cache_manager.blocks import AuxBlocks
    from cache_manager.feed import BlockFeed
    from cache_manager.keys import KeyChain
    from cache_manager.ports import StorageBackend
    from cache_manager.spec import AuxBlockDataSpec
    from kvroute.connector.fills import Request
    from kvroute.connector.limits import Limits
    from kvroute.connector.messages import StepMeta
    from kvroute.connector.meter import Meter
    from kvroute.connector.settings import Settings
    from kvroute.connector.versions import Versions
    from kvroute.connector.witness import Join, OtherRank


class Admission(NamedTuple):
    """A request that has got its blocks."""

    request: Request
    blocks: Sequence[int]
    first: int  # leading blocks that were hits here
    external: int  # tokens behind them whose KV comes from outside
    lends: bool  # another engine goes on from its prompt
    ticket: Any  # of prefill's answer, if this engine goes on from one
    kv: Mapping[str, str] = UNNAMED  # what names the KV among the inner connector's parameters

    def run(self, size: int) -> Run | None:
        """The whole blocks of ``size`` tokens whose KV comes from outside; ``None``: no KV does."""
        if not self.external:
            return None
        blocks = self.blocks[self.first : self.first + self.external // size]
        return Run(self.before, blocks, self.external, self.first * size)

    @property
    def before(self) -> int:
        """The block before those whose KV comes; -1: none."""
        return self.blocks[self.first - 1] if self.first else -1


Pairs = NDArray[np.int64]
"""``[n, 2]``: a block of the engine and a place on its host, from 0."""
NO_PAIRS: Final[Pairs] = np.empty((0, 2), np.int64)


class Load(NamedTuple):
    """KV that comes back for a request: into these blocks, which are its blocks ``first`` and on."""

    request_id: str
    first: int
    pairs: Pairs


class Moves(NamedTuple):
    """The copies of KV between an engine's blocks and its host that it begins with a step.

    ``kept`` are read before any block that was given out since the last step has new KV; ``kept_later`` when the step
    is over and before the next one begins; ``loads`` come when blocks have been given out.
    """

    kept: Pairs = NO_PAIRS
    kept_later: Pairs = NO_PAIRS
    loads: Sequence[Load] = ()


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """What the scheduler's end shares with its side of the carrier."""

    settings: Settings
    limits: Limits
    spec: AuxBlockDataSpec  # of routing
    kv_blocks: int  # of the engine
    feed: BlockFeed
    weights: Versions
    keys: Callable[[], KeyChain]  # of the present namespace
    blocks_of: Callable[[str, int, int], list[int]]  # the blocks [first, last) of a request
    hashes: int = 1  # that a request has for each of its blocks
    places: range = range(0)  # blocks for what the engine keeps on its host


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What the worker's end shares with its side of the carrier."""

    settings: Settings
    limits: Limits
    spec: AuxBlockDataSpec  # of routing
    kv_blocks: int  # of the engine
    blocks: AuxBlocks
    meter: Meter
    kv_caches: Mapping[str, torch.Tensor]
    joined: Join | None  # see :class:`kvroute.connector.witness.KvFolder`


class SchedulerSide:
    """The side in the scheduler's process. Its thread makes all calls, and none of them waits for a device."""

    has_unproved = False
    """Whether :meth:`unproved` may name any rows; else nobody asks."""

    def attach(self, greeting: Any) -> None:
        """The worker's side has started, with this message."""

    def takes(self, request: Request, first: int, external: int) -> int:
        """How many of ``external`` tokens behind the ``first`` blocks to load: as many as have rows."""
        return external

    def admitted(self, admission: Admission) -> Run | None:
        """The request has its blocks. The KV that comes for it in or between steps, if a worker is to look at it."""
        raise NotImplementedError

    def load(self, loads: Sequence[tuple[str, Run]]) -> None:
        """The next step begins to load this KV of requests, or waits for it."""

    def copied(self, source: int, target: int, rows: int) -> None:
        """The first rows of a block go to another one with the next step, as their KV does."""

    def leave(self, moves: Moves) -> None:
        """Before the blocks given out since the last step begin their lives: KV that the engine copies to its host."""

    def enter(self, moves: Moves) -> None:
        """They have begun: KV that the engine copies back."""

    def step(self, scheduled: Mapping[str, int]) -> Any:
        """The message for the worker's side with a step that computes so many tokens of each request."""
        return None

    def told(self, message: Any) -> None:
        """The worker's side has this message."""

    def why(self, request_id: str) -> Mapping[int, str]:
        """The reasons known so far for rows of the request that did not come, by block."""
        return {}

    def unproved(
        self,
        slots: NDArray[np.int64],
        lives: NDArray[np.int64],
    ) -> NDArray[np.bool_] | None:
        """Which rows ``[n]``, at these slots in these lives of their blocks, came without a proof of the last router's
        choice; ``None``: none did."""
        return None

    def ticket(self, request: Request, kv: Mapping[str, str]) -> dict[str, Any] | None:
        """The data beside a lent request's answer, for the engine that goes on from it; ``kv`` names its KV there."""
        return None

    def ended(self, request_id: str) -> Mapping[int, str]:
        """The request has ended: as :meth:`why`, for the last time."""
        return {}

    def close(self) -> None:
        """Free what the side holds."""


class WorkerSide:
    """The side in the worker's process.

    The thread that launches steps calls the first group, and waits for nothing; the thread behind the device, which may
    be the same one, calls the second group, of each step in this order.
    """

    @property
    def greeting(self) -> Any:
        """The message for :meth:`SchedulerSide.attach`."""
        return None

    # ---------------------------------------------------------------- the thread that launches

    def begun(self, step: StepMeta) -> bool:
        """A step begins. Whether the thread behind has to :meth:`start` it now, and not with its end."""
        return False

    def look(self, runs: Sequence[Run]) -> Any:
        """A look at the KV of ``runs``, which was loaded, for :meth:`compare`."""
        return None

    def computed(self, step: StepMeta) -> Any:
        """The step has been launched. The result is for :meth:`filled`."""
        return None

    def fail(self, blocks: set[int]) -> None:
        """The KV of these blocks could not be loaded."""

    def arrived(self, requests: AbstractSet[str], failed: AbstractSet[str]) -> set[str]:
        """Of ``requests``, whose KV has come or has ``failed`` to, and of those that wait: which may go on."""
        return set(requests)

    def told(self) -> Any:
        """The message for :meth:`SchedulerSide.told`; ``None``: there is none."""
        return None

    # ---------------------------------------------------------------- the thread behind the device

    def start(self, step: StepMeta) -> None:
        """Blocks are in the lives that the step means."""

    def land(self) -> None:
        """Wait for rows that are on their way to KV that has come."""

    def compare(self, runs: Sequence[Run], look: Any) -> None:
        """KV has come, with or without rows: make rows of other KV missing, and count those that did not come."""

    def filled(self, step: StepMeta, computed: Any) -> None:
        """The step's rows are written; ``computed`` is the result of :meth:`computed`."""

    # ---------------------------------------------------------------- any thread

    def counters(self) -> dict[str, Any]:
        """The present counters of what the carrier uses, by tier."""
        return {}

    def close(self) -> None:
        """Free what the side holds; the blocks are still open."""


class Carrier:
    """How rows arrive beside KV from outside. A value; see :mod:`kvroute.connector.carriers`."""

    places: int = 0
    """How many blocks the engine keeps on its host."""
    word: ClassVar[str] = "none"
    """What the settings, and the log, call it."""
    flagged: bool = False
    """Whether rows without a proof of the last router's choice are handed out, with a flag."""

    def store(self, settings: Settings) -> StorageBackend | None:
        """The store of rows that the worker opens, and closes; ``None``: there is none."""
        return None

    def scheduler(self, parts: SchedulerParts) -> SchedulerSide:
        raise NotImplementedError

    def worker(self, parts: WorkerParts) -> WorkerSide:
        raise NotImplementedError

    def other_rank(
        self,
        spec: AuxBlockDataSpec,
        kv_caches: Mapping[str, torch.Tensor],
        rank: int,
        joined: Join | None,
        limits: Limits,
    ) -> OtherRank | None:
        """The part of a rank that has no rows; ``None``: it has none."""
        return None


__all__ = [
    "NO_PAIRS",
    "Admission",
    "Carrier",
    "Load",
    "Moves",
    "Pairs",
    "SchedulerParts",
    "SchedulerSide",
    "WorkerParts",
    "WorkerSide",
]

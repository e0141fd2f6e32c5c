"""Engines that share a pool, simulated: what is hit, what crosses the network, what the master has to do. Pure, seeded.

The model, and what it leaves out:

* A request is a line of a Mooncake trace: a time, and the ids of its prompt's 512-token blocks. A fleet of ``engines``
  serves ``engines / engines_a_trace`` copies of the trace, of different users: their blocks differ, but for the first
  ``common`` blocks of a prompt (a system prompt), which are everybody's.
* Requests go to the engine that served the same first private block before (``affine``), or to any.
* An engine has a cache of its own, in least-recently-used order, and prefills one request after the other at
  ``prefill_tokens_s``; what it computes is in the pool when it is done. Decoding takes no time and stores nothing.
* A block that the engine lacks and the pool has, prefix by prefix, comes over the network; blocks are spread evenly, so
  that one in ``engines`` of a cell is the engine's own.
* When the pool is full it evicts the ``eviction_part`` of its bytes that nobody has used for longest, as the master
  does: with groups the rows of a block go with its KV; without, each object goes by its own last use. Every
  engine stores both; of the requests the part ``plain`` wants no rows and reads KV alone, the others compute a block
  again whose rows are gone.
* A pool has one master, which answers calls in the order in which they come, with ``Costs`` a key, on one core. A block
  is ``records_a_block`` objects of KV and as many of rows, each with a key: 8 where an engine's blocks have 64 tokens.
* With ``cells`` there are that many pools, each with its master and its engines.

It has no failures, no stragglers, no limit of the network: it says what is needed, not what a switch makes of it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BLOCK_TOKENS = 512
_COMMON = -1

Block = tuple[int, int]
"""A copy of the trace, or ``_COMMON``, and the id of a block in it."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The master's CPU seconds for one key of each call, in batches."""

    exist_s: float
    put_s: float
    get_s: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated. ``own_blocks`` are of an engine's own cache, ``lent_blocks`` what it lends to the pool."""

    engines: int
    own_blocks: int
    lent_blocks: int
    kv_nbytes: int  # of a block
    rows_nbytes: int  # of a block
    costs: Costs
    cells: int = 1
    groups: bool = True
    affine: bool = False
    plain: float = 0.5
    records_a_block: int = 1
    engines_a_trace: int = 8
    common: int = 0
    prefill_tokens_s: float = 20_000.0
    eviction_part: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        assert 1 <= self.cells <= self.engines
        assert self.own_blocks >= 0
        assert self.lent_blocks >= 1
        assert 0 < self.eviction_part <= 1


@dataclass(slots=True)
class Found:
    """Sums over the whole simulation. ``asked = own + pooled + computed``, always; blocks of prompts."""

    asked: int = 0
    own: int = 0  # in the engine's own cache
    pooled: int = 0  # came from the pool
    computed: int = 0
    computed_again: int = 0  # of these, those that some engine had stored: lost to eviction, or behind a lost one
    without_rows: int = 0  # of these, those whose KV the pool had
    rows_evicted: int = 0  # records
    get_nbytes: int = 0
    put_nbytes: int = 0
    remote_nbytes: int = 0  # of both, what crosses the network
    calls: int = 0  # of masters
    keys: int = 0  # of these calls
    master_s: float = 0.0  # that the busiest master worked
    waits_s: list[float] = field(default_factory=list)  # of calls, before a master began with them
    seconds: float = 0.0  # from the first request to the last

    @property
    def hit_rate(self) -> float:
        return (self.own + self.pooled) / max(self.asked, 1)

    @property
    def load(self) -> float:
        """Cores of its master that the busiest pool needs; above 1, calls queue up without end."""
        return self.master_s / max(self.seconds, 1e-9)

    def wait_s(self, part: float) -> float:
        """A quantile of what calls waited."""
        ordered = sorted(self.waits_s)
        return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class Master:
    """One server, first come first served."""

    def __init__(self, found: Found, records_a_block: int) -> None:
        self.found = found
        self.free_s = 0.0
        self.busy_s = 0.0
        self._records = records_a_block

    def call(self, now_s: float, objects: int, cost_s: float) -> float:
        """When the answer is there; no objects are no call."""
        if not objects:
            return now_s
        keys = objects * self._records
        begin_s = max(now_s, self.free_s)
        self.free_s = begin_s + keys * cost_s
        self.busy_s += keys * cost_s
        self.found.calls += 1
        self.found.keys += keys
        self.found.waits_s.append(begin_s - now_s)
        return self.free_s


class Pool:
    """The objects of one cell in the order of their last use: ``(block, False)`` is KV, ``(block, True)`` its rows."""

    def __init__(self, capacity_nbytes: int, fleet: Fleet, found: Found) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.used_nbytes = 0
        self.objects: OrderedDict[tuple[Block, bool], None] = OrderedDict()
        self.master = Master(found, fleet.records_a_block)
        self._fleet = fleet
        self._found = found
        self._nbytes = {False: fleet.kv_nbytes, True: fleet.rows_nbytes}

    def has(self, block: Block, *, rows: bool) -> bool:
        return (block, False) in self.objects and (not rows or (block, True) in self.objects)

    def use(self, block: Block, *, rows: bool) -> None:
        for kind in (False, True) if rows or self._fleet.groups else (False,):
            if (block, kind) in self.objects:
                self.objects.move_to_end((block, kind))

    def put(self, block: Block) -> int:
        """Bytes that were stored: what is there already is not."""
        nbytes = 0
        for kind in (False, True):
            if (block, kind) not in self.objects:
                self.objects[block, kind] = None
                nbytes += self._nbytes[kind]
        self.used_nbytes += nbytes
        if self.used_nbytes > self.capacity_nbytes:
            self._make_room()
        return nbytes

    def _make_room(self) -> None:
        wanted = (1 - self._fleet.eviction_part) * self.capacity_nbytes
        while self.used_nbytes > wanted and self.objects:
            (block, kind), _ = self.objects.popitem(last=False)
            self._lost(kind)
            if self._fleet.groups and self.objects.pop((block, not kind), 0) is None:
                self._lost(not kind)

    def _lost(self, kind: bool) -> None:
        self.used_nbytes -= self._nbytes[kind]
        self._found.rows_evicted += kind


@dataclass(slots=True)
class Engine:
    cell: int
    cache: OrderedDict[Block, None]
    free_s: float = 0.0


def requests(trace: Sequence[Mapping[str, Any]], fleet: Fleet) -> Iterator[tuple[float, list[Block], bool]]:
    """The fleet's requests by time, each with its blocks and whether it wants rows.

    Every copy of the trace begins at a time of its own within the first minute.
    """
    rng = np.random.default_rng(fleet.seed)
    copies = max(fleet.engines // fleet.engines_a_trace, 1)
    starts = [0.0, *rng.uniform(0.0, 60.0, copies - 1).tolist()]
    events = [
        (starts[copy] + line["timestamp"] / 1e3, copy, number)
        for copy in range(copies)
        for number, line in enumerate(trace)
    ]
    for when_s, copy, number in sorted(events):
        ids = trace[number]["hash_ids"]
        blocks = [(_COMMON if i < fleet.common else copy, block) for i, block in enumerate(ids)]
        yield when_s, blocks, bool(rng.random() >= fleet.plain)


def simulate(trace: Sequence[Mapping[str, Any]], fleet: Fleet) -> Found:
    """Run the fleet; equal arguments give equal answers."""
    rng = np.random.default_rng(fleet.seed + 1)
    found = Found()
    lent_nbytes = fleet.lent_blocks * (fleet.kv_nbytes + fleet.rows_nbytes)
    engines = [Engine(i % fleet.cells, OrderedDict()) for i in range(fleet.engines)]
    sizes = [sum(engine.cell == cell for engine in engines) for cell in range(fleet.cells)]
    pools = [Pool(size * lent_nbytes, fleet, found) for size in sizes]
    ever: list[set[Block]] = [set() for _ in range(fleet.cells)]  # what was stored in each cell, at any time
    homes: dict[Block, int] = {}
    done: list[tuple[float, int, int, list[Block], int]] = []  # prefills: end, number, engine, blocks, how many are new
    first_s = None
    now_s = 0.0

    def land(until_s: float) -> None:
        while done and done[0][0] <= until_s:
            when_s, _, who, blocks, fresh = heapq.heappop(done)
            pool, engine = pools[engines[who].cell], engines[who]
            stored = sum(pool.put(block) for block in blocks[-fresh:])
            ever[engine.cell].update(blocks[-fresh:])
            pool.master.call(when_s, 2 * fresh, fleet.costs.put_s)
            found.put_nbytes += stored
            found.remote_nbytes += stored * (sizes[engine.cell] - 1) // sizes[engine.cell]
            _keep(engine.cache, blocks, fleet.own_blocks)

    for number, (now_s, blocks, rows) in enumerate(requests(trace, fleet)):
        first_s = now_s if first_s is None else first_s
        land(now_s)
        who = int(rng.integers(fleet.engines))
        if fleet.affine:
            who = homes.setdefault(blocks[min(fleet.common, len(blocks) - 1)], who)
        engine = engines[who]
        pool = pools[engine.cell]
        own = _prefix(blocks, engine.cache)
        left = blocks[own:]
        answer_s = pool.master.call(now_s, (1 + rows) * len(left), fleet.costs.exist_s)
        pooled = next((i for i, block in enumerate(left) if not pool.has(block, rows=rows)), len(left))
        answer_s = pool.master.call(answer_s, (1 + rows) * pooled, fleet.costs.get_s)
        for block in left[:pooled]:
            pool.use(block, rows=rows)
        came = pooled * (fleet.kv_nbytes + rows * fleet.rows_nbytes)
        found.get_nbytes += came
        found.remote_nbytes += came * (sizes[engine.cell] - 1) // sizes[engine.cell]
        new = left[pooled:]
        found.asked += len(blocks)
        found.own += own
        found.pooled += pooled
        found.computed += len(new)
        found.computed_again += sum(block in ever[engine.cell] for block in new)
        found.without_rows += sum(
            rows and pool.has(block, rows=False) and not pool.has(block, rows=True) for block in new
        )
        _keep(engine.cache, blocks[: own + pooled], fleet.own_blocks)
        begin_s = max(answer_s, engine.free_s)
        engine.free_s = begin_s + len(new) * BLOCK_TOKENS / fleet.prefill_tokens_s
        if new:
            heapq.heappush(done, (engine.free_s, number, who, blocks, len(new)))
    found.seconds = now_s - (first_s or 0.0)
    land(float("inf"))
    found.master_s = max(pool.master.busy_s for pool in pools)
    return found


def _prefix(blocks: Sequence[Block], cache: Mapping[Block, None]) -> int:
    return next((i for i, block in enumerate(blocks) if block not in cache), len(blocks))


def _keep(cache: OrderedDict[Block, None], blocks: Sequence[Block], most: int) -> None:
    """The engine has used these: a prefix is never older than what follows it."""
    for block in reversed(blocks):
        cache[block] = None
        cache.move_to_end(block)
    while len(cache) > most:
        cache.popitem(last=False)


__all__ = ["BLOCK_TOKENS", "Costs", "Fleet", "Found", "Pool", "requests", "simulate"]

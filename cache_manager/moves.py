"""Blocks that an engine has copied: their rows follow, copied without the lock, behind a fence.

What has changed meanwhile, at either end, does not arrive. A move that fails changes nothing, except that its targets
lose their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy import count_nonzero as count

from cache_manager.errors import InvalidInputError, KVRouteError
from cache_manager.lock import Mistakes
from cache_manager.ports import KVBlocks, Region, TierName
from cache_manager.publish import bits_of
from cache_manager.slots import Ints, integers, prefix_bits, readable, rows_in
from cache_manager.table import BlockTable, Fence

Pairs = Sequence[tuple[int, int]] | Ints
"""(source, target) block ids ``[n, 2]``."""
MOVED: Final[dict[tuple[TierName, TierName], str]] = {
    ("device", "device"): "copied_rows",
    ("device", "host"): "swapped_out_rows",
    ("host", "device"): "swapped_in_rows",
}


def follow(
    source: BlockTable,
    target: BlockTable,
    pairs: Pairs,
    rows: Sequence[int] | None,
    kv: KVBlocks | None,
    mistakes: Mistakes,
) -> None:
    """:func:`move`; where it is refused, the engine has copied KV all the same: the targets' rows are missing.

    Where ``kv`` moves too, pairs that are not possible and failures of the copy are raised, and nothing has arrived.
    """
    try:
        move(source, target, pairs, rows, kv, mistakes)
    except BaseException as error:  # whatever refuses the pairs
        if kv is not None:
            raise
        known, n = readable(pairs)
        lost = None if known is None or n % 2 else known[1::2]
        pairs_lost = -(-n // 2)

        def lose() -> None:
            target.lose(lost)

        mistakes.report_loss("bad_moves_dropped", pairs_lost, "move", error, lose)
        if mistakes.strict or not isinstance(error, KVRouteError):
            raise
    finally:
        mistakes.log()


def move(
    source: BlockTable,
    target: BlockTable,
    pairs: Pairs,
    rows: Sequence[int] | None,
    kv: KVBlocks | None,
    mistakes: Mistakes,
) -> None:
    """Copy between tiers; at most the first ``rows`` of each pair. What cannot follow is dropped.

    ``kv`` is copied for every pair, also where rows cannot follow. Raises :class:`InvalidInputError` for impossible
    pairs, before anything has changed, and what ``kv`` raises.
    """

    def report(blocks: Ints, wanted: str) -> None:
        mistakes.report_blocks("bad_moves_dropped", blocks, "move", wanted)

    lock = target.lock
    fence = Fence()
    fence_of_kv = Fence()  # around the targets of pairs whose rows cannot follow
    sources, targets = split_pairs(pairs, source, target)
    if rows is not None:
        counts = integers(rows, "rows", "one count for each pair", n=targets.size)
        limits = prefix_bits(counts, target.tokens)
    try:
        with lock:
            if not target.slots.differ(targets):
                raise InvalidInputError("pairs target", "each block once", "one twice")
            if source is target:
                both = sources[source.slots.among(sources, targets)]
                if both.size:
                    raise InvalidInputError("pairs", "no block as source and as target", int(both.min()))
            if target.tier == "host":  # a copy into a host block begins the block's life
                target.renew(targets, target.generations.take(targets) + 1)
            else:
                target.lose(targets)
            writable = source.writable(sources)
            known = target.generations.take(targets) > 0
            good = writable & target.fillable(targets)
            if count(good) != targets.size:
                report(sources[~writable], "sources that were given out, and are not being copied into")
                report(targets[writable & ~known], "targets that were given out")
                report(targets[writable & known & ~good], "targets into which no copy, step or device writes")
            pairs_of_kv = sources, targets
            sources = sources[good]
            targets = targets[good]
            valid = bits_of(source.region, sources)
            if rows is not None:
                valid &= limits[good]
            origins = source.origins.names.take(sources)
            named = origins != 0  # another has no row; it stays open to those of any origin
            source.origins.fix(sources[named])
            drops = source.drops.take(sources)
            target.fence(fence, targets)
            if kv is not None:
                target.fence(fence_of_kv, pairs_of_kv[1][~good])
        copy_records(source.region, target.region, sources, targets)
        if kv is not None and pairs_of_kv[0].size:
            kv.copy(source.tier, target.tier, *pairs_of_kv)
        with lock:
            same = named & (source.drops.take(sources) == drops)  # it was neither forgotten nor given out,
            same &= source.origins.names.take(sources) == origins  # nor has a pass begun, or ended, to write it
            arrived = target.arrive(fence, same, valid, origins)
            counter = MOVED[source.tier, target.tier]
            lock.count(counter, rows_in(valid[arrived]))
    finally:
        fence_of_kv.over = True
        fence.over = True  # in one instruction, and no call before it: a signal handler cannot come between


def split_pairs(pairs: Pairs, source: BlockTable, target: BlockTable) -> tuple[Ints, Ints]:
    """Source and target ids; :class:`InvalidInputError` for anything but pairs of blocks of these tiers."""
    wanted = "(source, target) pairs of block ids"
    table = integers(pairs, "pairs", wanted, ndim=2)
    if table.size and table.shape[1] != 2:
        raise InvalidInputError("pairs", wanted, f"{table.dtype} of shape {table.shape}")
    table = table.reshape(-1, 2)
    sources = source.slots.ids(table[:, 0], "pairs source")
    targets = target.slots.ids(table[:, 1], "pairs target")
    return sources, targets


def copy_records(source: Region, target: Region, sources: Ints, targets: Ints) -> None:
    """Copy records pair by pair, neighbours in one copy; a fancy index would gather them first."""
    rows = source.rows
    into = target.rows
    neighbours = np.diff(sources) == 1
    neighbours &= np.diff(targets) == 1
    if not count(neighbours):
        pairs = zip(sources.tolist(), targets.tolist(), strict=True)
        for first, to in pairs:
            into[to] = rows[first]
        return
    cuts = np.flatnonzero(~neighbours) + 1
    begins = np.append(0, cuts)
    lengths = np.diff(begins, append=sources.size)
    firsts = sources[begins]
    places = targets[begins]
    runs = np.stack([firsts, places, lengths], axis=1)
    for first, to, n in runs.tolist():
        into[to : to + n] = rows[first : first + n]

"""Blocks that an engine has given out: each begins another life."""

from __future__ import annotations

import numpy as np
from numpy import count_nonzero as count

from cache_manager.lock import Mistakes
from cache_manager.publish import GENERATION_END
from cache_manager.slots import Blocks, Flags, Ints, integers
from cache_manager.table import BlockTable


def begin_lives(
    table: BlockTable, blocks: Blocks, generations: Blocks | None, mistakes: Mistakes, *, has_rows: bool
) -> Ints:
    """The generations ``[n]`` that begin, the given ones or those after the present ones; 0 for a block that cannot be
    given out, which is counted. One that is in the given generation already loses its rows."""
    if generations is None and isinstance(blocks, list) and not blocks:  # engines ask for room for every token
        table.lock.check_open()
        return np.empty(0, np.int64)
    with table.lock:
        ids, known = table.slots.known(blocks)
        good = known.copy()
        lives = table.generations.take(ids, mode="clip") + 1
        if generations is not None:
            next_lives = lives
            lives = integers(generations, "generations", "one integer for each block", n=ids.size)
            good &= (lives >= next_lives) & (lives < GENERATION_END)
        if table.fences:
            good[good] = ~table.fenced(ids[good])
        if count(good) == ids.size:
            table.renew(ids, lives, has_rows=has_rows)
        else:
            present = table.generations.take(ids, mode="clip")
            have_begun = known & (present == lives)
            table.forget(ids[have_begun])
            _report(table, ids, known, good, mistakes)
            table.renew(ids[good], lives[good], has_rows=has_rows)
            lives = np.where(good, lives, 0)
    if mistakes.unlogged:
        mistakes.log()
    return lives


def _report(table: BlockTable, ids: Ints, known: Flags, good: Flags, mistakes: Mistakes) -> None:
    """Count those of ``ids`` that are not ``good``, by what is wrong with them. The lock is held."""
    outside = ids.view(np.uint64) >= np.uint64(table.blocks)
    repeated = ~known & ~outside
    fenced = known & ~good
    fenced[fenced] = table.fenced(ids[fenced])
    outdated = known & ~good & ~fenced
    reasons = {
        f"block ids in [0, {table.blocks})": outside,
        "each block once": repeated,
        "blocks that are not being copied into": fenced,
        f"generations larger than before, and below {GENERATION_END}": outdated,
    }
    for wanted, bad in reasons.items():
        mistakes.report_blocks("stale_blocks", ids[bad], "renew", wanted)

"""A view of a region whose owner writes in another process at full speed.

The orders of loads and stores are tried one by one in ``test_publish.py``. Here processors do what they do.
"""

from __future__ import annotations

import time

import numpy as np
from life_canary import written
from region_children import Start

from cache_manager.publish import Rows
from cache_manager.regions import RegionView

BLOCKS, TOKENS = 8, 70
IDS = np.arange(BLOCKS)
READS, LIVES, ENOUGH_S = 1000, 200, 25  # so many reads and lives, or as many as there are in this time

WRITER = """
import select
from life_canary import Writer, layout_of
region = SharedRegion.create(layout_of(70, 64), 8, tier="device", namespace=NAMESPACE)
writer, random, every = Writer(region), np.random.default_rng(1), np.ones(70, bool)
writer.begin_lives(np.arange(8))
writer.rewrite(np.arange(8), every)
say(region.name)
end = time.monotonic() + 30
while time.monotonic() < end and not select.select([sys.stdin], [], [], 0)[0]:
    some = random.permutation(8)[: random.integers(1, 9)]
    what = random.integers(0, 4)
    if what == 0:
        writer.begin_lives(some)
    if what == 1:
        writer.clear(some, every)
        writer.write(some, every, (0,))
        writer.begin_lives(some)
    writer.rewrite(some, every if what % 2 else random.random(70) < 0.5)
say(writer.round, *writer.generations)
"""


def judged(rows: Rows, generations: np.ndarray) -> int:
    """How many rows of all blocks are valid: each of them is what was written."""
    values, valid = rows.values.reshape(BLOCKS, TOKENS, -1), rows.valid.reshape(BLOCKS, TOKENS)
    right = written(IDS, generations, TOKENS, values.shape[2], values[:, :, 0])
    assert not (valid & (values != right).any(axis=2)).any()
    return int(valid.sum())


def test_a_view_never_takes_torn_or_foreign_rows(child: Start) -> None:
    """Goal: the order that publish.py keeps is enough between processes. Method: an owner gives blocks away and writes
    rows again as fast as it can; rows say whose they are."""
    owner = child(WRITER)
    (name,) = owner.heard()
    valid = reads = 0
    with RegionView(name) as view:
        end, lives = time.monotonic() + ENOUGH_S, np.ones(BLOCKS, np.int64)
        while (reads < READS or int(lives.sum()) < LIVES) and time.monotonic() < end:
            for spec in ("long", "short"):
                valid, reads = valid + judged(view.read(spec, IDS, generations=lives), lives), reads + 1
                single = view.read_slots(spec, np.arange(BLOCKS * TOKENS), generations=np.repeat(lives, TOKENS))
                valid += judged(single, lives)
            # What a scheduler would know: the current generations, or those of a moment ago.
            lives = view.generations(IDS)
        owner.tell()
        rounds, *last = map(int, owner.heard())
        assert min(rounds, reads, valid // 10) > 10
        judged(view.read("long", IDS, generations=last), np.array(last))
        assert not view.read("long", IDS, generations=np.array(last) + 1).valid.any()
    assert owner.finish() == (0, "")

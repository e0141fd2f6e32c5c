"""Views of a region whose owner writes in another process, and reads beside a writer in a thread, at full speed.

The orders of loads and stores are tried one by one in ``test_publish.py``. Here processors do what they do.
"""

from __future__ import annotations

import time

import numpy as np
from life_canary import written
from region_children import Child, Start

from cache_manager.publish import Rows
from cache_manager.regions import RegionView

BLOCKS, TOKENS, WORDS = 8, 70, 64
IDS = np.arange(BLOCKS)
READS, LIVES, ENOUGH_S = 1000, 200, 25  # so many reads and lives, or as many as there are in this time

WRITER = """
from life_canary import Writer, layout_of
from cache_manager import publish
region = SharedRegion.create(layout_of(70, 64), 8, tier="device", namespace=NAMESPACE)
writer, random = Writer(region), np.random.default_rng(int(sys.argv[1]))
ids = np.arange(8)
every = np.ones(70, bool)
writer.begin_lives(ids)
writer.rewrite(ids, every)
say(region.name)
WORK
end = time.monotonic() + 30
import select
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


def judge(rows: Rows, generations: np.ndarray) -> tuple[int, int]:
    """How many rows of all blocks are valid, and how many of these are not what was written."""
    values = rows.values.reshape(BLOCKS, TOKENS, -1)
    right = written(IDS, generations, TOKENS, values.shape[2], values[:, :, 0])
    valid = rows.valid.reshape(BLOCKS, TOKENS)
    return int(valid.sum()), int((valid & (values != right).any(axis=2)).sum())


def count(owner: Child) -> tuple[int, int, list[np.ndarray]]:
    """Valid and wrong rows that a view has read while its owner wrote; generations at the end."""
    (name,) = owner.heard()
    valid = bad = reads = 0
    with RegionView(name) as view:
        end = time.monotonic() + ENOUGH_S
        generations = np.ones(BLOCKS, np.int64)
        while (reads < READS or int(generations.sum()) < LIVES) and time.monotonic() < end:
            for spec in ("long", "short"):
                found, is_wrong = judge(view.read(spec, IDS, generations=generations), generations)
                valid, bad, reads = valid + found, bad + is_wrong, reads + 1
            # What a scheduler would know: the current generations, or those of a moment ago.
            generations = (view._attached().words >> np.uint64(16)).astype(np.int64)
        owner.tell()
        rounds, *lives = owner.heard()
        assert int(rounds) > 10
        assert reads > 10
        last = np.array(lives, np.int64)
        assert judge(view.read("long", IDS, generations=last), last)[1] == 0
        assert not view.read("long", IDS, generations=last + 1).valid.any()
    assert owner.finish() == (0, "")
    return valid, bad, reads


def test_a_view_never_takes_torn_or_foreign_rows(child: Start) -> None:
    """Goal: the order that publish.py keeps is enough between processes. Method: an owner gives blocks away and writes
    rows again as fast as it can; rows say whose they are."""
    valid, bad, _ = count(child(WRITER.replace("WORK", ""), 1))
    assert bad == 0
    assert valid > 100

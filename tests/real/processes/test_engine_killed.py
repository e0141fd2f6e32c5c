"""An engine is killed while processes of its own copy its KV and store its rows: what other processes then find."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from waiting import GIVE_UP_S, until

from cache_manager.ports import Absence
from cache_manager.regions import RegionView, SharedRegion, reap_orphans
from cache_manager.regions.directory import DIRECTORY
from cache_manager.storage import open_store
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, get, payload_of

WAIT_S = GIVE_UP_S
BLOCKS, TOKENS = 16, 4

ENGINE = f"""
import sys, threading
from itertools import count
import numpy as np
from cache_manager.blocks import AuxBlocks
from cache_manager.keys import Namespace
from cache_manager.regions import SharedRegion
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage import open_store
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, put
from cache_manager.transfer_manager import CacheTransferManager

space, blocks = Namespace("m", 1), np.arange({BLOCKS})
slots = np.arange({BLOCKS * TOKENS})

class KV:
    spec = AuxBlockDataSpec("kv", (1 << 20,), "uint8", {TOKENS})

    def __init__(self):
        self.process, layout = CacheTransferManager(), RecordLayout((self.spec,))
        self.regions = {{
            tier: SharedRegion.create(layout, {BLOCKS}, tier=tier, namespace=space.fingerprint)
            for tier in ("device", "host")
        }}

    def copy(self, source, target, sources, targets):
        self.process.copy(self.regions[source], self.regions[target], sources, targets)

kv, store = KV(), open_store(sys.argv[1])
row = AuxBlockDataSpec("row", (2,), "uint64", {TOKENS})
aux = AuxBlocks([row], blocks={BLOCKS}, host_blocks={BLOCKS}, namespace=space, memory="shared", kv=kv)
tiers = "device", "host"
print(kv.process.pid, store.pid, *(r.name for t in tiers for r in (aux.region(t), kv.regions[t])), flush=True)

def stores():
    records = RecordStore(store, LAYOUT)
    for n in count():
        assert put(records, [n]) == [True]
        print(n, flush=True)

threading.Thread(target=stores, daemon=True).start()
for turn in count(1):
    aux.renew(blocks)
    kv.regions["device"].rows[:] = turn % 251
    aux.write_step(slots, {{"row": np.stack([np.full(slots.size, turn), slots], 1).astype(np.uint64)}})
    aux.swap_out(np.stack([blocks, blocks], 1))
    aux.renew(blocks)
    aux.swap_in(np.stack([blocks, blocks], 1))
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-c", ENGINE, f"apart:file://{tmp_path}/store?quota=64MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as started:
        yield started
        started.kill()


def test_an_engine_is_killed_while_its_kv_is_copied_and_its_rows_are_stored(
    engine: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Goal: what is readable afterwards is right, the processes end, and nothing stays. Method: SIGKILL when a swap is
    seen to have brought some of its bytes, while another thread stores; a row names its pass and slot, KV its pass.
    """
    assert engine.stdout is not None
    copier, storer, *names = engine.stdout.readline().split()
    with ExitStack() as stack:
        rows = {tier: stack.enter_context(RegionView(names[at])) for tier, at in (("device", 0), ("host", 2))}
        kv = {tier: stack.enter_context(SharedRegion.attach(names[at])) for tier, at in (("device", 1), ("host", 3))}
        until(lambda: kv["host"].rows[-1, -1] > 2, WAIT_S)
        looks = iter(range(10_000))  # on a busy machine no look may fall into a copy: then it is killed at any moment
        until(lambda: kv["host"].rows[0, 0] != kv["host"].rows[-1, -1] or next(looks, None) is None, WAIT_S)
        engine.kill()
        engine.wait()
        for pid in (copier, storer):
            until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), WAIT_S)
        every, valid = np.arange(BLOCKS), 0
        for tier, view in rows.items():
            found = view.read("row", every, generations=view.generations(every))
            turns, slots = found.values.reshape(-1, 2).T
            at = np.flatnonzero(found.valid)
            assert (slots[at] == at).all()
            of_kv = kv[tier].rows.reshape(BLOCKS * TOKENS, -1)[at]  # a copy: no region closes under a view
            assert (of_kv == turns[at, None] % 251).all(), "rows of the pass that made the KV"
            valid += at.size
        assert valid, "what was not being copied is there"
    assert {*names} <= {*reap_orphans()}
    assert not [name for name in names if (DIRECTORY / name).exists()]
    answered = list(map(int, engine.stdout.read().split()))
    with open_store(f"file://{tmp_path}/store?quota=64MiB") as store:
        records, last = RecordStore(store, LAYOUT), answered[-1]
        assert get(records, answered) == [payload_of(n) for n in answered]
        assert get(records, [last + 1])[0] in (payload_of(last + 1), Absence.MISS)
        assert records.counters.corrupt == 0

"""What does ``mooncake:`` cost beside Mooncake's own batch calls?

Records of ``--kib``, in batches of 32, are put into a pool on loopback and read again, ``--total-mib`` a turn. The
floor is ``batch_put_from`` and ``batch_get_into`` from registered memory in a separate process, without checks; kvroute
seals, sums and verifies each record.

Both take turns, in an order that rotates, and so have the same noise; a warm-up round is not counted. A cell is the
median of the rounds and, in brackets, the slowest and the fastest; a ratio is the median of the rounds' ratios. Every
record that is read is compared with its source within the timed loop. Records in files: ``bench.scale``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness import ROOT, Peer, Racer, asked, print_ratios, race, write_json
from bench.peers.mooncake_raw import take
from cache_manager.keys import BlockKey
from cache_manager.record import RecordHeader
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage import open_store
from cache_manager.storage.mooncake.settings import native_environment
from cache_manager.storage.records import RecordStore

sys.path.insert(0, str(ROOT / "tests" / "worlds"))  # the pool that the tests start
from mooncake_pool import running_master, running_owner

BATCH, LEASE_MS, TIMEOUT_MS = 32, 5_000, 10_000


def kvroute(url: str, records: int, nbytes: int, stack: ExitStack) -> Callable[[], dict[str, float]]:
    """The turn of ``RecordStore`` over the pool."""
    layout = RecordLayout((AuxBlockDataSpec("rows", (nbytes // 64,), "uint8", block_tokens=64),))
    store = RecordStore(stack.enter_context(open_store(url)), layout)
    keys = [BlockKey(os.urandom(32)) for _ in range(records)]
    sources = [row.data for row in np.random.default_rng(0).integers(0, 256, (records, nbytes), np.uint8)]
    buffers = [row.data for row in np.ones((BATCH, nbytes), np.uint8)]

    def put(start: int, stop: int) -> None:
        ones = [1] * (stop - start)
        assert None not in store.put(keys[start:stop], sources[start:stop], [b"\xff" * 8] * len(ones), ones, ones)

    def get(start: int, stop: int) -> None:
        assert all(type(found) is RecordHeader for found in store.get_into(keys[start:stop], buffers))

    return partial(take, put, get, sources, buffers)


def pool(stack: ExitStack, records: int, nbytes: int) -> list[Racer]:
    master = stack.enter_context(running_master(LEASE_MS))
    held = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
    owner = stack.enter_context(running_owner(master, held / "segment", max(4 * records * nbytes, 256 << 20)))
    path = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment = {**native_environment(TIMEOUT_MS), **os.environ, **path}
    peer = Peer(Path(sys.executable), "bench.peers.mooncake_raw", held / "log", environment, master.address)
    stack.callback(peer.close)
    turns = {
        "raw batch calls": lambda: peer.ask({"record_nbytes": nbytes, "records": records, "batch": BATCH}),
        "kvroute mooncake:": kvroute(master.url("bench", timeout_ms=TIMEOUT_MS), records, nbytes, stack),
    }

    def emptying(run: Callable[[], dict[str, float]]) -> dict[str, float]:
        found = run()
        assert owner.ask("remove_all", True) >= 0
        return found

    return [Racer(name, partial(emptying, run)) for name, run in turns.items()]


def main() -> None:
    args = asked(
        *(__doc__, 9, "32 MiB, 3 rounds: noisier"),
        kib=([32, 1024], "record sizes"),
        total_mib=(64, "of records in a turn"),
    )
    total_mib, rounds = (min(32, args.total_mib), min(3, args.rounds)) if args.quick else (args.total_mib, args.rounds)
    found, nbytes = list[dict[str, object]](), total_mib << 20
    rates = {f"{what}_s": (what, lambda seconds: nbytes / seconds / 1e9) for what in ("put", "get")}
    for kib in args.kib:
        with ExitStack() as stack:
            racers = pool(stack, nbytes // (kib << 10), kib << 10)
            race(racers, rounds, warm=1)
        title = f"{kib} KiB records in a Mooncake pool, batches of {BATCH}, GB/s, median of {rounds} rounds"
        print_ratios(title, racers, "raw batch calls", rates)
        found += [{"kib": kib, "what": each.name, **each.found} for each in racers]
    write_json(args.json, total_mib=total_mib, rows=found)


if __name__ == "__main__":
    main()

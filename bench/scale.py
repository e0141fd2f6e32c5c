"""What do records in files cost, in a fresh, a full and a large store, compared with LMDB and raw calls?

Each step has a separate process (``bench.peers.file_stores``) and measures the CPU time of its thread, so that other
jobs on the machine count little. The contestants take turns step by step; with ``--before DIR`` the kvroute of another
checkout takes part. Batches of 32:

* ``put`` and ``get`` of records of each ``--kib``, in a store with room, and ``get one``: each record by itself;
* full and evicting: with a quota of ``--quota-mib``, the last quarter of four times as many bytes (CPU and wall time);
* opening with ``--records`` of 4 KiB, and the resident memory that it adds;
* a reader's 99th percentile for a batch, beside a writer that replaces constantly (wall and CPU time).

LMDB checks nothing and is limited by number of records; raw is one ``pwritev`` or ``preadv`` a batch. kvroute seals and
verifies every record: "raw and sums", which adds an XXH3 of each, is what no store that does so can go below.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Peer, Racer, asked, print_ratios, race, write_json

MIB = 1 << 20


class Steps:
    """Runs each step in a separate process; a store's directory stays for the next step of a round."""

    def __init__(self, parent: Path, roots: dict[str, Path]) -> None:
        self.parent, self.roots = parent, roots

    def ask(self, name: str, what: str, kib: int, records: int, quota_nbytes: int, **more: Any) -> dict[str, float]:
        path = os.pathsep.join((str(self.roots.get(name, ROOT)), str(ROOT / "bench" / "peers")))
        environment = {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}
        peer = Peer(Path(sys.executable), "file_stores", self.parent / f"{name}-{what}.log", environment)
        store = "kvroute" if name in self.roots else name
        common = {"nbytes": kib << 10, "records": records, "quota_nbytes": quota_nbytes}
        try:
            return peer.ask({"what": what, "store": store, "directory": str(self.parent / name), **common, **more})
        finally:
            peer.close()


def fresh(steps: Steps, name: str, kib: int, total_nbytes: int) -> dict[str, float]:
    common = kib, total_nbytes // (kib << 10) // 32 * 32, 4 * total_nbytes
    return steps.ask(name, "put", *common) | steps.ask(name, "get", *common)


def full(steps: Steps, name: str, kib: int, quota_nbytes: int) -> dict[str, float]:
    return steps.ask(name, "put", kib, 4 * quota_nbytes // (kib << 10) // 32 * 32, quota_nbytes, **{"from": 0.75})


def large(steps: Steps, name: str, records: int) -> dict[str, float]:
    common = 4, records // 32 * 32, 2 * records * 4096 + (1 << 30)
    steps.ask(name, "put", *common)
    return steps.ask(name, "open", *common)


def beside(steps: Steps, name: str, kib: int) -> dict[str, float]:
    common = kib, 1024, 64 * MIB
    steps.ask(name, "put", *common)
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(partial(steps.ask, name, "replace", *common, lasts_s=4.0))
        found = steps.ask(name, "beside", *common, lasts_s=2.5)
        writer.result()
    return found


def in_turn(parent: Path | None, roots: dict[str, Path], name: str, step: Callable[[Steps, str], Any]) -> Any:
    """Run one step in a separate directory."""
    with tempfile.TemporaryDirectory(prefix="bench-scale-", dir=parent) as scratch:
        return step(Steps(Path(scratch), roots), name)


def main() -> None:
    args = asked(
        __doc__,
        3,
        kib=([24, 256], "record sizes"),
        total_mib=(128, "of records in a store with room"),
        quota_mib=(128, "of a store that is full"),
        records=(100_000, "in a large store"),
        before=(Path, "a checkout of an earlier kvroute"),
        dir=(Path, "where files go"),
    )
    roots = {"kvroute": ROOT} | ({"before": args.before} if args.before else {})
    names, ours = [*roots, "LMDB", "raw", "raw and sums"], list(roots)
    everything: dict[str, Any] = {}

    def compare(
        title: str, names: list[str], step: Callable[[Steps, str], Any], fields: dict[str, tuple[str, float]]
    ) -> None:
        racers = [Racer(name, partial(in_turn, args.dir, roots, name, step)) for name in names]
        race(racers, args.rounds)
        print_ratios(title, racers, names[0], {name: (head, scale.__mul__) for name, (head, scale) in fields.items()})
        everything[title] = {each.name: each.found for each in racers}

    for kib in args.kib:
        step = partial(fresh, kib=kib, total_nbytes=args.total_mib * MIB)
        of_records = {"put_s": ("put", 1e6), "get_s": ("get", 1e6), "get_one_s": ("get one", 1e6)}
        compare(f"{kib} KiB, room for all: CPU us a record", names, step, of_records)
        step = partial(full, kib=kib, quota_nbytes=args.quota_mib * MIB)
        both = {"put_s": ("CPU us a record", 1e6), "put_wall_s": ("wall us", 1e6)}
        compare(f"{kib} KiB, full and evicting at {args.quota_mib} MiB", names, step, both)
    step = partial(large, records=args.records)
    large_fields = {"open_s": ("open, CPU ms", 1e3), "rss_nbytes": ("RSS, bytes a record", 1 / args.records)}
    compare(f"{args.records:,} records of 4 KiB", [*ours, "LMDB"], step, large_fields)
    both = {"p99_s": ("p99, ms", 1e3), "p99_cpu_s": ("p99 of CPU, ms", 1e3)}
    compare("a reader's batch of 24 KiB beside a writer that replaces", ours, partial(beside, kib=24), both)
    write_json(args.json, rounds=args.rounds, found=everything)


if __name__ == "__main__":
    main()

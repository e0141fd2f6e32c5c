"""What do kvroute's stores cost beside what else keeps such records, checked and unchecked, synced and not?

Records of 32 KiB and 1 MiB are put and got in batches of 32, in three places, each with a base for its ratios:

* in memory, against a prefaulted memcpy slab: ``memory:``, LMCache's ``LocalCPUBackend``, vLLM's ``BlockObjectStore``;
* in files, against LMDB: ``file:``, LMDB with the same header and checksum, a file a record, LMCache's
  ``LocalDiskBackend``; and with every batch on stable storage, ``file:`` and LMDB;
* in a Mooncake pool on this machine whose segment another process holds, against Mooncake's own ``batch_put_from`` and
  ``batch_get_into`` from a client in the caller's process with registered memory: ``mooncake:``, the same calls with
  kvroute's header and checksum made in one process, and ``tiered:`` (a file store in front of the pool; a put goes to
  both, and gets are answered by the file store).

All take turns within a round, in an order that rotates, and so meet the same noise; a round before the first is not
counted. A cell is the median of the rounds and, in brackets, the slowest and the fastest; a ratio is the median of the
rounds' ratios to the base of the same round. Sources are prepared beforehand, a put ends when the store has everything,
and every record that is read is compared with its stamp within the timed loop. Files are flushed between put and get,
not timed, unless the table says that each batch is synced.

With ``--cpu`` a row takes the CPU time of the calling thread in place of the wall's: what other jobs on the machine
take does not count, nor does what a row waits for.

LMCache and vLLM run in environments of their own (``make bench-peers`` makes them) and in processes of their own, as
does the raw Mooncake client; without the environments their rows say so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from statistics import median

from bench.contestants import Files, KVRoute, Lmdb, Load, Slab, scratch
from bench.harness import ROOT, Contestant, Peer, PeerError, Table, Took, Turn, machine, take
from bench.peers import VENVS
from cache_manager.ports import StorageBackend
from cache_manager.storage import BUILT_IN, GROUP, open_store
from cache_manager.storage.mooncake.settings import native_environment
from cache_manager.storage.records import RecordStore

sys.path.insert(0, str(ROOT / "tests" / "support"))  # the pool that the tests start
from mooncake_pool import Master, Owner, running_master, running_owner

BATCH = 32
LEASE_MS = 5_000
TIMEOUT_MS = 10_000

BASES = {"in memory": "slab, memcpy", "in files": "LMDB", "in a Mooncake pool": "raw batch calls"}
COPY = "copy"

Clock = Callable[[], float]
"""Seconds."""


@dataclass(slots=True)
class Row:
    """A contestant, what its numbers mean, and its turns so far; ``absent`` says why there are none."""

    group: str
    name: str
    checked: str  # on get
    got: str  # what a get hands out
    synced: str
    turn: Callable[[Load], Took] | None
    absent: str = ""
    took: list[Took] = field(default_factory=list)


class PooledStore(KVRoute):
    """A store that stays open over the turns, over a pool that is emptied after each."""

    def __init__(self, load: Load, store: StorageBackend, owner: Owner) -> None:
        self.load, self.owner = load, owner
        self.store = RecordStore(store, load.layout)

    def close(self) -> None:
        assert self.owner.ask("remove_all", True) >= 0


def in_process(opened: Callable[[Load], Contestant], load: Load, *, clock: Clock = time.perf_counter) -> Took:
    contestant = opened(load)
    try:
        return take(contestant, load.stamps, load.buffers, BATCH, clock)
    finally:
        contestant.close()


def in_directory(
    opened: Callable[[Load, Path], Contestant], parent: Path | None, load: Load, *, clock: Clock = time.perf_counter
) -> Took:
    os.sync()  # what the one before left to write is not this one's load
    with scratch(parent) as directory:
        return in_process(lambda _: opened(load, directory), load, clock=clock)


def in_peer(peer: Peer, what: str, parent: Path | None, load: Load) -> Took:
    os.sync()
    with scratch(parent) as directory:
        return peer.take(Turn(what, load.layout.nbytes, len(load.keys), BATCH, 0, str(directory)))


def in_pool(peer: Peer, what: str, owner: Owner, load: Load) -> Took:
    took = peer.take(Turn(what, load.layout.nbytes, len(load.keys), BATCH, 0, ""))
    assert owner.ask("remove_all", True) >= 0
    return took


def file_store(load: Load, directory: Path, parameters: str = "") -> Contestant:
    return KVRoute(load, f"file://{directory}?quota=4GiB{parameters}")


def memory_store(load: Load) -> Contestant:
    return KVRoute(load, f"memory:?capacity={len(load.keys) * load.layout.nbytes}")


def rows_in_memory(clock: Clock) -> list[Row]:
    def row(name: str, checked: str, opened: Callable[[Load], Contestant]) -> Row:
        return Row("in memory", name, checked, COPY, "-", partial(in_process, opened, clock=clock))

    return [
        row("slab, memcpy", "no", Slab),
        row("slab + XXH3", "yes", partial(Slab, verify=True)),
        row("kvroute memory:", "yes", memory_store),
    ]


def rows_in_files(parent: Path | None, clock: Clock) -> list[Row]:
    def row(name: str, checked: str, synced: str, opened: Callable[[Load, Path], Contestant]) -> Row:
        return Row("in files", name, checked, COPY, synced, partial(in_directory, opened, parent, clock=clock))

    return [
        row("kvroute file:", "yes", "no", file_store),
        row("LMDB", "no", "no", Lmdb),
        row("LMDB, same header and XXH3", "yes", "no", partial(Lmdb, verify=True)),
        row("plain files, one a record", "no", "no", Files),
        row("kvroute file:, sync=batch", "yes", "each batch", partial(file_store, parameters="&sync=batch")),
        row("LMDB, sync", "no", "each batch", partial(Lmdb, sync=True)),
    ]


def rows_in_pool(stack: ExitStack, total_nbytes: int, tiered: bool, parent: Path | None, logs: Path) -> list[Row]:
    group = "in a Mooncake pool"
    master = stack.enter_context(running_master(LEASE_MS))
    held = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
    owner = stack.enter_context(running_owner(master, held / "segment", max(4 * total_nbytes, 256 << 20)))
    path = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment = {**native_environment(TIMEOUT_MS), **os.environ, **path}
    peer = Peer(Path(sys.executable), "bench.peers.mooncake_raw", logs / "raw", environment, master.address)
    stack.callback(peer.close)
    store = open_store(master.url("bench", timeout_ms=TIMEOUT_MS))
    stack.callback(store.close)
    rows = [
        Row(group, "raw batch calls", "no", "same memory", "-", partial(in_pool, peer, "raw", owner)),
        Row(group, "raw, same header and XXH3", "yes", COPY, "-", partial(in_pool, peer, "sealed", owner)),
        Row(
            *(group, "kvroute mooncake:", "yes", COPY, "-"),
            partial(in_process, lambda load: PooledStore(load, store, owner)),
        ),
    ]
    if tiered:
        rows.append(Row(group, "kvroute tiered: file, pool", "yes", COPY, "no", tiered_turn(master, owner, parent)))
    else:
        rows.append(Row(group, "kvroute tiered: file, pool", "", "", "", None, "this kvroute has no tiered: stores"))
    return rows


def tiered_turn(master: Master, owner: Owner, parent: Path | None) -> Callable[[Load], Took]:
    def turn(load: Load) -> Took:
        def opened(load: Load, directory: Path) -> Contestant:
            back = master.url("bench", timeout_ms=TIMEOUT_MS)
            return KVRoute(load, f"tiered:file://{directory}?quota=4GiB,{back}")

        took = in_directory(opened, parent, load)
        assert owner.ask("remove_all", True) >= 0
        return took

    return turn


def rows_of_peers(stack: ExitStack, parent: Path | None, logs: Path) -> list[Row]:
    rows = []
    for venv, module, environment, stores in (
        (
            *("lmcache", "bench.peers.lmcache_stores", {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}),
            {
                "LocalCPUBackend": ("in memory", "LMCache LocalCPU", COPY, "-"),
                "LocalDiskBackend": ("in files", "LMCache LocalDisk", COPY, "no"),
            },
        ),
        (
            *("vllm", "bench.peers.vllm_stores", {"VLLM_NO_USAGE_STATS": "1"}),
            {"BlockObjectStore": ("in memory", "vLLM BlockObjectStore", "new bytes", "-")},
        ),
    ):
        python, peer, absent = VENVS / venv / "bin" / "python", None, ""
        if python.exists():
            try:
                peer = Peer(python, module, logs / venv, environment)
                stack.callback(peer.close)
            except PeerError as error:
                absent = str(error)
        else:
            absent = f"no {python.relative_to(ROOT)}; `make bench-peers` makes it"
        for what, (group, name, got, synced) in stores.items():
            turn = partial(in_peer, peer, what, parent) if peer else None
            version = f" {peer.version.split()[-1]}" if peer else ""
            rows.append(Row(group, name + version, "no", got, synced, turn, absent and f"not installed: {absent}"))
    return rows


def run(rows: Sequence[Row], load: Load, rounds: int) -> None:
    """``rounds`` turns of each row, after one that does not count; a row that fails is out from then on."""
    racing = [row for row in rows if row.turn]
    for row in rows:
        row.took.clear()
    for each in range(rounds + 1 if racing else 0):
        at = each % len(racing)
        for row in racing[at:] + racing[:at]:
            if row.turn is None:
                continue
            try:
                took = row.turn(load)
            except PeerError as error:
                row.turn, row.absent = None, f"failed: {error}"
                continue
            if each:
                row.took.append(took)
        print(f"  round {each} of {rounds}", file=sys.stderr, flush=True)


def show(rows: Sequence[Row], load: Load, rounds: int) -> None:
    nbytes = len(load.keys) * load.layout.nbytes
    for group, base in BASES.items():
        ours = [row for row in rows if row.group == group]
        bases = next((row.took for row in ours if row.name == base), [])
        table = Table(
            f"{load.layout.nbytes >> 10} KiB records {group}, batches of {BATCH}, GB/s, median of {rounds} rounds",
            ["what", "put", f"x {base}", "get", f"x {base}", "checked", "a get gives", "synced"],
        )
        for row in ours:
            if not row.took:
                continue
            cells = []
            for name in ("put_s", "get_s"):
                seconds = [getattr(took, name) for took in row.took]
                rates = sorted(nbytes / s / 1e9 for s in seconds)
                ratios = [getattr(took, name) / s for took, s in zip(bases, seconds, strict=bool(bases))]
                cells.append(f"{median(rates):.2f} ({rates[0]:.2f}..{rates[-1]:.2f})")
                cells.append(f"{median(ratios):.2f}" if ratios else "-")
            table.row(row.name, *cells, row.checked, row.got, row.synced)
        if ours:
            table.print()
        for row in ours:
            if not row.took:
                print(f"{row.name}: {row.absent}")


@contextmanager
def opened_rows(args: argparse.Namespace, total_nbytes: int) -> Iterator[list[Row]]:
    there = {*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))}
    if args.tiered and "tiered" not in there:
        raise SystemExit(f"--tiered: no such scheme; there are {', '.join(sorted(there))}")
    clock = time.thread_time if args.cpu else time.perf_counter
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peers-")))
        makers = {
            "memory": lambda: rows_in_memory(clock),
            "files": lambda: rows_in_files(args.dir, clock),
            "pool": lambda: rows_in_pool(stack, total_nbytes, "tiered" in there, args.dir, logs),
            "peers": lambda: rows_of_peers(stack, args.dir, logs),
        }
        yield [row for name in args.only for row in makers[name]()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, nargs="+", default=[32, 1024], help="record sizes")
    parser.add_argument("--total-mib", type=int, default=64, help="of records in a turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dir", type=Path, help="where files go (default: the system's place for temporary files)")
    choices = ("memory", "files", "pool", "peers")
    parser.add_argument("--only", choices=choices, nargs="+", default=choices, help="these contestants")
    parser.add_argument("--tiered", action="store_true", help="fail when there is no tiered: store")
    parser.add_argument("--quick", action="store_true", help="32 MiB, 3 rounds: noisier")
    parser.add_argument(
        "--cpu", action="store_true", help="CPU time of the thread: memory and files, on a busy machine"
    )
    parser.add_argument("--json", type=Path, help="write every round's seconds there, too")
    args = parser.parse_args()
    if args.cpu and not {"memory", "files"}.issuperset(args.only):
        parser.error("--cpu is for --only memory files: others work in processes of their own")
    total_mib, rounds = (32, 3) if args.quick else (args.total_mib, args.rounds)
    everything = []
    with opened_rows(args, total_mib << 20) as rows:
        for kib in args.kib:
            load = Load.prepare(kib << 10, total_mib << 20, seed=0)
            run(rows, load, rounds)
            show(rows, load, rounds)
            for row in rows:
                seconds = [(took.put_s, took.get_s) for took in row.took]
                everything.append({"kib": kib, "group": row.group, "what": row.name, "put_get_s": seconds})
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "total_mib": total_mib, "rows": everything}, indent=1))


if __name__ == "__main__":
    main()

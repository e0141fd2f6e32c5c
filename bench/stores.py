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

With ``--cpu``, which is for ``--only memory files``, a row takes the CPU time of the calling thread in place of the
wall's: what other jobs on the machine take does not count, nor does what a row waits for.

LMCache and vLLM run in environments of their own (``make bench-peers`` makes them) and in processes of their own, as
does the raw Mooncake client; without the environments their rows say so.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.contestants import Files, KVRoute, Lmdb, Load, Slab, scratch
from bench.harness import ROOT, Contestant, Peer, PeerError, Racer, Turn, asked, print_ratios, race, take, write_json
from bench.peers import VENVS
from cache_manager.storage import open_store
from cache_manager.storage.mooncake.settings import native_environment
from cache_manager.storage.records import RecordStore

sys.path.insert(0, str(ROOT / "tests" / "support"))  # the pool that the tests start
from mooncake_pool import running_master, running_owner

BATCH = 32
LEASE_MS = 5_000
TIMEOUT_MS = 10_000

BASES = {"memory": "slab, memcpy", "files": "LMDB", "pool": "raw batch calls"}
COPY = "copy"


class Stores:
    """The contestants of one size of records, by where they keep them; notes: checked on get, what a get gives, synced.

    A turn is a new store, or one that is emptied after it, and all records put and got.
    """

    def __init__(self, stack: ExitStack, load: Load, parent: Path | None, clock: Callable[[], float]) -> None:
        self.stack, self.load, self.parent, self.clock = stack, load, parent, clock
        self.logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peers-")))

    def take(self, opened: Callable[[Load], Contestant]) -> dict[str, float]:
        contestant = opened(self.load)
        try:
            return take(contestant, self.load.stamps, self.load.buffers, BATCH, self.clock)
        finally:
            contestant.close()

    def take_in_directory(self, opened: Callable[[Load, Path], Contestant]) -> dict[str, float]:
        os.sync()  # what the one before left to write is not this one's load
        with scratch(self.parent) as directory:
            return self.take(lambda load: opened(load, directory))

    def ask(self, peer: Peer, what: str) -> dict[str, float]:
        os.sync()
        with scratch(self.parent) as directory:
            return peer.take(Turn(what, self.load.layout.nbytes, len(self.load.keys), BATCH, 0, str(directory)))

    def memory(self) -> Iterator[Racer]:
        room = f"memory:?capacity={len(self.load.keys) * self.load.layout.nbytes}"
        yield Racer("slab, memcpy", partial(self.take, Slab), ("no", COPY, "-"))
        yield Racer("slab + XXH3", partial(self.take, partial(Slab, verify=True)), ("yes", COPY, "-"))
        yield Racer("kvroute memory:", partial(self.take, partial(KVRoute, url=room)), ("yes", COPY, "-"))
        yield from self.peers("lmcache", {"LocalCPUBackend": ("LMCache LocalCPU", COPY, "-")})
        yield from self.peers("vllm", {"BlockObjectStore": ("vLLM BlockObjectStore", "new bytes", "-")})

    def files(self) -> Iterator[Racer]:
        def stored(load: Load, directory: Path, more: str = "") -> Contestant:
            return KVRoute(load, f"file://{directory}?quota=4GiB{more}")

        for name, checked, synced, opened in (
            ("kvroute file:", "yes", "no", stored),
            ("LMDB", "no", "no", Lmdb),
            ("LMDB, same header and XXH3", "yes", "no", partial(Lmdb, verify=True)),
            ("plain files, one a record", "no", "no", Files),
            ("kvroute file:, sync=batch", "yes", "each batch", partial(stored, more="&sync=batch")),
            ("LMDB, sync", "no", "each batch", partial(Lmdb, sync=True)),
        ):
            yield Racer(name, partial(self.take_in_directory, opened), (checked, COPY, synced))
        yield from self.peers("lmcache", {"LocalDiskBackend": ("LMCache LocalDisk", COPY, "no")})

    def pool(self) -> Iterator[Racer]:
        stack, total_nbytes = self.stack, len(self.load.keys) * self.load.layout.nbytes
        master = stack.enter_context(running_master(LEASE_MS))
        held = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        owner = stack.enter_context(running_owner(master, held / "segment", max(4 * total_nbytes, 256 << 20)))
        path = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environment = {**native_environment(TIMEOUT_MS), **os.environ, **path}
        peer = Peer(Path(sys.executable), "bench.peers.mooncake_raw", self.logs / "raw", environment, master.address)
        stack.callback(peer.close)
        url = master.url("bench", timeout_ms=TIMEOUT_MS)
        store = stack.enter_context(open_store(url))

        class Pooled(KVRoute):
            """Stays open over the turns."""

            def __init__(self, load: Load) -> None:
                self.load, self.store = load, RecordStore(store, load.layout)

            def close(self) -> None: ...

        def tiered(load: Load, directory: Path) -> Contestant:
            return KVRoute(load, f"tiered:file://{directory}?quota=4GiB,{url}")

        def emptied(turn: Callable[[], dict[str, float]]) -> Callable[[], dict[str, float]]:
            def emptying() -> dict[str, float]:
                found = turn()
                assert owner.ask("remove_all", True) >= 0
                return found

            return emptying

        for name, turn, notes in (
            ("raw batch calls", partial(self.ask, peer, "raw"), ("no", "same memory", "-")),
            ("raw, same header and XXH3", partial(self.ask, peer, "sealed"), ("yes", COPY, "-")),
            ("kvroute mooncake:", partial(self.take, Pooled), ("yes", COPY, "-")),
            ("kvroute tiered: file, pool", partial(self.take_in_directory, tiered), ("yes", COPY, "no")),
        ):
            yield Racer(name, emptied(turn), notes)

    def peers(self, venv: str, stores: dict[str, tuple[str, str, str]]) -> Iterator[Racer]:
        """Stores of another environment, which check nothing."""
        python, peer, absent = VENVS / venv / "bin" / "python", None, ""
        quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        if python.exists():
            try:
                peer = Peer(python, f"bench.peers.{venv}_stores", self.logs / venv, quiet)
                self.stack.callback(peer.close)
            except PeerError as error:
                absent = str(error)
        else:
            absent = f"no {python.relative_to(ROOT)}; `make bench-peers` makes it"
        for what, (name, *notes) in stores.items():
            named = f"{name} {peer.version.split()[-1]}" if peer else name
            yield Racer(named, partial(self.ask, peer, what) if peer else None, ("no", *notes), absent)


def main() -> None:
    args = asked(
        *(__doc__, 9, "32 MiB, 3 rounds: noisier"),
        kib=([32, 1024], "record sizes"),
        total_mib=(64, "of records in a turn"),
        dir=(Path, "where files go"),
        only=(list(BASES), "of " + ", ".join(BASES)),
        cpu=(False, "CPU time of the thread"),
    )
    total_mib, rounds = (32, 3) if args.quick else (args.total_mib, args.rounds)
    found, nbytes = list[dict[str, object]](), total_mib << 20
    rates = {f"{what}_s": (what, lambda seconds: nbytes / seconds / 1e9) for what in ("put", "get")}
    for kib in args.kib:
        load = Load.prepare(kib << 10, nbytes, seed=0)
        for where in args.only:
            with ExitStack() as stack:
                stores = Stores(stack, load, args.dir, time.thread_time if args.cpu else time.perf_counter)
                racers = list(getattr(stores, where)())
                race(racers, rounds, warm=1)
            title = f"{kib} KiB records, {where}, batches of {BATCH}, GB/s, median of {rounds} rounds"
            print_ratios(title, racers, BASES[where], rates, ["checked", "a get gives", "synced"])
            found += [{"kib": kib, "where": where, "what": each.name, **each.found} for each in racers]
    write_json(args.json, total_mib=total_mib, rows=found)


if __name__ == "__main__":
    main()

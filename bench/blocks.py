"""How fast are records stored and read back, beside a memcpy and beside what else one could use?

Records of four sizes are put and got one by one and in batches of 32, in memory and through the file system:

* ``slab``: a dict and a prefaulted memcpy slab, without checks: the floor. ``slab + xxh3`` seals and verifies as well;
* ``kvroute memory:`` and ``kvroute file:``: ``RecordStore`` over each store, sealed and verified;
* ``lmdb``: a transaction a batch, values copied into the caller's buffers, not verified; ``lmdb + xxh3`` stores the
  same header as kvroute and verifies it; ``lmdb, writemap`` is lmdb in its faster and less safe mode;
* ``files``: one file a record, written to a temporary name and renamed, not verified.

Every contestant copies from sources that were prepared beforehand and into the caller's buffers, and every record
that is read is compared with its stamp (16 bytes at its head and 16 at its tail) within the timed loop. ``put`` is the
loop until the last byte was handed over, ``put+flush`` the loop and then what puts it on stable storage. Stores are
new in every round, contestants take turns, and the best round counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import lmdb
import numpy as np

from bench.harness import STAMP_NBYTES, Contestant, Table, machine, take
from cache_manager.keys import BlockKey
from cache_manager.record import RecordHeader, check_record, checksum, pack_header, unpack_header
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage import open_store
from cache_manager.storage.memory import prefaulted
from cache_manager.storage.records import RecordStore

BATCHES = (1, 32)


@dataclass(frozen=True, slots=True)
class Load:
    """The records of a run, prepared: sources, keys, stamps, and the caller's buffers."""

    layout: RecordLayout
    keys: list[BlockKey]
    sources: list[memoryview]
    stamps: list[tuple[bytes, bytes]]
    buffers: list[memoryview]
    valid: list[bytes]
    generations: list[int]

    @classmethod
    def prepare(cls, record_nbytes: int, total_nbytes: int, seed: int) -> Load:
        rng = np.random.default_rng(seed)
        spec = AuxBlockDataSpec("rows", row_shape=(record_nbytes // 64,), dtype="uint8", block_tokens=64)
        layout = RecordLayout((spec,))
        records = total_nbytes // record_nbytes
        memory = np.frombuffer(prefaulted(total_nbytes), np.uint8).reshape(records, record_nbytes)
        memory[:] = rng.integers(0, 256, memory.shape, np.uint8)
        sources = [row.data for row in memory]
        target = np.frombuffer(prefaulted(BATCHES[-1] * record_nbytes), np.uint8).reshape(-1, record_nbytes)
        return cls(
            layout,
            [BlockKey(rng.bytes(32)) for _ in range(records)],
            sources,
            [(bytes(source[:STAMP_NBYTES]), bytes(source[-STAMP_NBYTES:])) for source in sources],
            [row.data for row in target],
            [b"\xff" * 8 for _ in range(records)],
            list(range(records)),
        )


class Slab:
    def __init__(self, load: Load, *, verify: bool = False) -> None:
        self.load, self.verify = load, verify
        self.nbytes = load.layout.nbytes
        self.memory = memoryview(prefaulted(len(load.keys) * self.nbytes))
        self.index: dict[BlockKey, tuple[int, int]] = {}

    def put(self, start: int, stop: int) -> None:
        load, nbytes = self.load, self.nbytes
        for i in range(start, stop):
            at = len(self.index) * nbytes
            source = load.sources[i]
            self.memory[at : at + nbytes] = source
            self.index[load.keys[i]] = (at, checksum(source) if self.verify else 0)

    def get(self, start: int, stop: int) -> None:
        load, nbytes = self.load, self.nbytes
        for i in range(start, stop):
            at, wanted = self.index[load.keys[i]]
            buffer = load.buffers[i - start]
            buffer[:] = self.memory[at : at + nbytes]
            if self.verify:
                assert checksum(buffer) == wanted

    def flush(self) -> None: ...

    def close(self) -> None:
        self.memory.release()


class KVRoute:
    def __init__(self, load: Load, url: str) -> None:
        self.load = load
        self.store = RecordStore(open_store(url), load.layout)

    def put(self, start: int, stop: int) -> None:
        load = self.load
        part = slice(start, stop)
        keys, sources = load.keys[part], load.sources[part]
        stored = self.store.put(keys, sources, load.valid[part], load.generations[part], [1] * len(keys))
        assert None not in stored

    def get(self, start: int, stop: int) -> None:
        found = self.store.get_into(self.load.keys[start:stop], self.load.buffers[: stop - start])
        assert all(type(header) is RecordHeader for header in found)

    def flush(self) -> None:
        self.store.flush()

    def close(self) -> None:
        self.store.close()


class Lmdb:
    def __init__(
        self, load: Load, directory: Path, *, verify: bool = False, writemap: bool = False, sync: bool = False
    ) -> None:
        self.load, self.verify = load, verify
        size = 4 * len(load.keys) * (load.layout.nbytes + 8192)
        self.environment = lmdb.open(str(directory), map_size=size, sync=sync, writemap=writemap)

    def put(self, start: int, stop: int) -> None:
        load = self.load
        with self.environment.begin(write=True) as transaction:
            for i in range(start, stop):
                source = load.sources[i]
                if self.verify:
                    header = RecordHeader(
                        load.keys[i], load.layout.fingerprint, i, 1, load.valid[i], len(source), checksum(source)
                    )
                    transaction.put(load.keys[i], b"".join((pack_header(header), source)))
                else:
                    transaction.put(load.keys[i], source)

    def get(self, start: int, stop: int) -> None:
        load = self.load
        with self.environment.begin(buffers=True) as transaction:
            for i in range(start, stop):
                found = transaction.get(load.keys[i])
                assert found is not None
                value = memoryview(found)
                buffer = load.buffers[i - start]
                if self.verify:
                    header = unpack_header(value)
                    buffer[:] = value[header.nbytes :]
                    check_record(header, load.keys[i], load.layout.fingerprint, buffer)
                else:
                    buffer[:] = value

    def flush(self) -> None:
        self.environment.sync(True)

    def close(self) -> None:
        self.environment.close()


class Files:
    def __init__(self, load: Load, directory: Path) -> None:
        self.load = load
        self.paths = [str(directory / key.hex()) for key in load.keys]

    def put(self, start: int, stop: int) -> None:
        for i in range(start, stop):
            temp = self.paths[i] + ".tmp"
            with open(temp, "wb", buffering=0) as file:
                file.write(self.load.sources[i])
            os.rename(temp, self.paths[i])

    def get(self, start: int, stop: int) -> None:
        for i in range(start, stop):
            with open(self.paths[i], "rb", buffering=0) as file:
                assert file.readinto(self.load.buffers[i - start]) == self.load.layout.nbytes

    def flush(self) -> None:
        os.sync()

    def close(self) -> None: ...


MEMORY: dict[str, Callable[[Load], Contestant]] = {
    "slab": Slab,
    "slab + xxh3": lambda load: Slab(load, verify=True),
    "kvroute memory:": lambda load: KVRoute(load, f"memory:?capacity={len(load.keys) * load.layout.nbytes}"),
}

FILE: dict[str, Callable[[Load, Path], Contestant]] = {
    "kvroute file:": lambda load, directory: KVRoute(load, f"file://{directory}?quota=4GiB"),
    "lmdb": Lmdb,
    "lmdb + xxh3": lambda load, directory: Lmdb(load, directory, verify=True),
    "lmdb, writemap": lambda load, directory: Lmdb(load, directory, writemap=True),
    "files": Files,
}


@dataclass(frozen=True, slots=True)
class Result:
    """GB/s of the best round."""

    what: str
    record_nbytes: int
    batch: int
    put: float
    put_flush: float
    get: float


@contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="blocks-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def measure(load: Load, batch: int, rounds: int, parent: Path | None) -> list[Result]:
    names = [*MEMORY, *FILE]
    best = {name: (float("inf"),) * 3 for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with ExitStack() as stack:
                if name in MEMORY:
                    contestant = MEMORY[name](load)
                else:
                    contestant = FILE[name](load, stack.enter_context(scratch(parent)))
                stack.callback(contestant.close)
                took = astuple(take(contestant, load.stamps, load.buffers, batch))
            before = best[name]
            best[name] = (min(before[0], took[0]), min(before[1], took[1]), min(before[2], took[2]))
    nbytes = len(load.keys) * load.layout.nbytes
    return [
        Result(name, load.layout.nbytes, batch, *(nbytes / seconds / 1e9 for seconds in best[name])) for name in names
    ]


def show(results: Sequence[Result]) -> None:
    by_name = {result.what: result for result in results}
    slab, peer = by_name["slab"], by_name["lmdb"]
    first = results[0]
    table = Table(
        f"{first.record_nbytes >> 10} KiB records in batches of {first.batch}, GB/s",
        ["what", "put", "x slab", "x lmdb", "put+flush", "x lmdb", "get", "x slab", "x lmdb"],
    )
    for r in results:
        table.row(
            r.what,
            f"{r.put:.2f}",
            f"{r.put / slab.put:.2f}",
            f"{r.put / peer.put:.2f}",
            f"{r.put_flush:.2f}",
            f"{r.put_flush / peer.put_flush:.2f}",
            f"{r.get:.2f}",
            f"{r.get / slab.get:.2f}",
            f"{r.get / peer.get:.2f}",
        )
    table.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, nargs="+", default=[8, 32, 128, 1024], help="record sizes")
    parser.add_argument("--total-mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where files go (default: the system's place for temporary files)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="32 MiB, 2 rounds: seconds, and noisier")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    args = parser.parse_args()
    total_mib, rounds = (32, 2) if args.quick else (args.total_mib, args.rounds)
    everything: list[Result] = []
    for kib in args.kib:
        load = Load.prepare(kib << 10, total_mib << 20, args.seed)
        for batch in BATCHES:
            print(f"{kib} KiB records, batches of {batch}, {total_mib} MiB, best of {rounds} ...", flush=True)
            results = measure(load, batch, rounds, args.dir)
            show(results)
            everything += results
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "results": [asdict(r) for r in everything]}, indent=1))


if __name__ == "__main__":
    main()

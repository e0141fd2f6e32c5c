"""Does the file store stay fast when it is large, and what does a process pay for it? Beside LMDB, in the same run.

For each number of records, ``--kib`` each: put and get in batches of 32, opening for writing with warm and with cold
pages, memory a record, checking every byte (``kvroute fsck``; LMDB has none, so all its values are read and summed),
and 1, 4 and 16 reader processes at once, each with random batches. Every step has processes of its own, so that memory
is that step's: RSS of one writer; of readers their PSS, in which a page that several map is divided among them. Reading
the store's files from end to end, from the same place, is the yardstick of fsck: from the page cache and from the disk.

They take turns step by step, and with ``--rounds`` opening and getting are the medians of so many turns. With
``--before DIR`` kvroute of another checkout, which has this benchmark, takes part as ``before``. LMDB writes without
sync and checks nothing when it reads; kvroute verifies every record. All are flushed after the puts, not timed.
``--full`` goes to a million records and 16 readers, and needs 10 GB of disk and a few minutes; without it a run takes
one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

import lmdb
import numpy as np

from bench.harness import ROOT, Peer, Table, machine, serve_answers
from cache_manager.keys import BlockKey
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage import open_store
from cache_manager.storage.records import RecordStore

BATCH = 32
SCOPE = b"bench..."
VALID = b"\xff" * 8


def layout(nbytes: int) -> RecordLayout:
    return RecordLayout((AuxBlockDataSpec("rows", row_shape=(nbytes // 64,), dtype="uint8", block_tokens=64),))


def key(number: int) -> BlockKey:
    return BlockKey(SCOPE + blake2b(number.to_bytes(8, "little"), digest_size=24).digest())


class Kvroute:
    def __init__(self, directory: Path, nbytes: int, total_nbytes: int, *, reads: bool) -> None:
        parameters = "mode=read" if reads else f"quota={2 * total_nbytes + (1 << 30)}"
        self._store = RecordStore(open_store(f"file://{directory}?{parameters}"), layout(nbytes))

    def put(self, numbers: Sequence[int], payloads: Sequence[memoryview]) -> None:
        keys = [key(n) for n in numbers]
        stored = self._store.put(keys, payloads, [VALID] * len(keys), list(numbers), [1] * len(keys))
        assert None not in stored

    def get(self, numbers: Sequence[int], buffers: Sequence[memoryview]) -> None:
        self._store.get_into([key(n) for n in numbers], buffers)

    def flush(self) -> None:
        self._store.flush()

    def close(self) -> None:
        self._store.close()

    @staticmethod
    def check(directory: Path) -> int:
        from kvroute.cli import main

        report = directory.with_name("fsck.json")
        assert main(["fsck", str(directory), "--json", str(report)]) == 0
        return sum(int(segment["records"]) for segment in json.loads(report.read_text())["segments"])


class Lmdb:
    def __init__(self, directory: Path, nbytes: int, total_nbytes: int, *, reads: bool) -> None:
        room = 2 * total_nbytes + (64 << 20) + total_nbytes // nbytes * 512
        self._env = lmdb.open(str(directory), map_size=room, sync=False, readonly=reads, lock=True, max_readers=64)

    def put(self, numbers: Sequence[int], payloads: Sequence[memoryview]) -> None:
        with self._env.begin(write=True, buffers=True) as txn:
            for number, payload in zip(numbers, payloads, strict=True):
                txn.put(key(number), payload)

    def get(self, numbers: Sequence[int], buffers: Sequence[memoryview]) -> None:
        with self._env.begin(buffers=True) as txn:
            for number, buffer in zip(numbers, buffers, strict=True):
                found: Any = txn.get(key(number))
                buffer[:] = found

    def flush(self) -> None:
        self._env.sync(True)

    def close(self) -> None:
        self._env.close()

    @staticmethod
    def check(directory: Path) -> int:
        from cache_manager.record import checksum

        count = total = 0
        env = lmdb.open(str(directory), readonly=True, lock=False, map_size=1 << 40)
        with env.begin(buffers=True) as txn:
            for _, value in txn.cursor():
                total ^= checksum(value)
                count += 1
        env.close()
        assert total or not count
        return count


STORES: dict[str, Callable[..., Kvroute | Lmdb]] = {"kvroute": Kvroute, "LMDB": Lmdb}


def memory_nbytes(which: str) -> int:
    """``Rss`` or ``Pss`` of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(which)


def chill(directory: Path) -> None:
    """Let the page cache drop the files' clean pages."""
    os.sync()
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_all(directory: Path) -> int:
    """Bytes of the files, read from end to end."""
    buffer, total = bytearray(1 << 20), 0
    for path in directory.iterdir():
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def answer(asked: dict[str, Any]) -> dict[str, float]:
    """One step, in a process that does nothing else."""
    directory, nbytes, records = Path(asked["directory"]), asked["nbytes"], asked["records"]
    kind = STORES[asked["store"]]
    common = (directory, nbytes, records * nbytes)
    if asked["cold"]:
        chill(directory)
    if asked["what"] == "read files":
        began = time.perf_counter()
        return {"nbytes": read_all(directory), "seconds": time.perf_counter() - began}
    if asked["what"] == "check":
        began = time.perf_counter()
        assert kind.check(directory) == records  # type: ignore[attr-defined]
        return {"seconds": time.perf_counter() - began}
    memory = np.random.default_rng(0).integers(0, 256, (BATCH, nbytes), np.uint8)
    buffers = [row.data for row in memory]
    if asked["what"] == "put":
        store = kind(*common, reads=False)
        began = time.perf_counter()
        for first in range(0, records, BATCH):
            numbers = range(first, min(first + BATCH, records))
            memory[: len(numbers), :8] = np.array(numbers, "<u8").view(np.uint8).reshape(-1, 8)
            store.put(numbers, buffers[: len(numbers)])
        seconds = time.perf_counter() - began
        store.flush()
        store.close()
        return {"seconds": seconds}
    for reads in (False, asked["reads"]):  # what the first one costs a process is not the store's size
        kind(directory.with_name(f"first-{os.getpid()}"), nbytes, 1 << 20, reads=reads).close()
    time.sleep(max(asked.get("begin_s", 0.0) - time.monotonic(), 0.0))
    which = "Pss" if asked["reads"] else "Rss"
    before = memory_nbytes(which)
    began = time.perf_counter()
    store = kind(*common, reads=asked["reads"])
    opened_s = time.perf_counter() - began
    held = memory_nbytes(which) - before
    rng, got = np.random.default_rng(os.getpid()), 0
    began = time.perf_counter()
    while got < asked["gets"]:
        chosen = rng.integers(records, size=BATCH)
        store.get(chosen.tolist(), buffers)
        assert (memory[:, :8].copy().view("<u8")[:, 0] == chosen).all(), "another record's bytes"
        got += BATCH
    seconds = time.perf_counter() - began
    store.close()
    return {"opened_s": opened_s, "nbytes": held, "gets": got, "seconds": seconds}


class Steps:
    """Asks processes of their own; ``roots`` are the checkouts that the contestants come from, by their names."""

    def __init__(self, parent: Path, roots: dict[str, Path], nbytes: int, records: int) -> None:
        self._parent, self._roots = parent, roots
        self._common = {"nbytes": nbytes, "records": records, "cold": False, "reads": False}

    def ask(self, processes: int, name: str, **asked: Any) -> list[dict[str, Any]]:
        with ExitStack() as stack:
            peers = []
            for i in range(processes):
                log, root = self._parent / f"log{i}", self._roots[name]
                peers.append(Peer(Path(sys.executable), "bench.scale", log, {}, "--answer", root=root))
                stack.callback(peers[-1].close)
            store = {"store": "LMDB" if name == "LMDB" else "kvroute", "directory": str(self._parent / name)}
            wanted = {**self._common, **store, "begin_s": time.monotonic() + 0.5, **asked}
            with ThreadPoolExecutor(processes) as pool:
                return list(pool.map(lambda peer: peer.ask(wanted), peers))


def measure(
    parent: Path | None,
    roots: dict[str, Path],
    nbytes: int,
    records: int,
    readers: Sequence[int],
    gets: int,
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """Every step of each, by name."""
    found: dict[str, dict[str, Any]] = {name: {"records": records, "readers": []} for name in roots}
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-scale-", dir=parent)))
        steps = Steps(root, roots, nbytes, records)
        for name in roots:
            (took,) = steps.ask(1, name, what="put")
            found[name]["put_us"] = 1e6 * took["seconds"] / records
        warm: dict[str, list[dict[str, Any]]] = {name: [] for name in roots}
        for name in [*roots] * rounds:
            warm[name] += steps.ask(1, name, what="open", gets=gets)
        for name, turns in warm.items():
            found[name]["open_s"] = median(took["opened_s"] for took in turns)
            found[name]["rss_a_record"] = median(took["nbytes"] for took in turns) / records
            found[name]["get_us"] = 1e6 * median(took["seconds"] for took in turns) / gets
            (took,) = steps.ask(1, name, what="open", cold=True, gets=0)
            found[name]["open_cold_s"] = took["opened_s"]
        for cold in (False, True):
            for name in roots:
                (took,) = steps.ask(1, name, what="check", cold=cold)
                (bare,) = steps.ask(1, name, what="read files", cold=cold)
                where = "_cold_s" if cold else "_s"
                found[name] |= {"check" + where: took["seconds"], "read" + where: bare["seconds"]}
                found[name]["files_nbytes"] = bare["nbytes"]
        for processes in readers:
            for name in roots:
                answers = steps.ask(processes, name, what="open", reads=True, gets=gets)
                found[name]["readers"].append(
                    {
                        "processes": processes,
                        "open_s": max(each["opened_s"] for each in answers),
                        "pss_a_record": sum(each["nbytes"] for each in answers) / processes / records,
                        "gets_a_s": sum(each["gets"] / each["seconds"] for each in answers),
                    }
                )
    return found


def show(measured: Sequence[dict[str, Any]], nbytes: int) -> None:
    columns = [
        "records",
        "what",
        "put us",
        "get us",
        "open s",
        "cold s",
        "RSS B",
        "check s",
        "x reading",
        "check cold s",
        "x disk",
        "put x",
        "get x",
    ]
    table = Table(f"{nbytes >> 10} KiB records in batches of {BATCH}; put x, get x: speed by LMDB's", columns)
    wide = Table("reader processes at once", ["records", "processes", "what", "open s", "PSS B", "gets/s", "x LMDB"])
    for found in measured:
        base = found["LMDB"]
        for name, it in found.items():
            table.row(
                *(f"{it['records']:,}", name, f"{it['put_us']:.1f}", f"{it['get_us']:.1f}", f"{it['open_s']:.3f}"),
                *(f"{it['open_cold_s']:.3f}", f"{it['rss_a_record']:.0f}", f"{it['check_s']:.2f}"),
                *(f"{it['check_s'] / it['read_s']:.1f}", f"{it['check_cold_s']:.2f}"),
                *(f"{it['check_cold_s'] / it['read_cold_s']:.1f}", f"{base['put_us'] / it['put_us']:.2f}"),
                f"{base['get_us'] / it['get_us']:.2f}",
            )
            for mine, theirs in zip(it["readers"], base["readers"], strict=True):
                wide.row(
                    *(f"{it['records']:,}", str(mine["processes"]), name, f"{mine['open_s']:.3f}"),
                    *(f"{mine['pss_a_record']:.0f}", f"{mine['gets_a_s']:,.0f}"),
                    f"{mine['gets_a_s'] / theirs['gets_a_s']:.2f}",
                )
    table.print()
    wide.print()


def main() -> None:
    if sys.argv[1:] == ["--answer"]:
        serve_answers("kvroute", answer)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 4], help="processes that read at once")
    parser.add_argument("--kib", type=int, default=4, help="of a record")
    parser.add_argument("--gets", type=int, default=3_200, help="records that each process gets")
    parser.add_argument("--dir", type=Path, help="where files go (default: the system's place for temporary files)")
    parser.add_argument("--rounds", type=int, default=1, help="turns of opening and getting")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier kvroute")
    parser.add_argument("--full", action="store_true", help="1e3 to 1e6 records; 1, 4 and 16 readers")
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    args = parser.parse_args()
    if args.full:
        args.records, args.readers, args.gets = [1_000, 10_000, 100_000, 1_000_000], [1, 4, 16], 32_000
    measured = []
    roots = {"kvroute": ROOT, **({"before": args.before} if args.before else {}), "LMDB": ROOT}
    for records in args.records:
        measured.append(measure(args.dir, roots, args.kib << 10, records, args.readers, args.gets, args.rounds))
        print(f"  {records:,} records", file=sys.stderr, flush=True)
    show(measured, args.kib << 10)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "kib": args.kib, "measured": measured}, indent=1))


if __name__ == "__main__":
    main()

"""Which way do a store's bytes come out of the page cache fastest, and which of them can end the process?

A batch of 32 records with headers of 128 bytes is read from a file that is in the page cache, at random places or side
by side, into buffers that are there:

* ``preadv``: a call a record or, side by side, one for all; what ``file:`` does;
* ``map``: a copy out of a mapping of the file whose pages are there; what LMDB does;
* ``process_vm_readv``: one call for all, in which the kernel copies out of the same mapping, so that a page that is not
  to be had is an error and no signal.

Each with and without XXH3 of every payload. The ways take turns within a round; a cell is the median over the rounds.

The last line answers what becomes of a process that has made its mapped pages present (``MADV_POPULATE_READ``, which
says by an error that the disk does not give one back) when the file is cut before the bytes are used.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from bench.harness import Table
from cache_manager.record import checksum

BATCH = 32
HEADER_NBYTES = 128
POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
CUT = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(fd, 1 << 16, prot=mmap.PROT_READ)
memory.madvise(22)
os.ftruncate(fd, 0)
memory[0]
"""
"""A file is mapped, its pages are made present, somebody cuts it, and it is read."""


class Ways:
    """A file of ``file_nbytes`` and buffers for a batch of payloads of ``nbytes``."""

    def __init__(self, path: Path, nbytes: int, file_nbytes: int) -> None:
        self.nbytes, self.step = nbytes, HEADER_NBYTES + nbytes
        piece = np.random.default_rng(0).bytes(BATCH * self.step)  # as a put writes them
        with path.open("wb", buffering=0) as file:
            while file.tell() < file_nbytes:
                file.write(piece)
        self.fd = os.open(path, os.O_RDONLY)
        self.records = os.fstat(self.fd).st_size // self.step
        self.map = mmap.mmap(self.fd, 0, prot=mmap.PROT_READ)
        self.map.madvise(POPULATE_READ)
        self.view = memoryview(self.map)
        self.memory = np.ones((BATCH, nbytes), np.uint8)
        self.buffers = [row.data for row in self.memory]
        self.headers = [bytearray(HEADER_NBYTES) for _ in range(BATCH)]
        self.call = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self.call.restype = ctypes.c_ssize_t
        self.here = np.stack([self.memory.ctypes.data + np.arange(BATCH) * nbytes, np.full(BATCH, nbytes)], 1)
        self.there = np.stack([np.zeros(BATCH, np.int64), np.full(BATCH, nbytes)], 1)
        self.start = np.frombuffer(self.map, np.uint8).ctypes.data

    def preadv(self, places: list[int], side_by_side: bool) -> None:
        if side_by_side:
            vector = [room for pair in zip(self.headers, self.buffers, strict=True) for room in pair]
            os.preadv(self.fd, vector, places[0])
            return
        for place, header, buffer in zip(places, self.headers, self.buffers, strict=True):
            os.preadv(self.fd, [header, buffer], place)

    def copy(self, places: list[int], _: bool) -> None:
        view, nbytes = self.view, self.nbytes
        for place, buffer in zip(places, self.buffers, strict=True):
            buffer[:] = view[place + HEADER_NBYTES : place + HEADER_NBYTES + nbytes]

    def process_vm_readv(self, places: list[int], _: bool) -> None:
        self.there[:, 0] = np.array(places) + (self.start + HEADER_NBYTES)
        count, unused = ctypes.c_ulong(BATCH), ctypes.c_ulong(0)
        here, there = (ctypes.c_void_p(each.ctypes.data) for each in (self.here, self.there))
        if self.call(os.getpid(), here, count, there, count, unused) < 0:
            raise OSError(ctypes.get_errno(), "process_vm_readv")


def measure(ways: Ways, side_by_side: bool, rounds: int) -> dict[str, float]:
    """Microseconds a record, by the way."""
    rng, took = np.random.default_rng(1), dict[str, list[float]]()
    names: dict[str, Callable[[list[int], bool], None]] = {
        "preadv": ways.preadv,
        "map": ways.copy,
        "process_vm_readv": ways.process_vm_readv,
    }
    for _ in range(rounds):
        for name, way in names.items():
            for summed in (False, True):
                first = rng.integers(ways.records - BATCH)
                chosen = first + np.arange(BATCH) if side_by_side else rng.integers(ways.records, size=BATCH)
                places = (chosen * ways.step).tolist()
                began = time.perf_counter()
                way(places, side_by_side)
                if summed:
                    for buffer in ways.buffers:
                        checksum(buffer)
                seconds = time.perf_counter() - began
                took.setdefault(name + ", XXH3" * summed, []).append(1e6 * seconds / BATCH)
    return {name: median(each) for name, each in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 32], help="record sizes")
    parser.add_argument("--file-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--dir", type=Path, help="where files go (default: the system's place for temporary files)")
    args = parser.parse_args()
    table = Table(
        f"us a record, batches of {BATCH}, median of {args.rounds} rounds", ["what", "random", "side by side"]
    )
    with tempfile.TemporaryDirectory(prefix="bench-reads-", dir=args.dir) as directory:
        path = Path(directory) / "file"
        for kib in args.kib:
            ways = Ways(path, kib << 10, args.file_mib << 20)
            random, beside = (measure(ways, each, args.rounds) for each in (False, True))
            for name in random:
                table.row(f"{kib} KiB, {name}", f"{random[name]:.2f}", f"{beside[name]:.2f}")
        table.print()
        ended = subprocess.run([sys.executable, "-c", CUT, path], check=False).returncode  # noqa: S603 - our own code
        says = signal.Signals(-ended).name if ended < 0 else f"exit status {ended}"
        print(f"a populated mapping of a file that is cut before it is read: {says}")


if __name__ == "__main__":
    main()

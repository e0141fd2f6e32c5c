"""What keeps records, as :mod:`bench.stores` asks it: it puts and gets records that were prepared, a batch at a time.

* ``Slab``: a dict and a prefaulted memcpy slab, without checks: the floor. ``verify`` seals and verifies as well;
* ``KVRoute``: ``RecordStore`` over a store, sealed and verified;
* ``Lmdb``: a transaction a batch, values copied into the caller's buffers, not verified; ``verify`` stores the same
  header as kvroute and verifies it;
* ``Files``: one file a record, written to a temporary name and renamed, not verified.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

from bench.harness import STAMP_NBYTES
from cache_manager.keys import BlockKey
from cache_manager.record import RecordHeader, check_record, checksum, pack_header, unpack_header
from cache_manager.spec import AuxBlockDataSpec, RecordLayout
from cache_manager.storage import open_store
from cache_manager.storage.memory import prefaulted
from cache_manager.storage.records import RecordStore

BATCH_MAX = 32


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
        target = np.frombuffer(prefaulted(BATCH_MAX * record_nbytes), np.uint8).reshape(-1, record_nbytes)
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


@contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="blocks-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)

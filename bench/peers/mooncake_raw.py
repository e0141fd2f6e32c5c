"""Mooncake's own batch calls from a client in this process: what the ``mooncake:`` store is measured against.

Sources and targets are registered, so that nothing is copied on this side; nothing is checked either. ``sealed`` makes
of each record what kvroute stores: header and payload behind each other in registered memory, with the checksum made
before and verified after.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import packages_distributions, version

import numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from bench.harness import Records, Turn, serve
from cache_manager.keys import BlockKey
from cache_manager.record import RecordHeader, check_record, checksum, pack_header, unpack_header

SETTINGS = "127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", ""
FINGERPRINT = bytes(16)
VALID = b"\xff" * 8


class Raw:
    """``batch_put_from`` and ``batch_get_into``, from and into the caller's memory."""

    def __init__(self, store: MooncakeDistributedStore, records: Records, turn: Turn) -> None:
        self._store, self._records = store, records
        self._names = [f"raw/{os.urandom(8).hex()}/{i:064x}" for i in range(turn.records)]
        self._registered: list[int] = []
        self._sizes = [turn.record_nbytes] * turn.batch
        self._sources = self._addresses(records.sources)
        self._targets = self._addresses(records.targets)

    def put(self, start: int, stop: int) -> None:
        names, sources = self._names[start:stop], self._sources[start:stop]
        assert not any(self._store.batch_put_from(names, sources, self._sizes, ReplicateConfig()))

    def get(self, start: int, stop: int) -> None:
        assert self._store.batch_get_into(self._names[start:stop], self._targets, self._sizes) == self._sizes

    def flush(self) -> None: ...

    def close(self) -> None:
        for address in self._registered:
            assert self._store.unregister_buffer(address) == 0

    def _addresses(self, memory: np.ndarray) -> list[int]:
        address = memory.ctypes.data
        assert self._store.register_buffer(address, memory.nbytes) == 0
        self._registered.append(address)
        return [address + i * memory.shape[1] for i in range(len(memory))]


class Sealed(Raw):
    """The same with kvroute's header and checksum, in one process: put copies into registered memory, get out of it."""

    def __init__(self, store: MooncakeDistributedStore, records: Records, turn: Turn) -> None:
        super().__init__(store, records, turn)
        self._keys = [BlockKey(os.urandom(32)) for _ in range(turn.records)]
        self._payloads = [row.data for row in records.sources]
        header = pack_header(self._header(0))
        self._stage = np.ones((turn.batch, len(header) + turn.record_nbytes), np.uint8)
        self._rows = [row.data for row in self._stage]
        self._staged = self._addresses(self._stage)
        self._sizes = [self._stage.shape[1]] * turn.batch

    def put(self, start: int, stop: int) -> None:
        for row, i in zip(self._rows, range(start, stop), strict=True):
            header = pack_header(self._header(i))
            row[: len(header)] = header
            row[len(header) :] = self._payloads[i]
        assert not any(
            self._store.batch_put_from(self._names[start:stop], self._staged, self._sizes, ReplicateConfig())
        )

    def get(self, start: int, stop: int) -> None:
        assert self._store.batch_get_into(self._names[start:stop], self._staged, self._sizes) == self._sizes
        for row, buffer, i in zip(self._rows, self._records.buffers, range(start, stop), strict=True):
            header = unpack_header(row)
            buffer[:] = row[header.nbytes :]
            check_record(header, self._keys[i], FINGERPRINT, buffer)

    def _header(self, i: int) -> RecordHeader:
        payload = self._payloads[i]
        return RecordHeader(self._keys[i], FINGERPRINT, i, 1, VALID, payload.nbytes, checksum(payload))


def main(master: str) -> None:
    store = MooncakeDistributedStore()
    assert store.setup(*SETTINGS, master) == 0
    serve(
        f"Mooncake {version(packages_distributions()['mooncake'][0])}",
        {
            "raw": lambda records, turn: Raw(store, records, turn),
            "sealed": lambda records, turn: Sealed(store, records, turn),
        },
    )
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])

"""Does a file store's clock keep what a cache that evicts the record used least recently would keep?

A trace of requests (one JSON object a line with ``hash_ids``, as published with Mooncake's FAST'25 paper) runs through
``file:`` stores of several quotas: a request gets its blocks, and puts missing ones. In the same run it goes through a
model that evicts the record used least recently and stores as many records as fit into the quota, header included. A
ratio is the store's hit rate divided by the model's.
"""

from __future__ import annotations

import json
import tempfile
from collections import OrderedDict
from pathlib import Path

from bench.harness import Table, asked, write_json
from cache_manager.keys import BlockKey
from cache_manager.record import RecordHeader, checksum
from cache_manager.storage.file import FileStore


class LeastRecent:
    """A cache of ``records`` keys that evicts the key used least recently."""

    def __init__(self, records: int) -> None:
        self.records = records
        self.keys: OrderedDict[int, None] = OrderedDict()

    def ask(self, blocks: list[int]) -> int:
        hits = 0
        for block in blocks:
            if block in self.keys:
                hits += 1
                self.keys.move_to_end(block)
        for block in blocks:
            self.keys[block] = None
            if len(self.keys) > self.records:
                self.keys.popitem(last=False)
        return hits


class Stored:
    """The file store under test."""

    def __init__(self, directory: Path, quota_nbytes: int, payload: bytes) -> None:
        self.store = FileStore(directory, quota_nbytes=quota_nbytes)
        self.payload, self.sum = payload, checksum(payload)

    def ask(self, blocks: list[int]) -> int:
        keys = [BlockKey(b"trace---" + block.to_bytes(24, "big")) for block in blocks]
        room = memoryview(bytearray(len(self.payload)))
        found = self.store.get_into(keys, [room] * len(keys))
        missing = [key for key, answer in zip(keys, found, strict=True) if not isinstance(answer, RecordHeader)]
        nbytes = len(self.payload)
        headers = [RecordHeader(key, b"f" * 16, 0, 1, b"\xff" * 8, nbytes, self.sum) for key in missing]
        self.store.put(headers, [self.payload] * len(headers))
        return len(keys) - len(missing)


def main() -> None:
    args = asked(
        *(__doc__, 1),
        trace=(Path, "one JSON object a line"),
        quota_mib=([16, 64, 156], "of a store"),
        kib=(4, "of a record"),
        requests=(4000, "only the first N"),
    )
    if args.trace is None:
        raise SystemExit("--trace: wanted a file")
    requests = [json.loads(line)["hash_ids"] for line in args.trace.open()][: args.requests]
    total = sum(map(len, requests))
    table = Table(
        f"{len(requests)} requests for {total} blocks of {args.kib} KiB",
        ["quota", "hit rate", "of records", "ratio"],
    )
    for quota_mib in args.quota_mib:
        quota_nbytes, payload = quota_mib << 20, bytes(args.kib << 10)
        with tempfile.TemporaryDirectory() as directory:
            stored = Stored(Path(directory), quota_nbytes, payload)
            model = LeastRecent(quota_nbytes // (len(payload) + 128))
            hits = [(stored.ask(blocks), model.ask(blocks)) for blocks in requests]
            stored.store.close()
        ours, theirs = (sum(column) / total for column in zip(*hits, strict=True))
        table.row(f"{quota_mib} MiB", f"{ours:.4f}", f"{theirs:.4f}", f"{ours / theirs:.3f}")
    table.print()
    write_json(args.json, rows=table.rows)


if __name__ == "__main__":
    main()

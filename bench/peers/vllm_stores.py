"""vLLM's ``BlockObjectStore``, alone: fixed-size objects in one mapping, nothing checked.

Objects are made beforehand, with their payload as ``bytes``, as the store wants them; ``get_concatenated`` answers one
new ``bytes`` object for a batch, and no further copy is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from vllm.distributed.aux_output_connector.store import BlockObject, BlockObjectStore

from bench.harness import Records, Turn, serve


class BlockObjects:
    def __init__(self, records: Records, _: Turn) -> None:
        self._nbytes = records.nbytes
        self._objects = [BlockObject(f"{i:064x}", row.tobytes()) for i, row in enumerate(records.sources)]
        self._store = BlockObjectStore(max_bytes=records.sources.nbytes, object_nbytes=records.nbytes)

    def put(self, start: int, stop: int) -> None:
        self._store.put(self._objects[start:stop])

    def get(self, start: int, stop: int) -> Sequence[memoryview]:
        joined = memoryview(self._store.get_concatenated([each.key for each in self._objects[start:stop]]))
        return [joined[at : at + self._nbytes] for at in range(0, len(joined), self._nbytes)]

    def flush(self) -> None: ...

    def close(self) -> None:
        self._store.close()


if __name__ == "__main__":
    serve(f"vLLM {version('vllm')}", {"BlockObjectStore": BlockObjects})

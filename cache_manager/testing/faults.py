"""Faults for tests of stores: a real store, wrapped so that it fails as real disks and networks do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cache_manager.errors import StorageError
from cache_manager.keys import BlockKey
from cache_manager.ports import Absence, StorageBackend
from cache_manager.record import Buffer, RecordHeader
from cache_manager.storage.guard import ClosingStore


class FaultyStore(ClosingStore):
    """A storage backend that fails, corrupts or interleaves on demand; otherwise it passes calls on."""

    def __init__(self, backend: StorageBackend) -> None:
        self.backend = backend
        self.fail_put = False
        self.fail_get = False
        self.fail_delete = False
        self.flip_next: int | None = None  # flip this bit (modulo the size) of the next payload read
        self.during_get: Callable[[], None] | None = None
        self.during_put: Callable[[], None] | None = None

    def put(
        self, headers: Sequence[RecordHeader], payloads: Sequence[Buffer], *, replace: bool = False
    ) -> list[RecordHeader | None]:
        if self.fail_put:
            raise StorageError("put failed on purpose")
        if self.during_put:
            self.during_put()
        return self.backend.put(headers, payloads, replace=replace)

    def get_into(self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]) -> list[RecordHeader | Absence]:
        if self.fail_get:
            raise StorageError("get failed on purpose")
        found = self.backend.get_into(keys, buffers)
        if self.flip_next is not None and buffers:
            view = buffers[0].cast("B")
            view[self.flip_next // 8 % len(view)] ^= 1 << self.flip_next % 8
        if self.during_get:
            self.during_get()
        return found

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self.backend.contains(keys)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        if self.fail_delete:
            raise StorageError("delete failed on purpose")
        self.backend.delete(keys)

    def flush(self) -> None:
        self.backend.flush()

    def usage(self) -> Mapping[str, int]:
        return self.backend.usage()

    def close(self) -> None:
        self.backend.close()

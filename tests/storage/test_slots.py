"""The file store of slots keeps the contract of stores."""

from __future__ import annotations

from pathlib import Path

from cache_manager.storage.slots import FileStore
from cache_manager.testing.contract import StorageContract


class TestOneExtent(StorageContract):
    def make_backend(self, directory: Path, capacity_nbytes: int) -> FileStore:
        return FileStore(directory, quota_nbytes=capacity_nbytes)


class TestManyExtents(StorageContract):
    def make_backend(self, directory: Path, capacity_nbytes: int) -> FileStore:
        return FileStore(directory, quota_nbytes=capacity_nbytes, extent_nbytes=32 << 10)

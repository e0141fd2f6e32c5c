"""Records in the files of one directory: :class:`FileStore` writes, :class:`FileReader` reads, :func:`fsck` checks."""

from __future__ import annotations

from pathlib import Path

from cache_manager.errors import ConfigError
from cache_manager.ports import StorageBackend
from cache_manager.storage.file.fsck import ExtentReport, FsckReport, fsck
from cache_manager.storage.file.reader import FileReader
from cache_manager.storage.file.store import QUOTA_NBYTES, FileStore, Sync
from cache_manager.storage.url import StoreUrl


def open_file_store(url: StoreUrl) -> StorageBackend:
    """``file:///dir?quota=4GiB&sync=none|batch&ttl=6h&min_free=1GiB&files=0600``.

    Or, to read, ``file:///dir?mode=read&ttl=6h&absent=error|wait``: ``wait`` opens it before its writer has made it.

    The path may be percent-encoded. ``files`` are the permissions of new files: 0600 unless a group (0640) or everybody
    (0644) is to read.
    """
    reads = url.choice("mode", ("write", "read"), "write") == "read"
    url.allow("mode", "ttl", *(("absent",) if reads else ("quota", "sync", "min_free", "files")))
    if url.host not in ("", "localhost") or not url.path.startswith("/") or "\0" in url.path:
        raise ConfigError("file: store path", "file:///absolute/path", repr(url.text))
    ttl_s = url.seconds("ttl", None)
    if reads:
        return FileReader(Path(url.path), ttl_s=ttl_s, waits=url.choice("absent", ("error", "wait"), "error") == "wait")
    return FileStore(
        Path(url.path),
        quota_nbytes=url.nbytes("quota", QUOTA_NBYTES),
        sync=Sync(url.choice("sync", tuple(Sync), Sync.NONE)),
        ttl_s=ttl_s,
        min_free_nbytes=url.nbytes("min_free", 0),
        file_mode=int(url.choice("files", ("0600", "0640", "0644"), "0600"), 8),
    )


__all__ = ["ExtentReport", "FileReader", "FileStore", "FsckReport", "Sync", "fsck", "open_file_store"]

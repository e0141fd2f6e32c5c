"""Records in the files of one directory: :class:`FileStore` writes, :class:`FileReader` reads, :func:`fsck` checks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from cache_manager.errors import ConfigError
from cache_manager.ports import StorageBackend
from cache_manager.storage.file.directory import FILE_MODE
from cache_manager.storage.file.fsck import ExtentReport, FsckReport, fsck
from cache_manager.storage.file.reader import FileReader
from cache_manager.storage.file.store import QUOTA_NBYTES, FileStore, Sync
from cache_manager.storage.url import StoreUrl, parse_nbytes

_PERCENT: Final = re.compile(r"([0-9]{1,2})%")
_MODE: Final = re.compile(r"0?6[04][04]")


def open_file_store(url: StoreUrl) -> StorageBackend:
    """``file:///dir?quota=4GiB&sync=none|batch&ttl=6h&min_free=1GiB&files=0600``.

    Or, to read, ``file:///dir?mode=read&ttl=6h&absent=error|wait``: ``wait`` opens it before its writer has made it.

    The path may be percent-encoded. ``min_free`` is a size or a share of the file system such as ``5%``. ``files`` are
    the permissions of new files, in octal: 0600 unless a group (0640) or everybody (0644) is to read.
    """
    reads = url.choice("mode", ("write", "read"), "write") == "read"
    url.allow("mode", "ttl", *(("absent",) if reads else ("quota", "sync", "min_free", "files")))
    if url.host not in ("", "localhost") or not url.path.startswith("/") or "\0" in url.path:
        raise ConfigError("file: store path", "file:///absolute/path", repr(url.text))
    ttl_s = url.seconds("ttl", None)
    if reads:
        waits = url.choice("absent", ("error", "wait"), "error") == "wait"
        return FileReader(Path(url.path), ttl_s=ttl_s, waits=waits)
    nbytes, percent = _min_free(url.parameters.get("min_free"))
    return FileStore(
        Path(url.path),
        quota_nbytes=url.nbytes("quota", QUOTA_NBYTES),
        sync=Sync(url.choice("sync", tuple(Sync), Sync.NONE)),
        ttl_s=ttl_s,
        min_free_nbytes=nbytes,
        min_free_percent=percent,
        file_mode=_file_mode(url.parameters.get("files")),
    )


def _min_free(text: str | None) -> tuple[int, int]:
    """Bytes and per cent, one of which is zero."""
    if text is None:
        return 0, 0
    if match := _PERCENT.fullmatch(text):
        return 0, int(match[1])
    return parse_nbytes(text, "file: store parameter min_free"), 0


def _file_mode(text: str | None) -> int:
    if text is None:
        return FILE_MODE
    if not _MODE.fullmatch(text):
        raise ConfigError("file: store parameter files", "0600, 0640 or 0644", repr(text))
    return int(text, 8)


__all__ = [
    "ExtentReport",
    "FileReader",
    "FileStore",
    "FsckReport",
    "Sync",
    "fsck",
    "open_file_store",
]

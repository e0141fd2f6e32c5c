"""Stores are chosen by URL; what a URL cannot say is a typed error that names it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from urllib.parse import quote

import pytest

from cache_manager import storage
from cache_manager.errors import ConfigError
from cache_manager.storage import StoreUrl, open_store
from cache_manager.storage.memory import MemoryStore


def test_a_memory_store_has_the_capacity_of_its_url() -> None:
    with_default, with_capacity = open_store("memory:"), open_store("memory:?capacity=1MiB")
    assert with_default.usage()["capacity_nbytes"] == 64 << 20
    assert with_capacity.usage()["capacity_nbytes"] == 1 << 20
    with_default.close()
    with_capacity.close()


@pytest.mark.parametrize("name", ["plain", "Übung 日本", "100%", "a#b", "a?b"])
def test_a_file_store_is_in_the_directory_of_its_url(tmp_path: Path, name: str) -> None:
    """Percent-encoded, or as it is where that is no other URL."""
    directory = tmp_path / name
    written = quote(str(directory)) if set(name) & set("%#?") else directory
    store = open_store(f"file://{written}?quota=1MiB&sync=batch")
    assert store.usage()["capacity_nbytes"] == 1 << 20
    store.close()
    assert {path.name for path in directory.iterdir()} == {"kvroute.lock"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "store: wanted a URL .* got ''"),
        ("/var/lib/kvroute", "store: wanted a URL"),
        ("redis://host/1", "store scheme: wanted one of apart, file, memory.* got 'redis'"),
        ("memory:?capacity=64MB", r"memory: store parameter capacity: wanted a positive whole number .* got '64MB'"),
        ("memory:?capacity=0", "store parameter capacity: wanted a positive"),
        (
            "file:///tmp/x?quota=999999999TiB",
            "file: store parameter quota: wanted 9223372036854775807 bytes at most, got '999999999TiB'",
        ),
        ("file:///tmp/x?ttl=999999999d", "file: store parameter ttl: wanted 3155760000 seconds at most"),
        ("memory:?capacity=", "store parameter: wanted name=value, got 'capacity='"),
        ("memory:?size=1MiB", "memory: store parameter: wanted one of capacity, got 'size'"),
        ("memory:?capacity=1MiB&capacity=2MiB", "store parameter capacity: wanted one value"),
        ("memory:///path", "memory: store path: wanted none"),
        ("memory:#x", "store: wanted a URL without '#'"),
        ("file:", "file: store path: wanted file:///absolute/path, got 'file:'"),
        ("file://host/dir", "file: store path"),
        ("file:///a%00b", "file: store path"),
        (
            "file:///tmp/x?qouta=1GiB",
            "file: store parameter: wanted one of mode, ttl, quota, sync, min_free, files, got 'qouta'",
        ),
        ("file:///tmp/x?sync=always", "file: store parameter sync: wanted one of none, batch, got 'always'"),
        ("file:///tmp/x?quota=1KiB", "quota: wanted 32768 bytes or more, got 1024 bytes"),
        ("tiered:", "tiered: store tiers: wanted URLs"),
        ("tiered:memory:", "tiered: store tiers: wanted 2 or more, got 1"),
        ("tiered:memory:,redis://h", "store scheme: wanted one of .*, got 'redis'"),
        ("tiered:/dir,memory:", "tiered: store tiers: wanted URLs"),
        ("tiered:?pause_ms=1,memory:,memory:", "tiered: store parameter: wanted one of .* got 'pause_ms'"),
    ],
)
def test_a_url_that_cannot_be_is_a_config_error(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(url)


def open_own_store(url: StoreUrl) -> MemoryStore:
    url.allow("slots")
    return MemoryStore(4096 * int(url.parameters["slots"]))


def test_a_further_scheme_comes_from_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution's entry points, as importlib.metadata hands them out."""
    entry = EntryPoint("own", f"{__name__}:open_own_store", storage.GROUP)
    monkeypatch.setattr(storage, "entry_points", lambda **wanted: EntryPoints([entry]).select(**wanted))
    store = open_store("own:?slots=2")
    assert store.usage()["capacity_nbytes"] == 8192
    store.close()
    with pytest.raises(ConfigError, match="one of apart, file, memory, mooncake, own"):
        open_store("other:")


def test_adapters_are_imported_when_they_are_asked_for() -> None:
    code = (
        "import sys, cache_manager.storage\n"
        "assert not {'cache_manager.storage.file', 'cache_manager.storage.memory'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""The page about a store of one's own tells the truth: its code is taken from it, proven by the contract and found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

from waiting import GIVE_UP_S

from cache_manager.storage import GROUP
from cache_manager.testing.contract import StorageContract

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "concepts" / "your-own-store.md").read_text()


def block(language: str) -> str:
    """The one block of that language on the page."""
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert isinstance(code, str)
    return code


def run(name: str, code: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(code, f"your-own-store.md: {name}", "exec"), module.__dict__)  # noqa: S102 - our own page
    return module


sqlite_store = run("sqlite_store", block("python"))
TestSqliteStore: type[StorageContract] = run("test_sqlite_store", block("py")).TestSqliteStore


OPEN = """
import sys
from cache_manager.errors import ConfigError
from cache_manager.storage import open_store
from cache_manager.storage.records import RecordStore
from cache_manager.testing.records import LAYOUT, get, payload_of, put

for url in (f"sqlite://{sys.argv[1]}/a.db?capacity=1MiB", f"tiered:memory:?capacity=1MiB,sqlite://{sys.argv[1]}/b.db"):
    for _ in range(2):
        store = RecordStore(open_store(url), LAYOUT)
        assert all(put(store, range(5)))
        assert get(store, range(5)) == [payload_of(n) for n in range(5)]
        store.close()
try:
    open_store("redis://h")
except ConfigError as error:
    assert "sqlite" in str(error), error
else:
    raise AssertionError("redis was opened")
"""


def test_an_installed_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    """Method: the files that pip would leave in site-packages, written from the page, on another process's path."""
    site, places = tmp_path / "site", tmp_path / "places"
    information = site / "kvroute_sqlite-1.0.dist-info"
    information.mkdir(parents=True)
    places.mkdir()
    (site / "sqlite_store.py").write_text(block("python"))
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kvroute-sqlite\nVersion: 1.0\n")
    groups = tomllib.loads(block("toml"))["project"]["entry-points"]
    assert list(groups) == [GROUP]
    lines = [f"{name} = {value}" for name, value in groups[GROUP].items()]
    (information / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]) + "\n")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", OPEN, str(places)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {file.name for file in places.glob("*.db")} == {"a.db", "b.db"}

"""``kvroute fsck``: what it finds, its exit status, its table, its JSON, and what it says where there is no store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cache_manager.errors import StoreFormatError, StoreMissingError
from cache_manager.storage.file import ExtentReport, FsckReport, fsck
from cache_manager.testing.records import get, key_of, payload_of, put
from kvroute.cli import FAILED, USAGE, main
from tests.storage.stores import files, flip, opened, payload_in


def test_where_there_is_no_store_nothing_is_checked_and_nothing_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for missing in (tmp_path / "empty", tmp_path / "nowhere"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(StoreMissingError):
            fsck(missing)
        assert main(["fsck", str(missing)]) == USAGE
        assert "there is no store" in capsys.readouterr().err
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreFormatError):
        fsck(tmp_path / "home")
    assert main(["fsck", str(tmp_path / "home")]) == USAGE
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "home", "thesis.tex"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kvroute.cli", "fsck", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_as_it_is_typed(tmp_path: Path) -> None:
    """Sound, then a payload, a page and a head damaged: said as far as it was asked, and nothing is changed."""
    directory, out = tmp_path / "store", tmp_path / "report.json"
    with opened(directory) as store:
        assert all(put(store, range(26)))
    first = run(str(directory))
    assert first.returncode == 0, first.stderr
    assert first.stdout.endswith(f"{directory}: sound (payloads were not read: --payloads)\n")
    flip(*payload_in(directory, key_of(2), 1000))
    assert run(str(directory)).returncode == 0
    flip(files(directory)[1], 0)
    raw = files(directory)[2].read_bytes()
    flip(files(directory)[2], raw.index(key_of(24)))
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    second = run(str(directory), "--payloads", "--json", str(out))
    assert second.returncode == FAILED
    report = json.loads(out.read_text())
    assert report["sound"] is False
    found = [(each["corrupt"], each["damaged_pages"], each["damaged_heads"]) for each in report["extents"]]
    assert found == [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert before == {path.name: path.read_bytes() for path in directory.iterdir()}
    with opened(directory) as store:
        served = {n for n, answer in enumerate(get(store, range(26))) if answer == payload_of(n)}
    assert served == set(range(26)) - {2, 24}


def test_the_table_has_a_line_an_extent() -> None:
    extent = ExtentReport("extent-00000001.kvr", 1_234_567, 20, 12, corrupt=1, refused="no reason")
    text = FsckReport("/store", (extent,), payloads=True).to_text()
    assert text.splitlines()[1:] == [
        "extent-00000001.kvr      1,234,567             20             12" + f"{0:>15}" * 2 + f"{1:>15}"
        "  left alone: no reason",
        "/store: not sound",
    ]

"""``kvroute fsck`` as it is typed: its exit status, its table, its JSON, and what it says where there is no store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cache_manager.errors import StoreFormatError, StoreMissingError
from cache_manager.storage.file import FsckReport, SegmentReport, fsck
from kvroute.cli import FAILED, USAGE, main
from tests.storage.file_stores import HEADER_NBYTES, at, filled, flip, segments


def test_where_there_is_no_store_nothing_is_checked_and_nothing_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for missing in (tmp_path / "empty", tmp_path / "nowhere"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(StoreMissingError):
            fsck(missing, repair=True)
        assert main(["fsck", str(missing), "--repair"]) == USAGE
        assert "there is no store" in capsys.readouterr().err
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreFormatError):
        fsck(tmp_path / "home", repair=True)
    assert main(["fsck", str(tmp_path / "home")]) == USAGE
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "home", "thesis.tex"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kvroute.cli", "fsck", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_as_it_is_typed(tmp_path: Path) -> None:
    """Sound, not sound, repaired, sound again; the table for people and the file for machines agree."""
    directory, out = filled(tmp_path / "store"), tmp_path / "report.json"
    first = run(str(directory))
    assert first.returncode == 0, first.stderr
    assert first.stdout.endswith(f"{directory}: sound\n")
    flip(segments(directory)[0], at(2) + HEADER_NBYTES + 1000)
    os.truncate(segments(directory)[2], at(1) + HEADER_NBYTES + 100)
    second = run(str(directory), "--json", str(out))
    assert second.returncode == FAILED
    assert "kvroute fsck --repair takes away what is wrong" in second.stdout
    report = json.loads(out.read_text())
    assert report["sound"] is False
    assert [segment["corrupt"] for segment in report["segments"]] == [1, 0, 0]
    third = run(str(directory), "--repair")
    assert third.returncode == FAILED
    assert "was not sound and is repaired" in third.stdout
    for arguments in ((), ("--repair",)):
        assert run(str(directory), *arguments).returncode == 0


def test_the_table_has_a_line_a_segment() -> None:
    segment = SegmentReport("segment-1.kvr", 1_234_567, records=12, corrupt=1, page_missing=True)
    text = FsckReport("/store", (segment,), ("segment-2.kvr.tmp",), ("notes",), None, repaired=False).to_text()
    assert text.splitlines() == [
        "segment            bytes    records    deleted    corrupt       torn      older unreadable lost bytes",
        f"segment-1.kvr  1,234,567         12          0          1{'0':>11}{'0':>11}{'0':>11}{0:>11}  no header page",
        "all            1,234,567         12          0          1          0          0          0          0",
        "left unfinished by a crash: segment-2.kvr.tmp",
        "no part of the store: notes",
        "/store: not sound; kvroute fsck --repair takes away what is wrong",
    ]

"""The tutorial of the life-cycle kit is what a reader sees who types it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "tutorial-prove.md").read_text()
FILES = {name: text for text, name in re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```", PAGE, re.DOTALL | re.MULTILINE)}
(DIFF,) = re.findall(r"^```diff\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
CONSOLE = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def prove(where: Path, *arguments: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "kvroute", "prove", "prove_paged:Mine", *arguments],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return ran.returncode, ran.stdout


def repair(where: Path) -> None:
    """What the page's diff says."""
    lines = DIFF.splitlines(keepends=True)
    was, now = ("".join(line[1:] for line in lines if line[0] in side) for side in (" -", " +"))
    text = (where / "paged.py").read_text()
    assert text.count(was) == 1
    (where / "paged.py").write_text(text.replace(was, now))


def test_the_bug_is_found_and_its_story_is_the_page_s(files: Path) -> None:
    """Goal: the story is true, and a run finds the bug. Method: its line tells it again; a run by itself fails."""
    story = CONSOLE[0][1]
    line = story.partition('--replay "')[2].partition('"')[0]
    status, told = prove(files, "--replay", line)
    assert status == 1
    assert told.partition("Managers elsewhere")[0] == story.partition("Managers elsewhere")[0]
    status, told = prove(files)
    assert status == 1
    assert told.startswith("refusal_changes_nothing")


def test_the_repair_repairs_it(files: Path) -> None:
    """Goal: the page ends well. Method: its diff, then its two commands and the pytest file."""
    repair(files)
    line = CONSOLE[1][0].partition('--replay "')[2].partition('"')[0]
    assert prove(files, "--replay", line) == (0, CONSOLE[1][1])
    status, told = prove(files, "--examples", "60")
    assert status == 0, told
    assert told.endswith("every invariant held\n")
    salted = (files / "prove_paged.py").read_text().replace('"prefix",', '"prefix", "salt",')
    (files / "prove_paged.py").write_text(salted)
    status, told = prove(files)
    assert status == 1
    assert told.startswith("salts_apart")

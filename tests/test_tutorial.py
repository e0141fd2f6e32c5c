"""The tutorial of the life-cycle kit shows the output that a reader gets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import GIVE_UP_S

PAGE = (Path(__file__).parents[1] / "docs" / "tutorial-prove.md").read_text()
FILES = {name: text for text, name in re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```", PAGE, re.DOTALL | re.MULTILINE)}
(DIFF,) = re.findall(r"^```diff\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
CONSOLE = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def prove(where: Path, adapter: str, *arguments: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "kvroute", "prove", adapter, *arguments],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=False,
    )
    return ran.returncode, ran.stdout


def repair(where: Path) -> None:
    """The changes of the page's diff."""
    lines = DIFF.partition("@@\n")[2].splitlines(keepends=True)
    was, now = ("".join(line[1:] for line in lines if line[0] in side) for side in (" -", " +"))
    text = (where / "paged.py").read_text()
    assert text.count(was) == 1
    (where / "paged.py").write_text(text.replace(was, now))


def test_the_bug_is_found_and_its_story_is_the_page_s(files: Path) -> None:
    """Goal: the story is true. Method: the page's command, and the command in its last line, print it again."""
    assert prove(files, "prove_paged:Mine") == (1, CONSOLE[0][1])
    assert prove(files, "prove_paged:Mine", "--seed", "0", "--examples", "1", "--steps", "50") == (1, CONSOLE[0][1])


@pytest.mark.parametrize("seed", range(5))
def test_the_repair_repairs_it(files: Path, seed: int) -> None:
    """Goal: the page ends well, whatever the seed. Method: its diff, then its adapter."""
    repair(files)
    status, told = prove(files, "prove_repaired:Repaired", "--seed", str(seed))
    assert status == 0, told
    assert told.endswith("every invariant held\n")


def test_the_last_file_is_a_test_that_passes(files: Path) -> None:
    """Goal: who follows the page to its end sees green. It tested the adapter before the repair. Method: pytest on the
    page's file, before and after the diff."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_paged.py"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    statuses = []
    for change in (lambda _: None, repair):
        change(files)
        ran = subprocess.run(
            command, cwd=files, env=environment, capture_output=True, text=True, timeout=GIVE_UP_S, check=False
        )
        statuses.append(ran.returncode)
    assert statuses == [1, 0], ran.stdout


def test_what_the_repaired_manager_does_not_keep_is_found(files: Path) -> None:
    """Goal: the page names the faults that remain. Method: the repair with the first adapter, and with salts."""
    repair(files)
    status, told = prove(files, "prove_paged:Mine")
    assert (status, told.partition(":")[0]) == (1, "held_is_found")
    salted = (files / "prove_paged.py").read_text().replace('"prefix",', '"prefix", "salt",')
    (files / "prove_paged.py").write_text(salted)
    status, told = prove(files, "prove_repaired:Repaired")
    assert (status, told.partition(":")[0]) == (1, "salts_apart")

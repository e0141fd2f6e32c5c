"""What cuts a release, without building: `make release` builds and checks, which takes minutes and an index."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RELEASE: dict[str, Any] = runpy.run_path(str(ROOT / ".ci" / "release.py"))
ReleaseError: type[Exception] = RELEASE["ReleaseError"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that a release reads and writes, with a changelog of one line."""
    place = tmp_path / "tree"
    judged = [f"kvroute/integrations/{engine}/versions.py" for engine in ("vllm", "sglang")]
    for file in (*RELEASE["PLACES"], *judged, "docs/compatibility.md"):
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, place / file)
    (place / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n### Fixed\n- A row.\n\n## 0.0.9 (2026-01-01)\n\n- Old.\n"
    )
    return place


def test_a_version_is_written_wherever_it_stands(tree: Path) -> None:
    RELEASE["prepare"](tree, "0.2.0rc1", "2026-11-30")
    assert set(RELEASE["versions"](tree).values()) == {"0.2.0rc1"}
    assert "\n## Unreleased\n\n## 0.2.0rc1 (2026-11-30)\n\n### Fixed\n- A row.\n" in (tree / "CHANGELOG.md").read_text()


def test_the_notes_have_the_section_the_engines_and_the_formats(tree: Path) -> None:
    RELEASE["prepare"](tree, "0.2.0", "2026-11-30")
    notes = RELEASE["notes"](tree, "0.2.0")
    assert "### Fixed\n- A row.\n" in notes
    assert "Old." not in notes
    assert "| vLLM | 0.24.0, " in notes
    assert "| SGLang | 0.5.12, 0.5.12.post1, " in notes
    assert "| routes as bytes | 4 |" in notes


def test_what_stands_against_a_release_is_named_and_nothing_is_written(tree: Path) -> None:
    before = {file: file.read_text() for file in tree.rglob("*") if file.is_file()}
    for version in ("1.2", "v1.2.3", "1.2.3-rc1"):
        with pytest.raises(ReleaseError, match=r"wanted X\.Y\.Z or X\.Y\.ZrcN, got"):
            RELEASE["prepare"](tree, version, "2026-11-30")
    with pytest.raises(ReleaseError, match=r"wanted a section '## 0\.2\.0 \(YYYY-MM-DD\)'"):
        RELEASE["notes"](tree, "0.2.0")
    assert {file: file.read_text() for file in tree.rglob("*") if file.is_file()} == before
    (tree / "CITATION.cff").write_text("title: kvroute\n")
    with pytest.raises(ReleaseError, match=r"CITATION\.cff: names no version"):
        RELEASE["prepare"](tree, "0.2.0", "2026-11-30")
    assert "## 0.2.0" not in (tree / "CHANGELOG.md").read_text()


def test_a_tag_that_is_not_there_or_of_another_version_builds_nothing(tree: Path, tmp_path: Path) -> None:
    """Method: a repository with a tag whose files name the version before."""
    for command in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "-m", "all"],
        ["tag", "v9.9.9"],
    ):
        subprocess.run(["git", *command], cwd=tree, check=True)
    out = tmp_path / "dist"
    with pytest.raises(ReleaseError, match=r"tag: wanted one of this repository, got 'v1\.0\.0'"):
        RELEASE["cut"](tree, "v1.0.0", [], out)
    with pytest.raises(ReleaseError, match=r"v9\.9\.9: wanted version 9\.9\.9 in every file, got \{"):
        RELEASE["cut"](tree, "v9.9.9", [], out)
    assert not out.exists()

"""The metadata of a distribution. `make dist` builds one, and CI runs that."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import kvroute

ROOT = Path(__file__).parents[1]


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited
    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["site_name"].removeprefix("kvroute ")
    assert {project["version"], kvroute.__version__, cited[1], site} == {kvroute.__version__}


def test_an_index_shows_no_dead_link() -> None:
    """Method: the page that an index shows has no link that is relative to the source."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.findall(r"\]\((?!https?://)", (ROOT / project["readme"]).read_text()) == []


def test_the_extra_of_trainers_has_the_releases_that_tests_run() -> None:
    """Goal: who installs it gets what was judged. Method: the pins of the tests' environment, and the page."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["trainers"]
    (where,) = re.findall(r"(?m)^\$\(TRAINERS\)/\.ready: (\S+)$", (ROOT / "Makefile").read_text())
    pins = (ROOT / where).read_text().splitlines()
    page = (ROOT / "docs" / "concepts" / "replay.md").read_text().lower().replace("-", " ")
    for requirement in extra:
        pin = requirement.partition(";")[0]
        assert pin in pins
        assert pin.replace("==", " ").replace("-", " ") in page

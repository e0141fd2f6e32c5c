"""Goal: the tests can fail. Method: plant each fault in a copy of the package and see the named claim break."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from all_planted import ALL, LISTS, OTHERS, choose
from nursery import THIRD_PARTY, nursery
from planted import Fault

import cache_manager

ROOT = Path(__file__).parents[2]

HUNT = """
import atexit, importlib.util, os, sys
package, copy, test = sys.argv[1:]
assert not {name.partition(".")[0] for name in sys.modules} & {"cache_manager", "transfer", "kvroute"}
assert importlib.util.find_spec(package).origin == f"{copy}/__init__.py"
import pytest
known = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
left = "ignore::ResourceWarning"
beside = "ignore:(rm_rf) error removing:pytest.PytestWarning"
options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:anyio", "-W", known, "-W", left, "-W", beside]
status = pytest.main([*options, test])
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(status)
"""
"""No module of ours is loaded before the copy is on the path: what is imported from here on is the copy's. A test that
fails may leave files and sockets open, and hunts beside each other clear one directory of old runs; a warning of that
would end pytest before it names the test. The process ends at once: to take down all that is loaded costs as much time
as most of these tests."""

HUNTS = 4
"""Some tests have threads, and on a busy machine these may never be where the fault shows: then the test runs again."""


@pytest.fixture(scope="session")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of the packages, each in a directory of its own, and the bytecode of what no fault has changed."""
    return tmp_path_factory.mktemp("planted")


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_planted_fault_is_caught(fault: Fault, where: Path) -> None:
    parent, original = where / f"of-{fault.package}", Path(cache_manager.__file__).parents[1] / fault.package
    copy = parent / fault.package
    if not copy.exists():
        shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__"))
    planted = parent / fault.file
    planted.write_text(fault.plant(planted.read_text()))
    os.utime(planted, (1 + ALL.index(fault), 1 + ALL.index(fault)))  # no other file's bytecode is taken for it
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "KVROUTE_"))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(where / "bytecode")
    environment["PYTHONPATH"] = os.pathsep.join((str(parent), str(original.parent)))
    environment["HYPOTHESIS_PROFILE"] = "hunt"
    try:
        for _ in range(HUNTS):
            ran = nursery(*THIRD_PARTY).run(
                ["-c", HUNT, fault.package, str(copy), fault.test], env=environment, cwd=ROOT, timeout=240
            )
            if ran.returncode:
                break
    finally:
        shutil.copy2(original.parent / fault.file, planted)
    assert ran.returncode == 1, f"not caught: {fault.name}\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
    found = any(claim in ran.stdout for claim in fault.claims)
    assert found, f"caught, but not by {' | '.join(fault.claims)}:\n{ran.stdout[-4000:]}"


def test_each_fault_finds_its_line() -> None:
    """Goal: an edit that leaves a fault without its line is seen by every run. Method: look all of them up."""
    assert len({fault.name for fault in ALL}) == len(ALL) > 200
    root = Path(cache_manager.__file__).parents[1]
    lost = [fault.name for fault in ALL if (root / fault.file).read_text().count(fault.removed) != 1]
    assert not lost, "the code has changed: bring these faults up to date"


def test_what_changed_is_planted_and_six_others() -> None:
    """Goal: a developer's run plants what an edit may have broken. Method: one file, one test, one list; each turn."""
    for index, fault in enumerate(ALL):
        for changed in (fault.file, fault.test.partition("::")[0]):
            assert fault in (found := choose({changed, "README.md"}, index))
            assert OTHERS < len(found) < len(ALL)
    assert {fault.name for turn in range(len(ALL)) for fault in choose(set(), turn)} == {fault.name for fault in ALL}
    assert len(choose({"tests/faults/memory.faults"}, 0)) == len(LISTS["memory.faults"]) + OTHERS

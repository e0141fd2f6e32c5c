"""Goal: the tests can fail. Method: plant each fault in a copy of the package and see the named claim break."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from all_planted import ALL, OTHERS, choose
from nursery import THIRD_PARTY, nursery
from planted import Fault
from planted_memory import MEMORY_FAULTS

import cache_manager

ROOT = Path(__file__).parents[2]

HUNT = """
import importlib.util, sys
package, copy, test = sys.argv[1:]
assert not {name.partition(".")[0] for name in sys.modules} & {"cache_manager", "transfer", "kvroute"}
assert importlib.util.find_spec(package).origin == f"{copy}/__init__.py"
import pytest
known = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", known, test]))
"""
"""No module of ours is loaded before the copy is on the path: what is imported from here on is the copy's."""


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_planted_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    copy = tmp_path / fault.package
    original = Path(cache_manager.__file__).parents[1] / fault.package
    shutil.copytree(original, copy)
    planted = copy / fault.file
    source = planted.read_text()
    assert source.count(fault.before) == 1, "the code has changed: bring the fault up to date"
    planted.write_text(source.replace(fault.before, fault.after))
    for compiled in (planted.parent / "__pycache__").glob(f"{planted.stem}.*"):
        compiled.unlink()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "KVROUTE_"))}
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), str(original.parent)))
    environment["HYPOTHESIS_PROFILE"] = "hunt"
    ran = nursery(*THIRD_PARTY).run(
        ["-c", HUNT, fault.package, str(copy), fault.node], env=environment, cwd=ROOT, timeout=240
    )
    assert ran.returncode == 1, f"not caught: {fault.name}\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
    assert fault.claim in ran.stdout, f"caught, but not by {fault.claim}:\n{ran.stdout[-4000:]}"


def test_what_changed_is_planted_and_six_others() -> None:
    """Goal: a developer's run plants what an edit may have broken. Method: one file, one test, one list; each turn."""
    for index, fault in enumerate(ALL):
        for changed in (f"{fault.package}/{fault.file}", fault.test.partition("::")[0]):
            assert fault in (found := choose({changed, "README.md"}, index))
            assert OTHERS < len(found) < len(ALL)
    assert {fault.name for turn in range(len(ALL)) for fault in choose(set(), turn)} == {fault.name for fault in ALL}
    assert len(choose({"tests/faults/planted_memory.py"}, 0)) == len(MEMORY_FAULTS) + OTHERS

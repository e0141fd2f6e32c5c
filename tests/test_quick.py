"""``make quick`` runs what a change touches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quick import ELSEWHERE, FILES_MAX, PACKAGES, ROOT, import_graph, module_name, nearest, touched

MODULES = [path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_a_changed_module_touches_the_tests_that_import_it() -> None:
    found = touched([Path("cache_manager/regions/directory.py"), Path("tests/spec/bench/test_benches_run.py")])
    assert found[0] == "tests/spec/bench/test_benches_run.py"
    assert "tests/spec/cache_manager/regions/test_shared.py" in found
    assert "tests/test_imports.py" not in found
    assert "tests/spec/cache_manager/storage/mooncake/test_faults.py" in touched([Path("tests/worlds/ports.py")])
    assert touched([Path("transfer/testing/loopback.py")]) == ["tests/machines/test_transfer_simulation.py"]


def test_every_module_has_tests() -> None:
    """Goal: no change passes ``make quick`` unseen. A bug that was found: 54 modules had no test there, because no test
    names them. Those whose tests need another environment are named here; ``make quick`` says so."""
    assert len(MODULES) > 120
    assert [file for file in MODULES if not nearest(module_name(file))] == []
    elsewhere = [str(file) for file in MODULES if not touched([file])]
    assert all(each.startswith(("kvroute/replay/", "kvroute/rollout/", "kvroute/integrations/")) for each in elsewhere)
    assert len(elsewhere) < 6, elsewhere


@pytest.mark.parametrize("leaf", ["cache_manager/table.py", "transfer/pull.py", "kvroute/routes/spans.py"])
def test_a_module_that_no_test_names_touches_a_part_of_the_tests(leaf: str) -> None:
    """Goal: no line of ``make quick`` is the whole suite. Method: modules that others import for the tests."""
    found = touched([Path(leaf)])
    assert 0 < len(found) <= 3 * FILES_MAX
    assert not any(each.startswith(ELSEWHERE) for each in found)


def test_names_of_packages_and_of_programs_are_followed_to_their_modules() -> None:
    """Method: a stub, a string that names a module, and a package that is started as a program."""
    graph, module = import_graph(), {str(file): module_name(file) for file in MODULES}
    assert module["cache_manager/storage/url.py"] in graph[module["cache_manager/storage/memory.py"]]
    assert module["cache_manager/blocks.py"] in graph[module["kvroute/__init__.py"]]
    assert module["cache_manager/storage/apart_process.py"] in graph[module["cache_manager/storage/apart.py"]]
    assert module["kvroute/__main__.py"] in graph[module_name(Path("tests/real/processes/test_demo.py"))]

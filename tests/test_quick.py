"""``make quick`` runs what a change touches."""

from __future__ import annotations

from pathlib import Path

from tests.quick import touched


def test_a_changed_module_touches_the_tests_that_name_it() -> None:
    found = touched([Path("cache_manager/regions/directory.py"), Path("tests/bench/test_benches_run.py")])
    assert found[0] == "tests/bench/test_benches_run.py"
    assert "tests/regions/test_shared.py" in found
    assert "tests/test_imports.py" not in found
    assert touched([Path("tests/support/ports.py")])[0] == "tests/storage/test_mooncake_faults.py"
    assert touched([Path("tests/end_to_end/test_demo.py")]) == []

"""Which faults a run plants: all of them in CI and where they are asked for, otherwise those of what changed."""

from __future__ import annotations

import os

import pytest
from all_planted import chosen


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """They are asked for by ``KVROUTE_FAULTS=all``, by ``-k``, and by a path of this directory."""
    named = any("faults" in argument for argument in config.invocation_params.args)
    if os.environ.get("KVROUTE_FAULTS") == "all" or config.getoption("keyword") or named:
        return
    wanted = {fault.name for fault in chosen()}
    left = [item for item in items if _plants(item) not in (None, *wanted)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def _plants(item: pytest.Item) -> str | None:
    """The name of the fault that a test plants; None for other tests."""
    if item.path.name != "test_planted_faults.py" or not isinstance(item, pytest.Function):
        return None
    return str(item.callspec.params["fault"].name) if hasattr(item, "callspec") else None

"""Tests against the trainers' real packages, in an environment of their own: `make test-trainers`.

Where Megatron-core is not installed, as in the project's own environment, nothing here is collected.
"""

from __future__ import annotations

import importlib.util
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

HERE = Path(__file__).parent
collect_ignore_glob = [] if importlib.util.find_spec("megatron") else ["*.py"]

if not collect_ignore_glob:
    import typing_extensions

    # SkyRL asks for Python 3.12, whose TypedDict pydantic needs; with this one it runs on 3.11 too.
    typing.TypedDict = typing_extensions.TypedDict
    sys.path.insert(0, str(HERE))
    # miles' wheel brings a Megatron of its own: it is installed apart, and the path's last.
    sys.path.append(str(Path(sys.prefix) / "apart"))


@pytest.fixture(scope="module")
def megatron() -> Iterator[Any]:
    """Megatron-core on a CPU, alone in its groups."""
    import mcore

    with mcore.rank_of():
        yield mcore


@pytest.fixture
def verl_stage() -> Iterator[Any]:
    """Routers with verl's own replay class."""
    import mcore
    import ranks

    with ranks.verl_patched(), mcore.rank_of():
        yield mcore.Stage((1, 2, 3), mcore.config())


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster of this machine, for one module."""
    import ray

    with TemporaryDirectory(prefix="ray") as directory:
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=256 << 20, _temp_dir=directory)
        try:
            yield
        finally:
            ray.shutdown()

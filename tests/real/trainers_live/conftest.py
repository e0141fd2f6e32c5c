"""Unchanged trainers over live engines: `make test-trainers-live`.

The process has vLLM's environment, with the trainers' packages behind it. Elsewhere nothing here is collected.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PINNED = {"0.24.0": "test_verl.py", "0.30.0": "test_skyrl.py"}
"""By vLLM's release: the trainer that pins it."""
collect_ignore_glob = ["*.py"]

if importlib.util.find_spec("vllm") and "KVROUTE_TRAINERS" in os.environ:
    from bench.vllm_peers import ON_CPU

    os.environ.update(
        ON_CPU,
        HF_HUB_OFFLINE="1",
        OPENBLAS_NUM_THREADS="1",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_DEDUP_LOGS="0",
        VERL_PLATFORM="cpu",
        VERL_USE_EXTERNAL_MODULES="verl_parts",
        VLLM_MAX_STOP_STRINGS="1000",
        VLLM_NO_USAGE_STATS="1",
        VLLM_PLUGINS="kvroute,on_cpu",
    )
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="kvroute-live-")
    # Each engine has three processes that import the same: the first one compiles for all.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", f"{tempfile.tempdir}/compiled")
    SESSION = os.getpid()
    atexit.register(lambda: os.getpid() == SESSION and shutil.rmtree(tempfile.tempdir, ignore_errors=True))
    import vllm

    collect_ignore_glob = [name for release, name in PINNED.items() if release != vllm.__version__]
    sys.path[:0] = [str(HERE), str(HERE.parent / "vllm")]
    import live

    os.environ["PYTHONPATH"] = live.as_installed(Path(tempfile.mkdtemp()), vllm.__version__)
    sys.path[:0] = os.environ["PYTHONPATH"].split(":")[:6]


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of one shape that talk: A, and B, which is A with another embedding; the first layer is dense."""
    import models
    import updates

    root = tmp_path_factory.mktemp("models")
    first, other = (models.saved(root, "qwen3_moe_dense_first", seed) for seed in (0, 1))
    live.talking(first)
    return {"A": first, "B": updates.with_embedding_of(first, other, root / "B")}


@pytest.fixture(scope="session")
def home(homes: dict[str, Path]) -> Path:
    """The checkpoint that engines load."""
    return homes["A"]


@pytest.fixture(scope="session", autouse=True)
def printed() -> Iterator[None]:
    """The table, when all has been judged."""
    yield
    print(f"\n{live.table()}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of this machine."""
    import ray

    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as directory:
        ray.init(num_cpus=8, include_dashboard=False, object_store_memory=256 << 20, _temp_dir=directory)
        try:
            yield ray
        finally:
            ray.shutdown()

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
PINNED = {
    ("vllm", "0.24.0"): "test_verl.py",
    ("vllm", "0.25.1"): "test_nemo_rl.py",
    ("vllm", "0.26.0"): "test_prime_rl.py",
    ("vllm", "0.30.0"): "test_skyrl.py",
    ("sglang", "0.5.12"): "test_verl_sglang.py",
    ("sglang", "0.5.12.post1"): "test_verl_sglang.py",
    ("sglang", "0.5.15.post1"): "test_slime.py",
    ("sglang", "0.5.16"): "test_miles.py",
}
"""By an engine's release: the trainer that pins it."""
collect_ignore_glob = ["*.py"]
ENGINE = next((name for name in ("vllm", "sglang") if importlib.util.find_spec(name)), None)
OF_ALL = {
    "HF_HUB_OFFLINE": "1",
    "MILES_HOST_IP": "127.0.0.1",  # miles' and slime's routers would be reached from outside
    "OPENBLAS_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "SLIME_HOST_IP": "127.0.0.1",
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_parts",
}
OF_VLLM = {"VLLM_MAX_STOP_STRINGS": "1000", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "kvroute,on_cpu"}

if ENGINE and "KVROUTE_TRAINERS" in os.environ:
    os.environ.update(OF_ALL)
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="kvroute-live-")
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        # Each engine has three processes that import the same: the first one compiles for all.
        sys.dont_write_bytecode = False
        sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", f"{tempfile.tempdir}/compiled")
    SESSION = os.getpid()
    atexit.register(lambda: os.getpid() == SESSION and shutil.rmtree(tempfile.tempdir, ignore_errors=True))
    if ENGINE == "vllm":
        from bench.vllm_peers import ON_CPU

        os.environ.update(ON_CPU, **OF_VLLM)
        import vllm as engine
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["SGLANG_PLUGINS"] = "cpu" if "KVROUTE_LIVE_STOCK" in os.environ else "kvroute,cpu"
        sys.path.insert(0, str(HERE.parent / "sglang"))
        import sglang as engine

    pinned = PINNED.get((ENGINE, engine.__version__))
    collect_ignore_glob = [file.name for file in HERE.glob("*.py") if file.name != pinned]
    sys.path[:0] = [str(HERE), str(HERE.parent / "vllm")]
    import live

    as_installed = live.as_installed if ENGINE == "vllm" else live.sglang_as_installed
    os.environ["PYTHONPATH"] = as_installed(Path(tempfile.mkdtemp()), engine.__version__)
    sys.path[:0] = os.environ["PYTHONPATH"].split(":")[:6]


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of one shape that talk: A, and B, which is A with another embedding."""
    import models
    import updates

    root = tmp_path_factory.mktemp("models")
    first, other = (models.saved(root, live.FAMILY, seed) for seed in (0, 1))
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
    live.left()


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

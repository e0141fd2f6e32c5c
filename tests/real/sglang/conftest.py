"""Tests inside SGLang itself, in its own environment: `make test-sglang`.

Where SGLang is not installed, as in the project's own environment, nothing here is collected.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from nursery import nursery
from waiting import GIVE_UP_S

from kvroute.connector.settings import APART_SCHEME, apart_url
from kvroute.rollout import GROUP

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
HAS_SGLANG = importlib.util.find_spec("sglang") is not None
MODULES = ["drawn_judge", "serve", "file_linker", "gated_rollouts", "older", "sglang_warm", "weights_recorder"]
collect_ignore_glob = ["cpu/*", *(f"{name}.py" for name in MODULES)] if HAS_SGLANG else ["*.py", "cpu/*"]
if HAS_SGLANG:
    sys.path[:0] = [str(HERE), str(HERE.parent / "vllm")]
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

PLUGINS = {"kvroute": "kvroute.integrations.sglang:register", "cpu": "sglang_on_cpu:register"}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The checkpoint of a family, made when it is first asked for."""
    import models

    return partial(models.saved, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two plugins are installed, as far as SGLang sees: kvroute's, and one for hosts without CUDA,
    which brings a rollout store of the tests, too."""
    home = tmp_path_factory.mktemp("plugins")
    stores = {"cpu": f"[{GROUP}]\ngated = gated_rollouts:opened\n"}
    for name, place in PLUGINS.items():
        about = home / f"{name}_plugin-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {place}\n{stores.pop(name, '')}")
    return home


def engine_environment(plugins: Path, *, kvroute: bool) -> dict[str, str]:
    """Of an engine's process."""
    path = [ROOT, HERE, HERE / "cpu", plugins, os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "SGLANG_PLUGINS": "kvroute,cpu" if kvroute else "cpu",
    }


@pytest.fixture
def serve(plugins: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run an engine with a plan, stock or with kvroute of these ``settings``; what it answered. Two may run at once.
    ``record`` is where it writes what its kernels are given."""
    plans, warm = count(), nursery("sglang_warm")

    def run(
        model: Path,
        do: list[Any],
        *,
        kvroute: bool = True,
        settings: Any = None,
        record: Path | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        plan = tmp_path / f"plan-{next(plans)}.json"
        out = plan.with_suffix(".jsonl")
        left = (settings or {}).get("rollouts")
        if left is not None and left.startswith(APART_SCHEME):  # readers open the store itself
            left = apart_url(left)[0]
        told = {"model": str(model), "options": options, "do": do, "rollouts": left, "out": str(out)}
        plan.write_text(json.dumps(told | {"record": record and str(record)}))
        environment = engine_environment(plugins, kvroute=kvroute) | {"KVROUTE_SGLANG": json.dumps(settings or {})}
        done = warm.run(["-m", "serve", str(plan)], env=environment, timeout=GIVE_UP_S)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return [json.loads(line) for line in out.read_text().splitlines()]

    return run

"""Tests inside vLLM itself, in its own environment: `make test-vllm`.

Where vLLM is not installed, as in the project's own environment, nothing here is collected.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from waiting import GIVE_UP_S

HERE = Path(__file__).parent
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*.py"]

if not collect_ignore_glob:
    os.environ.update(
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",  # the models are so small that threads would only wait for each other
        OPENBLAS_NUM_THREADS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_MAX_STOP_STRINGS="1000",  # it takes four by itself
        VLLM_NO_USAGE_STATS="1",
    )
    sys.path.insert(0, str(HERE))
    # Engines leave sockets and files behind: all of it goes with the session, but for what was compiled.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "kvroute-torchinductor")))
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="kvroute-vllm-")
    SESSION = os.getpid()  # and no process that is forked from it
    atexit.register(lambda: os.getpid() == SESSION and shutil.rmtree(tempfile.tempdir, ignore_errors=True))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The checkpoint of a family, made when it is first asked for."""
    import models

    return partial(models.saved, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    """What vLLM's plugin loader does in each of its processes, before it looks for a model."""
    from kvroute.integrations.vllm import config
    from kvroute.integrations.vllm.field import take_over

    # a loaded machine may need more than a second, and then computes hits again
    config.ENGINE_LIMITS = replace(config.ENGINE_LIMITS, question_s=GIVE_UP_S)
    take_over()


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """What vLLM puts into a process's environment for one model holds in no later file.

    For DeepSeek-V4 it turns compilation off there, for this process and all that it starts.
    """
    before = dict(os.environ)
    yield
    left = {name for name in os.environ if name not in before}
    os.environ.update(before)
    for name in left:
        del os.environ[name]


class Engines:
    """Makes engines, one at a time: the one before ends when the next is asked for."""

    def __init__(self) -> None:
        self.running: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import engines

        self.stop()
        self.running = engines.Engine(*args, **kwargs)
        return self.running

    def stop(self) -> None:
        running, self.running = self.running, None
        if running is not None:
            running.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engines]:
    assert tmp_path.exists(), "until the last engine has ended"
    engines = Engines()
    yield engines
    engines.stop()


# The far end.


@pytest.fixture(scope="session")
def homes(model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of one shape: A, and B which is A with another embedding; the first layer is dense."""
    import updates

    first, other = (model("qwen3_moe_dense_first", seed) for seed in (0, 1))
    return {"A": first, "B": updates.with_embedding_of(first, other, tmp_path_factory.mktemp("B") / "home")}


@pytest.fixture(scope="session")
def judge(homes: dict[str, Path]) -> Any:
    from far_judge import Judge

    return Judge(homes)


@pytest.fixture
def start(homes: dict[str, Path], tmp_path: Path) -> Iterator[Any]:
    """Starts engines in processes of their own."""
    from far_start import Engines

    engines = Engines(homes, tmp_path)
    yield engines
    engines.close()

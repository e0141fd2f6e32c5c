"""Block managers under the life-cycle kit; the adapters are examples. vLLM and SGLang are not in the project's own
environment: their tests are not collected there, and `make test-managers` and `make test-sglang` run them where they
are."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from budget import ALL_LIVES

from cache_manager.testing.life import BlockManagerMachine

BlockManagerMachine.examples = ALL_LIVES
HERE = Path(__file__).parent
absent = [engine for engine in ("vllm", "sglang") if importlib.util.find_spec(engine) is None]
collect_ignore = [f"test_{engine}.py" for engine in absent]
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "examples" / "managers")]

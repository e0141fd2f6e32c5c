"""Block managers under the life-cycle kit; the adapters are examples. That of vLLM needs vLLM, which is not in the
project's own environment: its tests are not collected there, and `make test-managers` runs them where it is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from budget import ALL_LIVES

from cache_manager.testing.life import BlockManagerMachine

BlockManagerMachine.examples = ALL_LIVES
HERE = Path(__file__).parent
collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_vllm.py", "planted_in_vllm.py"]
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "examples" / "managers")]

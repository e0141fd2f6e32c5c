"""The capture launch compiles for a GPU, which needs no GPU; the interpreter accepts programs that a GPU does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from waiting import GIVE_UP_S

SUPPORT = Path(__file__).parents[3] / "worlds" / "compiled_capture.py"


def test_the_launch_compiles_and_stores_several_values_at_once() -> None:
    """Goal: eight ids leave a thread at once, not one by one, and no value is loaded twice to be compared."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SUPPORT)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=GIVE_UP_S, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "58x8 of 256, 1: b32 v2.b32 24 loads",
        "58x8 of 256, 8: b32 v2.b32 48 loads",
        "60x8 of 384, 1: b32 v4.b32 24 loads",
        "60x8 of 384, 8: b32 v4.b32 48 loads",
    ]

"""The examples of the documents that need a trainer's package run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import GIVE_UP_S

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
EXAMPLES = [
    (page, code)
    for page in sorted(ROOT.glob("docs/**/*.md"))
    for code in re.findall(r'^```python title="trainers"\n(.*?)^```', page.read_text(), flags=re.DOTALL | re.MULTILINE)
]


@pytest.mark.parametrize(("page", "code"), EXAMPLES, ids=[page.stem for page, _ in EXAMPLES])
def test_an_example_runs_as_it_stands(page: Path, code: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={"PYTHONPATH": f"{ROOT}:{HERE}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=False,
    )
    assert ran.returncode == 0, f"{page.name}:\n{ran.stderr}"

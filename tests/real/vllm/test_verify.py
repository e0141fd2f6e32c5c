"""``kvroute verify`` on stock vLLM, whose own routed experts it judges. With kvroute in it: ``test_server.py``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import interpreter
import pytest
from test_server import running

from bench.harness import ROOT
from kvroute.cli import FAILED, main


@pytest.mark.timeout(900)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_stock_vllm(
    model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], eager: bool
) -> None:
    """Goal: right rows of stock vLLM are judged right, and its known loss is found: a model that was compiled on a CPU
    has no rows of its own. Method: its OpenAI server with Model Runner V2, in Triton's interpreter."""
    home = model("qwen3_moe")
    backend = interpreter.written(tmp_path / "backend")
    for place in (ROOT / ".venv").glob("lib/python3*/site-packages/triton*"):  # the project's own environment has it
        (backend / place.name).symlink_to(place)
    search = os.pathsep.join((str(backend), os.environ["PYTHONPATH"]))
    more = ("--enable-return-routed-experts", *(("--enforce-eager",) if eager else ()))
    environment = {**interpreter.ENVIRONMENT, "PYTHONPATH": search}
    with running(home, tmp_path / "log", *more, as_installed=True, environment=environment) as server:
        asked = ["--requests", "16", "--longest", "100", "--dtype", "float32"]
        status = main(["verify", "--url", server.url, "--model", str(home), *asked])
    assert ("DYNAMO_TRACE_ONCE" in (tmp_path / "log").read_text()) != eager, "what vLLM said of its mode"
    told = capsys.readouterr().out
    assert status == (0 if eager else FAILED), told
    right, wrong = re.search(r"^all +([\d,]+) +([\d,]+) +0 +0$", told, re.MULTILINE).groups()
    assert (right == "0", wrong == "0") == (not eager, eager), told

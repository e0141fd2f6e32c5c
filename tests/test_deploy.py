"""The files of ``deploy/`` say what kvroute takes. `make deploy-check` has their schemas; nothing runs a container."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvroute.cli import main
from kvroute.connector.carriers import ByTransfer
from kvroute.integrations.vllm.config import carrier_of, settings_of

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def compose() -> dict[str, Any]:
    """By engine, what vLLM is given."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return {name: transfer(services[name]["command"]) for name in ("prefill", "decode")}


def kubernetes() -> dict[str, Any]:
    found = {}
    for resource in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()):
        if resource["kind"] == "Deployment" and resource["metadata"]["name"] != "master":
            (container,) = resource["spec"]["template"]["spec"]["containers"]
            arguments = [text.replace("$(POD_IP)", "10.0.0.5") for text in container["args"]]
            arguments = [text.replace("$(MASTER_SERVICE_HOST)", "10.0.0.1") for text in arguments]
            assert "$" not in "".join(arguments)
            found[resource["metadata"]["name"]] = transfer(arguments)
    return found


def transfer(arguments: list[str]) -> dict[str, Any]:
    given: dict[str, Any] = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return given


@pytest.mark.parametrize("engines", [compose, kubernetes])
def test_the_engines_start_with_settings_that_kvroute_takes(engines: Any, tmp_path: Path) -> None:
    """Goal: what an operator copies is right. Method: kvroute's own reader of the settings, with a key that ``kvroute
    keys`` made, and its choice of a carrier for the connector."""
    assert main(["keys", str(tmp_path), "engines"]) == 0
    given = engines()
    assert sorted(given) == ["decode", "prefill"]
    for name, config in given.items():
        assert config["kv_connector_module_path"] == "kvroute.integrations.vllm"
        extra = config["kv_connector_extra_config"]
        path = extra["kvroute"]["keys"]
        assert Path(path).name == "engines.key_secret"
        extra["kvroute"]["keys"] = str(tmp_path / "engines.key_secret")
        settings = settings_of(SimpleNamespace(kv_connector_extra_config=extra))
        inner = config["kv_connector"].removeprefix("Kvroute")
        assert isinstance(carrier_of(settings, inner), ByTransfer)
        assert settings.rollouts.startswith("mooncake://") == (name == "decode")  # prefill's answer has no routes


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_image_has_the_wheel_of_this_repository(engine: str) -> None:
    """Goal: an image builds. Method: what its first stage copies is what the wheel is built of; the engine's release
    was judged."""
    text = (DEPLOY / f"{engine}.Dockerfile").read_text()
    wheel = text.partition("FROM python")[2].partition("\nFROM ")[0]
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", wheel, re.MULTILINE) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    project = (ROOT / "pyproject.toml").read_text()
    (packages,) = re.findall(r'^packages = \["kvroute", .*\]$', project, re.MULTILINE)
    needed = {*re.findall(r'"([^"]+)"', packages), "pyproject.toml", "LICENSE", "docs/package.md"}
    assert copied == needed
    (release,) = re.findall(rf"^ARG {engine.upper()}=(.+)$", text, re.MULTILINE)
    source = (ROOT / "kvroute" / "integrations" / engine / "versions.py").read_text()
    assert f'Judged("{release}", ("tests",)' in source

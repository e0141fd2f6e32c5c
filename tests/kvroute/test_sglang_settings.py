"""Settings of the SGLang integration, and its plugin: what stands in a configuration or in the environment."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from kvroute import ConfigError
from kvroute.connector.settings import Common
from kvroute.integrations.sglang.settings import settings_of


def test_invalid_settings_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a mistake can be mended by its message. Method: the place, what may stand there, and what was written."""
    wanted = "store, rollouts, weights, witness, strict, untested"
    with pytest.raises(ConfigError, match=rf"^linker_extra_config: wanted some of {wanted} .*got 'stor'"):
        settings_of({"linker": "KvrouteLinker", "linker_extra_config": {"stor": "x"}})
    monkeypatch.setenv("KVROUTE_SGLANG", "store=file:///x")
    with pytest.raises(ConfigError, match=r"^KVROUTE_SGLANG: wanted a JSON object, got 'store=file:///x'"):
        settings_of(None)
    monkeypatch.setenv("KVROUTE_SGLANG", '{"weights": 3}')
    with pytest.raises(ConfigError, match=r"^KVROUTE_SGLANG\.weights: wanted text, got 3"):
        settings_of(None)
    monkeypatch.setenv("KVROUTE_SGLANG", "")
    assert settings_of(None) == Common()
    monkeypatch.setenv("KVROUTE_SGLANG", '{"weights": "w"}')
    assert settings_of({"linker": "another"}) == Common(weights="w")


def test_a_plugin_that_two_packages_name_has_each_hook_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: kvroute installed twice is kvroute once. Method: a small registry; the plugin is called twice."""
    registered = list[tuple[str, Any]]()
    registry = SimpleNamespace(register=lambda place, _, kind: registered.append((place, kind)))
    hooks = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(BEFORE="before", AFTER="after"))
    stubs = {"sglang.srt.plugins.hook_registry": hooks, "sglang.srt": SimpleNamespace(runtime_context=None)}
    ours = "kvroute.integrations.sglang.plugin"
    for name in ("sglang", "sglang.srt.plugins", *stubs):
        monkeypatch.setitem(sys.modules, name, stubs.get(name, SimpleNamespace()))
    monkeypatch.delitem(sys.modules, ours, raising=False)
    sglang = import_module("kvroute.integrations.sglang")
    try:
        for _ in range(2):
            sglang.register()
    finally:
        sys.modules.pop(ours, None)  # it has the stubs
    assert len(registered) == len(set(registered)) > 10

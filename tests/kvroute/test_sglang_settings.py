"""Settings of the SGLang integration: what stands in the linker's configuration or in the environment."""

from __future__ import annotations

import pytest

from kvroute import ConfigError
from kvroute.integrations.sglang.settings import Settings, settings_of


def test_invalid_settings_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a mistake can be mended by its message. Method: the place, what may stand there, and what was written."""
    wanted = "store, rollouts, weights, strict, untested, witness, rows"
    with pytest.raises(ConfigError, match=rf"^linker_extra_config: wanted some of {wanted}.*got .*field `stor`"):
        settings_of({"linker": "KvrouteLinker", "linker_extra_config": {"stor": "x"}})
    monkeypatch.setenv("KVROUTE_SGLANG", "store=file:///x")
    with pytest.raises(ConfigError, match=r"^KVROUTE_SGLANG: wanted a JSON object, got 'store=file:///x'"):
        settings_of(None)
    monkeypatch.setenv("KVROUTE_SGLANG", '{"weights": 3}')
    with pytest.raises(ConfigError, match=r"KVROUTE_SGLANG: wanted .*`\$\.weights`"):
        settings_of(None)
    monkeypatch.setenv("KVROUTE_SGLANG", "")
    assert settings_of(None) == Settings()
    monkeypatch.setenv("KVROUTE_SGLANG", '{"weights": "w"}')
    assert settings_of({"linker": "another"}) == Settings(weights="w")
